"""Cutting a window at the ends of its sync stages, where the ranks are together by construction.

A segment runs from the end of one sync stage to the end of the next. Stages after the last sync of step t-1 open the
first segment of step t: a rank late there is late at the next sync, and cutting anywhere else would show that as its
peers' slow sync stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray
from sftriage.records import OTHER, Window


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One stage's part of a segment: N steps × R ranks, seconds.

    Step n is in the segment's row ``n + offset``: what came after the last sync belongs to the row of the next step.
    """

    stage: int
    values_NR: FloatArray
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One kind of segment over all steps of a window, in M rows × R ranks; row m ends in step m's sync.

    The ranks go through the ``local`` columns in order without waiting for anybody; ``own`` is the sync stage, or None
    where nothing synchronises. The opening segment begins with the stages that came after the last sync of the step
    before, and has one row more than the window has steps: what came after the last step's last sync.
    """

    local: tuple[Column, ...]
    own: Column | None
    n_rows: int
    n_ranks: int


def complete_steps(window: Window) -> BoolArray:
    """Steps (N) for which every rank's vector is there, and what refines it. Others are left out, never filled in."""
    # A sum is finite where all its terms are, but for the odd overflow: no such time is a measurement.
    with np.errstate(invalid="ignore", over="ignore"):
        total_N = np.zeros(len(window.durations_NRS))
        for stage in range(window.durations_NRS.shape[2]):
            total_N += window.durations_NRS[:, :, stage].sum(axis=1)
        for refinement in (window.outside_NRG, window.between_NR, _ready(window)):
            if refinement is not None:
                total_N += refinement.reshape(len(total_N), -1).sum(axis=1)
    return np.isfinite(total_N)


def segments(window: Window, valid_N: BoolArray | None = None) -> list[Segment]:
    """The window's segments in the order of a step.

    Without a sync stage there is one segment, the step itself. Steps that are not complete contribute nothing.
    """
    valid_N = complete_steps(window) if valid_N is None else valid_N
    n_steps, n_ranks, _ = window.durations_NRS.shape
    groups = _columns_by_segment(window)
    if not valid_N.all():
        groups = [[_without(column, valid_N) for column in group] for group in groups]
    tail, synced = groups[-1], groups[:-1]
    if not synced:
        return [Segment(tuple(tail), None, n_steps, n_ranks)]
    late = [Column(column.stage, column.values_NR, offset=1) for column in tail]
    opening = Segment((*late, *synced[0][:-1]), synced[0][-1], n_steps + 1, n_ranks)
    return [opening, *(Segment(tuple(group[:-1]), group[-1], n_steps, n_ranks) for group in synced[1:])]


def _without(column: Column, valid_N: BoolArray) -> Column:
    return Column(column.stage, np.where(valid_N[:, None], column.values_NR, 0.0), column.offset)


def _columns_by_segment(window: Window) -> list[list[Column]]:
    """Columns of each sync stage's segment in order, the sync stage's own last, and after them those of the tail."""
    schema = window.schema
    groups: list[list[Column]] = [[]]
    if window.between_NR is not None:
        groups[0].append(Column(schema.stages.index(OTHER), window.between_NR))
    n_sync = 0
    for index, stage in enumerate(schema.stages):
        values_NR = window.durations_NRS[:, :, index]
        if stage == OTHER and window.outside_NRG is not None:
            values_NR = np.maximum(values_NR - window.outside_NRG.sum(axis=2), 0.0)
        if stage not in schema.sync:
            groups[-1].append(Column(index, values_NR))
            continue
        if window.outside_NRG is not None:
            groups[-1].append(Column(schema.stages.index(OTHER), window.outside_NRG[:, :, n_sync]))
        groups[-1].extend(_split_when_ready(index, values_NR, window, n_sync))
        groups.append([])
        n_sync += 1
    return groups


def _split_when_ready(index: int, values_NR: FloatArray, window: Window, n_sync: int) -> list[Column]:
    """The sync stage's columns: with the moment of the last ready gradient, a local part and the part that waits."""
    ready_NR = _ready(window)
    if ready_NR is None or n_sync != 0:
        return [Column(index, values_NR)]
    local_NR = np.minimum(ready_NR, values_NR)
    return [Column(index, local_NR), Column(index, values_NR - local_NR)]


MIN_READY_FRACTION = 0.5
"""A split known in fewer of the steps is not used: the steps without it would have to be left out."""


def _ready(window: Window) -> FloatArray | None:
    """The ready moments, or None where too few steps have theirs for all ranks."""
    ready_NR = window.ready_NR
    if ready_NR is None or not window.schema.sync:
        return None
    known_N = np.isfinite(ready_NR).all(axis=1)
    return ready_NR if known_N.mean() >= MIN_READY_FRACTION else None
