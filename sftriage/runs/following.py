"""Following a run's journal: what was appended since the last look, each line once.

Of each event, rows keep what people see of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftriage.model import captures, events
from sftriage.model.verdicts import Clock, Label, Pattern, Regression, Verdict
from sftriage.policy.state import Losses, same_trouble, suspect_key
from sftriage.runs.journal import Appended
from sftriage.words.decisions import reason_sentence, resolution
from sftriage.words.news import News, news_of
from sftriage.words.verdicts import verdict_sentence, when, where, who

DISTURBED = ("self_inflicted",)
"""The reasons of a window that a capture disturbed."""

MAX_NAMED = 8
"""Suspects of a window, and ranks of a suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionRow:
    """What is kept of any decision. ``words`` explain ``reason``; ``asked`` are the captures that it requested.

    ``triggers`` say why, by capture, where that is on record.
    """

    time_s: float
    attempt: int = 0
    outcome: captures.Outcome
    reason: captures.ReasonCode
    words: str
    resolves: str = ""
    asked: tuple[captures.CaptureRequest, ...] = ()
    triggers: Mapping[str, captures.Trigger] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(_DecisionRow):
    """Captures that no window led to, and what was decided about them: a person asked, or another capture led to them.

    ``by`` is the person, or "", and ``why`` what they said, or the other capture, whose id is then in ``beside``.
    ``request_id`` is the person's (see `model.captures.ManualRequest`).
    """

    by: str
    why: str
    beside: str = ""
    request_id: str = ""


Other = (
    events.CostMeasured
    | events.PolicyChanged
    | events.EvidenceGathered
    | events.TakenOver
    | events.DiskRecovered
    | events.RingGivenUp
    | events.CauseFound
    | events.RemedyChanged
    | events.JobPaused
)
Note = RequestRow | Other
"""What is on record beside windows and captures."""


def note_kind(note: Note) -> str:
    """What something is listed as."""
    if isinstance(note, RequestRow):
        return "beside" if note.beside else "ask"
    return str(note.__struct_config__.tag)


@dataclass(frozen=True, slots=True)
class NamedSuspect:
    """A suspect in words, and its numbers (see `model.verdicts.Suspect`)."""

    who: str
    where: str
    when: str
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    pattern: Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow(_DecisionRow):
    """What is kept of one window: its verdict and the decision on it.

    ``stages`` and ``advances_s`` go together, and the latter sum to ``exposed_s``, of which ``excess_s`` is over what
    is normal (None where that was not looked into). ``named`` is the first suspect in a few words, "" where nobody is
    named, and ``onset_step`` where that one began. ``suspects`` are the first few, each with the first few of its
    ranks; of a window that is held there are none, but ``candidates``. ``coverage`` is the fraction of the window's
    vectors that were there, and ``clock`` the one that its times are on. ``lost_s`` is what the window adds to what
    suspects have cost. ``parameters`` are those that ``reason`` is
    said with. ``trouble`` is the key of who is named (`policy.state`), by which windows are compared, and not by
    words. ``regression`` is there while the job is slower than its own best, and once when that ends. ``news`` says
    when the window is worth a line.
    """

    first_step: int
    last_step: int
    label: Label
    reasons: tuple[str, ...]
    exposed_s: float
    step_s: float
    stages: tuple[str, ...]
    advances_s: tuple[float, ...]
    sentence: str
    named: str
    onset_step: int | None
    parameters: Mapping[str, captures.Parameter]
    rule: str
    suspects: tuple[NamedSuspect, ...]
    coverage: float | None
    clock: Clock
    candidates: tuple[NamedSuspect, ...] = ()
    excess_s: float | None = None
    regression: Regression | None = None
    lost_s: float = 0.0
    news: News
    trouble: str = ""

    def is_trouble_of(self, other: WindowRow) -> bool:
        """Whether both windows name the same rank, or host, in whichever words."""
        return bool(self.trouble and other.trouble) and same_trouble(self.trouble, other.trouble)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """A capture that was asked for, and what became of it: None while it runs."""

    capture_id: str
    rank: int
    role: captures.Role
    result: captures.CaptureResult | None

    @property
    def state(self) -> str:
        """``running``, or how it has ended."""
        return "running" if self.result is None else self.result.state

    @property
    def lost(self) -> bool:
        """It has come to nothing."""
        return self.result is not None and self.result.state != "stored"


def statuses(
    asked: Iterable[captures.CaptureRequest], results: Mapping[str, captures.CaptureResult]
) -> tuple[CaptureStatus, ...]:
    """What became of captures that were asked for."""
    return tuple(CaptureStatus(one.capture_id, one.rank, one.role, results.get(one.capture_id)) for one in asked)


@dataclass(slots=True)
class JournalTail:
    """What a journal says so far: see `View` for what its parts are."""

    path: Path
    rows: list[WindowRow] = field(default_factory=list)
    results: dict[str, captures.CaptureResult] = field(default_factory=dict)
    states: dict[str, captures.CaptureResult] = field(default_factory=dict)
    asks: list[RequestRow] = field(default_factory=list)
    notes: list[Other] = field(default_factory=list)
    skipped: int = 0
    dropped: int = 0
    losses: Losses = field(default_factory=Losses)
    _appended: Appended = field(init=False)

    def __post_init__(self) -> None:
        self._appended = Appended(self.path, self._take, self._restart)

    def follow(self) -> bool:
        """Read what has been appended; whether there was anything. A journal that shrank is read anew."""
        return self._appended.follow()

    def _restart(self) -> None:
        self.skipped = self.dropped = 0
        for kept in (self.rows, self.results, self.states, self.asks, self.notes):
            kept.clear()
        self.losses = Losses()

    def _take(self, line: bytes) -> None:
        try:
            event = events.decode(line)
        except (ValueError, RecursionError):
            self.skipped += bool(line.strip())
            return
        match event:
            case None | events.EvidenceGathered(remarks=()):
                pass
            case events.WindowJudged():
                before, self.losses = self.losses.lost_s, self.losses.after(event.verdict)
                lost_s = self.losses.lost_s - before
                self.rows.append(row_of(event.verdict, event.decision, event.triggers, lost_s))
            case events.JournalCompacted():
                self.losses, self.dropped = Losses.of_values(event.losses), event.dropped
            case events.CaptureChanged():
                self.states[event.result.capture_id] = event.result
                if event.result.state in captures.ENDED:
                    self.results[event.result.capture_id] = event.result
            case events.ManualRequestDecided() | events.FollowUpDecided():
                self.asks.append(request_row(event))
            case _:
                self.notes.append(event)


def row_of(
    verdict: Verdict, decision: captures.Decision, triggers: Mapping[str, captures.Trigger] = {}, lost_s: float = 0.0
) -> WindowRow:
    """What the page keeps of a window."""
    first = verdict.named
    of_suspect = "stage", "gain_s", "share", "persistence", "pattern"
    found = tuple(
        NamedSuspect(who(one), where(one), when(one), one.ranks[:MAX_NAMED], **picked(one, *of_suspect))
        for one in verdict.suspects[:MAX_NAMED]
        if one.ranks
    )
    excess_s = verdict.numbers.get("excess_s", -1.0)
    of_verdict = "first_step", "last_step", "label", "reasons", "exposed_s", "step_s", "clock", "regression"
    return WindowRow(
        **_decided(decision, triggers) | {"attempt": verdict.attempt} | picked(verdict, *of_verdict),
        stages=tuple(verdict.advances_s),
        advances_s=tuple(verdict.advances_s.values()),
        sentence=verdict_sentence(verdict),
        named=f"{who(first)} in {where(first)}" if first is not None and first.ranks else "",
        onset_step=None if first is None else first.onset_step,
        parameters=decision.parameters,
        rule=decision.rule or "",
        suspects=found if first is not None else (),
        candidates=found if first is None else (),
        coverage=verdict.numbers.get("coverage"),
        excess_s=excess_s if excess_s >= 0.0 else None,
        lost_s=lost_s,
        trouble="" if first is None or not first.ranks else suspect_key(first),
        news=news_of(verdict, decision),
    )


def picked(record: object, *names: str) -> dict[str, Any]:
    """Some attributes of a record by name."""
    return {name: getattr(record, name) for name in names}


def _decided(decision: captures.Decision, triggers: Mapping[str, captures.Trigger]) -> dict[str, Any]:
    return {
        **picked(decision, "time_s", "attempt", "outcome", "reason"),
        "words": reason_sentence(decision),
        "resolves": resolution(decision),
        "asked": decision.requests,
        "triggers": triggers,
    }


def request_row(event: events.ManualRequestDecided | events.FollowUpDecided) -> RequestRow:
    """What is kept of captures that no window led to."""
    decided = _decided(event.decision, event.triggers)
    if isinstance(event, events.FollowUpDecided):
        return RequestRow(**decided, by="", why=f"capture {event.capture_id}", beside=event.capture_id)
    asked = event.request
    return RequestRow(**decided, by=asked.who, why=asked.reason, request_id=asked.request_id)
