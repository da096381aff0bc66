"""The frontier: an exact, additive accounting of a window's exposed time.

At a stage boundary the frontier is the cumulative time of whichever rank is furthest along; a stage's advance is the
frontier's increment over it. Advances are never negative and sum to the exposed time (StageFrontier, arXiv 2606.06751).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray, SingleArray
from sftriage.frontier.segments import Segment, SegmentColumn, complete_steps, segments
from sftriage.model.windows import Window


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
        arrivals_M: for each row the time at which each rank (R) was through with the local columns.
        leader_M: the rank that arrived last, at ``last_M``.
        runner_up_M: the second last, at ``second_M`` (0 if there is one rank).
        end_M: the end of the segment, which is its exposed time.
        advance_KM, ahead_KM: for each column the frontier's advance over it, and the rank in front after it.
        some_KNX: for each local column the times of some ranks, in single precision.
    """

    segment: Segment
    arrivals_M: tuple[FloatArray, ...]
    leader_M: RankArray
    last_M: FloatArray
    runner_up_M: RankArray
    second_M: FloatArray
    end_M: FloatArray
    advance_KM: FloatArray
    ahead_KM: RankArray
    some_KNX: tuple[SingleArray, ...]

    @property
    def arrival_MR(self) -> FloatArray:
        """A copy of the arrivals of all rows."""
        return np.stack(self.arrivals_M)

    @property
    def boundaries(self) -> Iterator[tuple[SegmentColumn, FloatArray, RankArray]]:
        """Each column with ``advance_KM`` and ``ahead_KM``."""
        return zip(self.segment.columns, self.advance_KM, self.ahead_KM, strict=True)


NO_RANKS: RankArray = np.zeros(0, dtype=np.intp)

BLOCK_BYTES = 1 << 20
"""Rows are walked in blocks of this size, which stay in the cache from column to column."""


def walk(segment: Segment, some_X: RankArray = NO_RANKS) -> Walk:
    """Walk through a segment's columns once and compute the frontier; ``some_X`` are the ranks of ``some_KNX``."""
    n_rows, n_ranks, n_local = segment.n_rows, segment.n_ranks, len(segment.local)
    some_KNX = tuple(np.empty((column.n_steps, len(some_X)), np.float32) for column in segment.local)
    # The first local column writes all of it.
    arrival_MR = (np.empty if n_local else np.zeros)((n_rows, n_ranks))
    # The frontier and the leader after each column; index 0 is the start.
    frontier_KM = np.zeros((len(segment.columns) + 1, n_rows))
    ahead_KM = np.zeros(frontier_KM.shape, dtype=np.intp)
    second_M, runner_up_M = np.zeros(n_rows), np.zeros(n_rows, dtype=np.intp)
    n_together = max(1, BLOCK_BYTES // max(1, 8 * n_ranks))
    for begin in range(0, n_rows if n_ranks else 0, n_together):
        rows = slice(begin, min(begin + n_together, n_rows))
        reached_BR = arrival_MR[rows]
        for k, column in enumerate(segment.local):
            there, steps = _overlap(column, rows)
            values_BR = column.at(steps)
            if k == 0:
                reached_BR[: there.start], reached_BR[there.stop :] = 0.0, 0.0
                np.copyto(reached_BR[there], values_BR)
            else:
                reached_BR[there] += values_BR
            frontier_KM[k + 1, rows], ahead_KM[k + 1, rows] = _in_front(reached_BR)
            if len(some_X):
                some_KNX[k][steps] = values_BR.take(some_X, axis=1)
        second_M[rows], runner_up_M[rows] = _second(reached_BR, ahead_KM[n_local, rows])
        if segment.own is not None:
            frontier_KM[-1, rows], ahead_KM[-1, rows] = frontier_KM[n_local, rows], ahead_KM[n_local, rows]
            there, steps = _overlap(segment.own, rows)
            through = slice(begin + there.start, begin + there.stop)
            frontier_KM[-1, through], ahead_KM[-1, through] = _in_front(reached_BR[there] + segment.own.at(steps))
    return Walk(
        segment=segment,
        arrivals_M=tuple(arrival_MR),
        leader_M=ahead_KM[n_local],
        last_M=frontier_KM[n_local],
        runner_up_M=runner_up_M,
        second_M=second_M,
        end_M=frontier_KM[-1],
        advance_KM=np.diff(frontier_KM, axis=0),
        ahead_KM=ahead_KM[1:],
        some_KNX=some_KNX,
    )


def joined(parts: Sequence[tuple[Walk, slice]], segment: Segment) -> Walk:
    """The walk through a segment, put together from rows of other walks, in order."""
    names = ("leader_M", "last_M", "runner_up_M", "second_M", "end_M", "advance_KM", "ahead_KM")
    some_KNX = []
    for k, column in enumerate(segment.local):
        # A column's steps are ``offset`` rows later.
        steps = [slice(*(max(0, row - column.offset) for row in (rows.start, rows.stop))) for _, rows in parts]
        some_KNX.append(np.concatenate([one.some_KNX[k][at] for (one, _), at in zip(parts, steps, strict=True)]))
    return Walk(
        segment=segment,
        arrivals_M=tuple(arrival_R for one, rows in parts for arrival_R in one.arrivals_M[rows]),
        some_KNX=tuple(some_KNX),
        **{name: np.concatenate([getattr(one, name)[..., rows] for one, rows in parts], axis=-1) for name in names},
    )


def _overlap(column: SegmentColumn, rows: slice) -> tuple[slice, slice]:
    """The part of some rows that a column has: relative to the first of these rows, and as steps of the column."""
    first, last = (min(max(row - column.offset, 0), column.n_steps) for row in (rows.start, rows.stop))
    start = first + column.offset - rows.start
    return slice(start, start + last - first), slice(first, last)


def _in_front(reached_BR: FloatArray) -> tuple[FloatArray, RankArray]:
    """For each row the time of the rank in front, and which it is."""
    ahead_B = reached_BR.argmax(axis=1)
    return reached_BR[np.arange(len(ahead_B)), ahead_B], ahead_B


def _second(arrival_BR: FloatArray, leader_B: RankArray) -> tuple[FloatArray, RankArray]:
    """For each row the second last arrival, and whose it is; 0 if there is one rank."""
    if arrival_BR.shape[1] == 1:
        return np.zeros(len(leader_B)), leader_B
    rows = np.arange(len(leader_B))
    last_B = arrival_BR[rows, leader_B]
    arrival_BR[rows, leader_B] = -np.inf
    second = _in_front(arrival_BR)
    arrival_BR[rows, leader_B] = last_B
    return second


def walked(window: Window, some_X: RankArray = NO_RANKS) -> tuple[list[Walk], BoolArray]:
    """The walks through a window's segments, with the times of some ranks, and its complete steps (N).

    First all steps are taken to be complete, which saves a pass: a missing time is NaN, and shows in the frontier.
    """
    complete_N = np.ones(len(window.durations_NRS), dtype=np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        walks = [walk(segment, some_X) for segment in segments(window, complete_N)]
    if all(np.isfinite(one.end_M).all() for one in walks):
        return walks, complete_N
    complete_N = complete_steps(window)
    return [walk(segment, some_X) for segment in segments(window, complete_N)], complete_N


def anchored(window: Window) -> Accounting:
    """The accounting cut at the end of each sync stage, so that a delay after the last sync keeps its stage."""
    walks, complete_N = walked(window)
    return account(walks, window, int(complete_N.sum()))


def by_step(window: Window) -> tuple[FloatArray, BoolArray]:
    """Each step's (N) advances by stage (S) in seconds, and which steps are complete; the others have none.

    They sum to those of `anchored`. What came after a step's last sync belongs to that step.
    """
    walks, complete_N = walked(window)
    return advances_by_step(walks, window), complete_N


def advances_by_step(walks: list[Walk], window: Window) -> FloatArray:
    """The advances of walks through a window's segments, by step and stage (N × S), in seconds."""
    advances_NS = np.zeros((len(window.durations_NRS), len(window.schema.stages)))
    for one in walks:
        for column, advance_M, _ in one.boundaries:
            advances_NS[:, column.stage] += advance_M[column.offset : column.offset + column.n_steps]
    return advances_NS


def account(walks: list[Walk], window: Window, n_steps: int) -> Accounting:
    """The sums of the walks through a window's segments, over ``n_steps`` complete steps."""
    _, n_ranks, n_stages = window.durations_NRS.shape
    advances_S, led_SR = np.zeros(n_stages), np.zeros((n_stages, n_ranks))
    for one in walks:
        for column, advance_M, ahead_M in one.boundaries if n_ranks else ():
            advances_S[column.stage] += advance_M.sum()
            led_SR[column.stage] += np.bincount(ahead_M, advance_M, n_ranks)
    exposed_s = sum(float(one.end_M.sum()) for one in walks)
    # The lowest rank of equals.
    leaders_S = tuple(int(led_R.argmax()) if led_R.any() else None for led_R in led_SR)
    return Accounting(exposed_s, advances_S, leaders_S, n_steps)
