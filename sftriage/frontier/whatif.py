"""What-if replay: the exposed time that would be saved if one suspect were as its reference.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713): replace the
suspect's durations by its reference, let every wait shrink to what is left to wait for, and compare. In a segment all
ranks leave together, so the replay is short: the last arrival moves, the sync stage's own work stays. Only the rank
that arrives last can have a gain by itself, so a step costs one look at its leader and not R replays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import FloatArray, RankArray
from sftriage.frontier.segments import Segment, segments
from sftriage.records import Window

MAD_TO_SIGMA = 1.4826
"""Standard deviations in one median absolute deviation, for normal noise."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentReplay:
    """One kind of segment, row by row (M rows; a row is a step, see `Segment`), in seconds.

    Attributes:
        leader_M: the rank that arrived last.
        end_M: when the segment ended: its exposed time.
        last_M: the last arrival.
        lateness_M: the last arrival less the median arrival of the leader's peers.
        margin_M: the last arrival less the second last: no single rank can save more.
        excess_MS: the leader's local time over its peers' median, by stage (negative where it was quicker).
        level_MS: the median of the leader's peers' local time by stage: the step without its straggler.
        common_MS: the local time by stage that three quarters of the ranks take at least: what raises it slows the
            group, and not some of its ranks.
        total_RS: each rank's local time by stage, summed over all rows.
        jitter_s: scale of a rank's ordinary jitter in arrival, free of the level of its step and of its rank.
    """

    leader_M: RankArray
    end_M: FloatArray
    last_M: FloatArray
    lateness_M: FloatArray
    margin_M: FloatArray
    excess_MS: FloatArray
    level_MS: FloatArray
    common_MS: FloatArray
    total_RS: FloatArray
    jitter_s: float
    sync_stage: int | None

    @property
    def gain_MS(self) -> FloatArray:
        """What mending one stage of the leader alone would have saved."""
        return np.clip(np.minimum(self.margin_M[:, None], self.excess_MS), 0.0, None)

    @property
    def whole_gain_M(self) -> FloatArray:
        """What mending all local stages of the leader would have saved."""
        return np.asarray(np.clip(np.minimum(self.margin_M, self.excess_MS.sum(axis=1)), 0.0, None))


def replay(window: Window) -> list[SegmentReplay]:
    """The replay of each of the window's segments, in the order of a step."""
    return [_replay_segment(segment, len(window.schema.stages)) for segment in segments(window)]


def _replay_segment(segment: Segment, n_stages: int) -> SegmentReplay:
    local_MRK = segment.local_MRK
    arrival_MR = local_MRK.sum(axis=2)
    rows = np.arange(arrival_MR.shape[0])
    leader_M = arrival_MR.argmax(axis=1)
    last_M = arrival_MR[rows, leader_M]
    excess_MS = np.zeros((len(rows), n_stages))
    level_MS = np.zeros((len(rows), n_stages))
    common_MS = np.zeros((len(rows), n_stages))
    total_RS = np.zeros((arrival_MR.shape[1], n_stages))
    for k, stage in enumerate(segment.stage_K[: local_MRK.shape[2]]):
        column_MR = local_MRK[:, :, k]
        peers_M = peers_median(column_MR, leader_M)
        excess_MS[:, stage] += column_MR[rows, leader_M] - peers_M
        level_MS[:, stage] += peers_M
        total_RS[:, stage] += column_MR.sum(axis=0)
        common_MS[:, stage] += _lower_quartile(column_MR)
    end_M = (arrival_MR + segment.values_MRK[:, :, -1]).max(axis=1) if segment.sync else last_M
    return SegmentReplay(
        leader_M=leader_M,
        end_M=end_M,
        last_M=last_M,
        lateness_M=last_M - peers_median(arrival_MR, leader_M),
        margin_M=last_M - _second_largest(arrival_MR),
        excess_MS=excess_MS,
        level_MS=level_MS,
        common_MS=common_MS,
        total_RS=total_RS,
        jitter_s=jitter_s(arrival_MR),
        sync_stage=segment.stage_K[-1] if segment.sync else None,
    )


def peers_median(values_MR: FloatArray, rank_M: RankArray) -> FloatArray:
    """For each row, the median of all ranks but the given one (M); the rank's own value where it has no peers.

    Leaving the suspect out matters in small groups: in two ranks, the median of both is half the straggler.
    """
    n_ranks = values_MR.shape[1]
    own_M = np.take_along_axis(values_MR, rank_M[:, None], axis=1)
    if n_ranks == 1:
        return own_M[:, 0]
    # Taking one value out of a sorted row moves what lies above it down by one place.
    low, high = (n_ranks - 2) // 2, (n_ranks - 1) // 2
    sorted_MR = np.partition(values_MR, sorted({low, low + 1, high, high + 1} - {n_ranks}), axis=1)
    medians = [
        np.where(own_M[:, 0] <= sorted_MR[:, at], sorted_MR[:, min(at + 1, n_ranks - 1)], sorted_MR[:, at])
        for at in (low, high)
    ]
    return np.asarray((medians[0] + medians[1]) / 2)


def jitter_s(arrival_MR: FloatArray) -> float:
    """Scale (σ) of arrivals when the level of each step and of each rank is taken out; robust to rare large delays.

    Rows in which nobody was anywhere (steps left out) do not count.
    """
    arrival_MR = arrival_MR[arrival_MR.any(axis=1)]
    if arrival_MR.size == 0:
        return 0.0
    late_MR = arrival_MR - np.median(arrival_MR, axis=1, keepdims=True)
    residual_MR = late_MR - np.median(late_MR, axis=0, keepdims=True)
    return float(MAD_TO_SIGMA * np.median(np.abs(residual_MR)))


def _lower_quartile(values_MR: FloatArray) -> FloatArray:
    """For each row, what at least three quarters of the ranks reach (M); the smallest of up to four ranks."""
    at = (values_MR.shape[1] - 1) // 4
    return np.partition(values_MR, at, axis=1)[:, at]


def _second_largest(values_MR: FloatArray) -> FloatArray:
    """The second largest of each row (M); zero where there is one rank: nobody else is waited for."""
    if values_MR.shape[1] == 1:
        return np.zeros(values_MR.shape[0])
    return np.partition(values_MR, -2, axis=1)[:, -2]
