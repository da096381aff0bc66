"""What is said on a terminal while a job is watched: what changes, and nothing while all stays as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from sftriage.events import CaptureChanged, DiskFailed, DiskRecovered, Event, Sight, WindowJudged
from sftriage.records import ENDED, CaptureResult, Decision, Verdict
from sftriage.sinks.stream import Sink
from sftriage.words import disk_sentence, size, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


class Reporter(Sink):
    """A line for each change.

    Attributes:
        windows: windows that have been decided.
        captures: captures that are stored.
    """

    name = "terminal"

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[object, ...] = ("healthy", None, None, None)
        self.windows = self.captures = 0

    def take(self, seen: Event | Sight) -> None:
        """Say what is new in it."""
        match seen:
            case WindowJudged():
                self._judged(seen.verdict, seen.decision)
            case CaptureChanged() if seen.result.state in ENDED:
                self._captured(seen.result, seen.stored_bytes)
            case DiskFailed() | DiskRecovered():
                self.say(disk_sentence(seen))

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        """Said where it differs from the window before. A stall is always said."""
        if verdict.label == "stalled":
            self.say(verdict_sentence(verdict))
            return
        self.windows += 1
        suspect = verdict.suspects[0] if verdict.label == "suspect" else None
        slower = verdict.regression and (verdict.regression.since_step, verdict.regression.until_step)
        now = (verdict.label, verdict.reasons, suspect and (suspect.ranks, suspect.stage, suspect.pattern), slower)
        if now[0] != self._last[0] or (suspect and now != self._last) or (slower and slower != self._last[3]):
            self.say(verdict_sentence(verdict))
        self._last = now
        if decision.outcome == "capture":
            ranks = ", ".join(str(request.rank) for request in decision.requests)
            self.say(f"Capturing {decision.requests[0].steps} steps of rank {ranks}.")

    def _captured(self, result: CaptureResult, stored_bytes: int) -> None:
        if result.state != "stored":
            self.say(f"No trace of rank {result.rank}: {result.state}, {result.detail}.")
            return
        self.captures += 1
        self.say(
            f"Captured steps {result.first_step} to {result.last_step} of rank {result.rank} "
            f"({size(stored_bytes)}): sftriage traces show {result.capture_id}"
        )

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(f"sftriage: {text}", soft_wrap=True, markup=False)


class Progress(Sink):
    """The same of a demo of some ``steps``: one live line on a terminal, a line a change elsewhere.

    Attributes:
        captures: captures that have ended.
    """

    name = "terminal"

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._label = ""
        self._status: Status | None = None
        self.captures: list[CaptureResult] = []

    def live(self, what: str) -> AbstractContextManager[object]:
        """Show the live line while the job runs."""
        if not self._console.is_terminal:
            return nullcontext()
        self._status = self._console.status(what)
        return self._status

    def take(self, seen: Event | Sight) -> None:
        """Say what is new in it."""
        match seen:
            case WindowJudged():
                self._judged(seen.verdict, seen.decision)
            case CaptureChanged(result=result) if result.state in ENDED:
                self.captures.append(result)
                detail = f" ({result.detail})" if result.detail else ""
                self.say(f"Capture of rank {result.rank}: {result.state}{detail}.")
            case DiskFailed() | DiskRecovered():
                self.say(disk_sentence(seen))

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        label = f"{verdict.label} {verdict.reasons}"
        if label != self._label:
            self.say(verdict_sentence(verdict))
        self._label = label
        if decision.outcome == "capture":
            self.say(f"Starting torch.profiler on rank {', '.join(str(r.rank) for r in decision.requests)} alone.")
        if self._status is not None:
            done = f"step {verdict.last_step + 1} of {self._steps}"
            self._status.update(f"{done}, {verdict.label}, {verdict.exposed_s * 1e3:.0f} ms a step: {decision.outcome}")

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)
