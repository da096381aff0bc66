"""The charts of a page: which part of a run they show, and their drawings, of a fixed size. Pure.

A drawing is stretched to the page's width, so nothing in it is text. The timeline is the exposed time stacked by each
stage's advance; the bars are what filled the suspect stage, beside the same stage of a control rank, on one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, log10
from urllib.parse import urlencode

from sftriage.records import Label
from sftriage.runs.following import WindowRow
from sftriage.runs.outlook import TimelineColumn, columns_of, stages_of
from sftriage.traces.manifest import Findings, StageProfile

WIDTH, HEIGHT = 1000.0, 300.0
MAX_COLUMNS = 400
MAX_TABLE_ROWS = 40

PARTS = (("working", "working_s"), ("waiting", "waiting_s"), ("not seen by the profiler", "unseen_s"))

CHOICES: tuple[int, ...] = (200, 1000, 10_000)
"""How many of the last steps one can ask for with one click."""

_WORDS = {
    "last": "last is a whole number of steps, 1 or more",
    "from": "from is the number of a step",
    "to": "to is the number of a step",
}


@dataclass(frozen=True, slots=True)
class StepRange:
    """A part of a run. ``last`` is a number of steps; ``first_step`` and ``last_step`` are both included.

    ``problems`` are what was asked for and means nothing, in words. It is passed over.
    """

    last: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    problems: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, query: Mapping[str, str]) -> StepRange:
        """What an address asks for; what was left empty is not asked for."""
        asked = {name: _whole(text) for name in _WORDS if (text := query.get(name, "").strip())}
        problems = tuple(
            _WORDS[name] for name, number in asked.items() if number is None or (name, number) == ("last", 0)
        )
        last = asked.get("last")
        if last:
            return cls(last=last, problems=problems)
        return cls(first_step=asked.get("from"), last_step=asked.get("to"), problems=problems)

    @property
    def query(self) -> str:
        """The span as part of an address."""
        values = {"last": self.last, "from": self.first_step, "to": self.last_step}
        return urlencode({name: value for name, value in values.items() if value is not None})

    @property
    def whole(self) -> bool:
        """It is all of the run."""
        return self == StepRange()

    def select(self, rows: Sequence[WindowRow]) -> tuple[WindowRow, ...]:
        """The windows that touch it."""
        if self.whole or not rows:
            return tuple(rows)
        first, last = self._ends(rows)
        attempt = rows[-1].attempt if self.last else None
        touching = (row for row in rows if row.last_step >= first and row.first_step <= last)
        return tuple(row for row in touching if attempt is None or row.attempt == attempt)

    def heat_steps(self, rows: Sequence[WindowRow]) -> tuple[int, int, int] | None:
        """The attempt, and the first and the last step of the newest attempt in the span; ``rows`` are those it has."""
        judged = [row for row in rows if row.attempt == rows[-1].attempt and row.stages]
        if not judged:
            return None
        first, last = self._ends(rows)
        first = max(first, min(row.first_step for row in judged))
        last = min(last, max(row.last_step for row in judged))
        return (judged[-1].attempt, first, last) if first <= last else None

    def _ends(self, rows: Sequence[WindowRow]) -> tuple[int, int]:
        if self.last is not None:
            newest = rows[-1].last_step
            return newest - self.last + 1, newest
        first = -(2**62) if self.first_step is None else self.first_step
        return first, 2**62 if self.last_step is None else self.last_step


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None


@dataclass(frozen=True, slots=True)
class Series:
    """One stage: the outline of its area, and its share of the time that is shown."""

    stage: str
    path: str
    share: float


@dataclass(frozen=True, slots=True)
class Band:
    """Columns in a row with one label; x and width as fractions of the drawing's units."""

    label: Label
    x: float
    width: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Marker:
    """A capture, at the window that led to it."""

    capture_id: str
    x: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The whole chart. ``top_s`` is the time at its upper edge; ``restarts`` are where another attempt begins."""

    columns: tuple[TimelineColumn, ...]
    series: tuple[Series, ...]
    bands: tuple[Band, ...]
    markers: tuple[Marker, ...]
    restarts: tuple[float, ...]
    top_s: float


def timeline(rows: Sequence[WindowRow], max_columns: int = MAX_COLUMNS) -> Timeline | None:
    """The chart of some windows, or None of none."""
    if not rows:
        return None
    stages = stages_of(rows)
    columns = columns_of(rows, stages, max_columns)
    top_s = _nice(max(column.exposed_s for column in columns))
    width = WIDTH / len(columns)
    total_s = sum(column.exposed_s * column.windows for column in columns) or 1.0
    series, below = [], [0.0] * len(columns)
    for number, stage in enumerate(stages):
        above = [low + column.advances_s[number] for low, column in zip(below, columns, strict=True)]
        share = sum(column.advances_s[number] * column.windows for column in columns) / total_s
        series.append(Series(stage, _area(below, above, width, top_s), share))
        below = above
    return Timeline(
        columns=columns,
        series=tuple(series),
        bands=tuple(_bands(columns, width)),
        markers=tuple(_markers(rows, max_columns, width)),
        restarts=tuple(
            round(n * width, 2) for n in range(1, len(columns)) if columns[n].attempt != columns[n - 1].attempt
        ),
        top_s=top_s,
    )


def _area(below: Sequence[float], above: Sequence[float], width: float, top_s: float) -> str:
    """The outline of one stage's area: along its upper edge in steps, and back along the lower one."""
    scale = HEIGHT / top_s
    there = (f"{HEIGHT - value * scale:.1f}H{(n + 1) * width:.1f}" for n, value in enumerate(above))
    back = (f"V{HEIGHT - below[n] * scale:.1f}H{n * width:.1f}" for n in reversed(range(len(below))))
    return f"M0 {'V'.join(there)}{''.join(back)}Z"


def _bands(columns: Sequence[TimelineColumn], width: float) -> list[Band]:
    starts = [n for n in range(len(columns)) if n == 0 or columns[n].label != columns[n - 1].label]
    return [
        Band(
            columns[start].label,
            round(start * width, 2),
            round((end - start) * width, 2),
            columns[start].first_step,
            columns[end - 1].last_step,
        )
        for start, end in pairwise([*starts, len(columns)])
    ]


def _markers(rows: Sequence[WindowRow], max_columns: int, width: float) -> list[Marker]:
    each = -(-len(rows) // max_columns)
    return [
        Marker(one.capture_id, round((n // each + 0.5) * width, 2), row.first_step, row.last_step)
        for n, row in enumerate(rows)
        for one in row.asked
    ]


def _nice(value: float) -> float:
    """A round number that is not less, of which half is round as well."""
    if value < 1e-12:
        return 1e-3
    unit = 10.0 ** floor(log10(value))
    return next(unit * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if value <= unit * step * (1 + 1e-9))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. ``x`` and ``width`` are of the drawing."""

    name: str
    x: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A rank's stage: what it was captured as, and what filled it."""

    title: str
    rank: int | None
    stage_s: float
    parts: tuple[Part, ...]


def bars_of(findings: Findings | None) -> tuple[Bar, ...]:
    """The bars of a capture's findings, that of the captured rank first; none of none."""
    if findings is None:
        return ()
    beside = "control" if findings.beside == "rank" else "its other steps"
    sides = [("captured", findings.suspect), *([(beside, findings.control)] if findings.control else [])]
    top_s = max(sum(_seconds(side)) for _, side in sides)
    return tuple(Bar(title, side.rank, side.stage_s, _parts(side, top_s)) for title, side in sides)


def _parts(side: StageProfile, top_s: float) -> tuple[Part, ...]:
    parts, x = [], 0.0
    for (name, _), seconds in zip(PARTS, _seconds(side), strict=True):
        width = seconds / top_s * WIDTH if top_s > 0.0 else 0.0
        parts.append(Part(name, round(x, 2), round(width, 2), seconds))
        x += width
    return tuple(parts)


def _seconds(side: StageProfile) -> list[float]:
    """How long each part took; a manifest may say anything, and a width is not below nothing, nor without end."""
    return [min(max(float(getattr(side, field)), 0.0), 1e9) for _, field in PARTS]
