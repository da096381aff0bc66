"""The clear events of a window: the steps that one rank, or one host, held up alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray
from sftriage.frontier.roles import Roles
from sftriage.frontier.sequential import ClearEvent, Unit
from sftriage.frontier.whatif import SegmentReplay


def clear_events(
    replays: Sequence[SegmentReplay],
    held: Sequence[tuple[RankArray, FloatArray]],
    units: Sequence[Unit],
    counted_N: BoolArray,
    first_step: int,
    usual_s: float,
    min_share: float,
) -> list[ClearEvent]:
    """The events in the rows that count, in order: at most one a step, that of whoever held it up most.

    ``held`` has for each segment the number of the unit that arrived last (M), and by how much it held up the others
    (M, seconds). An event belongs to the step in which the leader lost most of it: what came after the last sync stage
    of a step shows in the row of the next.
    """
    n_steps = len(counted_N)
    found: dict[int, dict[int, float]] = {}
    for one, (unit_M, held_M) in zip(replays, held, strict=True):
        for row in np.flatnonzero((held_M[:n_steps] > 0.0) & counted_N):
            step = int(row) - int(one.offset_S[one.excess_MS[row].argmax()])
            of_step = found.setdefault(step, {})
            of_step[int(unit_M[row])] = of_step.get(int(unit_M[row]), 0.0) + float(held_M[row])
    events = []
    for step in sorted(found):
        unit, held_s = max(found[step].items(), key=lambda one: one[1])
        if held_s > min_share * usual_s:
            events.append(ClearEvent(first_step + step, units[unit], held_s / usual_s))
    return events


def held_by_ranks(replays: Sequence[SegmentReplay]) -> list[tuple[RankArray, FloatArray]]:
    """For each segment who arrived last, and what mending that rank alone would have saved."""
    return [(one.walk.leader_M, one.whole_gain_M) for one in replays]


def held_by_hosts(
    replays: Sequence[SegmentReplay], last_elsewhere: Sequence[FloatArray], places: Roles
) -> list[tuple[RankArray, FloatArray]]:
    """For each segment the host that arrived last, and what mending all of its ranks would have saved at most."""
    return [
        (
            places.role_R[one.walk.leader_M],
            np.minimum(one.walk.last_M - elsewhere_M, np.maximum(one.lateness_M, 0.0)),
        )
        for one, elsewhere_M in zip(replays, last_elsewhere, strict=True)
    ]
