"""The list of decisions: like ones in a row are one entry, so that a quiet night is one line. Pure.

Between them stands what else is on record: what people asked for, what captures cost, other policies, evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from sftriage.records import CaptureResult
from sftriage.runs.following import WindowRow
from sftriage.runs.notes import AskRow, CostRow, Note, captures_in
from sftriage.runs.outlook import CaptureStatus

PAGE_SIZE = 50


@dataclass(frozen=True, slots=True)
class Entry:
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


_Kind = TypeVar("_Kind", Entry, Entry | Noted)


@dataclass(frozen=True, slots=True)
class Page(Generic[_Kind]):
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
) -> Page[Entry]:
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
) -> Page[Entry | Noted]:
    """A page of all that is on record, or of one kind: an outcome, or a kind of note."""
    told: list[Entry | Noted] = [*_entries([row for row in rows if kind in ("", row.outcome)], results)]
    if notes:
        attempts = attempts_of(rows, notes)
        told += [_noted(note, results, attempts) for note in notes if not kind or kind in kinds_of(note)]
        # (of the same moment, the window comes first: what was asked for, or learnt, came of it)
        told.sort(key=_time_s)
    return _page(told, _counts(rows, notes), number, size)


def attempts_of(rows: Sequence[WindowRow], notes: Sequence[Note]) -> dict[str, int]:
    """The attempt that each capture was asked for in."""
    found = {one.capture_id: row.attempt for row in rows for one in row.asked}
    return found | {one.capture_id: note.attempt for note in notes if isinstance(note, AskRow) for one in note.asked}


def kinds_of(note: Note) -> tuple[str, ...]:
    """What a note is found under."""
    return (note.kind, note.outcome) if isinstance(note, AskRow) else (note.kind,)


def _page(entries: Sequence[_Kind], counts: Mapping[str, int], number: int, size: int) -> Page[_Kind]:
    pages = max(1, -(-len(entries) // size))
    number = min(max(number, 1), pages)
    end = len(entries) - (number - 1) * size
    return Page(tuple(reversed(entries[max(0, end - size) : end])), number, pages, counts)


def _counts(rows: Sequence[WindowRow], notes: Sequence[Note]) -> Counter[str]:
    return Counter(row.outcome for row in rows) + Counter(kind for note in notes for kind in kinds_of(note))


def _time_s(told: Entry | Noted) -> float:
    return told.row.time_s if isinstance(told, Entry) else told.note.time_s


def _noted(note: Note, results: Mapping[str, CaptureResult], attempts: Mapping[str, int]) -> Noted:
    if isinstance(note, AskRow):
        return Noted(note, tuple(CaptureStatus(one, results.get(one.capture_id)) for one in note.asked))
    if isinstance(note, CostRow):
        found = (results[one] for one in captures_in(note, attempts, results))
        return Noted(note, tuple(CaptureStatus.of(result) for result in found))
    return Noted(note)


def _entries(rows: Sequence[WindowRow], results: Mapping[str, CaptureResult]) -> list[Entry]:
    """All entries, oldest first."""
    starts = [n for n, row in enumerate(rows) if n == 0 or row.asked or _kind(row) != _kind(rows[n - 1])]
    entries = []
    for start, end in pairwise([*starts, len(rows)]):
        first, last = rows[start], rows[end - 1]
        captures = tuple(CaptureStatus(one, results.get(one.capture_id)) for one in first.asked)
        entries.append(Entry(first.first_step, first.time_s, end - start, last, captures))
    return entries


def _kind(row: WindowRow) -> tuple[object, ...]:
    """What two windows share whose decisions are one entry of the list."""
    return (row.attempt, row.label, row.reasons, row.named, row.outcome, row.rule, bool(row.asked))
