"""Who holds the others up, told step by step along the run: a sequential likelihood-ratio test.

A step in which one unit alone holds the others up by more than some share of it is a *clear event* of that unit. Where
nothing is wrong, whoever causes a clear event does so by chance, each as often as any other; who is guilty causes most
of them. The logarithm of the odds of the second against the first adds up from event to event and is never below zero
(Page's test). With a threshold h it passes that by chance once in e^h events at most (Lorden 1971), where events are
independent. Ranks are units, and so are hosts, which arrive with their last rank.

What every unit does alike (an evaluation, a checkpoint) makes somebody last, another one each time: the odds go
nowhere, however regular it is. What one unit does at regular steps has the odds of that rhythm besides: it is asked
how likely chance lays so many of its events into one phase of a period (Fisher's exact test).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.settings import Settings

UnitName: TypeAlias = "int | str"
"""A rank by its number, or a host by its name."""

HISTORY_STEPS = 512
"""Steps whose events are remembered."""

MAX_PERIOD_STEPS = 64
"""The longest period that is looked for: it fits eight times into what is remembered.

A fault that stays away for longer has ended, and the next one is another."""

MIN_TIMES = 4
"""What comes back has been there four times: three gaps that agree."""

_LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, HISTORY_STEPS + 1)))])


@dataclass(frozen=True, slots=True)
class ClearEvent:
    """A step that one unit alone held up, by this share of the usual step."""

    step: int
    unit: UnitName
    share: float


@dataclass(frozen=True, slots=True)
class Rhythm:
    """What one unit does at every step whose number is ``phase`` over a multiple of ``period``, since ``onset``."""

    period: int
    phase: int
    onset: int
    log_odds: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What there is against one unit: for each test the log odds, and the event at which they rose from nothing."""

    log_odds: tuple[float, ...]
    since: tuple[int, ...]
    named: bool = False

    @property
    def onset(self) -> int:
        """The event with which the test that says most rose from nothing."""
        return self.since[max(range(len(self.since)), key=self.log_odds.__getitem__)]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the steps before ``next_step`` say of a job's ranks, or of its hosts: of so many of them.

    Of who is not in ``units`` they say nothing. ``events`` are the clear ones of the last `HISTORY_STEPS` steps.
    """

    n_units: int = 0
    next_step: int = 0
    units: Mapping[UnitName, Standing] = field(default_factory=dict)
    events: tuple[ClearEvent, ...] = ()

    def named(self, unit: UnitName) -> bool:
        """Whether the odds have named a unit, and its fault is not known to have ended."""
        return unit in self.units and self.units[unit].named

    def log_odds(self, unit: UnitName) -> float:
        """The best that any test says against a unit."""
        return max(self.units[unit].log_odds, default=0.0) if unit in self.units else 0.0


def advanced(evidence: Evidence, events: Sequence[ClearEvent], next_step: int, settings: Settings) -> Evidence:
    """The evidence after the steps before ``next_step``, in which there were these events, in order."""
    if evidence.n_units < 2:
        return replace(evidence, next_step=next_step)
    tests = _tests(evidence.n_units, settings)
    units = dict(evidence.units)
    last_step = {event.unit: event.step for event in evidence.events}
    for event in events:
        units = {unit: one for unit, one in units.items() if event.step - last_step[unit] <= MAX_PERIOD_STEPS}
        own = units.pop(event.unit, None) or Standing((0.0,) * len(tests), (event.step,) * len(tests))
        units = {
            unit: lowered
            for unit, one in units.items()
            if any((lowered := _after(one, event, tests, settings, own=False)).log_odds)
        }
        units[event.unit] = _after(own, event, tests, settings, own=True)
        last_step[event.unit] = event.step
    units = {unit: one for unit, one in units.items() if next_step - last_step[unit] <= MAX_PERIOD_STEPS}
    kept = tuple(one for one in (*evidence.events, *events) if one.step >= next_step - HISTORY_STEPS)
    return Evidence(evidence.n_units, next_step, units, kept)


Tests: TypeAlias = "tuple[tuple[float, float, float], ...]"
"""Of each test: from which share of the step on an event counts; the log odds it adds for its own, and for another."""


def _after(one: Standing, event: ClearEvent, tests: Tests, settings: Settings, *, own: bool) -> Standing:
    """What there is against a unit after an event, which was its own or another's."""
    cap = settings.whole_factor * settings.naming_log_odds
    since = tuple(event.step if own and odds == 0.0 else at for odds, at in zip(one.log_odds, one.since, strict=True))
    log_odds = tuple(
        min(cap, max(0.0, odds + (hit if own else miss))) if event.share > size else odds
        for odds, (size, hit, miss) in zip(one.log_odds, tests, strict=True)
    )
    least = settings.naming_log_odds * (settings.keep_fraction if one.named else 1.0)
    return Standing(log_odds, since, (own or one.named) and max(log_odds) >= least)


@lru_cache(maxsize=32)
def _tests(n_units: int, settings: Settings) -> Tests:
    chance = max(1.0 / n_units, settings.min_chance)
    return tuple(
        (size, math.log(guilty / chance), math.log((1.0 - guilty) / (1.0 - chance)))
        for size in (settings.min_event_fraction, *settings.event_fractions)
        for guilty in settings.guilty_fractions
    )


def rhythm(evidence: Evidence, unit: UnitName, settings: Settings) -> Rhythm | None:
    """What a unit does at regular steps, where its odds name the unit; None where there is no such thing.

    Most of its events fall into one phase, and those of the others do not: else the rhythm is the job's. Who causes the
    events and when they come are two things, and their odds add up. It is looked for among events from each size on,
    for smaller ones may be ordinary hiccups.
    """
    found: list[Rhythm] = []
    standing = evidence.units.get(unit)
    n_tries = evidence.n_units * sum(range(2, MAX_PERIOD_STEPS + 1))
    n_guilty = len(settings.guilty_fractions)
    folded: tuple[NDArray[np.intp], tuple[int, int, float] | None] = (np.zeros(0, np.intp), None)
    for i, size in enumerate((settings.min_event_fraction, *settings.event_fractions)):
        steps = _steps(one for one in evidence.events if one.unit == unit and one.share > size)
        if len(steps) != len(folded[0]):
            folded = steps, _fold(steps, evidence.next_step)
        best = folded[1]
        if best is None:
            continue
        period, phase, log_chance = best
        own = steps[steps % period == phase]
        ended = evidence.next_step - own[-1] > 2 * period
        mostly = 2 * len(own) >= (steps >= own[0]).sum()
        log_odds = -log_chance - math.log(n_tries)
        if ended or not mostly or log_odds < settings.rhythm_log_odds:
            continue
        others = _steps(one for one in evidence.events if one.unit != unit and one.step >= own[0] - period)
        n_steps = int(min(evidence.next_step - own[0] + period, HISTORY_STEPS))
        hits = np.asarray([(others % period == phase).sum()])
        times = np.maximum(-(-n_steps // period), hits)
        if _log_chance(hits, times, len(others), n_steps)[0] < -settings.rhythm_log_odds:
            continue  # it is everybody's
        log_odds += 0.0 if standing is None else max(standing.log_odds[n_guilty * i : n_guilty * (i + 1)])
        if log_odds >= settings.naming_log_odds:
            found.append(Rhythm(period, phase, int(own[0]), log_odds))
    return max(found, key=lambda one: one.log_odds, default=None)


def _steps(events: Iterable[ClearEvent]) -> NDArray[np.intp]:
    """The steps that have such an event, in order and once: what came after a step's last sync stage is told later."""
    return np.asarray(sorted({one.step for one in events}), np.intp)


def _fold(steps: NDArray[np.intp], next_step: int) -> tuple[int, int, float] | None:
    """The period and phase into which the steps fall least likely by chance, and the logarithm of that chance."""
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
    """Log of the chance that of ``n_drawn`` of ``n_steps`` steps just ``hits`` are among certain ``times``.

    (That of as many or more is hardly larger, where it is small. Where chance alone would bring more, it is 0.)
    """

    def log_choose(a: NDArray[np.intp] | int, b: NDArray[np.intp] | int) -> NDArray[np.float64]:
        return np.asarray(_LOG_FACTORIALS[a] - _LOG_FACTORIALS[b] - _LOG_FACTORIALS[np.subtract(a, b)])

    missed = np.minimum(n_drawn - hits, n_steps - times)
    log_chance = log_choose(times, hits) + log_choose(n_steps - times, missed) - log_choose(n_steps, n_drawn)
    return np.asarray(np.where(hits * n_steps > n_drawn * times, log_chance, 0.0))
