"""What captures cost the job, measured: the steps in them and just after them against those before, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sftriage.events import CostMeasured
from sftriage.records import Window

AFTER_STEPS = 10
"""Steps after a capture that may still be slower for it: its trace is exported and packed meanwhile."""

BEFORE_STEPS = 50
"""Steps before a capture that say what a step takes without one: their mean, with what comes back every few steps."""

NEAR_STEPS = 10
"""The last of them, whose median says it where that has just become more: what was slow before is no capture's cost."""

MOST_MEDIANS = 5.0
"""A step of more medians than these counts as so many: a checkpoint is not what a step takes."""

MIN_BEFORE_STEPS = 5
"""Of fewer, nothing is known of what a step takes without a capture."""

KEPT_STEPS = 2048
"""Steps that are remembered: the longest capture, and what is before and after it."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The last steps of one attempt of a job: for each, how long the slowest rank took, and whether a profiler ran.

    ``settled`` is the last step up to which captures have been accounted for.
    """

    steps: Mapping[int, tuple[float, bool]] = field(default_factory=dict)
    settled: int = -1

    def after(self, window: Window, now_s: float) -> tuple[Ledger, list[CostMeasured]]:
        """The ledger with one more window, and what has become known by it at ``now_s``, in seconds of the epoch."""
        steps = dict(self.steps)
        last = max(steps, default=-1)
        for n, took_s in enumerate(_took_s(window)):
            number = window.first_step + n
            if number > last:
                steps[number] = (took_s, window.capturing_N is not None and bool(window.capturing_N[n]))
        for number in list(steps)[: max(0, len(steps) - KEPT_STEPS)]:
            del steps[number]
        ledger, costs = Ledger(steps, self.settled), []
        while (touched := ledger._next()) is not None:
            costs.append(CostMeasured(now_s, window.attempt, *touched, *ledger._cost_s(*touched)))
            ledger = Ledger(steps, touched[1] + AFTER_STEPS)
        return ledger, costs

    def _next(self) -> tuple[int, int] | None:
        """The first and last step of the next captures, if what comes just after them has been seen."""
        touched = [number for number, (_, capturing) in self.steps.items() if capturing and number > self.settled]
        if not touched:
            return None
        first = last = touched[0]
        for number in touched:
            if number - last > AFTER_STEPS:
                break
            last = number
        return (first, last) if last + AFTER_STEPS <= max(self.steps) else None

    def _cost_s(self, first: int, last: int) -> tuple[float | None, float | None]:
        """What captures in these steps cost, and what a step took before; None where nothing is known of before."""
        before = [
            took_s
            for number, (took_s, capturing) in self.steps.items()
            if self.settled < number < first and not capturing and np.isfinite(took_s)
        ][-BEFORE_STEPS:]
        if len(before) < MIN_BEFORE_STEPS:
            return None, None
        before_s = _usual_s(np.asarray(before))
        during = [took_s for number, (took_s, _) in self.steps.items() if first <= number <= last + AFTER_STEPS]
        return float(np.nansum(np.asarray(during) - before_s)), before_s


def _usual_s(before_N: NDArray[np.float64]) -> float:
    """What a step takes, by those just before."""
    most_s = MOST_MEDIANS * float(np.median(before_N))
    return max(float(np.median(before_N[-NEAR_STEPS:])), float(np.minimum(before_N, most_s).mean()))


def _took_s(window: Window) -> list[float]:
    """What each step took the slowest rank, from the end of the step before; NaN for one that nobody saw."""
    took_NR = window.durations_NRS.sum(axis=2)
    if window.between_NR is not None:
        took_NR = took_NR + np.nan_to_num(window.between_NR, nan=0.0)
    # (fmax passes over missing ranks)
    return [float(took_s) for took_s in np.fmax.reduce(took_NR, axis=1, initial=np.nan)]
