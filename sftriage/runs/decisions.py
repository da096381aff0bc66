"""A journal as rows for display: its windows and decisions, and the list of decisions.

`JournalTail` follows a journal, each line once. In the list, like decisions in a row are one entry, so that a quiet
night is one line; between them are the other events: manual requests, costs, policy changes, evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.errors import InputError, UsageError
from sftriage.model import captures, events
from sftriage.model.verdicts import Clock, Label, Pattern, Regression, Verdict
from sftriage.model.windows import plain
from sftriage.policy.state import Losses, same_trouble, suspect_key
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import Appended, read_journal
from sftriage.windows.log_files import find_logs
from sftriage.words.decisions import decision_values, reason_sentence, resolution
from sftriage.words.news import News, news_of
from sftriage.words.run import disk_now, event_sentence
from sftriage.words.verdicts import slow_stage, subject, timing, verdict_sentence

if TYPE_CHECKING:
    from sftriage.traces.catalogue import CaptureRow

DISTURBED = ("self_inflicted",)
"""The reasons of a window that a capture disturbed."""

MAX_NAMED = 8
"""Suspects of a window, and ranks of a suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionRow:
    """The stored part of any decision. ``words`` explain ``reason``; ``requests`` are the captures that it requested.

    ``triggers`` say why, by capture, where that is on record.
    """

    time_s: float
    attempt: int = 0
    outcome: captures.Outcome
    reason: captures.ReasonCode
    words: str
    resolves: str = ""
    requests: tuple[captures.CaptureRequest, ...] = ()
    triggers: Mapping[str, captures.Trigger] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(_DecisionRow):
    """Captures that no window led to, and the decision on them: a person or another capture requested them.

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
"""Events other than windows and captures."""


def note_kind(note: Note) -> str:
    """The kind under which an event is listed."""
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

    ``advances_s``, by stage, sum to ``exposed_s``, of which ``excess_s`` is over what is normal (None where that is not
    known). ``named`` is the first suspect in a few words, "" where no rank is named, and ``onset_step`` where that one
    began. ``suspects`` are the first few, each with the first few of its ranks; a held window has ``candidates``
    instead. ``coverage`` is the fraction of the window's vectors that were there, and ``clock`` the one that its times
    are on. ``lost_s`` is what the window adds to the cost of suspects. ``parameters`` are those of the words of
    ``reason``. ``trouble`` is the key (`policy.state`) by which windows are compared. ``regression`` is there while the
    job is slower than its own best, and once when that ends. ``news`` says when the window is worth a line.
    """

    first_step: int
    last_step: int
    label: Label
    reasons: tuple[str, ...]
    exposed_s: float
    step_s: float
    advances_s: Mapping[str, float]
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
        """Whether both windows name the same rank or host."""
        return bool(self.trouble and other.trouble) and same_trouble(self.trouble, other.trouble)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """A requested capture and its state.

    ``state`` is a `CaptureState`, or ``damaged`` where what is stored is no capture.
    ``asked_by`` is the person who requested it, "" for a policy; ``reproduced`` says whether the fault was in it;
    ``upload`` is how far it is on its way to a store elsewhere, "" where it goes to none.
    """

    capture_id: str
    rank: int | None
    role: str
    state: str = "running"
    detail: str = ""
    first_step: int | None = None
    last_step: int | None = None
    size_bytes: int = 0
    asked_by: str = ""
    reproduced: str = ""
    upload: str = ""
    upload_reason: str = ""

    @property
    def lost(self) -> bool:
        return self.state not in ("running", "stored")


def statuses(
    asked: Iterable[captures.CaptureRequest], results: Mapping[str, captures.CaptureResult]
) -> tuple[CaptureStatus, ...]:
    """The states of requested captures: running or ended."""
    return tuple(_status(one.capture_id, one.rank, one.role, results.get(one.capture_id)) for one in asked)


def _status(capture_id: str, rank: int, role: str, result: captures.CaptureResult | None) -> CaptureStatus:
    found = () if result is None else (result.state, result.detail, result.first_step, result.last_step)
    return CaptureStatus(capture_id, rank, role, *found)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """The journal's contents so far.

    ``rows`` are windows, ``requests`` captures that no window led to, and ``notes`` the other events, each in order.
    By capture, ``results`` says how it ended and ``states`` how far it is. ``skipped`` lines could not be read, a
    compaction removed ``dropped`` windows, and ``losses`` are what stragglers have cost since the run began.
    """

    rows: list[WindowRow] = field(default_factory=list)
    results: dict[str, captures.CaptureResult] = field(default_factory=dict)
    states: dict[str, captures.CaptureResult] = field(default_factory=dict)
    requests: list[RequestRow] = field(default_factory=list)
    notes: list[Other] = field(default_factory=list)
    skipped: int = 0
    dropped: int = 0
    losses: Losses = field(default_factory=Losses)


class JournalTail:
    """Follows a journal."""

    def __init__(self, path: Path) -> None:
        self.record = JournalRecord()
        self._appended = Appended(path, self._take, self._restart)

    def follow(self) -> bool:
        """Read what has been appended; return whether there was anything. A journal that shrank is read again."""
        return self._appended.follow()

    def _restart(self) -> None:
        self.record = JournalRecord()

    def _take(self, line: bytes) -> None:
        record = self.record
        try:
            event = events.decode(line)
        except (ValueError, RecursionError):
            self.record = replace(record, skipped=record.skipped + bool(line.strip()))
            return
        match event:
            case None | events.EvidenceGathered(remarks=()):
                pass
            case events.WindowJudged():
                losses = record.losses.after(event.verdict)
                lost_s = losses.lost_s - record.losses.lost_s
                record.rows.append(row_of(event.verdict, event.decision, event.triggers, lost_s))
                self.record = replace(record, losses=losses)
            case events.JournalCompacted():
                self.record = replace(record, losses=Losses.of_values(event.losses), dropped=event.dropped)
            case events.CaptureChanged():
                record.states[event.result.capture_id] = event.result
                if event.result.state in captures.ENDED:
                    record.results[event.result.capture_id] = event.result
            case events.ManualRequestDecided() | events.FollowUpDecided():
                record.requests.append(request_row(event))
            case _:
                record.notes.append(event)


def row_of(
    verdict: Verdict, decision: captures.Decision, triggers: Mapping[str, captures.Trigger] = {}, lost_s: float = 0.0
) -> WindowRow:
    """The part of a window that the page stores."""
    first = verdict.named
    of_suspect = "stage", "gain_s", "share", "persistence", "pattern"
    found = tuple(
        NamedSuspect(subject(one), slow_stage(one), timing(one), one.ranks[:MAX_NAMED], **picked(one, *of_suspect))
        for one in verdict.suspects[:MAX_NAMED]
        if one.ranks
    )
    excess_s = verdict.numbers.get("excess_s", -1.0)
    of_verdict = "first_step", "last_step", "label", "reasons", "exposed_s", "step_s", "clock", "regression"
    return WindowRow(
        **_decided(decision, triggers) | {"attempt": verdict.attempt} | picked(verdict, *of_verdict),
        advances_s=verdict.advances_s,
        sentence=verdict_sentence(verdict),
        named=f"{subject(first)} in {slow_stage(first)}" if first is not None and first.ranks else "",
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
        "requests": decision.requests,
        "triggers": triggers,
    }


def request_row(event: events.ManualRequestDecided | events.FollowUpDecided) -> RequestRow:
    """The stored part of captures that no window led to."""
    decided = _decided(event.decision, event.triggers)
    if isinstance(event, events.FollowUpDecided):
        return RequestRow(**decided, by="", why=f"capture {event.capture_id}", beside=event.capture_id)
    asked = event.request
    return RequestRow(**decided, by=asked.who, why=asked.reason, request_id=asked.request_id)


PAGE_SIZE = 50


@dataclass(frozen=True, slots=True)
class DecisionGroup:
    """Consecutive like decisions. ``row`` is the newest and stands for all."""

    first_step: int
    windows: int
    row: WindowRow
    captures: tuple[CaptureStatus, ...] = ()

    @property
    def time_s(self) -> float:
        return self.row.time_s


@dataclass(frozen=True, slots=True)
class Noted:
    """Another event, with the captures that it requested or concerns."""

    note: Note
    kind: str
    captures: tuple[CaptureStatus, ...] = ()

    @property
    def time_s(self) -> float:
        return self.note.time_s


@dataclass(frozen=True, slots=True)
class LogPage:
    """One page of the list, newest first. ``number`` counts from 1.

    ``counts`` are windows and requested captures by outcome, and other events by kind.
    """

    entries: tuple[DecisionGroup | Noted, ...]
    number: int
    pages: int
    counts: Mapping[str, int]


def log_of(
    rows: Sequence[WindowRow],
    notes: Sequence[Note],
    results: Mapping[str, captures.CaptureResult],
    kind: str = "",
    number: int = 1,
    size: int = PAGE_SIZE,
) -> LogPage:
    """A page of all events, or of one kind: an outcome, or a kind of note.

    A number past the end is the last page.
    """
    told: list[DecisionGroup | Noted] = [*groups_of([row for row in rows if kind in ("", row.outcome)], results)]
    requests = (note for note in notes if isinstance(note, RequestRow))
    asking: Iterator[WindowRow | RequestRow] = chain(rows, requests)
    attempts = {one.capture_id: row.attempt for row in asking for one in row.requests}
    kinds = [(note_kind(note), *([note.outcome] if isinstance(note, RequestRow) else [])) for note in notes]
    told += [_noted(note, results, attempts) for note, of in zip(notes, kinds, strict=True) if not kind or kind in of]
    if notes:
        # (at the same time, the window comes first: requests and findings resulted from it)
        told.sort(key=lambda one: one.time_s)
    counts = Counter(row.outcome for row in rows) + Counter(chain(*kinds))
    pages = max(1, -(-len(told) // size))
    number = min(max(number, 1), pages)
    end = len(told) - (number - 1) * size
    return LogPage(tuple(reversed(told[max(0, end - size) : end])), number, pages, counts)


def _noted(note: Note, results: Mapping[str, captures.CaptureResult], attempts: Mapping[str, int]) -> Noted:
    if isinstance(note, RequestRow):
        return Noted(note, note_kind(note), statuses(note.requests, results))
    ended: Iterable[captures.CaptureResult] = ()
    if isinstance(note, events.CauseFound):
        ended = (one for one in results.values() if one.capture_id == note.capture_id)
    elif isinstance(note, events.CostMeasured):
        ended = captures_in(note, attempts, results.values())
    return Noted(note, note_kind(note), tuple(_status(one.capture_id, one.rank, "suspect", one) for one in ended))


def captures_in(
    cost: events.CostMeasured, attempts: Mapping[str, int], results: Iterable[captures.CaptureResult]
) -> Iterator[captures.CaptureResult]:
    """The captures that caused a cost: those of its attempt that recorded any of its steps."""
    for result in results:
        if result.first_step is not None and result.last_step is not None:
            touch = result.first_step <= cost.last_step and result.last_step >= cost.first_step
            if touch and attempts.get(result.capture_id) == cost.attempt:
                yield result


def groups_of(rows: Sequence[WindowRow], results: Mapping[str, captures.CaptureResult]) -> list[DecisionGroup]:
    """The decisions on windows, consecutive like ones as one group, oldest first."""

    def alike(row: WindowRow) -> tuple[object, ...]:
        return (row.attempt, row.label, row.reasons, row.trouble, row.outcome, row.rule, bool(row.requests))

    starts = [n for n, row in enumerate(rows) if n == 0 or row.requests or alike(row) != alike(rows[n - 1])]
    return [
        DecisionGroup(rows[start].first_step, end - start, rows[end - 1], statuses(rows[start].requests, results))
        for start, end in pairwise([*starts, len(rows)])
    ]


MAX_DECISIONS = 8  # about one step


def decided_in(record: Iterable[events.Event]) -> list[events.Decided]:
    """The events that hold a decision."""
    return [one for one in record if isinstance(one, events.Decided)]


def states_in(record: Iterable[events.Event]) -> dict[str, captures.CaptureResult]:
    """The states of captures, by id."""
    return {one.result.capture_id: one.result for one in record if isinstance(one, events.CaptureChanged)}


def decisions_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """A run's decisions as values, in order, each with the results of the captures it requested (``results``).

    Raises:
        InputError: the journal cannot be read.
    """
    record = list(read_journal(directory.decisions))
    results = {capture_id: one for capture_id, one in states_in(record).items() if one.state in captures.ENDED}
    return [
        {
            **decision_values(one.decision),
            "results": [plain(results[it.capture_id]) for it in one.decision.requests if it.capture_id in results],
        }
        for one in decided_in(record)
    ]


def decided_about(decisions: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The newest decisions on windows that contain a step."""
    return [one for one in decisions if one["first_step"] <= step <= one["last_step"]][-MAX_DECISIONS:]


def unlike(decisions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest of each group of like decisions (label, outcome and reason)."""
    newest = {(one["label"], one["outcome"], one["reason"]): one for one in decisions}
    return [one for one in decisions if newest[one["label"], one["outcome"], one["reason"]] is one]


def faults_in(directory: RunDirectory | None) -> list[WindowRow]:
    """The windows of a run that name a suspect, in order; none without a run."""
    if directory is None:
        return []
    journal = JournalTail(directory.decisions)
    journal.follow()
    return [row for row in journal.record.rows if row.label == "suspect" and row.trouble]


def fault_at(step: int, rows: Sequence[CaptureRow], named: Sequence[WindowRow]) -> CaptureRow | None:
    """The capture of the fault in a step: one with a known cause if there is one, otherwise the nearest.

    A capture's fault lasts from its onset to the end of the last window that names the same suspect;
    if the run's windows are not known, to the end of the capture.
    """
    of_capture = {request.capture_id: one for one in named for request in one.requests}
    found = []
    for row in rows:
        if row.role == "control" or row.label == "asked":
            continue
        first = row.window_first_step if row.onset_step is None else row.onset_step
        last = max(row.last_step, row.window_last_step)
        if (its := of_capture.get(row.capture_id)) is not None:
            again = (one for one in named if (one.trouble, one.attempt) == (its.trouble, its.attempt))
            last = max(last, *(one.last_step for one in again if one.onset_step is None or one.onset_step <= last))
        if first <= step <= last:
            found.append(row)
    return min(found, key=lambda row: (row.cause is None, row.distance_from(step), row.first_step), default=None)


def window_of(directory: RunDirectory, what: str) -> events.WindowJudged:
    """The last window that contains a step, is ``FIRST-LAST``, or led to a capture.

    Raises:
        UsageError: there is no such window or capture.
        InputError: the journal cannot be read.
    """
    damaged: list[bytes] = []
    record = list(read_journal(directory.decisions, damaged))
    decided = decided_in(record)
    for event in reversed(decided):
        first, last = event.decision.first_step, event.decision.last_step
        is_it = what == f"{first}-{last}" or (what.isdecimal() and first <= int(what) <= last)
        asked = any(one.capture_id == what for one in event.decision.requests)
        if isinstance(event, events.WindowJudged) and (is_it or asked):
            return event
    for event in decided:
        if any(one.capture_id == what for one in event.decision.requests):
            raise UsageError(f"no window led to {what}: {reason_sentence(event.decision)}")
    if what.isdecimal() and (missing := _unwritten(directory, record, int(what))) is not None:
        raise UsageError(f"{directory.path}: no window of step {what} is on record. {missing}")
    lines = "1 line of its journal is" if len(damaged) == 1 else f"{len(damaged)} lines of its journal are"
    advice = "`sftriage decisions` lists its windows" + (f" ({lines} damaged)" if damaged else "")
    raise UsageError(f"{directory.path} has no window or capture {what}; {advice}")


def remedies_by(directory: RunDirectory, window: events.WindowJudged) -> list[events.RemedyChanged]:
    """The remedies tried by the time of a window: the last of each group of ranks."""
    told = [one for one in read_journal(directory.decisions) if isinstance(one, events.RemedyChanged)]
    return list({one.switch: one for one in told if one.time_s <= window.decision.time_s}.values())


def _unwritten(directory: RunDirectory, record: Sequence[events.Event], step: int) -> str | None:
    """Why windows of a step are lost or late: the run directory could not or cannot be written. None: they are not."""
    for event in record:
        if isinstance(event, events.DiskRecovered) and event.lost_steps is not None:
            first, last = event.lost_steps
            if first <= step <= last:
                return event_sentence(event)
        if isinstance(event, events.JournalCompacted) and step <= event.dropped_step:
            return event_sentence(event)
    if step <= max((one.decision.last_step for one in decided_in(record)), default=-1):
        return None
    rings = Path(read_info(directory).rings)
    if not rings.is_dir():
        return None
    from sftriage.runs.liveness import DISK, noted_problem  # not above: needs numpy, only for a run in progress

    problem = noted_problem(rings / DISK)
    return disk_now(problem) if problem else None


def why_none(directory: RunDirectory, step: int) -> str:
    """Why there is no decision on a step, in words."""
    record = list(read_journal(directory.decisions))
    windows = [
        (one.decision.first_step, one.decision.last_step)
        for one in decided_in(record)
        if isinstance(one, events.WindowJudged) and one.verdict.label != "stalled"
    ]
    try:
        if (missing := _unwritten(directory, record, step)) is not None:
            return missing.rstrip(".")
        ended = not Path(read_info(directory).rings).is_dir()
    except InputError:
        ended = True
    return why_undecided(windows, step, ended=ended)


def kept_no_longer(directory: RunDirectory, step: int) -> str | None:
    """The sentence that a step's times are no longer kept; None if they are, or never were."""
    try:
        if all(log.all_there for log in find_logs(directory.steps)):
            return None
    except OSError:
        return None
    from sftriage.windows.logs import StepLogs  # not above: most runs keep all steps and need no numpy

    logs = StepLogs(directory.steps)
    logs.look()
    thinned = logs.thinning(max(logs.attempts, default=0))
    return None if thinned is None or thinned.leaves(step) else str(thinned)


def why_undecided(windows: Sequence[tuple[int, int]], step: int, *, ended: bool) -> str:
    """Why no window holds a step, in words."""
    if not windows:
        return "no window was judged" + ("; the job has ended" if ended else " yet")
    first, last = min(one for one, _ in windows), max(one for _, one in windows)
    if step < first:
        return f"it is a warm-up step; the first window begins at step {first}"
    if step > last:
        return f"the last window ends at step {last}" + (", and the job has ended" if ended else " so far")
    return "its windows are missing: the job was not being watched then"
