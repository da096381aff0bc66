"""The clear events of a window: the steps that one rank, or one host, held up alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray
from sftriage.frontier.roles import Roles
from sftriage.frontier.sequential import MIN_TIMES, ClearEvent, Evidence, UnitName
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import SegmentReplay

MAX_LOOKED_AT = 16
"""Ranks, and hosts, that are looked at closely: those that held up most."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Who arrived last in a window, among ranks or among hosts, and by how much that one alone held up the others.

    ``last`` has for each segment the number of the last (M) and what mending it would have saved (M, seconds);
    ``places`` the hosts, None where ranks are the units.
    """

    n_units: int
    last: tuple[tuple[RankArray, FloatArray], ...]
    places: Roles | None = None

    def unit(self, number: int) -> UnitName:
        """The name of a unit."""
        return number if self.places is None else self.places.names[number]


def arrivals_of_ranks(replays: Sequence[SegmentReplay], n_ranks: int) -> Arrivals:
    """Ranks."""
    return Arrivals(n_ranks, tuple((one.walk.leader_M, one.whole_gain_M) for one in replays))


def arrivals_of_hosts(
    replays: Sequence[SegmentReplay], last_elsewhere: Sequence[FloatArray], places: Roles, settings: Settings
) -> Arrivals:
    """Hosts; ``last_elsewhere`` has for each segment the last arrival on another host than the leader's (M).

    Where the last rank alone explains what its host held up, it was the rank's doing and not the host's.
    """
    last = []
    for one, elsewhere_M in zip(replays, last_elsewhere, strict=True):
        held_M = np.minimum(one.walk.last_M - elsewhere_M, np.maximum(one.lateness_M, 0.0))
        alone_M = one.margin_M >= settings.most_fraction * held_M
        last.append((places.role_R[one.walk.leader_M], np.where(alone_M, 0.0, held_M)))
    return Arrivals(len(places.names), tuple(last), places)


def who_held_up(arrivals: Arrivals, evidence: Evidence, least_s: float) -> list[int]:
    """The numbers of the units to be looked at closely: those that held the others up most, not more than a few.

    Whoever did for less than ``least_s`` is no candidate, unless it is one that comes back.
    """
    led_U = np.zeros(arrivals.n_units)
    for number_M, held_M in arrivals.last:
        led_U += np.bincount(number_M, held_M, len(led_U))
    times = Counter(one.unit for one in evidence.events)
    first = [n for n in np.argsort(-led_U, kind="stable")[:MAX_LOOKED_AT].tolist() if led_U[n] > 0.0]
    return [n for n in first if led_U[n] >= least_s or times[arrivals.unit(n)] >= MIN_TIMES]


def clear_events(
    arrivals: Arrivals,
    replays: Sequence[SegmentReplay],
    counted_N: BoolArray,
    first_step: int,
    usual_s: float,
    min_share: float,
) -> list[ClearEvent]:
    """The events in the rows that count, in order: at most one a step, that of whoever held it up most.

    ``usual_s`` is what a step takes that nobody holds up. An event belongs to the step in which the leader lost most of
    it: what came after the last sync stage of a step shows in the row of the next.
    """
    n_steps = len(counted_N)
    found: dict[int, dict[int, float]] = {}
    for one, (number_M, held_M) in zip(replays, arrivals.last, strict=True):
        for row in np.flatnonzero((held_M[:n_steps] > 0.0) & counted_N):
            step = int(row) - int(one.offset_S[one.excess_MS[row].argmax()])
            of_step = found.setdefault(step, {})
            of_step[int(number_M[row])] = of_step.get(int(number_M[row]), 0.0) + float(held_M[row])
    events = []
    for step in sorted(found):
        number, held_s = max(found[step].items(), key=lambda one: one[1])
        if held_s > min_share * usual_s:
            events.append(ClearEvent(first_step + step, arrivals.unit(number), held_s / usual_s))
    return events
