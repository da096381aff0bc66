"""The clear events of a window: the steps that one rank, or one host, alone delayed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray
from sftriage.frontier.roles import Roles
from sftriage.frontier.units import UnitName
from sftriage.frontier.whatif import SegmentReplay
from sftriage.verdicts.sequential import MIN_TIMES, ClearEvent, Evidence
from sftriage.verdicts.settings import Settings

MAX_EXAMINED = 16
"""Ranks, and hosts, whose gains are worked out stage by stage: those that delayed the others most."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Which unit arrived last in each row of each segment, and what mending that unit alone would have saved.

    Attributes:
        names: of all ranks, or hosts.
        last: for each segment the number of the last unit (M) and its gain in seconds (M).
    """

    names: Sequence[UnitName]
    last: tuple[tuple[RankArray, FloatArray], ...]


def arrivals_of_ranks(replays: Sequence[SegmentReplay], n_ranks: int) -> Arrivals:
    """The arrivals of ranks."""
    return Arrivals(range(n_ranks), tuple((one.walk.leader_M, one.whole_gain_M) for one in replays))


def arrivals_of_hosts(
    replays: Sequence[SegmentReplay], last_elsewhere: Sequence[FloatArray], places: Roles, settings: Settings
) -> Arrivals:
    """The arrivals of hosts; ``last_elsewhere`` is for each segment the last arrival on any host but the leader's (M).

    Where the last rank alone explains most of its host's delay, the row counts for the rank and not for the host.
    """
    last = []
    for one, elsewhere_M in zip(replays, last_elsewhere, strict=True):
        gain_M = np.minimum(one.walk.last_M - elsewhere_M, np.maximum(one.lateness_M, 0.0))
        alone_M = one.margin_M >= settings.most_fraction * gain_M
        last.append((places.role_R[one.walk.leader_M], np.where(alone_M, 0.0, gain_M)))
    return Arrivals(places.names, tuple(last))


def units_to_examine(arrivals: Arrivals, evidence: Evidence, least_s: float) -> list[int]:
    """The numbers of the units that may be candidates: those that delayed the others most, `MAX_EXAMINED` at most.

    One that delayed them by less than ``least_s`` over the window is none, unless it may be recurring.
    """
    total_U = np.zeros(len(arrivals.names))
    for number_M, gain_M in arrivals.last:
        total_U += np.bincount(number_M, gain_M, len(total_U))
    times = Counter(one.unit for one in evidence.events)
    first = [n for n in np.argsort(-total_U, kind="stable")[:MAX_EXAMINED].tolist() if total_U[n] > 0.0]
    return [n for n in first if total_U[n] >= least_s or times[arrivals.names[n]] >= MIN_TIMES]


def clear_events(
    arrivals: Arrivals,
    replays: Sequence[SegmentReplay],
    counted_N: BoolArray,
    first_step: int,
    usual_s: float,
    min_share: float,
) -> list[ClearEvent]:
    """The clear events in the rows that count, in order: at most one a step, that of the unit with the largest gain.

    ``usual_s`` is the length of a step that nobody delays. An event belongs to the step in which the leader lost most
    of the time: a delay after a step's last sync stage shows in the row of the next step.
    """
    n_steps = len(counted_N)
    found: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for one, (number_M, gain_M) in zip(replays, arrivals.last, strict=True):
        for row in np.flatnonzero((gain_M[:n_steps] > 0.0) & counted_N):
            step = int(row) - int(one.offset_S[one.excess_MS[row].argmax()])
            found[step][int(number_M[row])] += float(gain_M[row])
    events = []
    for step in sorted(found):
        number, gain_s = max(found[step].items(), key=lambda one: one[1])
        if gain_s > min_share * usual_s:
            events.append(ClearEvent(first_step + step, arrivals.names[number], gain_s / usual_s))
    return events
