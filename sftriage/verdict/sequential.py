"""Sequential likelihood-ratio tests along the run: which rank, or which host, delays the others. `evidence` calls it.

A *unit* is a rank or a host (which arrives with its last rank). A *clear event* of a unit is a step that this unit
alone delayed by more than some share of the step. At each event, two hypotheses are compared. Either nothing is wrong:
each unit is equally likely to cause the event, or, if delays last for several steps, the unit of the last event is as
likely as others were after theirs. Or the unit is at fault and causes most of the events. The log likelihood ratio is
summed over the events and never falls below zero (CUSUM, Page 1954): chance alone reaches a threshold h at most once in
e^h events (Lorden 1971).

Work that all units do makes a different unit last each time, so that no unit's sum grows. If each unit does it at its
own time, the events of several are the same period apart, which is then the job's. If a unit's events also fall into
one phase of a period, the odds of that are added (Fisher's exact test).

Work that a rank does alone, by its own note, while the others wait (it compiles, evaluates, saves) is named by that
note, if the rank is last in the steps that it alone marked and hardly ever in others. If other ranks do the same at
their own times, no rank is named: it is the job's work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sftriage.model.verdicts import OwnWork, Settings
from sftriage.verdict.accounting import BoolArray, FloatArray, RankArray
from sftriage.verdict.units import UnitName
from sftriage.verdict.whatif import Roles, SegmentReplay

HISTORY_STEPS = 512
"""Steps whose events are kept."""

Runs: TypeAlias = "tuple[tuple[UnitName, bool], ...]"
"""Runs of consecutive clear events by one unit, each with whether it had a second event."""

MAX_RUNS = 64
"""Runs that are kept."""

MAX_PERIOD_STEPS = 64
"""The longest period to search for, an eighth of `HISTORY_STEPS`. A fault absent for longer has ended."""

MIN_TIMES = 4
"""Minimum events of a recurrence: three gaps that agree."""

MAX_DRIFT = 0.1
"""Gaps between events that differ from a period by at most this fraction of it count as that period."""

MAX_PERIODS_APART = 3
"""Maximum periods between two events of a recurrence with missing ones: a longer gap, with its drift, may be chance."""

_LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, HISTORY_STEPS + 1)))])


@dataclass(frozen=True, slots=True)
class ClearEvent:
    """A step that one unit alone delayed, by ``share`` of the usual step."""

    step: int
    unit: UnitName
    share: float


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A unit's events at every step n with ``n % period == phase``, since the step ``onset``."""

    period: int
    phase: int
    onset: int
    log_odds: float


@dataclass(frozen=True, slots=True)
class UnitOdds:
    """The state of the tests of one unit.

    Attributes:
        log_odds: the sum of each test, natural logarithm, at least 0.
        since: for each test, the step of the event at which its sum last rose from 0.
        named: whether one of them has reached the threshold, and the fault is not known to have ended.
    """

    log_odds: tuple[float, ...]
    since: tuple[int, ...]
    named: bool = False

    @property
    def onset(self) -> int:
        """The step at which the largest sum rose from 0."""
        return self.since[max(range(len(self.since)), key=self.log_odds.__getitem__)]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The tests of all of a job's ranks, or of all its hosts (``n_units``), after the steps before ``next_step``.

    Attributes:
        units: the state of each unit whose sums are not all 0.
        events: the clear events of the last `HISTORY_STEPS` steps, in order.
        runs: for each size, the last runs of events that are at least so large.
    """

    n_units: int = 0
    next_step: int = 0
    units: Mapping[UnitName, UnitOdds] = field(default_factory=dict)
    events: tuple[ClearEvent, ...] = ()
    runs: tuple[Runs, ...] = ()

    def named(self, unit: UnitName) -> bool:
        """Whether a test has named the unit, and its fault is not known to have ended."""
        return unit in self.units and self.units[unit].named

    def events_of(self, unit: UnitName, settings: Settings) -> list[int]:
        """The steps of the unit's events in the test that names it, since its sum rose from 0."""
        state = self.units[unit]
        test = max(range(len(state.since)), key=state.log_odds.__getitem__)
        size = settings.event_sizes[test // len(settings.guilty_fractions)]
        own = (event for event in self.events if event.unit == unit and event.step >= state.since[test])
        return [event.step for event in own if event.share > size]

    def log_odds(self, unit: UnitName) -> float:
        return max(self.units[unit].log_odds, default=0.0) if unit in self.units else 0.0


def advanced(evidence: Evidence, events: Sequence[ClearEvent], next_step: int, settings: Settings) -> Evidence:
    """The evidence after the steps before ``next_step``, whose clear events were ``events``, in order."""
    if evidence.n_units < 2:
        return replace(evidence, next_step=next_step)
    sizes, chance = settings.event_sizes, _least_chance(evidence.n_units, settings)
    none = (0.0,) * (len(sizes) * len(settings.guilty_fractions))
    units, runs = dict(evidence.units), list(evidence.runs or [()] * len(sizes))
    last_step = {event.unit: event.step for event in evidence.events}
    for event in events:
        units = {unit: state for unit, state in units.items() if event.step - last_step[unit] <= MAX_PERIOD_STEPS}
        units.setdefault(event.unit, UnitOdds(none, (event.step,) * len(none)))
        updated = {unit: _updated(state, unit, event, runs, chance, settings) for unit, state in units.items()}
        units = {unit: state for unit, state in updated.items() if any(state.log_odds)}
        last_step[event.unit] = event.step
        runs = [_longer(r, event.unit) if event.share > size else r for r, size in zip(runs, sizes, strict=True)]
    units = {unit: state for unit, state in units.items() if next_step - last_step[unit] <= MAX_PERIOD_STEPS}
    kept = tuple(event for event in (*evidence.events, *events) if event.step >= next_step - HISTORY_STEPS)
    return Evidence(evidence.n_units, next_step, units, kept, tuple(runs))


def _least_chance(n_units: int, settings: Settings) -> float:
    """The fraction of clear events that a unit causes by chance."""
    return max(1.0 / n_units, settings.min_chance)


def _longer(runs: Runs, unit: UnitName) -> Runs:
    if not runs or runs[-1][0] != unit:
        return (*runs, (unit, False))[-MAX_RUNS:]
    return runs if runs[-1][1] else (*runs[:-1], (unit, True))


def _chance(runs: Runs, unit: UnitName, least: float) -> float:
    """The probability that chance makes the next event this unit's: at least ``least``.

    After one of its own, it is the fraction of the others' runs that continued (rule of succession, from ``least``). A
    run that is a whole fault counts once.
    """
    if not runs or runs[-1][0] != unit:
        return least
    others = [went_on for other, went_on in runs if other != unit]
    return max(least, (sum(others) + 1.0) / (len(others) + 1.0 / least))


def _updated(
    state: UnitOdds, unit: UnitName, event: ClearEvent, runs: list[Runs], least: float, settings: Settings
) -> UnitOdds:
    """A unit's state after an event, its own or another's; ``runs`` came before it, ``least`` is any unit's chance."""
    own, since, log_odds = unit == event.unit, list(state.since), list(state.log_odds)
    enough, fractions = settings.naming_log_odds, settings.guilty_fractions
    for k, size in enumerate(settings.event_sizes):
        if event.share <= size:
            continue
        chance = _chance(runs[k], unit, least)
        for i, guilty in enumerate(fractions, k * len(fractions)):
            if own and log_odds[i] == 0.0:
                since[i] = event.step
            # If runs continue by chance as often as those of a unit at fault, the event shows nothing.
            guilty = max(guilty, chance)
            change = math.log(guilty / chance) if own else math.log((1.0 - guilty) / (1.0 - chance))
            log_odds[i] = min(settings.whole_factor * enough, max(0.0, log_odds[i] + change))
    if state.named:
        enough *= settings.most_fraction
    return UnitOdds(tuple(log_odds), tuple(since), (own or state.named) and max(log_odds) >= enough)


def recurrence_of(evidence: Evidence, unit: UnitName, settings: Settings) -> Recurrence | None:
    """The recurrence of a unit's events that is likely enough to name it; None if there is none.

    Most of the unit's events fall into one phase of the period, and the period is not the job's. The unit and the times
    of the events are independent, so the log odds of both are added. Events are searched by minimum size, because
    smaller ones may be ordinary hiccups.
    """
    recurrences: list[Recurrence] = []
    n_tries = evidence.n_units * sum(range(2, MAX_PERIOD_STEPS + 1))
    n_guilty = len(settings.guilty_fractions)
    log_odds_T = evidence.units[unit].log_odds if unit in evidence.units else ()
    folded: dict[int, tuple[int, int, float] | None] = {}
    for i, size in enumerate(settings.event_sizes):
        steps = _steps(event for event in evidence.events if event.unit == unit and event.share > size)
        if len(steps) not in folded:
            folded[len(steps)] = _fold(steps, evidence.next_step)
        best = folded[len(steps)]
        if best is None:
            continue
        period, phase, log_chance = best
        own = steps[steps % period == phase]
        goes_on = evidence.next_step - own[-1] <= 2 * period
        mostly = 2 * len(own) >= (steps >= own[0]).sum()
        log_odds = -log_chance - math.log(n_tries)
        candidate = Recurrence(period, phase, int(own[0]), log_odds)
        if not (goes_on and mostly and log_odds >= settings.recurrence_log_odds):
            continue
        log_odds += max(log_odds_T[n_guilty * i : n_guilty * (i + 1)], default=0.0)
        if log_odds >= settings.naming_log_odds and not _is_of_job(candidate, evidence, unit, size, settings):
            recurrences.append(replace(candidate, log_odds=log_odds))
    return max(recurrences, key=lambda recurrence: recurrence.log_odds, default=None)


def _is_of_job(found: Recurrence, evidence: Evidence, unit: UnitName, size: float, settings: Settings) -> bool:
    """Whether the others' events recur like a unit's: in its phase, or in phases of their own.

    Events in its phase are work of all units, in which one of a few is often last several times in a row: they count
    against it as in any test. In other phases they may drift a little, and count from half of the unit's usual size.
    """
    enough = settings.recurrence_log_odds
    own = [event for event in evidence.events if event.unit == unit and event.step % found.period == found.phase]
    steps, usual = _steps(own), settings.most_fraction * float(np.median([event.share for event in own]))
    others = [event for event in evidence.events if event.unit != unit and event.step >= found.onset - found.period]
    in_phase = _steps(event for event in others if event.share > size and event.step % found.period == found.phase)
    guilty, chance = settings.guilty_fractions[0], _least_chance(evidence.n_units, settings)
    of_unit = len(steps) * math.log(guilty / chance) + len(in_phase) * math.log((1.0 - guilty) / (1.0 - chance))
    if of_unit < enough:
        return True
    since = max(found.onset - found.period, evidence.next_step - HISTORY_STEPS)
    large = [(event.unit, event.step - since) for event in others if event.share > usual]
    # (if mostly every second period shows, the apparent period may be twice as long)
    gaps = np.sort(np.diff(steps))
    return any(
        _log_chance_of_followed(large, period, most_periods, evidence.next_step - since) < -enough
        for period in {found.period, int(gaps[len(gaps) // 2])}
        for most_periods in (1, MAX_PERIODS_APART)
    )


def _log_chance_of_followed(
    events: Sequence[tuple[UnitName, int]], period: int, most_periods: int, n_steps: int
) -> float:
    """Log probability that by chance as many events are followed by another one of their unit, some periods later.

    The lower of the least likely unit's and that of all together: among many units, others may hide each one's.
    """
    if not events:
        return 0.0
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit, _ in events))}
    # One axis for all units, on which no event of a unit is within reach of another unit's.
    span = n_steps + (most_periods + 1) * period * 2
    at_E = np.asarray(sorted({numbers[unit] * span + step for unit, step in events}), np.intp)
    # (a delay that lasts for a few steps is one event)
    at_E = at_E[np.diff(at_E, prepend=-span) > max(1, int(MAX_DRIFT * period))]
    unit_E, step_E = np.divmod(at_E, span)
    hit_E, width_E = np.zeros(len(at_E), np.bool_), np.zeros(len(at_E))
    for apart in range(period, (most_periods + 1) * period, period):
        drift = int(MAX_DRIFT * apart)
        known_E = step_E + apart + drift < n_steps
        first_E, after_E = (np.searchsorted(at_E, at_E + apart + by) for by in (-drift, drift + 1))
        hit_E |= known_E & (first_E < after_E)
        width_E += known_E * (2 * drift + 1)
    chance_E = 1.0 - (1.0 - np.bincount(unit_E)[unit_E] / n_steps) ** width_E
    of_U = [np.bincount(unit_E, of_E).tolist() for of_E in (hit_E, width_E > 0, chance_E)]
    least_likely = min(map(_log_binomial, *of_U)) + math.log(len(numbers))
    return min(least_likely, _log_binomial(*map(sum, of_U)))


def _log_binomial(hits: float, times: float, due: float) -> float:
    """Log probability of this many ``hits`` in ``times`` where chance expects ``due``; 0 if it expects as many."""
    if hits <= due:
        return 0.0
    choose = math.lgamma(times + 1) - math.lgamma(hits + 1) - math.lgamma(times - hits + 1)
    misses = (times - hits) * math.log1p(-due / times) if hits < times else 0.0
    return choose + hits * math.log(due / times) + misses


def _steps(events: Iterable[ClearEvent]) -> NDArray[np.intp]:
    """The distinct steps of events, sorted: a delay after a step's last sync stage becomes known with the next step."""
    return np.asarray(sorted({event.step for event in events}), np.intp)


def _fold(steps: NDArray[np.intp], next_step: int) -> tuple[int, int, float] | None:
    """The period and phase in which these steps are least likely by chance, and the log of that probability."""
    if len(steps) < MIN_TIMES:
        return None
    n_steps = int(min(next_step - steps[0], HISTORY_STEPS))
    period_P = np.arange(2, min(n_steps // (MIN_TIMES - 1), MAX_PERIOD_STEPS) + 1)
    if not len(period_P):
        return None
    first_P = np.cumsum(period_P) - period_P
    bins_PE = first_P[:, None] + steps % period_P[:, None]
    counts_B = np.bincount(bins_PE.ravel(), minlength=int(period_P.sum()))
    most_P = np.maximum.reduceat(counts_B, first_P)
    times_P = np.maximum(-(-n_steps // period_P), most_P)
    log_chance_P = _log_chance(most_P, times_P, len(steps), n_steps)
    log_chance_P[most_P < MIN_TIMES] = 0.0
    p = int(log_chance_P.argmin())
    if log_chance_P[p] >= 0.0:
        return None
    phase = int(counts_B[first_P[p] : first_P[p] + period_P[p]].argmax())
    return int(period_P[p]), phase, float(log_chance_P[p])


def _log_chance(hits: NDArray[np.intp], times: NDArray[np.intp], n_drawn: int, n_steps: int) -> NDArray[np.float64]:
    """Log probability that ``hits`` of ``n_drawn`` steps, drawn from ``n_steps``, are among ``times`` fixed ones.

    The hypergeometric probability of exactly that many, close to the tail if small; 0 if chance expects more.
    """

    def log_choose(a: NDArray[np.intp] | int, b: NDArray[np.intp] | int) -> NDArray[np.float64]:
        return np.asarray(_LOG_FACTORIALS[a] - _LOG_FACTORIALS[b] - _LOG_FACTORIALS[np.subtract(a, b)])

    missed = np.minimum(n_drawn - hits, n_steps - times)
    log_chance = log_choose(times, hits) + log_choose(n_steps - times, missed) - log_choose(n_steps, n_drawn)
    return np.asarray(np.where(hits * n_steps > n_drawn * times, log_chance, 0.0))


MAX_EXAMINED = 16
"""Maximum ranks, and hosts, whose gains are computed stage by stage: those that delayed the others most."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Which unit arrived last in each row of each segment, and what fixing that unit alone would have saved.

    Attributes:
        names: all ranks, or hosts.
        last: for each segment, the number of the last unit (M) and its gain in seconds (M).
    """

    names: Sequence[UnitName]
    last: tuple[tuple[RankArray, FloatArray], ...]


def arrivals_of_ranks(replays: Sequence[SegmentReplay], n_ranks: int) -> Arrivals:
    """The arrivals of ranks."""
    return Arrivals(range(n_ranks), tuple((replay.leader_M, replay.whole_gain_M) for replay in replays))


def arrivals_of_hosts(
    replays: Sequence[SegmentReplay], last_elsewhere: Sequence[FloatArray], places: Roles, settings: Settings
) -> Arrivals:
    """The arrivals of hosts; ``last_elsewhere`` is for each segment the last arrival on any host but the leader's (M).

    If the last rank alone explains most of its host's delay, the row counts for the rank and not for the host.
    """
    last = []
    for replay, elsewhere_M in zip(replays, last_elsewhere, strict=True):
        gain_M = np.minimum(replay.last_M - elsewhere_M, np.maximum(replay.lateness_M, 0.0))
        alone_M = replay.margin_M >= settings.most_fraction * gain_M
        last.append((places.role_R[replay.leader_M], np.where(alone_M, 0.0, gain_M)))
    return Arrivals(places.names, tuple(last))


def units_to_examine(arrivals: Arrivals, evidence: Evidence, least_s: float) -> list[int]:
    """The numbers of the units that may be candidates: those that delayed the others most, at most `MAX_EXAMINED`.

    A unit that delayed them by less than ``least_s`` over the window is no candidate, unless it may be recurring.
    """
    total_U = np.zeros(len(arrivals.names))
    for number_M, gain_M in arrivals.last:
        total_U += np.bincount(number_M, gain_M, len(total_U))
    times = Counter(event.unit for event in evidence.events)
    first = [n for n in np.argsort(-total_U, kind="stable")[:MAX_EXAMINED].tolist() if total_U[n] > 0.0]
    return [n for n in first if total_U[n] >= least_s or times[arrivals.names[n]] >= MIN_TIMES]


MIN_TIMES_ALONE = 3
"""Minimum times that a rank has delayed the others with what it does alone."""

MAX_RECENT = 32
"""Times that are kept step by step."""

MAX_KNOWN = 256
"""Ranks and kinds that are kept: the most recent ones."""

MIN_COST_FRACTION = 0.01
"""Minimum cost of what a rank does alone, as a fraction of the time since it first did, to name the rank."""

Known: TypeAlias = "Mapping[tuple[int, str], Alone]"


@dataclass(frozen=True, slots=True)
class Alone:
    """What one rank did alone, by one kind, in the run so far.

    Attributes:
        first_step: the first step in which it delayed the others.
        times, late: how many steps it marked, and in how many of them it delayed the others.
        lost_s: the cost of that, in seconds.
        recent: the last steps that it marked, each with its cost.
    """

    first_step: int
    times: int = 0
    late: int = 0
    lost_s: float = 0.0
    recent: tuple[tuple[int, float], ...] = ()

    def after(self, step: int, lost_s: float) -> Alone:
        first_step = step if lost_s and not self.late else self.first_step
        recent = (*self.recent, (step, lost_s))[-MAX_RECENT:]
        return Alone(first_step, self.times + 1, self.late + (lost_s > 0.0), self.lost_s + lost_s, recent)

    @property
    def period_steps(self) -> int | None:
        """The steps from one time to the next; None if they differ."""
        gaps = np.diff([step for step, _ in self.recent])
        usual = int(np.median(gaps)) if len(gaps) else 0
        # (steps of some times are unknown)
        times = np.maximum(np.round(gaps / max(1, usual)), 1)
        return usual if usual and (np.abs(gaps - times * usual) <= MAX_DRIFT * usual).all() else None


def log_odds_of(alone: Alone, rank: int, ranks: Evidence, n_steps: int, settings: Settings) -> float:
    """The log odds that a rank is last because of what it marked, against chance.

    By chance it is last there as often as in its other steps, and by as much.
    """
    marked = {step for step, _ in alone.recent}
    usual_s = [event.share for event in ranks.events if event.unit == rank and event.step in marked]
    least = settings.most_fraction * float(np.median(usual_s)) if usual_s else 0.0
    others = sum(event.unit == rank and event.step not in marked and event.share > least for event in ranks.events)
    n_others = max(1, min(n_steps, HISTORY_STEPS) - len(marked))
    guilty, chance = settings.guilty_fractions[0], (others + 1.0) / (n_others + 2.0)
    if chance >= guilty:
        return 0.0
    missed = alone.times - alone.late
    return alone.late * math.log(guilty / chance) + missed * math.log((1.0 - guilty) / (1.0 - chance))


def named_alone(
    known: Known, ranks: Evidence, n_steps: int, usual_s: float, settings: Settings
) -> dict[int, tuple[str, Alone, float]]:
    """For each rank that is named by its own notes: the kind, what it did, and the log odds."""
    named: dict[int, tuple[str, Alone, float]] = {}
    for (rank, kind), alone in known.items():
        gaps = np.diff([step for step, _ in alone.recent])
        # A delay in every step is a fault like any other.
        if alone.late < MIN_TIMES_ALONE or not len(gaps) or float(np.median(gaps)) < 2.0:
            continue
        rivals = (rival.lost_s for (other, same), rival in known.items() if same == kind and other != rank)
        if max(rivals, default=0.0) >= settings.most_fraction * alone.lost_s:
            continue
        since_s = alone.lost_s + (ranks.next_step - alone.first_step) * usual_s
        log_odds = log_odds_of(alone, rank, ranks, n_steps, settings)
        enough = log_odds >= settings.naming_log_odds and alone.lost_s >= MIN_COST_FRACTION * since_s
        if enough and (rank not in named or alone.lost_s > named[rank][1].lost_s):
            named[rank] = kind, alone, log_odds
    return named


def is_marked(noted_NR: NDArray[Any] | None, rank: int | str, gain_N: FloatArray, settings: Settings) -> bool:
    """Whether a rank marked the steps that have most of its cost."""
    if noted_NR is None or isinstance(rank, str):
        return False
    marked_s = float(gain_N[noted_NR[:, rank] != ""].sum())
    return marked_s > 0.0 and marked_s >= settings.most_fraction * float(gain_N.sum())


def own_work(known: Known, rank: int, filled_N: BoolArray, noted_NR: NDArray[Any] | None) -> OwnWork | None:
    """What a rank did alone in most of the steps that its fault fills; None if it marked fewer."""
    if noted_NR is None or not filled_N.any():
        return None
    kinds: Sequence[str] = noted_NR[filled_N, rank].tolist()
    kind = max(set(kinds) - {""}, key=kinds.count, default="")
    alone = known.get((rank, kind))
    if alone is None or 2 * kinds.count(kind) < len(kinds):
        return None
    return OwnWork(kind, kinds.count(kind) / len(kinds), alone.late, alone.lost_s)
