"""When a suspect was there: in which steps of a window, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray
from sftriage.frontier.recurrence import Recurrence
from sftriage.frontier.settings import Settings
from sftriage.records import Pattern

FILLED_FRACTION = 0.7
"""A run of steps is the fault's where it is there in so many of them: noise hides some."""


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """How a suspect went over a window: the steps it fills (N), and what sort of fault that makes it.

    ``onset`` is a step of the job: where it began, or the window's first where it was there already.
    """

    pattern: Pattern
    filled_N: BoolArray
    onset: int
    period: int | None = None


def course_of(present_N: BoolArray, first_step: int, settings: Settings, min_persistence: float) -> Course | None:
    """The course of one suspect over a window, or None where it fills neither most of it nor a run of its steps.

    Args:
        present_N: steps in which the suspect's gain was there.
        first_step: the job's number of the window's first step.
        settings: the thresholds.
        min_persistence: fraction of the window's steps that make it there throughout.
    """
    n_steps = len(present_N)
    # Of a short window a quarter shows where it began; it takes a long run to be named for that run alone.
    run = _run(present_N, min(settings.min_run_steps, max(2, n_steps // 4)))
    named = run is not None and run[1] - run[0] >= settings.min_run_steps
    burst = run is not None and named and present_N[run[0] : run[1]].sum() >= FILLED_FRACTION * present_N.sum()
    since = n_steps if run is None else n_steps - run[1]
    to_the_end = since <= max(2, settings.min_run_steps // 4)
    # So many steps without it end a run as so many with it make one, however much of the window it filled.
    over = burst and since >= settings.min_run_steps
    if present_N.mean() >= min_persistence and not over:
        began = run[0] if run is not None and to_the_end and 2 * present_N[: run[0]].sum() <= run[0] else 0
        return Course("chronic", np.arange(n_steps) >= began, first_step + began)
    if run is not None and burst:
        filled_N = (np.arange(n_steps) >= run[0]) & (np.arange(n_steps) < (n_steps if to_the_end else run[1]))
        return Course("chronic" if to_the_end else "one-off", filled_N, first_step + run[0])
    return None


def _run(present_N: BoolArray, min_steps: int) -> tuple[int, int] | None:
    """The steps [a, b) that the suspect fills, and hardly any around them; None where there is no such run.

    It is the maximum-sum segment, where a step with the suspect counts for it and a step without against it.
    """
    n_steps = len(present_N)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present_N, 0.5, -0.5))])
    lowest = np.minimum.accumulate(sums)
    end = int((sums - lowest)[1:].argmax()) + 1 if n_steps else 0
    start = int(sums[: end + 1].argmin())
    if end - start < min_steps or present_N[start:end].mean() < FILLED_FRACTION:
        return None
    return start, end


def recurring(recurrence: Recurrence, first_step: int, used_N: BoolArray) -> Course:
    """The course of what comes back, over those steps of a window that count."""
    at_phase_N = (first_step + np.arange(len(used_N))) % recurrence.period == recurrence.phase
    return Course("recurring", used_N & at_phase_N, recurrence.onset, recurrence.period)
