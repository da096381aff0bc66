"""Cutting a window at the ends of its sync stages, where the ranks are together by construction.

A segment runs from the end of one sync stage to the end of the next. Stages after the last sync of step t-1 open the
first segment of step t: a rank late there is late at the next sync, and cutting anywhere else would show that as its
peers' slow sync stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray
from sftriage.model.windows import EXCHANGE, OTHER, Window

Index = slice | tuple[slice | RankArray, ...]
"""Some steps, or some of them and for each a rank or ranks, as numpy takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumn:
    """One stage's part of a segment: N steps × R ranks, seconds.

    It is computed when it is used, so that a large job's window is not copied.

    Attributes:
        stage: the index of the stage.
        whole_NR: the stage's time as recorded.
        offset: step n is in row ``n + offset`` of the segment: what came after the last sync is in the next step's row.
        over_NR: only time over this is in the column, if given.
        up_to_NR: only time up to this is in the column, if given.
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
        """The number of steps."""
        return len(self.whole_NR)

    @property
    def values_NR(self) -> FloatArray:
        """The times of all steps and ranks."""
        return self.at(slice(None))

    def at(self, index: Index) -> FloatArray:
        """The times at an index; not to be written to."""
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

    The ranks go through the ``local`` columns in order without waiting for anybody; ``own`` is the sync stage, or None
    where nothing synchronises. The opening segment begins with the stages that came after the last sync of the step
    before, and has one row more than the window has steps: what came after the last step's last sync.
    """

    local: tuple[SegmentColumn, ...]
    own: SegmentColumn | None
    n_rows: int
    n_ranks: int

    @property
    def columns(self) -> tuple[SegmentColumn, ...]:
        """All columns, the sync stage's own last."""
        return self.local if self.own is None else (*self.local, self.own)


def complete_steps(window: Window) -> BoolArray:
    """Steps (N) whose vectors, and what refines them, are there for all ranks. Others are left out, never filled in."""
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
    """The window's segments in the order of a step.

    Without a sync stage there is one segment, the step itself. Steps that are not complete contribute nothing.
    """
    valid_N = complete_steps(window) if valid_N is None else valid_N
    n_steps, n_ranks, _ = window.durations_NRS.shape
    groups = _columns_by_segment(window)
    if not valid_N.all():
        valid_NR = np.broadcast_to(valid_N[:, None], (n_steps, n_ranks))
        groups = [[replace(column, valid_NR=valid_NR) for column in group] for group in groups]
    tail, synced = groups[-1], groups[:-1]
    if not synced:
        return [Segment(tuple(tail), None, n_steps, n_ranks)]
    late = [replace(column, offset=1) for column in tail]
    opening = Segment((*late, *synced[0][:-1]), synced[0][-1], n_steps + 1, n_ranks)
    return [opening, *(Segment(tuple(group[:-1]), group[-1], n_steps, n_ranks) for group in synced[1:])]


def _columns_by_segment(window: Window) -> list[list[SegmentColumn]]:
    """The columns of each sync stage's segment, the sync stage's own last; and in the last list those of the tail."""
    schema, outside_NRG = window.schema, window.outside_NRG
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
        parts = _split_when_ready(column, window)
        if outside_NRG is not None:
            parts.insert(0, SegmentColumn(schema.stages.index(OTHER), outside_NRG[:, :, n_sync]))
        n_sync += 1
        if stage == EXCHANGE and parts[-1] is column:
            if not any((part.whole_NR > 0.0).any() for part in parts):
                continue  # there was none, and nothing is cut
            # It may lie anywhere in the step, and make up for many steps: of a rank's time there only what the last
            # one to arrive takes, too, is no wait.
            least_N = column.whole_NR.min(axis=1, initial=np.inf)
            parts[-1] = replace(column, up_to_NR=np.broadcast_to(least_N[:, None], column.whole_NR.shape))
        groups[-1].extend(parts)
        groups.append([])
    return groups


def _split_when_ready(column: SegmentColumn, window: Window) -> list[SegmentColumn]:
    """The columns of a sync stage: split at the moment of the last ready gradient, if known, into local and waiting."""
    ready_NR = _ready(window)
    if ready_NR is None or window.schema.stages[column.stage] != window.schema.split_sync:
        return [column]
    values_NR = column.values_NR
    return [
        SegmentColumn(column.stage, values_NR, up_to_NR=ready_NR),
        SegmentColumn(column.stage, values_NR, over_NR=ready_NR),
    ]


def _ready(window: Window) -> FloatArray | None:
    """The ready moments; None if less than half of the steps have those of all ranks: the others are left out."""
    ready_NR = window.ready_NR
    if ready_NR is None or not window.schema.sync:
        return None
    return ready_NR if np.isfinite(ready_NR).all(axis=1).mean() >= 0.5 else None
