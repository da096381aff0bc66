"""When a fault was there: the steps of a window that it fills, what sort of fault that makes it, and since when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray
from sftriage.frontier.sequential import Rhythm
from sftriage.frontier.settings import Settings
from sftriage.records import Pattern


@dataclass(frozen=True, slots=True)
class Onset:
    """The step a fault most likely began at, and the earliest and latest that are nearly as likely.

    ``pause_steps`` is for how long it has been away since, at most.
    """

    step: int
    earliest: int
    latest: int
    pause_steps: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """How a suspect went over a window: the steps it fills (N), what sort of fault that makes it, and since when."""

    pattern: Pattern
    filled_N: BoolArray
    onset: Onset
    period: int | None = None


def onset_of(events: Sequence[int], since: int, last_step: int, settings: Settings) -> Onset:
    """When the fault began that shows in these steps (in order), ``since`` one of them.

    The change point of largest likelihood between steps that hardly ever have an event and steps that mostly do, each
    as often as the events of the other side say.
    """
    first = events[0] - 1
    steps_N = np.arange(first, last_step + 1)
    there_N = np.isin(steps_N, events)
    after = float(np.clip(there_N[steps_N >= since].mean(), 0.3, 0.95))
    before = float(np.clip(there_N[steps_N < since].mean(), 0.02, 0.5 * after))
    hit, miss = math.log(after / before), math.log((1.0 - after) / (1.0 - before))
    # That it began at a step: from there on everything is of the fault.
    total_N: NDArray[np.float64] = np.cumsum(np.where(there_N, hit, miss)[::-1])[::-1]
    total_N = np.where(there_N, total_N, -np.inf)
    best = int(total_N.argmax())
    as_likely = steps_N[total_N >= total_N[best] - settings.onset_log_likelihood]
    # Steps without an event before the first of them cost little each.
    slack = int(settings.onset_log_likelihood / -miss)
    began = int(steps_N[best])
    pause = int(np.diff([step for step in events if step >= began]).max(initial=1))
    return Onset(began, max(0, int(as_likely[0]) - slack), int(as_likely[-1]), pause)


def course_of(present_N: BoolArray, first_step: int, onset: Onset, settings: Settings) -> Course | None:
    """The course of one suspect over the steps of a window that count; None where it is in none of them.

    ``present_N``: its gain was there. It has passed where it has been away for longer than it ever was while it lasted,
    and for as many steps as show that.
    """
    n_steps = len(present_N)
    there = np.flatnonzero(present_N)
    there = there[there >= onset.step - first_step]
    if not len(there):
        return None
    pause = max(onset.pause_steps, int(np.diff(there).max(initial=1)))
    over = n_steps - 1 - there[-1] >= max(settings.min_away_steps, 2 * pause)
    end = int(there[-1]) + 1 if over else n_steps
    step_N = np.arange(n_steps)
    filled_N = (step_N >= there[0]) & (step_N < end) if onset.step > first_step else step_N < end
    return Course("one-off" if over else "chronic", filled_N, onset)


def recurring(rhythm: Rhythm, first_step: int, used_N: BoolArray) -> Course:
    """The course of what comes back, over those steps of a window that count."""
    at_phase_N = (first_step + np.arange(len(used_N))) % rhythm.period == rhythm.phase
    onset = Onset(rhythm.onset, max(0, rhythm.onset - rhythm.period + 1), rhythm.onset)
    return Course("recurring", used_N & at_phase_N, onset, rhythm.period)
