"""When a suspect was there: in which steps of a window, since when, and whether it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray
from sftriage.frontier.settings import Settings
from sftriage.records import Pattern

REGULAR_FRACTION = 0.6
"""Of the times a rank held the others up, so many must be at one period; the others are hiccups."""

MIN_TIMES = 4
"""A fault comes back when it has been there four times: three gaps that agree are no chance."""

MAX_PERIODS = 16
"""Periods that are tried, the commonest distances first."""

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


def course_of(
    present_N: BoolArray,
    clear_N: BoolArray,
    first_step: int,
    earlier: Sequence[int],
    settings: Settings,
    min_persistence: float,
) -> Course | None:
    """The course of one suspect over a window, or None where it makes no pattern.

    Args:
        present_N: steps in which the suspect's gain was there.
        clear_N: of these, the steps in which it stands out of jitter.
        first_step: the job's number of the window's first step.
        earlier: steps before the window in which it stood out.
        settings: the thresholds.
        min_persistence: fraction of the window's steps that make it there throughout.
    """
    n_steps = len(present_N)
    run = _run(present_N, settings.min_run_steps)
    to_the_end = run is not None and run[1] >= n_steps - max(2, settings.min_run_steps // 4)
    if present_N.mean() >= min_persistence:
        began = run[0] if run is not None and to_the_end and 2 * present_N[: run[0]].sum() <= run[0] else 0
        return Course("chronic", np.arange(n_steps) >= began, first_step + began)
    if run is not None and present_N[run[0] : run[1]].sum() >= FILLED_FRACTION * present_N.sum():
        filled_N = (np.arange(n_steps) >= run[0]) & (np.arange(n_steps) < (n_steps if to_the_end else run[1]))
        return Course("chronic" if to_the_end else "one-off", filled_N, first_step + run[0])
    return _recurring(clear_N, first_step, earlier)


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


def _recurring(clear_N: BoolArray, first_step: int, earlier: Sequence[int]) -> Course | None:
    """A suspect that comes back at regular distance, with other times between that are hiccups.

    Of all periods, the one whose steps it fills best and which has most of its times. What comes back in no order is
    not told from hiccups of the machine, and is no pattern.
    """
    if not clear_N.any():
        return None
    steps = np.unique(np.concatenate([np.asarray(earlier, dtype=np.int64), first_step + np.flatnonzero(clear_N)]))
    # Steps in a row are one time.
    times = steps[np.concatenate([[True], np.diff(steps) > 1])]
    best, found = 0.0, None
    for period in _periods(times):
        phase = int(np.bincount(times % period, minlength=period).argmax())
        regular = times[times % period == phase]
        purity = len(regular) / len(times)
        filled = len(regular) / ((regular[-1] - regular[0]) // period + 1)
        here_N = clear_N & ((first_step + np.arange(len(clear_N))) % period == phase)
        as_expected = here_N.sum() >= FILLED_FRACTION * (len(clear_N) // period) and here_N.any()
        enough = len(regular) >= MIN_TIMES and purity >= REGULAR_FRACTION and filled >= FILLED_FRACTION
        if enough and as_expected and purity * filled > best:
            best, found = purity * filled, Course("recurring", here_N, int(regular[0]), period)
    return found


def _periods(times: NDArray[np.int64]) -> list[int]:
    """What the period may be: distances from one time to the next, or past one hiccup, that were met more than once."""
    distances = np.concatenate([np.diff(times), times[2:] - times[:-2]])
    periods, counts = np.unique(distances, return_counts=True)
    commonest = np.argsort(-counts, kind="stable")[:MAX_PERIODS]
    return [int(period) for period, count in zip(periods[commonest], counts[commonest], strict=True) if count > 1]
