"""What-if replay: the exposed time that would be saved if one suspect were as its reference.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713): replace the
suspect's durations by its reference, let every wait shrink to what is left to wait for, and compare. In a segment all
ranks leave together, so the replay is short: the last arrival moves, the sync stage's own work stays. Only the rank
that arrives last can have a gain by itself, so a step costs one look at its leader and not R replays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.accounting import BLOCK_BYTES, Walk
from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray, SingleArray, medians
from sftriage.frontier.roles import MEDIAN_RANKS, Roles, sampled
from sftriage.frontier.segments import SegmentColumn

MAD_TO_SIGMA = 1.4826
"""Standard deviations in one median absolute deviation, for normal noise."""

LARGE_COHORT = 256
"""From so many ranks on, one of them more or less does not move their median, and single precision will do for it."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentReplay:
    """One kind of segment, row by row (M rows; a row is a step, see `Segment`), in seconds.

    Attributes:
        second_M: the second last arrival.
        lateness_M: the last arrival less the median arrival of the leader's peers.
        reference_KMC: for each local column, the median of each cohort, the leader left out.
        common_KMC: for each local column, what three quarters of each cohort's ranks take at least: what raises it
            slows the group, and not some of its ranks.
        excess_MS: the leader's local time over its peers' median, by stage (negative where it was quicker).
        offset_S: how many rows after its own step a stage is: 1 for what came after the last sync.
        jitter_s: scale of a rank's ordinary jitter in arrival, free of the level of its step and of its rank.
    """

    walk: Walk
    second_M: FloatArray
    lateness_M: FloatArray
    reference_KMC: tuple[FloatArray, ...]
    common_KMC: tuple[FloatArray, ...]
    excess_MS: FloatArray
    offset_S: RankArray
    jitter_s: float

    @property
    def margin_M(self) -> FloatArray:
        """The last arrival less the second last: no single rank can save more."""
        return self.walk.last_M - self.second_M

    @property
    def gain_MS(self) -> FloatArray:
        """What mending one stage of the leader alone would have saved."""
        return np.clip(np.minimum(self.margin_M[:, None], self.excess_MS), 0.0, None)

    @property
    def whole_gain_M(self) -> FloatArray:
        """What mending all local stages of the leader would have saved."""
        return np.asarray(np.clip(np.minimum(self.margin_M, self.excess_MS.sum(axis=1)), 0.0, None))

    def over_NCS(self, ranks: RankArray, roles: Roles, n_steps: int) -> FloatArray:
        """Time of some ranks over their cohorts' medians, by step and stage (N × len(ranks) × S)."""
        over_NCS = np.zeros((n_steps, len(ranks), self.excess_MS.shape[1]))
        for column, reference_MC in zip(self.walk.segment.local, self.reference_KMC, strict=True):
            reference_NC = reference_MC[column.offset : column.offset + n_steps][:, roles.role_R[ranks]]
            over_NCS[:, :, column.stage] += column.of(ranks) - reference_NC
        return over_NCS


def replay(walks: list[Walk], roles: Roles, n_stages: int) -> list[SegmentReplay]:
    """The replay of each of a window's segments, in the order of a step."""
    return [_replay_segment(walk, roles, n_stages) for walk in walks]


def _replay_segment(walk: Walk, roles: Roles, n_stages: int) -> SegmentReplay:
    segment, leader_M = walk.segment, walk.leader_M
    rows = np.arange(segment.n_rows)
    excess_MS = np.zeros((len(rows), n_stages))
    weight_S, offset_S = np.zeros(n_stages), np.zeros(n_stages, dtype=np.intp)
    references, commons = [], []
    for k, column in enumerate(segment.local):
        some_NX = walk.some_KNX[k] if walk.some_KNX else None
        at = slice(column.offset, column.offset + column.n_steps)
        reference_MC, common_MC = (np.zeros((len(rows), len(roles.members))) for _ in range(2))
        reference_MC[at], common_MC[at] = _levels(column, some_NX, leader_M[at], roles)
        own_M = np.zeros(len(rows))
        own_M[at] = column.at((np.arange(column.n_steps), leader_M[at]))
        excess_M = own_M - reference_MC[rows, roles.role_R[leader_M]]
        excess_MS[:, column.stage] += excess_M
        weight = float(np.abs(excess_M).sum())
        if weight > weight_S[column.stage]:
            weight_S[column.stage], offset_S[column.stage] = weight, column.offset
        references.append(reference_MC)
        commons.append(common_MC)
    arrival_MC, _ = _levels(SegmentColumn(-1, walk.arrival_MR), None, leader_M, roles)
    return SegmentReplay(
        walk=walk,
        second_M=_second_largest(walk.arrival_MR, leader_M),
        lateness_M=walk.last_M - arrival_MC[rows, roles.role_R[leader_M]],
        reference_KMC=tuple(references),
        common_KMC=tuple(commons),
        excess_MS=excess_MS,
        offset_S=offset_S,
        jitter_s=jitter_s(walk.arrival_MR, roles),
    )


def _levels(
    column: SegmentColumn, some_NX: SingleArray | None, leader_N: RankArray, roles: Roles
) -> tuple[FloatArray, FloatArray]:
    """For each step and cohort the median without the leader, and what three quarters reach: (N × C, N × C)."""
    median_NC, common_NC = (np.empty((column.n_steps, len(roles.members))) for _ in range(2))
    for c, ranks in enumerate(roles.members):
        if len(ranks) >= LARGE_COHORT:
            sample = sampled(ranks, MEDIAN_RANKS)
            whole = len(roles.members) == 1
            median_NC[:, c], common_NC[:, c] = _levels_of_many(column, sample, some_NX if whole else None)
        else:
            sorted_NX = np.sort(column.of(ranks), axis=1)
            own_N = column.at((np.arange(column.n_steps), leader_N))
            median_NC[:, c] = median_without(sorted_NX, own_N, roles.role_R[leader_N] == c)
            common_NC[:, c] = sorted_NX[:, (len(ranks) - 1) // 4]
    return median_NC, common_NC


def _levels_of_many(
    column: SegmentColumn, ranks: RankArray, some_NX: SingleArray | None
) -> tuple[FloatArray, FloatArray]:
    """For each step the (lower) median of many ranks, and what three quarters of them reach: (N, N).

    In single precision, and a few steps at a time, so that they stay in the cache; ``some_NX`` are their times, where
    these have been taken already.
    """
    middle, quarter = (len(ranks) - 1) // 2, (len(ranks) - 1) // 4
    median_N, common_N = np.empty(column.n_steps), np.empty(column.n_steps)
    n_together = max(1, BLOCK_BYTES // (8 * len(ranks)))
    for first in range(0, column.n_steps, n_together):
        steps = slice(first, first + n_together)
        some_BX = column.at(steps).take(ranks, axis=1) if some_NX is None else some_NX[steps]
        some_BX = some_BX.astype(np.float32)
        some_BX.partition(middle, axis=1)
        median_N[steps] = some_BX[:, middle]
        some_BX[:, :middle].partition(quarter, axis=1)
        common_N[steps] = some_BX[:, quarter]
    return median_N, common_N


def median_without(sorted_MR: FloatArray, own_M: FloatArray, leave_out_M: BoolArray) -> FloatArray:
    """For each row the median; where ``leave_out_M``, of all but its value ``own_M`` (itself where it has no peers).

    Leaving the suspect out matters in small groups: in two ranks, the median of both is half the straggler.
    """
    n_ranks = sorted_MR.shape[1]
    if n_ranks == 1:
        return sorted_MR[:, 0].copy()
    all_M = (sorted_MR[:, (n_ranks - 1) // 2] + sorted_MR[:, n_ranks // 2]) / 2
    # Taking one value out of a sorted row moves what lies above it down by one place.
    medians = [
        np.where(own_M <= sorted_MR[:, at], sorted_MR[:, min(at + 1, n_ranks - 1)], sorted_MR[:, at])
        for at in ((n_ranks - 2) // 2, (n_ranks - 1) // 2)
    ]
    return np.asarray(np.where(leave_out_M, (medians[0] + medians[1]) / 2, all_M))


def jitter_s(arrival_MR: FloatArray, roles: Roles) -> float:
    """Scale (σ) of arrivals when the level of each step and of each rank is taken out; robust to rare large delays.

    Rows in which nobody was anywhere (steps left out) do not count.
    """
    residuals = []
    for members in roles.members:
        part_MR = arrival_MR.take(sampled(members), axis=1)
        part_MR = part_MR[part_MR.any(axis=1)]
        if part_MR.size:
            late_MR = part_MR - medians(part_MR)[:, None]
            late_MR -= medians(late_MR.T.copy())
            residuals.append(np.abs(late_MR, out=late_MR).ravel())
    return float(MAD_TO_SIGMA * medians(np.concatenate(residuals))) if residuals else 0.0


def _second_largest(values_MR: FloatArray, leader_M: RankArray) -> FloatArray:
    """The largest of each row without the leader (M); zero where there is one rank: nobody else is waited for."""
    if values_MR.shape[1] == 1:
        return np.zeros(values_MR.shape[0])
    rows = np.arange(len(values_MR))
    last_M = values_MR[rows, leader_M]
    values_MR[rows, leader_M] = -np.inf
    second_M = values_MR.max(axis=1)
    values_MR[rows, leader_M] = last_M
    return np.asarray(second_M)
