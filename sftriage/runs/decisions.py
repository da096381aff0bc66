"""The list of decisions: like ones in a row are one entry, so that a quiet night is one line. Pure.

Between them stands what else is on record: what people asked for, what captures cost, other policies, evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.errors import InputError, UsageError
from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureResult
from sftriage.model.windows import plain
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.following import CaptureStatus, Note, RequestRow, WindowRow, note_kind, statuses
from sftriage.runs.journal import read_journal
from sftriage.windows.log_files import find_logs
from sftriage.words.decisions import decision_values, reason_sentence
from sftriage.words.run import compacted_sentence, disk_now, disk_sentence

if TYPE_CHECKING:
    from sftriage.traces.catalogue import CaptureRow

PAGE_SIZE = 50


@dataclass(frozen=True, slots=True)
class DecisionGroup:
    """Decisions in a row that are alike. ``row`` is the newest of them, and speaks for all."""

    first_step: int
    windows: int
    row: WindowRow
    captures: tuple[CaptureStatus, ...] = ()

    @property
    def time_s(self) -> float:
        return self.row.time_s


@dataclass(frozen=True, slots=True)
class Noted:
    """Something else on record, with the captures that it asked for, or is about."""

    note: Note
    kind: str
    captures: tuple[CaptureStatus, ...] = ()

    @property
    def time_s(self) -> float:
        return self.note.time_s


@dataclass(frozen=True, slots=True)
class LogPage:
    """One page of the list, newest first. ``number`` counts from 1.

    ``counts`` are windows, and captures asked for beside them, by outcome; and the others by kind.
    """

    entries: tuple[DecisionGroup | Noted, ...]
    number: int
    pages: int
    counts: Mapping[str, int]


def log_of(
    rows: Sequence[WindowRow],
    notes: Sequence[Note],
    results: Mapping[str, CaptureResult],
    kind: str = "",
    number: int = 1,
    size: int = PAGE_SIZE,
) -> LogPage:
    """A page of all that is on record, or of one kind: an outcome, or a kind of note.

    A number past the end is the last page.
    """
    told: list[DecisionGroup | Noted] = [*groups_of([row for row in rows if kind in ("", row.outcome)], results)]
    requests = (note for note in notes if isinstance(note, RequestRow))
    asking: Iterator[WindowRow | RequestRow] = chain(rows, requests)
    attempts = {one.capture_id: row.attempt for row in asking for one in row.asked}
    kinds = [(note_kind(note), *([note.outcome] if isinstance(note, RequestRow) else [])) for note in notes]
    told += [_noted(note, results, attempts) for note, of in zip(notes, kinds, strict=True) if not kind or kind in of]
    if notes:
        # (of the same moment, the window comes first: what was asked for, or learnt, came of it)
        told.sort(key=lambda one: one.time_s)
    counts = Counter(row.outcome for row in rows) + Counter(chain(*kinds))
    pages = max(1, -(-len(told) // size))
    number = min(max(number, 1), pages)
    end = len(told) - (number - 1) * size
    return LogPage(tuple(reversed(told[max(0, end - size) : end])), number, pages, counts)


def _noted(note: Note, results: Mapping[str, CaptureResult], attempts: Mapping[str, int]) -> Noted:
    if isinstance(note, RequestRow):
        return Noted(note, note_kind(note), statuses(note.asked, results))
    ended: Iterable[CaptureResult] = ()
    if isinstance(note, events.CauseFound):
        ended = (one for one in results.values() if one.capture_id == note.capture_id)
    elif isinstance(note, events.CostMeasured):
        ended = captures_in(note, attempts, results.values())
    captures = tuple(CaptureStatus(one.capture_id, one.rank, "suspect", one) for one in ended)
    return Noted(note, note_kind(note), captures)


def captures_in(
    cost: events.CostMeasured, attempts: Mapping[str, int], results: Iterable[CaptureResult]
) -> Iterator[CaptureResult]:
    """The captures that a cost is of: those of its attempt that measured any of its steps."""
    for result in results:
        if result.first_step is not None and result.last_step is not None:
            touch = result.first_step <= cost.last_step and result.last_step >= cost.first_step
            if touch and attempts.get(result.capture_id) == cost.attempt:
                yield result


def groups_of(rows: Sequence[WindowRow], results: Mapping[str, CaptureResult]) -> list[DecisionGroup]:
    """The decisions on windows, like ones in a row as one, oldest first."""

    def alike(row: WindowRow) -> tuple[object, ...]:
        return (row.attempt, row.label, row.reasons, row.trouble, row.outcome, row.rule, bool(row.asked))

    starts = [n for n, row in enumerate(rows) if n == 0 or row.asked or alike(row) != alike(rows[n - 1])]
    return [
        DecisionGroup(rows[start].first_step, end - start, rows[end - 1], statuses(rows[start].asked, results))
        for start, end in pairwise([*starts, len(rows)])
    ]


MAX_DECISIONS = 8  # about one step


def decided_in(record: Iterable[events.Event]) -> list[events.Decided]:
    """The events by which something was decided."""
    return [one for one in record if isinstance(one, events.Decided)]


def states_in(record: Iterable[events.Event]) -> dict[str, CaptureResult]:
    """How captures stand, by id."""
    return {one.result.capture_id: one.result for one in record if isinstance(one, events.CaptureChanged)}


def decisions_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """A run's decisions as values, in order, each with what became of the captures it asked for (``results``).

    Raises:
        InputError: the journal cannot be read.
    """
    record = list(read_journal(directory.decisions))
    results = {capture_id: one for capture_id, one in states_in(record).items() if one.state in ENDED}
    return [
        {
            **decision_values(one.decision),
            "results": [plain(results[it.capture_id]) for it in one.decision.requests if it.capture_id in results],
        }
        for one in decided_in(record)
    ]


def decided_about(decisions: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The decisions on windows that hold a step, the newest of them."""
    return [one for one in decisions if one["first_step"] <= step <= one["last_step"]][-MAX_DECISIONS:]


def unlike(decisions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of decisions that are alike (label, outcome and reason) the newest alone."""
    newest = {(one["label"], one["outcome"], one["reason"]): one for one in decisions}
    return [one for one in decisions if newest[one["label"], one["outcome"], one["reason"]] is one]


@dataclass(frozen=True, slots=True)
class Named:
    """A window that names a suspect: whom and where, in which attempt, since when, and what it had captured."""

    identity: tuple[object, ...]
    attempt: int
    onset_step: int | None
    last_step: int
    captured: tuple[str, ...]


def faults_in(directory: RunDirectory | None) -> list[Named]:
    """The windows of a run that name somebody, in order; none where there is no run.

    Raises:
        InputError: the journal cannot be read.
    """
    found = []
    for event in [] if directory is None else read_journal(directory.decisions):
        if isinstance(event, events.WindowJudged) and event.verdict.label == "suspect" and event.verdict.suspects:
            first, verdict = event.verdict.suspects[0], event.verdict
            captured = tuple(one.capture_id for one in event.decision.requests)
            found.append(Named(first.identity, verdict.attempt, first.onset_step, verdict.last_step, captured))
    return found


def fault_at(step: int, rows: Sequence[CaptureRow], named: Sequence[Named]) -> CaptureRow | None:
    """The capture of the fault that a step has: one whose cause is known if there is one, and else the nearest.

    A capture's fault lasts from its onset to the end of the last window that names the same suspect since about then;
    where the run's windows are not known, to the end of the capture.
    """
    of_capture = {capture_id: one for one in named for capture_id in one.captured}
    found = []
    for row in rows:
        if row.role == "control" or row.label == "asked":
            continue
        first = row.window_first_step if row.onset_step is None else row.onset_step
        last = max(row.last_step, row.window_last_step)
        if (its := of_capture.get(row.capture_id)) is not None:
            again = (one for one in named if (one.identity, one.attempt) == (its.identity, its.attempt))
            last = max(last, *(one.last_step for one in again if one.onset_step is None or one.onset_step <= last))
        if first <= step <= last:
            found.append(row)
    return min(found, key=lambda row: (row.cause is None, row.distance_from(step), row.first_step), default=None)


def window_of(directory: RunDirectory, what: str) -> events.WindowJudged:
    """The last window that holds a step, is ``FIRST-LAST``, or led to a capture.

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
            raise UsageError(f"{what} was not led to by a window: {reason_sentence(event.decision)}")
    if what.isdecimal() and (missing := _unwritten(directory, record, int(what))) is not None:
        raise UsageError(f"{directory.path}: no window of step {what} is on record. {missing}")
    lines = "1 line of its journal is" if len(damaged) == 1 else f"{len(damaged)} lines of its journal are"
    advice = "`sftriage decisions` lists its windows" + (f" ({lines} damaged)" if damaged else "")
    raise UsageError(f"{directory.path} has no window or capture {what}; {advice}")


def remedies_by(directory: RunDirectory, window: events.WindowJudged) -> list[events.RemedyChanged]:
    """What had been done about stragglers when a window was decided: of each group of ranks the last."""
    told = [one for one in read_journal(directory.decisions) if isinstance(one, events.RemedyChanged)]
    return list({one.switch: one for one in told if one.time_s <= window.decision.time_s}.values())


def _unwritten(directory: RunDirectory, record: Sequence[events.Event], step: int) -> str | None:
    """That windows of a step are lost, or may come, in words: the run directory could not be written, or cannot be."""
    for event in record:
        if isinstance(event, events.DiskRecovered) and event.lost_steps is not None:
            first, last = event.lost_steps
            if first <= step <= last:
                return disk_sentence(event)
        if isinstance(event, events.JournalCompacted) and step <= event.dropped_step:
            return compacted_sentence(event.dropped, event.dropped_step)
    if step <= max((one.decision.last_step for one in decided_in(record)), default=-1):
        return None
    rings = Path(read_info(directory).rings)
    if not rings.is_dir():
        return None
    from sftriage.runs.liveness import DISK, noted_problem  # not above: it needs numpy, and only of a run that goes on

    problem = noted_problem(rings / DISK)
    return disk_now(problem) if problem else None


def why_none(directory: RunDirectory, step: int) -> str:
    """Why nothing was decided about a step, in words."""
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
    """That what the ranks took in a step is not kept any more, in words; None where it is, or never was."""
    try:
        if all(log.all_there for log in find_logs(directory.steps)):
            return None
    except OSError:
        return None
    from sftriage.windows.logs import StepLogs  # not above: of most runs all is kept, and nobody needs numpy

    logs = StepLogs(directory.steps)
    logs.look()
    thinned = logs.thinning(max(logs.attempts, default=0))
    return None if thinned is None or thinned.leaves(step) else str(thinned)


def why_undecided(windows: Sequence[tuple[int, int]], step: int, *, ended: bool) -> str:
    """Why no window holds a step, in words."""
    if not windows:
        return "no window was" + ("; the job has ended" if ended else " yet")
    first, last = min(one for one, _ in windows), max(one for _, one in windows)
    if step < first:
        return f"it is one of the job's first steps, which are warm-up; the first window begins at step {first}"
    if step > last:
        return f"the last window ends at step {last}" + (", and the job has ended" if ended else " so far")
    return "its windows are missing: nobody watched the job then"
