"""Following a run's journal: what was appended since the last look, each line once.

Of each event is kept what is shown of it, as short as it is shown. The journal lies on a disk that others can write to:
every number is checked, and a line that is too long, or is no entry, is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from sftriage.decisions import (
    ENDED,
    CaptureRequest,
    CaptureResult,
    Clock,
    Decision,
    Label,
    Outcome,
    Parameter,
    Pattern,
    Profiler,
    ReasonCode,
    Regression,
    Role,
    Suspect,
    Trigger,
    Verdict,
)
from sftriage.events import (
    CaptureChanged,
    CauseFound,
    CostMeasured,
    DiskRecovered,
    EvidenceGathered,
    FollowUpDecided,
    JobPaused,
    JournalCompacted,
    ManualRequestDecided,
    NamedPolicy,
    Place,
    PolicyChanged,
    RemedyChanged,
    RingGivenUp,
    TakenOver,
    WindowJudged,
)
from sftriage.policy import suspects
from sftriage.policy.losses import Losses
from sftriage.records import MAX_STAGES
from sftriage.runs.appended import Appended
from sftriage.runs.journal import event_of
from sftriage.words.decisions import reason_sentence, resolution
from sftriage.words.news import News, news_of
from sftriage.words.verdicts import verdict_sentence, when, where, who

MAX_TEXT = 4000
MAX_NAMED = 8
MAX_S = 1e11
"""No time is longer, and no date later than some three thousand years from now."""

_MAX_ASKED = 256
_MAX_LINES = 20
_MAX_PIPELINE = 4096


@dataclass(frozen=True, slots=True)
class RequestedCapture:
    """A capture that a decision asked for, and how much; ``trigger`` is why, where that is on record."""

    capture_id: str
    rank: int
    role: Role
    profiler: Profiler = "torch"
    steps: int = 1
    warmup_steps: int = 0
    max_seconds: float = 0.0
    max_bytes: int = 0
    trigger: Trigger | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionRow:
    """What is kept of any decision. ``words`` say ``reason``, and ``asked`` are the captures that it asked for."""

    time_s: float
    attempt: int = 0
    outcome: Outcome
    reason: ReasonCode
    words: str
    resolves: str = ""
    asked: tuple[RequestedCapture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(_DecisionRow):
    """Captures that no window led to, and what was decided about them: a person asked, or another capture led to them.

    ``by`` is the person, or "", and ``why`` what they said, or the other capture, whose id is then in ``beside``.
    ``request_id`` is the person's (see `decisions.ManualRequest`).
    """

    by: str
    why: str
    beside: str = ""
    request_id: str = ""


Other = (
    CostMeasured
    | PolicyChanged
    | EvidenceGathered
    | TakenOver
    | DiskRecovered
    | RingGivenUp
    | CauseFound
    | RemedyChanged
    | JobPaused
)
Note = RequestRow | Other
"""What is on record beside windows and captures; of an `Other`, only as much of its texts as is shown."""


def note_kind(note: Note) -> str:
    """What something is listed as."""
    if isinstance(note, RequestRow):
        return "beside" if note.beside else "ask"
    return str(note.__struct_config__.tag)


@dataclass(frozen=True, slots=True)
class NamedSuspect:
    """A suspect in words, and its numbers (see `decisions.Suspect`)."""

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
    said with. ``trouble`` is the key of who is named (`policy.suspects`), by which windows are compared, and not by
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
    parameters: Mapping[str, Parameter]
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
        return bool(self.trouble and other.trouble) and suspects.same(self.trouble, other.trouble)


@dataclass(slots=True)
class JournalTail:
    """What a journal says so far: see `View` for what its parts are."""

    path: Path
    rows: list[WindowRow] = field(default_factory=list)
    results: dict[str, CaptureResult] = field(default_factory=dict)
    states: dict[str, CaptureResult] = field(default_factory=dict)
    asks: list[RequestRow] = field(default_factory=list)
    notes: list[Other] = field(default_factory=list)
    skipped: int = 0
    dropped: int = 0
    losses: Losses = field(default_factory=Losses)
    _stages: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    _appended: Appended = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has been read."""
        self._appended = Appended(self.path, self._entry, self._begin)

    def follow(self) -> bool:
        """Read what has been appended; whether there was anything. A journal that shrank is read anew."""
        return self._appended.follow()

    def _begin(self) -> None:
        self.skipped = self.dropped = 0
        for kept in (self.rows, self.results, self.states, self.asks, self.notes):
            kept.clear()
        self.losses = Losses()

    def _entry(self, line: bytes) -> None:
        try:
            event = event_of(line)
            match event:
                case None:
                    pass
                case WindowJudged():
                    losses = self.losses.after(event.verdict)
                    lost_s = losses.lost_s - self.losses.lost_s
                    row = replace(row_of(event.verdict, event.decision, event.triggers), lost_s=lost_s)
                    self.losses = losses
                    # Thousands of windows name the same stages.
                    shared = self._stages.setdefault(row.stages, row.stages)
                    self.rows.append(row if shared is row.stages else replace(row, stages=shared))
                case JournalCompacted():
                    self.losses, self.dropped = Losses.of_values(event.losses), event.dropped
                case CaptureChanged():
                    capture_id, state = event.result.capture_id, event.result.state
                    self.states[capture_id] = event.result
                    if state in ENDED:
                        self.results[capture_id] = event.result
                case ManualRequestDecided() | FollowUpDecided():
                    self.asks.append(request_row(event))
                case _:
                    if (note := note_of(event)) is not None:
                        self.notes.append(note)
        except (ValueError, IndexError, RecursionError):
            self.skipped += bool(line.strip())


def row_of(verdict: Verdict, decision: Decision, triggers: Mapping[str, Trigger] = {}) -> WindowRow:
    """What the page keeps of a window.

    Raises:
        ValueError: numbers that no window has.
    """
    times_s = (verdict.exposed_s, decision.time_s, *verdict.advances_s.values())
    if not all(0.0 <= seconds < MAX_S for seconds in times_s) or not verdict.first_step <= verdict.last_step:
        raise ValueError("a time or a step that cannot be")
    first = verdict.named
    found = tuple(_named(one) for one in verdict.suspects[:MAX_NAMED] if one.ranks)
    coverage, excess_s = (verdict.numbers.get(name, -1.0) for name in ("coverage", "excess_s"))
    return WindowRow(
        **_decided(decision, triggers) | {"attempt": verdict.attempt},
        first_step=verdict.first_step,
        last_step=verdict.last_step,
        label=verdict.label,
        reasons=verdict.reasons,
        exposed_s=verdict.exposed_s,
        step_s=verdict.step_s if 0.0 <= verdict.step_s < MAX_S else verdict.exposed_s,
        stages=tuple(verdict.advances_s),
        advances_s=tuple(verdict.advances_s.values()),
        sentence=verdict_sentence(verdict)[:MAX_TEXT],
        named=f"{who(first)} in {where(first)}"[:MAX_TEXT] if first is not None and first.ranks else "",
        onset_step=None if first is None else first.onset_step,
        parameters=_bounded(decision.parameters),
        rule=(decision.rule or "")[:MAX_TEXT],
        suspects=found if first is not None else (),
        candidates=found if first is None else (),
        coverage=coverage if 0.0 <= coverage <= 1.0 else None,
        excess_s=excess_s if 0.0 <= excess_s < MAX_S else None,
        clock=verdict.clock,
        regression=None if verdict.regression is None else _regression(verdict.regression),
        trouble="" if first is None or not first.ranks else suspects.key(first),
        news=news_of(verdict, decision),
    )


def _regression(found: Regression) -> Regression:
    if not all(
        abs(number) < MAX_S for number in (found.fraction, found.best_step_s, found.descheduled_fraction or 0.0)
    ):
        raise ValueError("a slowdown that cannot be")
    stages = tuple(stage[:MAX_TEXT] for stage in found.stages[:MAX_STAGES])
    return replace(found, stages=stages, kind=found.kind[:MAX_TEXT])


def _decided(decision: Decision, triggers: Mapping[str, Trigger]) -> dict[str, Any]:
    return {
        "time_s": decision.time_s,
        "attempt": decision.attempt,
        "outcome": decision.outcome,
        "reason": decision.reason,
        "words": reason_sentence(decision)[:MAX_TEXT],
        "resolves": resolution(decision)[:MAX_TEXT],
        "asked": tuple(_requested(one, triggers.get(one.capture_id)) for one in decision.requests[:_MAX_ASKED]),
    }


def _requested(request: CaptureRequest, trigger: Trigger | None) -> RequestedCapture:
    bounds = request.steps, request.warmup_steps, request.max_seconds, request.max_bytes
    why = None
    if trigger is not None:
        if not abs(trigger.gain_s) < MAX_S:
            raise ValueError("a gain that cannot be")
        texts: dict[str, Any] = {name: getattr(trigger, name)[:MAX_TEXT] for name in ("policy", "rule", "why")}
        why = replace(trigger, ranks=trigger.ranks[:MAX_NAMED], **texts)
    return RequestedCapture(request.capture_id, request.rank, request.role, request.profiler, *bounds, why)


def _named(suspect: Suspect) -> NamedSuspect:
    if not all(abs(number) < MAX_S for number in (suspect.gain_s, suspect.share, suspect.persistence)):
        raise ValueError("a gain that cannot be")
    return NamedSuspect(
        who=who(suspect)[:MAX_TEXT],
        where=where(suspect)[:MAX_TEXT],
        when=when(suspect)[:MAX_TEXT],
        ranks=suspect.ranks[:MAX_NAMED],
        stage=None if suspect.stage is None else suspect.stage[:MAX_TEXT],
        gain_s=suspect.gain_s,
        share=suspect.share,
        persistence=suspect.persistence,
        pattern=suspect.pattern,
    )


def request_row(event: ManualRequestDecided | FollowUpDecided) -> RequestRow:
    """What is kept of captures that no window led to.

    Raises:
        ValueError: numbers that cannot be.
    """
    _check(event.decision.time_s)
    by, why, led_by, request_id = "", "", "", ""
    if isinstance(event, ManualRequestDecided):
        by, why = event.request.who[:MAX_TEXT], event.request.reason[:MAX_TEXT]
        request_id = event.request.request_id[:MAX_TEXT]
    else:
        led_by = event.capture_id[:MAX_TEXT]
        why = f"capture {led_by}"
    decided = _decided(event.decision, event.triggers)
    return RequestRow(**decided, by=by, why=why, beside=led_by, request_id=request_id)


def note_of(event: Other) -> Other | None:
    """What is kept of the other events; None where there is nothing to be shown.

    Raises:
        ValueError: numbers that cannot be.
    """
    _check(event.time_s)
    match event:
        case CostMeasured():
            _check(abs(event.cost_s or 0.0), event.before_s or 0.0)
            return event
        case PolicyChanged():
            policies = tuple(NamedPolicy(one.name[:MAX_TEXT]) for one in event.policies[:_MAX_LINES])
            problems, later = _lines(event.problems), _lines(event.later)
            return msgspec.structs.replace(event, policies=policies, problems=problems, later=later)
        case DiskRecovered():
            _check(event.since_s)
            late, lost = (
                {name[:MAX_TEXT]: n for name, n in list(one.items())[:_MAX_LINES]} for one in (event.late, event.lost)
            )
            return msgspec.structs.replace(event, problem=event.problem[:MAX_TEXT], late=late, lost=lost)
        case CauseFound():
            texts = {name: getattr(event, name)[:MAX_TEXT] for name in ("capture_id", "code", "sentence", "next_step")}
            place = event.place and Place(
                event.place.function[:MAX_TEXT], event.place.file[:MAX_TEXT], event.place.line
            )
            return msgspec.structs.replace(event, **texts, place=place)
        case RemedyChanged():
            texts = {name: getattr(event, name)[:MAX_TEXT] for name in ("who", "where", "switch")}
            numbers = {name[:MAX_TEXT]: one for name, one in list(event.numbers.items())[:_MAX_LINES]}
            _check(*map(abs, numbers.values()))
            if (seen := event.pipeline) is not None:
                _check(*seen.forward_S, *seen.backward_S, *seen.delay_L)
                if max(seen.microbatches, len(seen.forward_S)) > _MAX_PIPELINE:
                    raise ValueError("a pipeline that cannot be")
            return msgspec.structs.replace(event, **texts, numbers=numbers, ahead_S=event.ahead_S[:_MAX_LINES])
        case JobPaused():
            _check(event.lasted_s)
            return msgspec.structs.replace(event, stage=event.stage[:MAX_TEXT])
        case RingGivenUp():
            return msgspec.structs.replace(event, reason=event.reason[:MAX_TEXT])
        case TakenOver():
            return msgspec.structs.replace(event, host=event.host[:MAX_TEXT])
    return msgspec.structs.replace(event, remarks=_lines(event.remarks), gpus=None) if event.remarks else None


def _bounded(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """As many of a decision's parameters, or of other things by name, and as much of each, as there ever are."""

    def cut(value: str | int | float) -> Any:
        return value[:MAX_TEXT] if isinstance(value, str) else value

    return {
        name[:MAX_TEXT]: tuple(map(cut, value[:_MAX_LINES])) if isinstance(value, tuple) else cut(value)
        for name, value in list(parameters.items())[:_MAX_LINES]
    }


def _lines(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text[:MAX_TEXT] for text in texts[:_MAX_LINES])


def _check(*seconds: float) -> None:
    if not all(0.0 <= one < MAX_S for one in seconds):
        raise ValueError("a time that cannot be")
