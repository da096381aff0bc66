"""Windows overlap: what a window has in common with the one before it is not looked at again, where that is much.

A row of a replay depends on its own step, and on what the step before left behind. So of a window that goes on where
another left off, the rows of the steps that both have are taken over, but for the first: there, what the step before it
left behind is no part of the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sftriage.frontier.accounting import walked
from sftriage.frontier.arrays import FloatArray
from sftriage.frontier.roles import SAMPLE_RANKS, Roles
from sftriage.frontier.segments import Segment, segments
from sftriage.frontier.whatif import SegmentReplay, joined, replay
from sftriage.records import StageSchema, Window

TOLD_BY_RANKS = 8
"""That two windows have the same times in the steps that they share is told by so many ranks."""

Parts = tuple[StageSchema, int, Roles, tuple[tuple[object, ...], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The replays of a window, for the next one. Of the window itself it keeps the times of a few ranks (N × X × S)."""

    first_step: int
    parts: Parts
    some_NXS: FloatArray
    replays: tuple[SegmentReplay, ...]


def remembered(window: Window, roles: Roles, replays: list[SegmentReplay]) -> Replayed | None:
    """What is kept for the next window; None of a job so small that looking again is quicker."""
    if window.durations_NRS.shape[1] <= SAMPLE_RANKS:
        return None
    emptied = [
        replace(one, walk=replace(one.walk, segment=replace(one.walk.segment, local=(), own=None))) for one in replays
    ]
    found = [one.walk.segment for one in replays]
    return Replayed(window.first_step, _parts(window, roles, found), _some(window), tuple(emptied))


def resumed(window: Window, roles: Roles, before: Replayed | None) -> list[SegmentReplay] | None:
    """The replays of a complete window with what is known of the one before; None if that is of no use."""
    n_steps = len(window.durations_NRS)
    if before is None or window.durations_NRS.shape[1] <= SAMPLE_RANKS:
        return None
    ahead = window.first_step - before.first_step
    last_known = before.first_step + len(before.some_NXS) - 1
    n_shared = last_known - window.first_step + 1
    if ahead <= 0 or not 2 <= n_shared < n_steps:
        return None
    whole = segments(window, np.ones(n_steps, dtype=np.bool_))
    same_parts = before.parts == _parts(window, roles, whole)
    if not same_parts or not np.array_equal(before.some_NXS[ahead:], _some(window)[:n_shared]):
        return None
    found = []
    for first, last in ((window.first_step, window.first_step), (last_known, window.last_step)):
        walks, complete_N = walked(window.steps(first, last), roles.some_X)
        if not complete_N.all():
            return None
        found.append(replay(walks, roles, len(window.schema.stages)))
    one_step, new = found
    return [
        joined(
            [
                (one_step[k], slice(0, 1)),
                (before.replays[k], slice(ahead + 1, ahead + n_shared)),
                (new[k], slice(1, new[k].walk.segment.n_rows)),
            ],
            segment,
            roles,
            len(window.schema.stages),
        )
        for k, segment in enumerate(whole)
    ]


def _parts(window: Window, roles: Roles, found: list[Segment]) -> Parts:
    """What two windows must have in common for their rows to be alike: ranks, and columns made in the same way."""
    columns = tuple(
        (column.stage, column.offset, column.over_NR is None, column.up_to_NR is None)
        for segment in found
        for column in segment.columns
    )
    return window.schema, window.attempt, roles, columns


def _some(window: Window) -> FloatArray:
    return window.durations_NRS[:, :: window.durations_NRS.shape[1] // TOLD_BY_RANKS].copy()
