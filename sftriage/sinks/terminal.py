"""Prints a line for each change of a job's state on the terminal of `sftriage run`, `attach` and `demo`."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureResult, Decision
from sftriage.model.verdicts import Verdict
from sftriage.sinks.stream import Sink
from sftriage.words.decisions import (
    capturing_sentence,
    caused,
    ended_sentence,
    outcome_sentence,
    reason_sentence,
)
from sftriage.words.news import WITHIN_S, RecentLines, news_of
from sftriage.words.run import event_sentence
from sftriage.words.verdicts import counted, milliseconds, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


class LineSink(Sink):
    """Prints one line for each change that is news (`sftriage.words.news`).

    Attributes:
        windows: judged windows, including those of earlier controllers of the run.
        captures: stored captures.
        hang: why the job hangs now, if it is known, and what to do.
    """

    def __init__(self) -> None:
        self._printed = RecentLines()
        self._of_hangs: set[str] = set()
        self._deferred, self._paused_s = "", -math.inf
        self._broken: list[str] = []
        # The ranks of the last suspect that was printed.
        self._named: tuple[int, ...] = ()
        self.windows = self.captures = 0
        self.hang = ""

    def take(self, event: events.Event | events.Observation) -> None:
        match event:
            case events.WindowJudged():
                self._judged(event.verdict, event.decision)
            case events.ManualRequestDecided() | events.FollowUpDecided() if event.decision.requests:
                why = reason_sentence(event.decision)
                self.say(f"{capturing_sentence(event.decision.requests)[:-1]}; {why}")
            case events.ManualRequestDecided():
                self.say(f"No capture for {event.request.who}'s request: {reason_sentence(event.decision)}.")
            case events.CaptureChanged() if event.result.state in ENDED:
                self._captured(event.result, event.stored_bytes)
            case events.JobPaused() if event.time_s >= self._paused_s + WITHIN_S:
                # (a job may pause every few steps to evaluate: once a minute is enough)
                self._paused_s = event.time_s
                self.say(event_sentence(event))
            case events.JobBroken():
                self._broken.append(event_sentence(event))
            case events.TakenOver():
                self.windows, self.captures = self.windows + event.windows, self.captures + event.captures
            case events.CauseFound() if event.capture_id in self._of_hangs:
                if event.code == "unknown" and self.hang:
                    return
                self.hang = f"{caused(event)} {event.next_step}".strip()
                self.say(self.hang)
            case events.DifferencesFound() if event.ranks == self._named:
                self.say(event_sentence(event))
            case events.CauseFound() | events.RemedyChanged() | events.DiskFailed() | events.DiskRecovered() if (
                text := event_sentence(event)
            ):
                self.say(text)

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        """Print news: always a stall and the first window after it; once per suspect why there is no capture."""
        sentence, found = verdict_sentence(verdict), news_of(verdict, decision)
        self.windows += verdict.label != "stalled"
        self.hang = self.hang if verdict.label == "stalled" else ""
        if verdict.label == "stalled":
            self._printed.anew()
            self._deferred = ""
            self.say(sentence)
        elif found.urgency != "never":
            if self._printed.after(found):
                self.say(sentence)
                self._named = () if verdict.named is None else verdict.named.ranks[: events.MAX_COMPARED]
            self._deferred = sentence if self._printed.lacks(found) else ""
            if (why_not := outcome_sentence(decision)) and self._printed.refusing(found, decision.outcome):
                self.say(why_not)
        self._of_hangs.update(request.capture_id for request in decision.requests if request.of_whole_job)
        if decision.requests:
            self.say(capturing_sentence(decision.requests))

    def _captured(self, result: CaptureResult, stored_bytes: int) -> None:
        self.captures += result.state == "stored"
        self.say(ended_sentence(result, stored_bytes, whole_job=result.capture_id in self._of_hangs))

    def finish(self) -> None:
        if self._deferred:
            self.say(self._deferred)

    def end(self) -> None:
        """Print which rank went first, if the job ended early: the last line of a job."""
        while self._broken:
            self.say(self._broken.pop(0))

    @abstractmethod
    def say(self, text: str) -> None:
        """Print one line."""


def print_line(console: Console, text: str) -> None:
    """Print a line where another program may have left an unfinished one, such as a progress bar.

    On a terminal, clear the bar, which its program draws again; in a file, end its line first.
    """
    start = "\r\x1b[K" if console.is_terminal and not console.is_dumb_terminal else "\n" * _mid_line(console)
    # (the terminal may be gone: the job goes on)
    with contextlib.suppress(OSError):
        console.file.write(f"{start}{text}\n")
        console.file.flush()


def _mid_line(console: Console) -> bool:
    """Whether the console is a file whose last line is unfinished; False for a pipe, which cannot be read back."""
    try:
        number = console.file.fileno()
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        # (our own descriptor is write-only)
        with open(f"/proc/self/fd/{number}", "rb") as file:  # noqa: PTH123  # a link that only `open` follows
            return os.pread(file.fileno(), 1, status.st_size - 1) != b"\n"
    except (OSError, ValueError):
        return False


class Reporter(LineSink):
    """Prints on a terminal that the job writes to as well."""

    name = "terminal"

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def say(self, text: str) -> None:
        print_line(self._console, f"sftriage: {text}")


class Progress(Reporter):
    """Prints the lines of a demo of ``steps`` steps, with a live status line on a terminal.

    Attributes:
        ended: results of all captures so far.
    """

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console)
        self._steps = steps
        self._status: Status | None = None
        self.ended: list[CaptureResult] = []

    def live(self, text: str) -> AbstractContextManager[object]:
        if not self._console.is_terminal:
            return nullcontext()
        self._status = self._console.status(text)
        return self._status

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        super()._judged(verdict, decision)
        if self._status is not None:
            done = f"step {verdict.last_step + 1} of {self._steps}, {counted(self.windows, 'window')} judged"
            self._status.update(f"{done}; newest: {verdict.label}, {milliseconds(verdict.step_s)} a step")

    def _captured(self, result: CaptureResult, stored_bytes: int) -> None:
        super()._captured(result, stored_bytes)
        self.ended.append(result)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
