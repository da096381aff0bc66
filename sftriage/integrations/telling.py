"""What the events of a run are in a tracker: numbers at a step, and texts where they are news."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sftriage.model.events import CaptureChanged, CauseFound, Event, RemedyChanged, WindowJudged
from sftriage.model.verdicts import Verdict
from sftriage.sinks.terminal import LineSink

NOBODY = -1.0


class TrackerEntry(NamedTuple):
    """What an event is at a step: numbers by name, and a text with its name, or ""."""

    step: int
    numbers: Mapping[str, float]
    name: str
    text: str


class EntrySink(LineSink):
    """Says what the terminal says, and keeps the numbers as well."""

    name = "trackers"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._step = 0

    def entry(self, event: Event) -> TrackerEntry:
        """What is logged of an event."""
        numbers: Mapping[str, float] = {}
        name = "sftriage/run"
        match event:
            case WindowJudged(verdict=verdict):
                self._step, name = max(self._step, verdict.last_step), "sftriage/verdict"
                numbers = {} if verdict.label == "stalled" else numbers_of(verdict)
            case CaptureChanged(result=result):
                name = "sftriage/capture"
                if result.state == "stored" and result.last_step is not None:
                    self._step = max(self._step, result.last_step)
                    numbers = {"sftriage/captured_rank": float(result.rank)}
            case RemedyChanged():
                self._step, name = max(self._step, event.step), "sftriage/remedy"
            case CauseFound():
                name = "sftriage/cause"
        self._lines.clear()
        self.take(event)
        return TrackerEntry(self._step, numbers, name, "\n".join(self._lines))

    def say(self, text: str) -> None:
        """One line."""
        self._lines.append(text)


def numbers_of(verdict: Verdict) -> dict[str, float]:
    """Step time, and by stage the exposed time that it sums up from; whom the window names, and what that one costs."""
    found = verdict.named
    first = None if found is None or not found.ranks else found
    return {
        "sftriage/step_time_s": verdict.step_s,
        **{f"sftriage/exposed_s/{stage}": advance_s for stage, advance_s in verdict.advances_s.items()},
        "sftriage/suspect_rank": NOBODY if first is None else float(first.ranks[0]),
        "sftriage/suspect_gain_s": 0.0 if first is None else first.gain_s,
    }
