"""When the newest steps of a job began and ended, in nanoseconds since the epoch."""

from __future__ import annotations

from itertools import islice

import numpy as np

from sftriage.events import Span
from sftriage.windows.decoding import StepArrays

KEPT_STEPS = 4096
"""Steps that are remembered at least: ranks are read one after the other, each with all that it has."""


class StepTimes:
    """The first rank's start and the last rank's end of each of the newest steps, of the newest attempt.

    Args:
        kept_steps: how many, if they are more than `KEPT_STEPS`.
    """

    def __init__(self, kept_steps: int = 0) -> None:
        self._kept_steps = max(kept_steps, KEPT_STEPS)
        self._attempt = 0
        self._spans: dict[int, Span] = {}

    def note(self, attempt: int, steps: StepArrays, wall_ns: int = 0) -> None:
        """Take steps that have been read; ``wall_ns`` is what their clock lags behind nanoseconds since the epoch."""
        if attempt < self._attempt:
            return
        if attempt > self._attempt:
            self._attempt, self._spans = attempt, {}
        if not len(steps):
            return
        steps = steps.in_order()
        first_X = np.flatnonzero(np.diff(steps.step_B, prepend=steps.step_B[0] - 1))
        start_X = (np.minimum.reduceat(steps.start_ns_B, first_X) + wall_ns).tolist()
        ends_B = steps.start_ns_B + steps.durations_ns_BS.sum(axis=1)
        end_X = (np.maximum.reduceat(ends_B, first_X) + wall_ns).tolist()
        for step, start_ns, end_ns in zip(steps.step_B[first_X].tolist(), start_X, end_X, strict=True):
            known = self._spans.get(step)
            if known is not None:
                start_ns, end_ns = min(start_ns, known.start_ns), max(end_ns, known.end_ns)
            self._spans[step] = Span(start_ns, end_ns)
        for step in list(islice(self._spans, max(0, len(self._spans) - self._kept_steps))):
            del self._spans[step]

    def of(self, attempt: int, first_step: int, last_step: int) -> Span | None:
        """From the start of one step to the end of another; None where either is not known any more, or not yet."""
        if attempt != self._attempt or first_step not in self._spans or last_step not in self._spans:
            return None
        return Span(self._spans[first_step].start_ns, self._spans[last_step].end_ns)
