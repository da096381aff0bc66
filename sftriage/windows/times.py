"""When the newest steps of a job began and ended, on the clock of the host that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from sftriage.records import StepRecord

KEPT_STEPS = 4096
"""Steps that are remembered at least: ranks are read one after the other, each with all that it has."""


class Span(NamedTuple):
    """From when to when, in nanoseconds on the host's monotonic clock."""

    start_ns: int
    end_ns: int


class StepTimes:
    """The first rank's start and the last rank's end of each of the newest steps, of the newest attempt.

    Args:
        kept_steps: how many, if they are more than `KEPT_STEPS`.
    """

    def __init__(self, kept_steps: int = 0) -> None:
        self._kept_steps = max(kept_steps, KEPT_STEPS)
        self._attempt = 0
        self._spans: dict[int, Span] = {}

    def note(self, attempt: int, records: Iterable[StepRecord]) -> None:
        """Take steps of one rank that have been read."""
        if attempt < self._attempt:
            return
        if attempt > self._attempt:
            self._attempt, self._spans = attempt, {}
        for one in records:
            start_ns, end_ns = one.start_ns, one.start_ns + sum(one.durations_ns)
            known = self._spans.get(one.step)
            if known is not None:
                start_ns, end_ns = min(start_ns, known.start_ns), max(end_ns, known.end_ns)
            self._spans[one.step] = Span(start_ns, end_ns)
        for step in list(islice(self._spans, max(0, len(self._spans) - self._kept_steps))):
            del self._spans[step]

    def of(self, attempt: int, first_step: int, last_step: int) -> Span | None:
        """From the start of one step to the end of another; None where either is not known any more, or not yet."""
        if attempt != self._attempt or first_step not in self._spans or last_step not in self._spans:
            return None
        return Span(self._spans[first_step].start_ns, self._spans[last_step].end_ns)
