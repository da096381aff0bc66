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
class Segment:
    """One kind of segment over all steps of a window: M rows × R ranks × K columns, seconds.

    ``stage_K`` gives each column's stage (index into the schema). The last column is the sync stage's own when ``sync``
    is true, and only then; the columns before it are local. Row m ends in step m's sync. The opening segment begins
    with the stages that came after the last sync of the step before, and has one row more than the window has steps:
    what came after the last step's last sync.
    """

    values_MRK: FloatArray
    stage_K: tuple[int, ...]
    sync: bool

    @property
    def local_MRK(self) -> FloatArray:
        """The columns a rank goes through without waiting for anybody."""
        return self.values_MRK[:, :, :-1] if self.sync else self.values_MRK


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    stage: int
    values_NR: FloatArray


def complete_steps(window: Window) -> BoolArray:
    """Steps (N) for which every rank's vector is there, and what refines it. Others are left out, never filled in."""
    valid_N: BoolArray = np.asarray(np.isfinite(window.durations_NRS).all(axis=(1, 2)))
    for refinement in (window.outside_NRG, window.between_NR, window.ready_NR):
        if refinement is not None:
            valid_N &= np.isfinite(refinement).reshape(len(valid_N), -1).all(axis=1)
    return valid_N


def segments(window: Window) -> list[Segment]:
    """The window's segments in the order of a step.

    Without a sync stage there is one segment, the step itself. Steps that are not complete contribute nothing.
    """
    valid_N = complete_steps(window)
    groups = _columns_by_segment(window)
    tail, synced = groups[-1], groups[:-1]
    if not synced:
        return [_stack(tail, valid_N, sync=False)]
    opening = _opening(tail, synced[0], valid_N)
    return [opening, *(_stack(group, valid_N, sync=True) for group in synced[1:])]


def _columns_by_segment(window: Window) -> list[list[_Column]]:
    """Columns of each sync stage's segment in order, and last those after the last sync (maybe none)."""
    schema = window.schema
    groups: list[list[_Column]] = [[]]
    if window.between_NR is not None:
        groups[0].append(_Column(schema.stages.index(OTHER), window.between_NR))
    n_sync = 0
    for index, stage in enumerate(schema.stages):
        values_NR = window.durations_NRS[:, :, index]
        if stage == OTHER and window.outside_NRG is not None:
            values_NR = np.maximum(values_NR - window.outside_NRG.sum(axis=2), 0.0)
        if stage not in schema.sync:
            groups[-1].append(_Column(index, values_NR))
            continue
        if window.outside_NRG is not None:
            groups[-1].append(_Column(schema.stages.index(OTHER), window.outside_NRG[:, :, n_sync]))
        groups[-1].extend(_split_when_ready(index, values_NR, window))
        groups.append([])
        n_sync += 1
    return groups


def _split_when_ready(index: int, values_NR: FloatArray, window: Window) -> list[_Column]:
    """The sync stage's columns: with the moment of the last ready gradient, a local part and the part that waits."""
    if window.ready_NR is None or window.schema.sync_in_order[:1] != (window.schema.stages[index],):
        return [_Column(index, values_NR)]
    local_NR = np.minimum(window.ready_NR, values_NR)
    return [_Column(index, local_NR), _Column(index, values_NR - local_NR)]


def _opening(tail: list[_Column], head: list[_Column], valid_N: BoolArray) -> Segment:
    """Row t is the tail of step t-1 and the head of step t; the row after the last step is its tail alone."""
    n_steps, n_ranks = head[0].values_NR.shape
    values_MRK = np.zeros((n_steps + 1, n_ranks, len(tail) + len(head)))
    for k, column in enumerate(tail):
        values_MRK[1:, :, k] = np.where(valid_N[:, None], column.values_NR, 0.0)
    for k, column in enumerate(head, start=len(tail)):
        values_MRK[:-1, :, k] = np.where(valid_N[:, None], column.values_NR, 0.0)
    stage_K = tuple(column.stage for column in (*tail, *head))
    return Segment(values_MRK, stage_K, sync=True)


def _stack(columns: list[_Column], valid_N: BoolArray, *, sync: bool) -> Segment:
    values_NRK = np.stack([np.where(valid_N[:, None], c.values_NR, 0.0) for c in columns], axis=2)
    return Segment(values_NRK, tuple(c.stage for c in columns), sync=sync)


def by_step(values_M: FloatArray, n_steps: int) -> FloatArray:
    """Rows of a segment as steps (N, ...): what came after the last step's last sync is that step's."""
    values_N = values_M[:n_steps].copy()
    if len(values_M) > n_steps:
        values_N[-1] += values_M[n_steps:].sum(axis=0)
    return values_N
