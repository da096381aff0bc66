"""The timeline: exposed time stacked by each stage's advance, as the paths of a drawing of a fixed size. Pure.

A column is one window, or the mean of several in a row where there are many: the mean of exact stacks is an exact
stack, whose height is the mean step time. The drawing is stretched to the page's width, so nothing in it is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, log10

from sftriage.records import Label
from sftriage.runs.following import WindowRow

WIDTH, HEIGHT = 1000.0, 300.0
MAX_COLUMNS = 400
MAX_TABLE_ROWS = 40

_SEVERITY: tuple[Label, ...] = ("healthy", "needs_evidence", "suspect", "stalled")


@dataclass(frozen=True, slots=True)
class Column:
    """Windows in a row, as one. ``advances_s`` are means, one a stage of the chart, and sum to ``exposed_s``."""

    first_step: int
    last_step: int
    attempt: int
    windows: int
    label: Label
    named: str
    exposed_s: float
    advances_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One stage: the outline of its area, and its share of the time that is shown."""

    stage: str
    number: int
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

    columns: tuple[Column, ...]
    series: tuple[Series, ...]
    bands: tuple[Band, ...]
    markers: tuple[Marker, ...]
    restarts: tuple[float, ...]
    top_s: float

    @property
    def ticks_s(self) -> tuple[float, ...]:
        """What to write beside the chart, from the top down."""
        return (self.top_s, self.top_s / 2, 0.0)


def timeline(rows: Sequence[WindowRow], max_columns: int = MAX_COLUMNS) -> Timeline | None:
    """The chart of some windows, or None of none."""
    if not rows:
        return None
    stages = _stages(rows)
    columns = columns_of(rows, stages, max_columns)
    top_s = _nice(max(column.exposed_s for column in columns))
    width = WIDTH / len(columns)
    total_s = sum(column.exposed_s * column.windows for column in columns) or 1.0
    series, below = [], [0.0] * len(columns)
    for number, stage in enumerate(stages):
        above = [low + column.advances_s[number] for low, column in zip(below, columns, strict=True)]
        share = sum(column.advances_s[number] * column.windows for column in columns) / total_s
        series.append(Series(stage, number, _area(below, above, width, top_s), share))
        below = above
    return Timeline(
        columns=columns,
        series=tuple(series),
        bands=tuple(_bands(columns, width)),
        markers=tuple(_markers(rows, max_columns, width)),
        restarts=tuple(
            _round(n * width) for n in range(1, len(columns)) if columns[n].attempt != columns[n - 1].attempt
        ),
        top_s=top_s,
    )


def columns_of(rows: Sequence[WindowRow], stages: Sequence[str], max_columns: int) -> tuple[Column, ...]:
    """Windows put together into columns of as many each, the last of the rest."""
    each = -(-len(rows) // max_columns)
    return tuple(_column(rows[start : start + each], stages) for start in range(0, len(rows), each))


def _stages(rows: Sequence[WindowRow]) -> tuple[str, ...]:
    """Every stage that is named, in the order of the newest window's step."""
    kinds = dict.fromkeys(row.stages for row in reversed(rows))
    return tuple(dict.fromkeys(stage for stages in kinds for stage in stages))


def _column(rows: Sequence[WindowRow], stages: Sequence[str]) -> Column:
    # A step that hangs has no frontier yet: it is in the label, not in the stack.
    timed = [row for row in rows if row.stages]
    sums = dict.fromkeys(stages, 0.0)
    for row in timed:
        for stage, advance_s in zip(row.stages, row.advances_s, strict=True):
            sums[stage] += advance_s
    worst = max(rows, key=lambda row: _SEVERITY.index(row.label))
    advances_s = tuple(sums[stage] / max(1, len(timed)) for stage in stages)
    return Column(
        first_step=rows[0].first_step,
        last_step=rows[-1].last_step,
        attempt=rows[-1].attempt,
        windows=len(rows),
        label=worst.label,
        named=worst.named,
        exposed_s=sum(advances_s),
        advances_s=advances_s,
    )


def _area(below: Sequence[float], above: Sequence[float], width: float, top_s: float) -> str:
    """The outline of one stage's area: along its upper edge in steps, and back along the lower one."""
    scale = HEIGHT / top_s
    parts = ["M0"]
    for n, value in enumerate(above):
        parts.append(f"{' ' if n == 0 else 'V'}{HEIGHT - value * scale:.1f}H{(n + 1) * width:.1f}")
    back = range(len(below) - 1, -1, -1)
    parts.extend(f"V{HEIGHT - below[n] * scale:.1f}H{n * width:.1f}" for n in back)
    return "".join(parts) + "Z"


def _bands(columns: Sequence[Column], width: float) -> list[Band]:
    starts = [n for n in range(len(columns)) if n == 0 or columns[n].label != columns[n - 1].label]
    return [
        Band(
            columns[start].label,
            _round(start * width),
            _round((end - start) * width),
            columns[start].first_step,
            columns[end - 1].last_step,
        )
        for start, end in pairwise([*starts, len(columns)])
    ]


def _markers(rows: Sequence[WindowRow], max_columns: int, width: float) -> list[Marker]:
    each = -(-len(rows) // max_columns)
    return [
        Marker(one.capture_id, _round((n // each + 0.5) * width), row.first_step, row.last_step)
        for n, row in enumerate(rows)
        for one in row.asked
    ]


def _nice(value: float) -> float:
    """A round number that is not less, of which half is round as well."""
    if value < 1e-12:
        return 1e-3
    unit = 10.0 ** floor(log10(value))
    return next(unit * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if value <= unit * step * (1 + 1e-9))


def _round(value: float) -> float:
    return round(value, 2)
