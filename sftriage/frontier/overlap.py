"""Reuse of the replay of the window before, for the steps that two overlapping windows share. Of large jobs only.

A row of a replay depends on its own step, and on what came after the last sync of the step before. So the rows of
shared steps are the same in both windows, except the first: the step before it is not part of the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sftriage.frontier.accounting import walked
from sftriage.frontier.arrays import FloatArray
from sftriage.frontier.roles import SAMPLE_RANKS, Roles
from sftriage.frontier.segments import Segment, segments
from sftriage.frontier.whatif import SegmentReplay, joined, replay
from sftriage.model.windows import StageSchema, Window

TOLD_BY_RANKS = 8
"""Ranks whose times are compared to check that two windows agree in the steps that they share."""

Parts = tuple[StageSchema, int, Roles, tuple[tuple[object, ...], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class KeptReplay:
    """The replays of a window, kept for the next one, with the times of a few ranks (N × X × S)."""

    first_step: int
    parts: Parts
    some_NXS: FloatArray
    replays: tuple[SegmentReplay, ...]


def remembered(window: Window, roles: Roles, replays: list[SegmentReplay]) -> KeptReplay | None:
    """What is kept for the next window; None for a small job, where replaying again is faster."""
    if window.durations_NRS.shape[1] <= SAMPLE_RANKS:
        return None
    emptied = [
        replace(one, walk=replace(one.walk, segment=replace(one.walk.segment, local=(), own=None))) for one in replays
    ]
    found = [one.walk.segment for one in replays]
    return KeptReplay(window.first_step, _parts(window, roles, found), _some(window), tuple(emptied))


def resumed(window: Window, roles: Roles, before: KeptReplay | None) -> list[SegmentReplay] | None:
    """The replays of a complete window, reusing those of the one before; None if they cannot be reused."""
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
            len(window.schema.stages),
        )
        for k, segment in enumerate(whole)
    ]


def _parts(window: Window, roles: Roles, found: list[Segment]) -> Parts:
    """What two windows must have in common for their rows to be the same: ranks and columns."""
    columns = tuple(
        (column.stage, column.offset, column.over_NR is None, column.up_to_NR is None)
        for segment in found
        for column in segment.columns
    )
    return window.schema, window.attempt, roles, columns


def _some(window: Window) -> FloatArray:
    return window.durations_NRS[:, :: window.durations_NRS.shape[1] // TOLD_BY_RANKS].copy()
