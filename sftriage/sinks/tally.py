"""Every step of a job counted once: windows overlap, and a step's time depends on how the step before it ended.

What came after the last sync of a step opens the first segment of the next one (see `frontier.segments`), so that steps
are accounted with the one before them, and sum to what one window of them all would say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sftriage.decisions import Clock
from sftriage.frontier.accounting import by_step
from sftriage.records import Window


class StepTally:
    """Takes windows in order, and tells of each the steps that are new; an attempt that is over is forgotten.

    A step counts as the first window that had it saw it.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._last: Window | None = None
        self._clock: Clock = "host"

    def last_step(self, attempt: int) -> int | None:
        """The last step of an attempt that has been counted; None where there is none."""
        return self._last.last_step if self._last is not None and attempt == self._attempt else None

    def take(self, window: Window, clock: Clock = "host") -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
        """What `by_step` says of the last steps of a window, which none before it had; None where there are none.

        ``clock`` is the one that it was judged on.
        """
        if window.attempt < self._attempt:
            return None
        if window.attempt > self._attempt:
            self._attempt, self._last = window.attempt, None
        window = on_clock(window, clock)
        before = self._last
        next_step = window.first_step if before is None else max(window.first_step, before.last_step + 1)
        if next_step > window.last_step:
            return None
        same_clock, self._clock = clock == self._clock, clock
        self._last = window.steps(window.last_step, window.last_step)
        whole = window
        if before is not None and before.last_step + 1 == window.first_step and same_clock and _alike(before, whole):
            whole = Window.joined((before, whole))
        elif next_step > window.first_step:
            # The step before the first new one is in the window.
            whole = window.steps(next_step - 1, window.last_step)
        advances_NS, complete_N = by_step(whole)
        new = next_step - whole.first_step
        return advances_NS[new:], complete_N[new:]


def on_clock(window: Window, clock: Clock) -> Window:
    """A window's times on a clock, as far as the accounting reads them.

    The last ready gradient is left out: it splits a stage, and the parts are credited to that stage all the same.
    """
    if clock == "device" and window.device_NRS is not None:
        times = (window.device_NRS, window.device_outside_NRG, window.device_between_NR)
    else:
        times = (window.durations_NRS, window.outside_NRG, window.between_NR)
    return Window(window.schema, window.first_step, *times, attempt=window.attempt)


def _alike(before: Window, after: Window) -> bool:
    """Whether two windows have the same ranks, stages and refinements."""

    def kind(one: Window) -> tuple[object, ...]:
        return one.schema, one.durations_NRS.shape[1:], one.outside_NRG is None, one.between_NR is None

    return kind(before) == kind(after)
