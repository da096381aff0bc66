"""The frontier: an exact, additive accounting of a window's exposed time.

At a stage boundary the frontier is the cumulative time of whichever rank is furthest along; a stage's advance is the
frontier's increment over it. Advances are never negative and sum to the exposed time (StageFrontier, arXiv 2606.06751).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray, SingleArray
from sftriage.frontier.roles import MEDIAN_RANKS, sampled
from sftriage.frontier.segments import Segment, SegmentColumn, complete_steps, segments
from sftriage.records import Window


@dataclass(frozen=True, slots=True, eq=False)
class Accounting:
    """Where a window's exposed time went, in seconds over all its complete steps.

    ``advances_S.sum() == exposed_s`` to floating-point precision. ``leaders_S`` is the rank that led each stage's
    boundary, weighted by what the frontier advanced there while it led (None where the frontier never advanced).
    """

    exposed_s: float
    advances_S: FloatArray
    leaders_S: tuple[int | None, ...]
    n_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """One pass through a segment, in seconds.

    Attributes:
        arrival_MR: when each rank was through with the local columns.
        leader_M: the rank that arrived last, at ``last_M``.
        end_M: when the segment ended: its exposed time.
        boundaries: for each column its stage, and row by row the frontier's advance over it and the rank in front.
        some_KNX: for each local column the times of `MEDIAN_RANKS` sampled ranks, taken in passing (single precision);
            none where there are not more than these.
    """

    segment: Segment
    arrival_MR: FloatArray
    leader_M: RankArray
    last_M: FloatArray
    end_M: FloatArray
    boundaries: tuple[tuple[int, FloatArray, RankArray], ...]
    some_KNX: tuple[SingleArray, ...] = ()


BLOCK_BYTES = 1 << 20
"""Rows that are walked together: what the ranks have reached in them stays in the cache from column to column."""


def walk(segment: Segment) -> Walk:
    """Go through a segment's columns once, keeping the frontier."""
    n_rows, n_ranks, n_local = segment.n_rows, segment.n_ranks, len(segment.local)
    columns = segment.local if segment.own is None else (*segment.local, segment.own)
    sample = sampled(np.arange(n_ranks), MEDIAN_RANKS)
    passing = _Passing(
        arrival_MR=np.empty((n_rows, n_ranks)),
        at_KM=np.zeros((len(columns), n_rows)),
        ahead_KM=np.zeros((len(columns), n_rows), dtype=np.intp),
        sample=sample,
        some_KNX=[np.empty((one.n_steps, len(sample)), np.float32) for one in segment.local if len(sample) < n_ranks],
    )
    n_together = max(1, BLOCK_BYTES // max(1, 8 * n_ranks))
    for first in range(0, n_rows if n_ranks else 0, n_together):
        passing.go_through(segment, slice(first, min(first + n_together, n_rows)))
    # Before the first column, everybody is at the start.
    frontier_KM = np.concatenate([np.zeros((1, n_rows)), passing.at_KM])
    ahead_KM = np.concatenate([np.zeros((1, n_rows), dtype=np.intp), passing.ahead_KM])
    advances = zip(columns, np.diff(frontier_KM, axis=0), passing.ahead_KM, strict=True) if n_ranks else ()
    return Walk(
        segment=segment,
        arrival_MR=passing.arrival_MR,
        leader_M=ahead_KM[n_local],
        last_M=frontier_KM[n_local],
        end_M=frontier_KM[-1],
        boundaries=tuple((column.stage, advance_M, ahead_M) for column, advance_M, ahead_M in advances),
        some_KNX=tuple(passing.some_KNX),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """What is filled in on the way through a segment, see `Walk`: after each column the frontier, and who leads."""

    arrival_MR: FloatArray
    at_KM: FloatArray
    ahead_KM: RankArray
    sample: RankArray
    some_KNX: list[SingleArray]

    def go_through(self, segment: Segment, rows: slice) -> None:
        reached_BR = self.arrival_MR[rows]
        reached_BR.fill(0.0)
        for k, column in enumerate(segment.local):
            steps, values_BR = self._pass(k, column, reached_BR, rows)
            if self.some_KNX:
                self.some_KNX[k][steps] = values_BR.take(self.sample, axis=1)
        if segment.own is not None:
            self._pass(len(segment.local), segment.own, reached_BR.copy(), rows)

    def _pass(self, k: int, column: SegmentColumn, reached_BR: FloatArray, rows: slice) -> tuple[slice, FloatArray]:
        """Go through the k-th column; returns the steps that it has in these rows, and the ranks' times in them."""
        first, last = (min(max(row - column.offset, 0), column.n_steps) for row in (rows.start, rows.stop))
        start, values_BR = first + column.offset - rows.start, column.at(slice(first, last))
        reached_BR[start : start + last - first] += values_BR
        ahead_B = reached_BR.argmax(axis=1)
        self.at_KM[k, rows], self.ahead_KM[k, rows] = reached_BR[np.arange(len(ahead_B)), ahead_B], ahead_B
        return slice(first, last), values_BR


def walked(window: Window) -> tuple[list[Walk], BoolArray]:
    """The walks through a window's segments, and its complete steps (N).

    Mostly all steps are complete, and no pass is spent on looking: what is missing is NaN, and in front of everybody.
    """
    complete_N = np.ones(len(window.durations_NRS), dtype=np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        walks = [walk(segment) for segment in segments(window, complete_N)]
    if all(np.isfinite(one.end_M).all() for one in walks):
        return walks, complete_N
    complete_N = complete_steps(window)
    return [walk(segment) for segment in segments(window, complete_N)], complete_N


def plain(window: Window) -> Accounting:
    """The paper's accounting: each rank measured from its own step start (arXiv 2606.06751).

    d[r,j] ≥ 0; c[r,j] = Σ_{i≤j} d[r,i]; f_j = max_r c[r,j]; a_j = f_j - f_{j-1}.
    """
    valid_N = complete_steps(window)
    columns = (SegmentColumn(s, window.durations_NRS[valid_N, :, s]) for s in range(len(window.schema.stages)))
    return account([walk(Segment(tuple(columns), None, int(valid_N.sum()), window.durations_NRS.shape[1]))], window)


def anchored(window: Window) -> Accounting:
    """The accounting cut at the end of each sync stage, so that a delay after the last sync keeps its stage."""
    walks, complete_N = walked(window)
    return account(walks, window, int(complete_N.sum()))


def by_step(window: Window) -> tuple[FloatArray, BoolArray]:
    """Each step's (N) advances by stage (S) in seconds, and which steps are complete; the others have none.

    Over the steps they sum to what `anchored` says. What came after a step's last sync is the step's own.
    """
    walks, complete_N = walked(window)
    advances_NS = np.zeros((len(window.durations_NRS), len(window.schema.stages)))
    for one in walks:
        columns = one.segment.local if one.segment.own is None else (*one.segment.local, one.segment.own)
        for column, (stage, advance_M, _) in zip(columns, one.boundaries, strict=False):
            advances_NS[:, stage] += advance_M[column.offset : column.offset + column.n_steps]
    return advances_NS, complete_N


def account(walks: list[Walk], window: Window, n_steps: int | None = None) -> Accounting:
    """What the walks through a window's segments add up to; ``n_steps`` complete steps, counted if not given."""
    n_stages, n_ranks = len(window.schema.stages), window.durations_NRS.shape[1]
    advances_S = np.zeros(n_stages)
    led_SR = np.zeros((n_stages, n_ranks))
    exposed_s = 0.0
    for one in walks:
        for stage, advance_M, leader_M in one.boundaries:
            advances_S[stage] += advance_M.sum()
            led_SR[stage] += np.bincount(leader_M, weights=advance_M, minlength=n_ranks)
        exposed_s += float(one.end_M.sum())
    leaders_S = tuple(int(row.argmax()) if row.any() else None for row in led_SR)
    n_steps = int(complete_steps(window).sum()) if n_steps is None else n_steps
    return Accounting(exposed_s, advances_S, leaders_S, n_steps)
