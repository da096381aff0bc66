"""The list of decisions: like ones in a row are one entry, so that a quiet night is one line. Pure.

Between them stands what else is on record: what people asked for, what captures cost, other policies, evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from sftriage.errors import InputError, UsageError
from sftriage.events import (
    CaptureChanged,
    Decided,
    Event,
    FollowUpDecided,
    ManualRequestDecided,
    WindowJudged,
)
from sftriage.records import ENDED, CaptureResult, Decision, plain
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.following import WindowRow
from sftriage.runs.journal import read_journal
from sftriage.runs.notes import CostRow, Note, RequestRow, captures_in
from sftriage.runs.outlook import CaptureStatus
from sftriage.words import decision_values, reason_sentence

PAGE_SIZE = 50


@dataclass(frozen=True, slots=True)
class DecisionGroup:
    """Decisions in a row that are alike. ``row`` is the newest of them, and speaks for all."""

    first_step: int
    first_time_s: float
    windows: int
    row: WindowRow
    captures: tuple[CaptureStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Noted:
    """Something else on record, with the captures that it asked for, or is about."""

    note: Note
    captures: tuple[CaptureStatus, ...] = ()


_Kind = TypeVar("_Kind", DecisionGroup, DecisionGroup | Noted)


@dataclass(frozen=True, slots=True)
class LogPage(Generic[_Kind]):
    """One page of the list, newest first. ``number`` counts from 1.

    ``counts`` are windows, and captures asked for beside them, by outcome; and the others by kind.
    """

    entries: tuple[_Kind, ...]
    number: int
    pages: int
    counts: Mapping[str, int]


def page_of(
    rows: Sequence[WindowRow],
    results: Mapping[str, CaptureResult],
    outcome: str = "",
    number: int = 1,
    size: int = PAGE_SIZE,
) -> LogPage[DecisionGroup]:
    """A page of the decisions on windows, with an outcome or all; a number past the end is the last page."""
    entries = _entries([row for row in rows if not outcome or row.outcome == outcome], results)
    return _page(entries, _counts(rows, ()), number, size)


def log_of(
    rows: Sequence[WindowRow],
    notes: Sequence[Note],
    results: Mapping[str, CaptureResult],
    kind: str = "",
    number: int = 1,
    size: int = PAGE_SIZE,
) -> LogPage[DecisionGroup | Noted]:
    """A page of all that is on record, or of one kind: an outcome, or a kind of note."""
    told: list[DecisionGroup | Noted] = [*_entries([row for row in rows if kind in ("", row.outcome)], results)]
    if notes:
        attempts = attempts_of(rows, notes)
        told += [_noted(note, results, attempts) for note in notes if not kind or kind in kinds_of(note)]
        # (of the same moment, the window comes first: what was asked for, or learnt, came of it)
        told.sort(key=_time_s)
    return _page(told, _counts(rows, notes), number, size)


def attempts_of(rows: Sequence[WindowRow], notes: Sequence[Note]) -> dict[str, int]:
    """The attempt that each capture was asked for in."""
    found = {one.capture_id: row.attempt for row in rows for one in row.asked}
    return found | {
        one.capture_id: note.attempt for note in notes if isinstance(note, RequestRow) for one in note.asked
    }


def kinds_of(note: Note) -> tuple[str, ...]:
    """What a note is found under."""
    return (note.kind, note.outcome) if isinstance(note, RequestRow) else (note.kind,)


def _page(entries: Sequence[_Kind], counts: Mapping[str, int], number: int, size: int) -> LogPage[_Kind]:
    pages = max(1, -(-len(entries) // size))
    number = min(max(number, 1), pages)
    end = len(entries) - (number - 1) * size
    return LogPage(tuple(reversed(entries[max(0, end - size) : end])), number, pages, counts)


def _counts(rows: Sequence[WindowRow], notes: Sequence[Note]) -> Counter[str]:
    return Counter(row.outcome for row in rows) + Counter(kind for note in notes for kind in kinds_of(note))


def _time_s(told: DecisionGroup | Noted) -> float:
    return told.row.time_s if isinstance(told, DecisionGroup) else told.note.time_s


def _noted(note: Note, results: Mapping[str, CaptureResult], attempts: Mapping[str, int]) -> Noted:
    if isinstance(note, RequestRow):
        return Noted(note, tuple(CaptureStatus(one, results.get(one.capture_id)) for one in note.asked))
    if isinstance(note, CostRow):
        found = (results[one] for one in captures_in(note, attempts, results))
        return Noted(note, tuple(CaptureStatus.of(result) for result in found))
    return Noted(note)


def _entries(rows: Sequence[WindowRow], results: Mapping[str, CaptureResult]) -> list[DecisionGroup]:
    """All entries, oldest first."""
    starts = [n for n, row in enumerate(rows) if n == 0 or row.asked or _kind(row) != _kind(rows[n - 1])]
    entries = []
    for start, end in pairwise([*starts, len(rows)]):
        first, last = rows[start], rows[end - 1]
        captures = tuple(CaptureStatus(one, results.get(one.capture_id)) for one in first.asked)
        entries.append(DecisionGroup(first.first_step, first.time_s, end - start, last, captures))
    return entries


def _kind(row: WindowRow) -> tuple[object, ...]:
    """What two windows share whose decisions are one entry of the list."""
    return (row.attempt, row.label, row.reasons, row.named, row.outcome, row.rule, bool(row.asked))


MAX_DECISIONS = 8
"""How many decisions about one step are told."""


def decided_in(events: Sequence[Event]) -> list[Decided]:
    """The events by which something was decided."""
    return [one for one in events if isinstance(one, WindowJudged | ManualRequestDecided | FollowUpDecided)]


def results_in(events: Sequence[Event]) -> dict[str, CaptureResult]:
    """What became of the captures that have ended, by id."""
    ended = (one.result for one in events if isinstance(one, CaptureChanged) and one.result.state in ENDED)
    return {result.capture_id: result for result in ended}


def decisions_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """A run's decisions as values, in order, each with what became of the captures it asked for (``results``).

    Raises:
        InputError: the journal cannot be read.
    """
    events = list(read_journal(directory.decisions))
    results = results_in(events)
    return [
        {
            **decision_values(one.decision),
            "results": [plain(results[it.capture_id]) for it in one.decision.requests if it.capture_id in results],
        }
        for one in decided_in(events)
    ]


def decided_about(decisions: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The decisions on windows that hold a step, the newest of them."""
    return [one for one in decisions if one["first_step"] <= step <= one["last_step"]][-MAX_DECISIONS:]


def window_of(directory: RunDirectory, what: str) -> WindowJudged:
    """The last window that holds a step, is ``FIRST-LAST``, or led to a capture.

    Raises:
        UsageError: there is no such window or capture.
        InputError: the journal cannot be read.
    """
    damaged: list[bytes] = []
    decided = decided_in(list(read_journal(directory.decisions, damaged)))
    for event in reversed(decided):
        if isinstance(event, WindowJudged) and _is(event.decision, what):
            return event
    for event in decided:
        if any(one.capture_id == what for one in event.decision.requests):
            raise UsageError(f"{what} was not led to by a window: {reason_sentence(event.decision)}")
    advice = "`sftriage decisions` lists its windows"
    if damaged:
        advice += f" ({'1 line' if len(damaged) == 1 else f'{len(damaged)} lines'} of its journal "
        advice += f"{'is' if len(damaged) == 1 else 'are'} damaged)"
    raise UsageError(f"{directory.path} has no window or capture {what}; {advice}")


def _is(decision: Decision, what: str) -> bool:
    first, last = decision.first_step, decision.last_step
    if what == f"{first}-{last}" or (what.isdecimal() and first <= int(what) <= last):
        return True
    return any(one.capture_id == what for one in decision.requests)


def why_none(directory: RunDirectory, step: int) -> str:
    """Why nothing was decided about a step, in words."""
    decided = decided_in(list(read_journal(directory.decisions)))
    windows = [
        (one.decision.first_step, one.decision.last_step)
        for one in decided
        if isinstance(one, WindowJudged) and one.verdict.label != "stalled"
    ]
    try:
        ended = not Path(read_info(directory).rings).is_dir()
    except InputError:
        ended = True
    return why_undecided(windows, step, ended=ended)


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
