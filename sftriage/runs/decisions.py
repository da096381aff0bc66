"""A journal as rows: its windows, the decisions on them, and its other events.

The views of a run (terminal, page, reports, assistants, objects of a cluster) read the journal through `JournalTail`,
which reads each line once. In a list, consecutive like decisions are one entry, so that a quiet night is one line.
"""

from __future__ import annotations

from array import array
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
from sftriage.policy.state import AddedLoss, Losses, same_trouble, suspect_key
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import Appended, read_journal
from sftriage.windows.log_files import find_logs
from sftriage.words.decisions import decision_values, reason_sentence, resolution
from sftriage.words.news import News, news_of
from sftriage.words.run import disk_now, event_sentence
from sftriage.words.verdicts import named_in_short, slow_stage, subject, timing, verdict_sentence

if TYPE_CHECKING:
    from sftriage.traces.catalogue import CaptureRow

DISTURBED = ("self_inflicted",)
"""The reasons of a window that a capture disturbed."""

MAX_NAMED = 8
"""Suspects of a window, and ranks of a suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionRow:
    """What is kept of any decision: ``words`` for its reason, and the ``requests`` for captures that it made.

    ``triggers`` say why, by capture, if that is on record.
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
    """Captures that a person or another capture requested, and the decision on them.

    ``by`` is the person, or "". ``why`` is the person's reason, or names the other capture, whose id is in ``beside``.
    ``request_id`` is that of the `ManualRequest`.
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
    | events.JobBroken
    | events.DifferencesFound
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


@dataclass(frozen=True, slots=True)
class StallCounts:
    """The ranks of a stall: ``waiting`` in one of the ``sync`` stages, ``missing`` there, and ``unseen``.

    ``unnamed`` are missing ones that no kept suspect names. No rank had moved for ``still_s`` seconds.
    """

    sync: tuple[str, ...]
    waiting: int
    missing: int
    unseen: int
    unnamed: int
    still_s: float

    @classmethod
    def of(cls, verdict: Verdict) -> StallCounts:
        waiting, missing, unseen = (
            int(verdict.numbers.get(f"{name}_ranks", 0)) for name in ("waiting", "missing", "unseen")
        )
        named = sum(len(suspect.ranks) for suspect in verdict.suspects[:MAX_NAMED])
        still_s = verdict.numbers.get("still_s", verdict.exposed_s)
        return cls(verdict.sync, waiting, max(missing, named), unseen, max(0, missing - named), still_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow(_DecisionRow):
    """What is kept of one window: its verdict and the decision on it.

    ``advances_s``, by stage, sum to ``exposed_s``; ``excess_s`` of that is over the normal step time (None: unknown).
    ``named`` is the first suspect in a few words, "" if no rank is named, and ``onset_step`` the step at which its
    fault began. ``suspects`` are the first few, each with the first few of its ranks; a held window has ``candidates``
    instead. ``coverage`` is the fraction of the window's vectors that arrived, and ``lost_s`` what the window adds to
    the cost of suspects. ``trouble`` is the key (`policy.state`) by which windows are compared. ``regression`` is set
    while the job is slower than its own best, and once when that ends; ``stall`` while a step stalls. ``news`` says
    whether to print the window. The named suspect has ``period_steps`` and ``alone``, and a step has ``work``
    (0: not noted); ``lost_from_step`` is the first that adds to ``lost_s``.
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
    stall: StallCounts | None = None
    news: News
    trouble: str = ""
    period_steps: int | None = None
    alone: bool = False
    work: float = 0.0
    lost_from_step: int | None = None

    def is_trouble_of(self, other: WindowRow) -> bool:
        """Whether both windows name the same rank or host."""
        return bool(self.trouble and other.trouble) and same_trouble(self.trouble, other.trouble)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """A requested capture and its state: a `CaptureState`, or ``damaged`` if what is stored is not a capture.

    A capture of the ``whole_job`` is of every rank, and is called by the ``rank`` that the job's stall named first.
    ``asked_by`` is the person who requested it, "" for a policy. ``reproduced`` says whether it contains the fault, and
    ``upload`` is the state of its copy to a remote store, "" without one.
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
    whole_job: bool = False

    @property
    def whose(self) -> str:
        """The captured rank in words; "" if it is unknown."""
        return "every rank" if self.whole_job else "" if self.rank is None else f"rank {self.rank}"

    @property
    def lost(self) -> bool:
        return self.state not in ("running", "stored")


def statuses(
    requests: Iterable[captures.CaptureRequest], results: Mapping[str, captures.CaptureResult]
) -> tuple[CaptureStatus, ...]:
    """The states of requested captures: running or ended."""
    return tuple(
        replace(_status(request, request.role, results), whole_job=request.of_whole_job) for request in requests
    )


def _status(
    capture: captures.CaptureRequest | captures.CaptureResult, role: str, results: Mapping[str, captures.CaptureResult]
) -> CaptureStatus:
    result = results.get(capture.capture_id)
    found = () if result is None else (result.state, result.detail, result.first_step, result.last_step)
    return CaptureStatus(capture.capture_id, capture.rank, role, *found)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """The journal's contents so far.

    ``rows`` are windows, ``requests`` captures that no window led to, and ``notes`` the other events, each in order.
    By capture, ``results`` says how it ended and ``states`` how far it is. ``skipped`` lines could not be read, a
    compaction removed ``dropped`` windows. ``losses`` are what stragglers have cost since the run began, and ``added``
    what the windows on record add to that.
    """

    rows: list[WindowRow] = field(default_factory=list)
    results: dict[str, captures.CaptureResult] = field(default_factory=dict)
    states: dict[str, captures.CaptureResult] = field(default_factory=dict)
    requests: list[RequestRow] = field(default_factory=list)
    notes: list[Other] = field(default_factory=list)
    skipped: int = 0
    dropped: int = 0
    losses: Losses = field(default_factory=Losses)
    added: list[AddedLoss] = field(default_factory=list)


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
                added = record.losses.added_by(event.verdict)
                lost_s = 0.0 if added is None else sum(added.step_s)
                record.rows.append(row_of(event.verdict, event.decision, event.triggers, lost_s))
                if added is not None:
                    record.added.append(replace(added, step_s=array("f", added.step_s)))
                    self.record = replace(record, losses=record.losses.plus(added))
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
    first, of_suspect = verdict.named, ("stage", "gain_s", "share", "persistence", "pattern")
    found = tuple(
        NamedSuspect(subject(each), slow_stage(each), timing(each), each.ranks[:MAX_NAMED], **picked(each, *of_suspect))
        for each in verdict.suspects[:MAX_NAMED]
        if each.ranks
    )
    excess_s = verdict.numbers.get("excess_s", -1.0)
    of_verdict = "first_step", "last_step", "label", "reasons", "exposed_s", "step_s", "clock", "regression"
    return WindowRow(
        **_decided(decision, triggers) | {"attempt": verdict.attempt} | picked(verdict, *of_verdict),
        advances_s=verdict.advances_s,
        sentence=verdict_sentence(verdict),
        named=named_in_short(first) if first is not None and first.ranks else "",
        onset_step=None if first is None else first.onset_step,
        parameters=decision.parameters,
        rule=decision.rule or "",
        suspects=found if first is not None else (),
        candidates=found if first is None else (),
        coverage=verdict.numbers.get("coverage"),
        excess_s=excess_s if excess_s >= 0.0 else None,
        lost_s=lost_s,
        stall=StallCounts.of(verdict) if verdict.label == "stalled" else None,
        trouble="" if first is None or not first.ranks else suspect_key(first),
        period_steps=None if first is None else first.period_steps,
        alone=first is not None and first.alone is not None,
        work=verdict.numbers.get("work", 0.0),
        lost_from_step=None if verdict.lost is None else verdict.lost.first_step,
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
    """The row of captures that no window led to."""
    decided = _decided(event.decision, event.triggers)
    if isinstance(event, events.FollowUpDecided):
        return RequestRow(**decided, by="", why=f"capture {event.capture_id}", beside=event.capture_id)
    request = event.request
    return RequestRow(**decided, by=request.who, why=request.reason, request_id=request.request_id)


PAGE_SIZE = 50


@dataclass(frozen=True, slots=True)
class DecisionGroup:
    """Consecutive like decisions. ``row`` is the newest and stands for all."""

    first_step: int
    windows: int
    row: WindowRow
    captures: tuple[CaptureStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Noted:
    """Another event, with the captures that it requested or concerns."""

    note: Note
    kind: str
    captures: tuple[CaptureStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class LogPage:
    """One page of the list, newest first. ``number`` counts from 1, ``counts`` are by outcome and kind of event."""

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
    entries: list[DecisionGroup | Noted] = [*groups_of([row for row in rows if kind in ("", row.outcome)], results)]
    decided: Iterator[WindowRow | RequestRow] = chain(rows, (note for note in notes if isinstance(note, RequestRow)))
    attempts = {request.capture_id: row.attempt for row in decided for request in row.requests}
    counts = Counter[str](row.outcome for row in rows)
    for note in notes:
        kinds = [note_kind(note), *([note.outcome] if isinstance(note, RequestRow) else [])]
        counts.update(kinds)
        if kind in ("", *kinds):
            entries.append(_noted(note, results, attempts))
    if notes:
        # (at the same time, the window comes first: requests and findings resulted from it)
        entries.sort(key=lambda entry: (entry.row if isinstance(entry, DecisionGroup) else entry.note).time_s)
    pages = max(1, -(-len(entries) // size))
    number = min(max(number, 1), pages)
    end = len(entries) - (number - 1) * size
    return LogPage(tuple(reversed(entries[max(0, end - size) : end])), number, pages, counts)


def _noted(note: Note, results: Mapping[str, captures.CaptureResult], attempts: Mapping[str, int]) -> Noted:
    if isinstance(note, RequestRow):
        return Noted(note, note_kind(note), statuses(note.requests, results))
    ended: Iterable[captures.CaptureResult] = ()
    if isinstance(note, events.CauseFound):
        ended = (result for result in results.values() if result.capture_id == note.capture_id)
    elif isinstance(note, events.CostMeasured):
        ended = captures_in(note, attempts, results.values())
    return Noted(note, note_kind(note), tuple(_status(result, "suspect", results) for result in ended))


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
    return [event for event in record if isinstance(event, events.Decided)]


def states_in(record: Iterable[events.Event]) -> dict[str, captures.CaptureResult]:
    """The states of captures, by id."""
    return {event.result.capture_id: event.result for event in record if isinstance(event, events.CaptureChanged)}


def decisions_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """A run's decisions as values, in order, each with the results of the captures that it requested (``results``).

    Raises:
        InputError: the journal cannot be read.
    """
    record = list(read_journal(directory.decisions))
    ended = {name: plain(result) for name, result in states_in(record).items() if result.state in captures.ENDED}
    decided = [event.decision for event in decided_in(record)]
    requested = [[request.capture_id for request in decision.requests] for decision in decided]
    return [
        {**decision_values(decision), "results": [ended[name] for name in names if name in ended]}
        for decision, names in zip(decided, requested, strict=True)
    ]


def decided_about(decisions: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The newest decisions on windows that contain a step."""
    about = [decision for decision in decisions if decision["first_step"] <= step <= decision["last_step"]]
    return about[-MAX_DECISIONS:]


def unlike(decisions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest of each group of like decisions (label, outcome and reason)."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for decision in reversed(decisions):
        newest.setdefault((decision["label"], decision["outcome"], decision["reason"]), decision)
    return list(newest.values())[::-1]


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
    window_of_capture = {request.capture_id: window for window in named for request in window.requests}
    found = []
    for row in rows:
        if row.role == "control" or row.label == "asked":
            continue
        first = row.window_first_step if row.onset_step is None else row.onset_step
        last = captured_to = max(row.last_step, row.window_last_step)
        if (cause := window_of_capture.get(row.capture_id)) is not None:
            for window in named:
                begun = window.onset_step is None or window.onset_step <= captured_to
                if begun and (window.trouble, window.attempt) == (cause.trouble, cause.attempt):
                    last = max(last, window.last_step)
        if first <= step <= last:
            found.append(row)
    return min(found, key=lambda row: (row.cause is None, row.distance_from(step), row.first_step), default=None)


def window_of(directory: RunDirectory, name: str) -> events.WindowJudged:
    """The last window that contains a step, is ``FIRST-LAST``, or led to a capture.

    Raises:
        UsageError: there is no such window or capture.
        InputError: the journal cannot be read.
    """
    damaged: list[bytes] = []
    record = list(read_journal(directory.decisions, damaged))
    capture: captures.Decision | None = None
    for event in reversed(decided_in(record)):
        first, last = event.decision.first_step, event.decision.last_step
        requested = any(request.capture_id == name for request in event.decision.requests)
        is_named = requested or name == f"{first}-{last}" or (name.isdecimal() and first <= int(name) <= last)
        if is_named and isinstance(event, events.WindowJudged):
            return event
        capture = event.decision if requested else capture
    if capture is not None:
        raise UsageError(f"no window led to {name}: {reason_sentence(capture)}")
    if name.isdecimal() and (missing := _unwritten(directory, record, int(name))) is not None:
        raise UsageError(f"{directory.path}: no window of step {name} is on record. {missing}")
    lines = "1 line of its journal is" if len(damaged) == 1 else f"{len(damaged)} lines of its journal are"
    advice = "`sftriage decisions` lists its windows" + (f" ({lines} damaged)" if damaged else "")
    raise UsageError(f"{directory.path} has no window or capture {name}; {advice}")


def remedies_by(directory: RunDirectory, window: events.WindowJudged) -> list[events.RemedyChanged]:
    """The remedies tried by the time of a window: the last of each group of ranks."""
    tried = (event for event in read_journal(directory.decisions) if isinstance(event, events.RemedyChanged))
    return list({remedy.switch: remedy for remedy in tried if remedy.time_s <= window.decision.time_s}.values())


def differences_in(notes: Iterable[object], judged: WindowRow | Verdict) -> events.DifferencesFound | None:
    """What differs between the first suspect and its peers, as it was found last."""
    about = [(judged.attempt, suspect.ranks[: events.MAX_COMPARED]) for suspect in judged.suspects[:1]]
    found = (note for note in notes if isinstance(note, events.DifferencesFound))
    return next((note for note in reversed([*found]) if (note.attempt, note.ranks) in about), None)


def differences_of(directory: RunDirectory, verdict: Verdict) -> events.DifferencesFound | None:
    """The same of a window of a run."""
    return differences_in(read_journal(directory.decisions), verdict)


def _unwritten(directory: RunDirectory, record: Sequence[events.Event], step: int) -> str | None:
    """Why the windows of a step are lost or late (a full disk, a compacted journal); None if they are not."""
    for event in record:
        lost = isinstance(event, events.DiskRecovered) and event.lost_steps
        dropped = isinstance(event, events.JournalCompacted) and step <= event.dropped_step
        if dropped or (lost and lost[0] <= step <= lost[1]):
            return event_sentence(event)
    if step <= max((event.decision.last_step for event in decided_in(record)), default=-1):
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
        (event.decision.first_step, event.decision.last_step)
        for event in decided_in(record)
        if isinstance(event, events.WindowJudged) and event.verdict.label != "stalled"
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
    logs.refresh()
    thinned = logs.thinning(max(logs.attempts, default=0))
    return None if thinned is None or thinned.leaves(step) else str(thinned)


def why_undecided(windows: Sequence[tuple[int, int]], step: int, *, ended: bool) -> str:
    """Why no window holds a step, in words."""
    if not windows:
        return "no window was judged" + ("; the job has ended" if ended else " yet")
    first, last = min(start for start, _ in windows), max(end for _, end in windows)
    if step < first:
        return f"it is a warm-up step; the first window begins at step {first}"
    if step > last:
        return f"the last window ends at step {last}" + (", and the job has ended" if ended else " so far")
    return "its windows are missing: the job was not being watched then"
