"""What is said on a terminal while a job is watched: how it stands now, and nothing while that stays as it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sftriage.decisions import ENDED, CaptureResult, Decision, Verdict
from sftriage.events import (
    CaptureChanged,
    CauseFound,
    DiskFailed,
    DiskRecovered,
    Event,
    FollowUpDecided,
    ManualRequestDecided,
    RemedyChanged,
    Sight,
    WindowJudged,
)
from sftriage.sinks.stream import Sink
from sftriage.words.advice import remedy_told
from sftriage.words.amounts import counted, milliseconds
from sftriage.words.captures import capturing_sentence, caused, ended_sentence
from sftriage.words.decisions import outcome_sentence, reason_sentence
from sftriage.words.keeping import disk_failed_sentence, disk_sentence
from sftriage.words.verdicts import verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

WITHIN_S = 60.0
MOST_TIMES, MOST = 2, 6
"""How often the same is said within a minute, and how many things in all."""


@dataclass(frozen=True, slots=True)
class RecentLines:
    """What was said of a job last, and all that was within the last minute, with the time.

    The rule, window by window: what a window finds is said at once where it is not what was said last, and not at all
    where it is. But what flickers from window to window is said twice within a minute, and of more different things no
    more than six: what comes beyond that waits until the minute is over, and is said then if it is still so. So a
    terminal is never flooded, and is wrong for a minute at most. What must be said (``at_once``: a capture begins
    because of it) waits for nothing, but is not repeated either.
    """

    last: Hashable = None
    recent: tuple[tuple[Hashable, float], ...] = ()

    def after(self, found: Hashable, time_s: float, *, at_once: bool = False) -> tuple[RecentLines, bool]:
        """What has been said once a window was judged at ``time_s``, and whether what it found is said now."""
        # (a clock that was set back keeps nobody silent)
        recent = tuple((one, said_s) for one, said_s in self.recent if 0.0 <= time_s - said_s < WITHIN_S)
        waits = len(recent) >= MOST or sum(one == found for one, _ in recent) >= MOST_TIMES
        if found == self.last or (waits and not at_once):
            return self, False
        return RecentLines(found, (*recent, (found, time_s))), True


def standing(verdict: Verdict) -> Hashable:
    """What two windows share of which the second is no news: who, where and why."""
    suspect = verdict.suspects[0] if verdict.label == "suspect" else None
    named = suspect and (suspect.identity, suspect.pattern)
    slower = verdict.regression and (verdict.regression.since_step, verdict.regression.until_step)
    return verdict.label, verdict.reasons, named, slower


class LineSink(Sink):
    """A line for each change (see `RecentLines`).

    Attributes:
        windows: windows that have been decided.
        captures: captures that are stored.
    """

    def __init__(self) -> None:
        self._said = self._why_not = RecentLines()
        self._waits = ""
        self.windows = self.captures = 0

    def take(self, seen: Event | Sight) -> None:
        """Say what is new in it."""
        match seen:
            case WindowJudged():
                self._judged(seen.verdict, seen.decision)
            case ManualRequestDecided() | FollowUpDecided() if seen.decision.requests:
                why = reason_sentence(seen.decision)
                self.say(f"{capturing_sentence(seen.decision.requests)[:-1]}; {why}")
            case ManualRequestDecided():
                self.say(f"{seen.request.who} asked for a capture, and gets none: {reason_sentence(seen.decision)}.")
            case CaptureChanged() if seen.result.state in ENDED:
                self._captured(seen.result, seen.stored_bytes)
            case CauseFound(code=code) if code != "unknown":
                self.say(caused(seen))
            case RemedyChanged():
                self.say(remedy_told(seen))
            case DiskFailed():
                self.say(disk_failed_sentence(seen.problem))
            case DiskRecovered():
                self.say(disk_sentence(seen))

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        """Said where it is news. A stall is told of when it begins or changes: it always is, and so is what is next.

        A window that a capture disturbed says nothing about the job, and the capture is said itself.
        """
        sentence, now_s = verdict_sentence(verdict), decision.time_s
        self.windows += verdict.label != "stalled"
        if verdict.label == "stalled":
            self._said, self._waits = RecentLines(), ""
            self.say(sentence)
        elif verdict.reasons != ("self_inflicted",):
            found = standing(verdict)
            self._said, news = self._said.after(found, now_s, at_once=decision.outcome == "capture")
            self._waits = "" if self._said.last == found else sentence
            if news:
                self.say(sentence)
            why_not = outcome_sentence(decision)
            self._why_not, news = self._why_not.after(why_not and (decision.reason, decision.rule), now_s)
            if news and why_not:
                self.say(why_not)
        if decision.requests:
            self.say(capturing_sentence(decision.requests))

    def _captured(self, result: CaptureResult, stored_bytes: int) -> None:
        self.captures += result.state == "stored"
        self.say(ended_sentence(result, stored_bytes))

    def finish(self) -> None:
        """The job is over: what waited to be said of it is."""
        if self._waits:
            self.say(self._waits)

    @abstractmethod
    def say(self, text: str) -> None:
        """One line."""


class Reporter(LineSink):
    """Says it on a terminal."""

    name = "terminal"

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(f"sftriage: {text}", soft_wrap=True)


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
        """Show the live line while the job runs."""
        if not self._console.is_terminal:
            return nullcontext()
        self._status = self._console.status(what)
        return self._status

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        super()._judged(verdict, decision)
        if self._status is not None:
            done = f"step {verdict.last_step + 1} of {self._steps}, {counted(self.windows, 'window')} judged"
            self._status.update(f"{done}; the newest: {verdict.label}, {milliseconds(verdict.exposed_s)} a step")

    def _captured(self, result: CaptureResult, stored_bytes: int) -> None:
        super()._captured(result, stored_bytes)
        self.ended.append(result)

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, soft_wrap=True)
