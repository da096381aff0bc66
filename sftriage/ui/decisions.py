"""The list of decisions: like ones in a row are one entry, so that a quiet night is one line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sftriage.records import CaptureResult
from sftriage.ui.journal import WindowRow
from sftriage.ui.outlook import CaptureStatus

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
class Page:
    """One page of the list, newest first. ``number`` counts from 1; ``counts`` are windows by outcome."""

    entries: tuple[Entry, ...]
    number: int
    pages: int
    counts: Mapping[str, int]


def page_of(
    rows: Sequence[WindowRow],
    results: Mapping[str, CaptureResult],
    outcome: str = "",
    number: int = 1,
    size: int = PAGE_SIZE,
) -> Page:
    """A page of the decisions with an outcome, or of all of them; a number past the end is the last page."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
    entries = _entries([row for row in rows if not outcome or row.outcome == outcome], results)
    pages = max(1, -(-len(entries) // size))
    number = min(max(number, 1), pages)
    end = len(entries) - (number - 1) * size
    return Page(tuple(reversed(entries[max(0, end - size) : end])), number, pages, counts)


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
