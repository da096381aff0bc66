"""Where a window's exposed time went: the *frontier*, an exact, additive accounting, segment by segment, on a clock.

A segment runs from the end of one sync stage, where the ranks are together by construction, to the end of the next.
Stages after the last sync of step t-1 open the first segment of step t: cut anywhere else, a rank that is late there
would show as its peers' slow sync stage. At a stage boundary the frontier is the cumulative time of whichever rank is
furthest along; a stage's advance is its increment. Advances are never negative and sum to the exposed time
(StageFrontier, arXiv 2606.06751). Axes: N steps, R ranks, S stages, M rows. `judging` and `sftriage.account` call it.

A host's clock shows launches, and waits for its device wherever the host next blocks. The device reaches a boundary in
its own stream when it has finished all earlier launches, and not before the host has launched it: a late host shows
there too, in its own stage, as far as the device had to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.model.verdicts import Clock, Settings
from sftriage.model.windows import EXCHANGE, OTHER, Window

FloatArray = NDArray[np.float64]
SingleArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
RankArray = NDArray[np.intp]


def medians(values: FloatArray, axis: int = -1) -> FloatArray:
    """The medians along an axis, as `np.median` computes them, at a fraction of its cost; no value may be NaN."""
    middle = values.shape[axis] // 2
    parted = np.partition(values if axis == -1 else np.moveaxis(values, axis, -1), middle, axis=-1)
    if values.shape[axis] % 2:
        return np.asarray(parted[..., middle])
    # The lower of the two middle values is the largest of those below the upper one.
    return np.asarray((parted[..., :middle].max(axis=-1) + parted[..., middle]) / 2)


def known_medians(values_NXC: FloatArray) -> FloatArray:
    """The medians over ranks of the known values, as `np.nanmedian` computes them, at a fraction of its cost."""
    # Unknown values come last: in a row without known ones, also at -1 and 0.
    ordered_NXC, known_NC = np.sort(values_NXC, axis=1), (~np.isnan(values_NXC)).sum(axis=1)
    lower_NC, upper_NC = (
        np.take_along_axis(ordered_NXC, at_NC[:, None], axis=1)[:, 0] for at_NC in ((known_NC - 1) // 2, known_NC // 2)
    )
    return np.asarray((lower_NC + upper_NC) / 2)


Index = slice | tuple[slice | RankArray, ...]
"""Some steps, or some steps with a rank or ranks for each, as numpy indexes them."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumn:
    """One stage's part of a segment: N steps × R ranks, seconds; computed when used, so that no large window is copied.

    Attributes:
        offset: step n is in row ``n + offset`` of the segment: time after the last sync is in the next step's row.
        over_NR, up_to_NR: only time over this, and up to this, is in the column, if given.
        valid_NR: where False, the time is 0.
    """

    stage: int
    whole_NR: FloatArray
    offset: int = 0
    over_NR: FloatArray | None = None
    up_to_NR: FloatArray | None = None
    valid_NR: BoolArray | None = None

    @property
    def n_steps(self) -> int:
        return len(self.whole_NR)

    @property
    def values_NR(self) -> FloatArray:
        return self.at(slice(None))

    def at(self, index: Index) -> FloatArray:
        """The times at an index; read-only."""
        return self._part(lambda whole_NR: whole_NR[index])

    def of(self, ranks: RankArray) -> FloatArray:
        """The times of some ranks; much faster than indexing."""
        return self._part(lambda whole_NR: whole_NR.take(ranks, axis=1))

    def _part(self, part: Callable[[NDArray[Any]], NDArray[Any]]) -> FloatArray:
        values = part(self.whole_NR)
        if self.over_NR is not None:
            values = values - part(self.over_NR)
            np.maximum(values, 0.0, out=values)
        if self.up_to_NR is not None:
            values = np.minimum(values, part(self.up_to_NR))
        return values if self.valid_NR is None else np.where(part(self.valid_NR), values, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One kind of segment over all steps of a window, in M rows × R ranks; row m ends in step m's sync.

    The ranks go through the ``local`` columns without waiting for each other; ``own`` is the sync stage, or None if
    nothing synchronises. The opening segment begins with the stages after the last sync of the step before, and has one
    row more than the window has steps, for the time after the last step's last sync.
    """

    local: tuple[SegmentColumn, ...]
    own: SegmentColumn | None
    n_rows: int
    n_ranks: int
    n_steps: int
    n_stages: int

    @property
    def columns(self) -> tuple[SegmentColumn, ...]:
        return self.local if self.own is None else (*self.local, self.own)


def complete_steps(window: Window) -> BoolArray:
    """Steps (N) with vectors and refinements of all ranks. Other steps are left out, never filled in."""
    # NaN propagates through max, so that the largest time is finite only if all are.
    n_steps = len(window.durations_NRS)
    valid_N = np.ones(n_steps, dtype=np.bool_)
    if not window.durations_NRS.shape[1]:
        return valid_N
    with np.errstate(invalid="ignore"):
        for stage in range(window.durations_NRS.shape[2]):
            valid_N &= np.isfinite(window.durations_NRS[:, :, stage].max(axis=1))
        for refinement in (window.outside_NRG, window.between_NR, _ready(window)):
            if refinement is not None:
                valid_N &= np.isfinite(refinement.reshape(n_steps, -1).max(axis=1, initial=0.0))
    return valid_N


def segments(window: Window, valid_N: BoolArray | None = None) -> list[Segment]:
    """The window's segments in the order of a step; without a sync stage there is one, the step itself.

    Steps that are not complete contribute nothing.
    """
    valid_N = complete_steps(window) if valid_N is None else valid_N
    shape = n_steps, n_ranks, n_stages = window.durations_NRS.shape
    sizes = n_ranks, n_steps, n_stages
    groups = _columns_by_segment(window)
    if not valid_N.all():
        valid_NR = np.broadcast_to(valid_N[:, None], shape[:2])
        groups = [[replace(column, valid_NR=valid_NR) for column in group] for group in groups]
    tail, synced = groups[-1], groups[:-1]
    if not synced:
        return [Segment(tuple(tail), None, n_steps, *sizes)]
    late = [replace(column, offset=1) for column in tail]
    opening = Segment((*late, *synced[0][:-1]), synced[0][-1], n_steps + 1, *sizes)
    return [opening, *(Segment(tuple(group[:-1]), group[-1], n_steps, *sizes) for group in synced[1:])]


def _columns_by_segment(window: Window) -> list[list[SegmentColumn]]:
    """The columns of each sync stage's segment, with the sync stage's own last; the last list has those of the tail."""
    schema, outside_NRG, ready_NR = window.schema, window.outside_NRG, _ready(window)
    groups: list[list[SegmentColumn]] = [[]]
    if window.between_NR is not None:
        groups[0].append(SegmentColumn(schema.stages.index(OTHER), window.between_NR))
    n_sync = 0
    for index, stage in enumerate(schema.stages):
        column = SegmentColumn(index, window.durations_NRS[:, :, index])
        if stage == OTHER and outside_NRG is not None:
            outside_NR = outside_NRG[:, :, 0] if outside_NRG.shape[2] == 1 else outside_NRG.sum(axis=2)
            column = replace(column, over_NR=outside_NR)
        if stage not in schema.sync:
            groups[-1].append(column)
            continue
        parts = [column]
        if ready_NR is not None and stage == schema.split_sync:
            # Split at the moment of the last ready gradient into local and waiting.
            parts = [replace(column, up_to_NR=ready_NR), replace(column, over_NR=ready_NR)]
        if outside_NRG is not None:
            parts.insert(0, SegmentColumn(schema.stages.index(OTHER), outside_NRG[:, :, n_sync]))
        n_sync += 1
        if stage == EXCHANGE and parts[-1] is column:
            if not any((part.whole_NR > 0.0).any() for part in parts):
                continue  # there was no exchange, and nothing is cut
            # It may lie anywhere in the step, and make up for many steps: only the time that the last rank to arrive
            # spends there too is no wait.
            least_N = column.whole_NR.min(axis=1, initial=np.inf)
            parts[-1] = replace(column, up_to_NR=np.broadcast_to(least_N[:, None], column.whole_NR.shape))
        groups[-1].extend(parts)
        groups.append([])
    return groups


def _ready(window: Window) -> FloatArray | None:
    """The ready moments; None if less than half of the steps have those of all ranks."""
    ready_NR = window.ready_NR
    if ready_NR is None or not window.schema.sync:
        return None
    return ready_NR if np.isfinite(ready_NR).all(axis=1).mean() >= 0.5 else None


@dataclass(frozen=True, slots=True, eq=False)
class Accounting:
    """Where a window's exposed time went, in seconds over all its complete steps (``complete_N``).

    ``advances_S.sum() == exposed_s`` to floating-point precision. ``leaders_S`` is the rank that led each stage's
    boundary, weighted by the frontier's advance there while it led (None if it never advanced). ``advances_NS`` has
    the time after a step's last sync in that step.
    """

    exposed_s: float
    advances_S: FloatArray
    leaders_S: tuple[int | None, ...]
    advances_NS: FloatArray
    complete_N: BoolArray

    @property
    def n_steps(self) -> int:
        return int(self.complete_N.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """One pass through a segment, in seconds.

    Attributes:
        arrivals_M: for each row, the time at which each rank (R) had finished the local columns.
        leader_M, runner_up_M: the ranks that arrived last, at ``last_M``, and second last, at ``second_M`` (0 of one
            rank).
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
        return np.stack(self.arrivals_M)


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


def _overlap(column: SegmentColumn, rows: slice) -> tuple[slice, slice]:
    """The part of some rows that a column covers: relative to the first row, and as steps of the column."""
    first, last = (min(max(row - column.offset, 0), column.n_steps) for row in (rows.start, rows.stop))
    start = first + column.offset - rows.start
    return slice(start, start + last - first), slice(first, last)


def _in_front(reached_BR: FloatArray) -> tuple[FloatArray, RankArray]:
    """For each row, the time of the rank in front, and the rank."""
    ahead_B = reached_BR.argmax(axis=1)
    return reached_BR[np.arange(len(ahead_B)), ahead_B], ahead_B


def _second(arrival_BR: FloatArray, leader_B: RankArray) -> tuple[FloatArray, RankArray]:
    """For each row, the second last arrival, and its rank; 0 if there is one rank."""
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

    At first all steps are assumed to be complete, which saves a pass: a missing time is NaN, and shows in the frontier.
    """
    complete_N = np.ones(len(window.durations_NRS), dtype=np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        walks = [walk(segment, some_X) for segment in segments(window, complete_N)]
    if all(np.isfinite(part.end_M).all() for part in walks):
        return walks, complete_N
    complete_N = complete_steps(window)
    return [walk(segment, some_X) for segment in segments(window, complete_N)], complete_N


def anchored(window: Window) -> Accounting:
    """The accounting cut at the end of each sync stage, so that a delay after the last sync keeps its stage."""
    return account(*walked(window), window)


def account(walks: Sequence[Walk], complete_N: BoolArray, window: Window) -> Accounting:
    """The sums of the walks through a window's segments, over its complete steps."""
    n_steps, n_ranks, n_stages = window.durations_NRS.shape
    advances_NS, advances_S = np.zeros((n_steps, n_stages)), np.zeros(n_stages)
    led_SR = np.zeros((n_stages, n_ranks))
    for part in walks if n_ranks else ():
        for column, advance_M, ahead_M in zip(part.segment.columns, part.advance_KM, part.ahead_KM, strict=True):
            advances_NS[:, column.stage] += advance_M[column.offset : column.offset + n_steps]
            advances_S[column.stage] += advance_M.sum()
            led_SR[column.stage] += np.bincount(ahead_M, advance_M, n_ranks)
    exposed_s = sum(float(segment_walk.end_M.sum()) for segment_walk in walks)
    # The lowest rank of equals.
    leaders_S = tuple(int(led_R.argmax()) if led_R.any() else None for led_R in led_SR)
    return Accounting(exposed_s, advances_S, leaders_S, advances_NS, complete_N)


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A window whose durations are times of the ``clock`` on which it is judged.

    ``limited``: that is the host's clock though the device's is needed. ``agree``: the clocks do not contradict each
    other.
    """

    window: Window
    clock: Clock = "host"
    limited: bool = False
    agree: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)


def timed(window: Window, settings: Settings) -> Timed:
    """The window on its clock: the device's if that is known in enough steps, otherwise the host's."""
    least = {"min_device_coverage": settings.most_fraction}
    if window.device_NRS is None:
        if not window.on_device:
            return Timed(window)
        return Timed(window, limited=True, numbers={"device_coverage": 0.0, **least})
    device = on_device(window)
    host_N, both_N = complete_steps(window), complete_steps(device)
    both_N &= host_N
    numbers = {"device_coverage": float(both_N.sum()) / max(1.0, float(host_N.sum())), **least}
    if not both_N.any() or numbers["device_coverage"] < settings.most_fraction:
        return Timed(window, limited=True, numbers=numbers)
    steps_s = {"host_step_s": _step_s(window, both_N), "device_step_s": _step_s(device, both_N)}
    shorter_s, longer_s = sorted(steps_s.values())
    agreement = shorter_s / longer_s if longer_s > 0.0 else 1.0
    numbers |= steps_s | {"clock_agreement": agreement, "min_clock_agreement": settings.most_fraction}
    if agreement < settings.most_fraction:
        return Timed(window, limited=True, agree=False, numbers=numbers)
    return Timed(device, clock="device", numbers=numbers)


def on_device(window: Window) -> Window:
    """The window with the devices' times as durations.

    If a step is unknown, so is the time before the next one, which is then incomplete: no row of the accounting is half
    there.
    """
    assert window.device_NRS is not None
    between_NR = window.device_between_NR
    if between_NR is not None:
        after_gap_NR = np.zeros(between_NR.shape, dtype=np.bool_)
        after_gap_NR[1:] = ~np.isfinite(window.device_NRS[:-1]).all(axis=2)
        if after_gap_NR.any():
            between_NR = np.where(after_gap_NR, np.nan, between_NR)
    return replace(
        window,
        durations_NRS=window.device_NRS,
        outside_NRG=window.device_outside_NRG,
        between_NR=between_NR,
        ready_NR=window.device_ready_NR,
    )


def _step_s(window: Window, steps_N: BoolArray) -> float:
    """The mean length of some steps over the ranks, with the time between steps."""
    total_NR = window.durations_NRS[steps_N].sum(axis=2)
    return float((total_NR if window.between_NR is None else total_NR + window.between_NR[steps_N]).mean())
