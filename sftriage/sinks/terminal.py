"""The lines on a terminal while a job is watched: its state, and nothing while that does not change."""

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
from sftriage.words.decisions import capturing_sentence, ended_sentence, outcome_sentence, reason_sentence
from sftriage.words.news import WITHIN_S, RecentLines, news_of
from sftriage.words.run import event_sentence
from sftriage.words.verdicts import counted, milliseconds, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


class LineSink(Sink):
    """A line for each change that is worth one (see `sftriage.words.news`).

    Attributes:
        windows: windows that have been decided, those before the run was taken over included.
        captures: captures that are stored.
    """

    def __init__(self) -> None:
        self._said = RecentLines()
        self._waits, self._paused_s = "", -math.inf
        self.windows = self.captures = 0

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
                # (what pauses every few steps, as an evaluation does, is printed once a minute)
                self._paused_s = event.time_s
                self.say(event_sentence(event))
            case events.TakenOver():
                self.windows, self.captures = self.windows + event.windows, self.captures + event.captures
            case events.CauseFound() | events.RemedyChanged() | events.DiskFailed() | events.DiskRecovered() if (
                text := event_sentence(event)
            ):
                self.say(text)

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        """Print news: a stall and what follows it always; why there is no capture once per suspect."""
        sentence, found = verdict_sentence(verdict), news_of(verdict, decision)
        self.windows += verdict.label != "stalled"
        if verdict.label == "stalled":
            self._said.anew()
            self._waits = ""
            self.say(sentence)
        elif found.urgency != "never":
            if self._said.after(found):
                self.say(sentence)
            self._waits = sentence if self._said.lacks(found) else ""
            if (why_not := outcome_sentence(decision)) and self._said.refusing(found, decision.outcome):
                self.say(why_not)
        if decision.requests:
            self.say(capturing_sentence(decision.requests))

    def _captured(self, result: CaptureResult, stored_bytes: int) -> None:
        self.captures += result.state == "stored"
        self.say(ended_sentence(result, stored_bytes))

    def finish(self) -> None:
        if self._waits:
            self.say(self._waits)

    @abstractmethod
    def say(self, text: str) -> None:
        """One line."""


def print_line(console: Console, text: str) -> None:
    """Print a line where another program may have stopped within one, as a progress bar does.

    On a terminal that clears the bar, which its program draws again; in a file it ends the bar's line.
    """
    start = "\r\x1b[K" if console.is_terminal and not console.is_dumb_terminal else "\n" * _within_a_line(console)
    # Nobody may be reading; what is done is done all the same.
    with contextlib.suppress(OSError):
        console.file.write(f"{start}{text}\n")
        console.file.flush()


def _within_a_line(console: Console) -> bool:
    """Whether what is printed into is a file that does not end with a line's end. Of a pipe that is not known."""
    try:
        number = console.file.fileno()
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        # It is open for writing only.
        with open(f"/proc/self/fd/{number}", "rb") as file:  # noqa: PTH123  # a link that only `open` follows
            return os.pread(file.fileno(), 1, status.st_size - 1) != b"\n"
    except (OSError, ValueError):
        return False


class Reporter(LineSink):
    """Prints it on a terminal, which the job writes to as well."""

    name = "terminal"

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def say(self, text: str) -> None:
        print_line(self._console, f"sftriage: {text}")


class Progress(Reporter):
    """The same of a demo of some ``steps``, with one live line on a terminal.

    Attributes:
        ended: captures that have ended.
    """

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console)
        self._steps = steps
        self._status: Status | None = None
        self.ended: list[CaptureResult] = []

    def live(self, what: str) -> AbstractContextManager[object]:
        if not self._console.is_terminal:
            return nullcontext()
        self._status = self._console.status(what)
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
