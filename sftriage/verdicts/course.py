"""The course of a fault: which steps of a window it fills, its pattern, and its onset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sftriage.decisions import Pattern
from sftriage.frontier.arrays import BoolArray
from sftriage.verdicts.sequential import Recurrence
from sftriage.verdicts.settings import Settings


@dataclass(frozen=True, slots=True)
class Onset:
    """The most likely first step of a fault, and the earliest and latest that are nearly as likely.

    ``pause_steps``: the longest gap between two of its events since then.
    """

    step: int
    earliest: int
    latest: int
    pause_steps: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The pattern of a suspect's fault, the steps of the window that it fills (N), and its onset."""

    pattern: Pattern
    filled_N: BoolArray
    onset: Onset
    period: int | None = None


def onset_of(events: Sequence[int], since: int, last_step: int, settings: Settings) -> Onset:
    """The onset of a fault with events at these steps (sorted); it is estimated near ``since``, one of them.

    The maximum-likelihood change point between steps that rarely have an event and steps that mostly do. Both rates are
    estimated from the events before and after ``since``.
    """
    first = events[0] - 1
    steps_N = np.arange(first, last_step + 1)
    there_N = np.isin(steps_N, events)
    after = float(np.clip(there_N[steps_N >= since].mean(), 0.3, 0.95))
    before = float(np.clip(there_N[steps_N < since].mean(), 0.02, 0.5 * after))
    hit, miss = math.log(after / before), math.log((1.0 - after) / (1.0 - before))
    # The log likelihood of each step as the onset: all steps from there on have the higher rate.
    total_N: NDArray[np.float64] = np.cumsum(np.where(there_N, hit, miss)[::-1])[::-1]
    total_N = np.where(there_N, total_N, -np.inf)
    best = int(total_N.argmax())
    as_likely = steps_N[total_N >= total_N[best] - settings.onset_log_likelihood]
    # An onset some steps without an event earlier is nearly as likely.
    slack = int(settings.onset_log_likelihood / -miss)
    began = int(steps_N[best])
    pause = int(np.diff([step for step in events if step >= began]).max(initial=1))
    return Onset(began, max(0, int(as_likely[0]) - slack), int(as_likely[-1]), pause)


def course_of(present_N: BoolArray, first_step: int, onset: Onset, settings: Settings) -> Course | None:
    """The course of a suspect over the steps of a window that count; None if it is present in none of them.

    ``present_N``: whether its gain was there. The fault is over once it has been absent for `min_away_steps`, and for
    twice as long as it ever was while it lasted.
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


def recurring_course(recurrence: Recurrence, first_step: int, used_N: BoolArray) -> Course:
    """The course of a recurring fault over the steps of a window that count."""
    at_phase_N = (first_step + np.arange(len(used_N))) % recurrence.period == recurrence.phase
    onset = Onset(recurrence.onset, max(0, recurrence.onset - recurrence.period + 1), recurrence.onset)
    return Course("recurring", used_N & at_phase_N, onset, recurrence.period)
