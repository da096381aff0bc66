"""The charts of a page: which part of a run they show, and their drawings, of a fixed size. Pure.

A drawing is stretched to the page's width, so nothing in it is text. Every chart over a run's steps has the same axis:
a column holds one step or several, a power of two, so that columns of a longer run are made of those of a shorter one.
Attempts of a job follow one another on it, for a job that starts again counts its steps anew. The timeline is the
exposed time stacked by each stage's advance; the bars are what filled the suspect stage, beside the same stage of a
control rank, on one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import floor, isnan, log10
from urllib.parse import urlencode

from sftriage.model.captures import CaptureResult
from sftriage.model.verdicts import Label
from sftriage.runs.decisions import RequestRow, WindowRow
from sftriage.runs.lateness import HeatMap
from sftriage.traces.manifest import Findings, StageProfile

MAX_COLUMNS = 400

_SEVERITY: tuple[Label, ...] = ("healthy", "needs_evidence", "suspect", "stalled")


@dataclass(frozen=True, slots=True)
class Stretch:
    """The steps of one attempt, the last one included. Its columns begin at ``at``."""

    attempt: int
    first_step: int
    last_step: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis: ``column_steps`` steps in a column, whose first is a multiple of it; ``columns`` in all."""

    column_steps: int
    columns: int
    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, stretches: Sequence[Stretch], max_columns: int = MAX_COLUMNS) -> Axis | None:
        if not stretches:
            return None
        each = 1
        while (total := sum(_columns(one, each) for one in stretches)) > max_columns and each < 2**62:
            each *= 2
        placed, at = [], 0
        for one in stretches:
            placed.append(Stretch(one.attempt, one.first_step, one.last_step, at))
            at += _columns(one, each)
        return cls(each, total, tuple(placed))

    def stretch(self, attempt: int) -> Stretch | None:
        return next((one for one in self.stretches if one.attempt == attempt), None)

    def column(self, attempt: int, step: int) -> int | None:
        one = self.stretch(attempt)
        if one is None or not one.first_step <= step <= one.last_step:
            return None
        return one.at + step // self.column_steps - one.first_step // self.column_steps


def _columns(one: Stretch, each: int) -> int:
    return one.last_step // each - one.first_step // each + 1


def axis_of(rows: Sequence[WindowRow], first_step: int, last_step: int, max_columns: int = MAX_COLUMNS) -> Axis | None:
    """The axis of some windows, as far as their steps are between two others."""
    stretches: list[Stretch] = []
    for attempt, of_attempt in groupby(rows, key=lambda row: row.attempt):
        judged = list(of_attempt)
        first = max(first_step, min(row.first_step for row in judged))
        last = min(last_step, max(row.last_step for row in judged))
        # (the rows of one attempt may be told again after those of another)
        if first <= last and attempt not in {one.attempt for one in stretches}:
            stretches.append(Stretch(attempt, first, last))
    return Axis.of(stretches, max_columns)


def newest_steps(rows: Sequence[WindowRow]) -> list[tuple[int, int]]:
    """The steps that each window is drawn at, the last one included: those that no window before it had.

    Windows overlap, and each is judged over more steps than these. A stall is at its step.
    """
    drawn, seen = [], (-1, -1)
    for row in rows:
        attempt, last = seen if seen[0] == row.attempt else (row.attempt, row.first_step - 1)
        if row.label == "stalled":
            drawn.append((row.first_step, row.last_step))
            seen = attempt, last
        else:
            drawn.append((min(max(row.first_step, last + 1), row.last_step), row.last_step))
            seen = attempt, max(last, row.last_step)
    return drawn


@dataclass(frozen=True, slots=True)
class TimelineColumn:
    """Windows drawn as one, over ``width`` columns of the axis from ``at`` on; they are the newest of these steps.

    ``advances_s`` are means, one a stage of the chart, and sum to ``exposed_s``.
    """

    first_step: int
    last_step: int
    attempt: int
    windows: int
    label: Label
    named: str
    exposed_s: float
    advances_s: tuple[float, ...]
    at: int = 0
    width: int = 1


def columns_of(
    rows: Sequence[WindowRow], stages: Sequence[str], axis: Axis, advances: Mapping[int, Sequence[float]] = {}
) -> tuple[TimelineColumn, ...]:
    """The windows at the steps that they are drawn at; where several fall into a column of the axis, as their mean.

    ``advances`` are what the stages took in the steps of a column, by its number. Where they are known, the column
    shows them: windows overlap, so a step is in the mean of several, and a fault that begins in it shows as a slope.
    """
    of_column: dict[int, list[int]] = {}
    for n, (row, (first, last)) in enumerate(zip(rows, newest_steps(rows), strict=True)):
        there = axis.stretch(row.attempt)
        if there is None or last < there.first_step or first > there.last_step:
            continue
        begin = axis.column(row.attempt, max(first, there.first_step))
        end = axis.column(row.attempt, min(last, there.last_step))
        if begin is not None and end is not None:
            for column in range(begin, end + 1):
                of_column.setdefault(column, []).append(n)
    drawn: list[TimelineColumn] = []
    before: tuple[int, list[int]] = (-2, [])
    for at, numbers in sorted(of_column.items()):
        there = axis.stretch(rows[numbers[-1]].attempt)
        if not advances and before == (at - 1, numbers) and there is not None and drawn[-1].attempt == there.attempt:
            drawn[-1] = replace(drawn[-1], width=drawn[-1].width + 1)
        else:
            drawn.append(_mean_of([rows[n] for n in numbers], stages, at))
        if at in advances and there is not None:
            first = (there.first_step // axis.column_steps + at - there.at) * axis.column_steps
            first, last = max(first, there.first_step), min(first + axis.column_steps - 1, there.last_step)
            own = tuple(advances[at])
            drawn[-1] = replace(drawn[-1], first_step=first, last_step=last, advances_s=own, exposed_s=sum(own))
        before = (at, numbers)
    return tuple(drawn)


def _mean_of(rows: Sequence[WindowRow], stages: Sequence[str], at: int) -> TimelineColumn:
    # A step that hangs has no frontier yet: it is in the label, not in the stack.
    timed = [row for row in rows if row.advances_s]
    sums = dict.fromkeys(stages, 0.0)
    for row in timed:
        for stage, advance_s in row.advances_s.items():
            sums[stage] += advance_s
    worst = max(rows, key=lambda row: _SEVERITY.index(row.label))
    advances_s = tuple(sums[stage] / max(1, len(timed)) for stage in stages)
    return TimelineColumn(
        first_step=rows[0].first_step,
        last_step=rows[-1].last_step,
        attempt=rows[-1].attempt,
        windows=len(rows),
        label=worst.label,
        named=worst.named,
        exposed_s=sum(advances_s),
        advances_s=advances_s,
        at=at,
    )


WIDTH, HEIGHT = 1000.0, 300.0
MAX_OVER = 3.0
"""How much higher than nearly all columns the chart is at most."""

MAX_TABLE_ROWS = 40
TRIED_TICKS = 8
"""Round steps that are tried as ticks: those are kept that leave each other room."""

PARTS = (("working", "working_s"), ("waiting", "waiting_s"), ("not profiled", "unseen_s"))

CHOICES: tuple[int, ...] = (200, 1000, 10_000)
"""How many of the last steps one can ask for with one click."""

_WORDS = {
    "last": "last must be a whole number of steps, 1 or more",
    "from": "from must be the number of a step",
    "to": "to must be the number of a step",
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
        asked = {
            name: int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None
            for name in _WORDS
            if (text := query.get(name, "").strip())
        }
        problems = tuple(
            _WORDS[name] for name, number in asked.items() if number is None or (name, number) == ("last", 0)
        )
        last = asked.get("last")
        if last:
            return cls(last=last, problems=problems)
        return cls(first_step=asked.get("from"), last_step=asked.get("to"), problems=problems)

    @property
    def query(self) -> str:
        values = {"last": self.last, "from": self.first_step, "to": self.last_step}
        return urlencode({name: value for name, value in values.items() if value is not None})

    @property
    def whole(self) -> bool:
        return self == StepRange()

    def select(self, rows: Sequence[WindowRow]) -> tuple[WindowRow, ...]:
        if self.whole or not rows:
            return tuple(rows)
        first, last = self._ends(rows)
        attempt = rows[-1].attempt if self.last else None
        touching = (row for row in rows if row.last_step >= first and row.first_step <= last)
        return tuple(row for row in touching if attempt is None or row.attempt == attempt)

    def axis(self, rows: Sequence[WindowRow]) -> Axis | None:
        return axis_of(rows, *self._ends(rows)) if rows else None

    def _ends(self, rows: Sequence[WindowRow]) -> tuple[int, int]:
        if self.last is not None:
            newest = rows[-1].last_step
            return newest - self.last + 1, newest
        first = -(2**62) if self.first_step is None else self.first_step
        return first, 2**62 if self.last_step is None else self.last_step


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
    """A capture, at the steps that it recorded; one that recorded none, at the end of the window that led to it."""

    capture_id: str
    rank: int
    x: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A step that is named on the axis, ``at`` a fraction of its width."""

    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The whole chart. ``top_s`` is the time at its upper edge; ``restarts`` are where another attempt begins.

    ``stepwise``: columns are steps, and not windows. ``cut``: some are higher than the chart.
    """

    axis: Axis
    columns: tuple[TimelineColumn, ...]
    series: tuple[Series, ...]
    bands: tuple[Band, ...]
    markers: tuple[Marker, ...]
    restarts: tuple[float, ...]
    ticks: tuple[Tick, ...]
    top_s: float
    stepwise: bool = False
    cut: bool = False


def timeline(
    rows: Sequence[WindowRow],
    axis: Axis | None,
    results: Mapping[str, CaptureResult] | None = None,
    asks: Sequence[RequestRow] = (),
    heat: HeatMap | None = None,
) -> Timeline | None:
    """The chart of some windows, and of the captures that were asked for; None where no step of them has ended.

    Its columns are the steps of the ``heat`` map where that has them on the clock that the windows are judged by.
    """
    # Every stage that is named, in the order of the newest window's step.
    kinds = dict.fromkeys(tuple(row.advances_s) for row in reversed(rows))
    stages = tuple(dict.fromkeys(stage for of_row in kinds for stage in of_row))
    if axis is None or not stages:
        return None
    advances = _own_advances(axis, stages, heat) if heat is not None and rows[-1].clock == "host" else {}
    columns = columns_of(rows, stages, axis, advances)
    times_s = sorted(column.exposed_s for column in columns) or [0.0]
    # A few steps that are very long leave the others their height.
    highest_s, usual_s = times_s[-1], times_s[int(0.95 * (len(times_s) - 1))] if advances else 0.0
    top_s = _nice(min(highest_s, MAX_OVER * usual_s) if usual_s else highest_s)
    total_s = sum(column.exposed_s * column.width for column in columns) or 1.0
    series, below = [], [0.0] * len(columns)
    for number, stage in enumerate(stages):
        above = [low + column.advances_s[number] for low, column in zip(below, columns, strict=True)]
        share = sum(column.advances_s[number] * column.width for column in columns) / total_s
        series.append(Series(stage, _area(columns, below, above, WIDTH / axis.columns, top_s), share))
        below = above
    return Timeline(
        axis=axis,
        columns=columns,
        series=tuple(series),
        bands=tuple(_bands(columns, WIDTH / axis.columns)),
        markers=tuple(_markers(rows, asks, results or {}, axis)),
        restarts=tuple(round(one.at * WIDTH / axis.columns, 2) for one in axis.stretches[1:]),
        ticks=ticks_of(axis),
        top_s=top_s,
        stepwise=bool(advances),
        cut=highest_s > top_s,
    )


def _own_advances(axis: Axis, stages: Sequence[str], heat: HeatMap) -> dict[int, list[float]]:
    """What each stage of the chart took in the steps of each column of the axis, as far as the map knows it."""
    if set(heat.stages) - set(stages):
        return {}
    at = [stages.index(stage) for stage in heat.stages]
    own: dict[int, list[float]] = {}
    for column, values in enumerate(heat.advances_CS.tolist(), start=axis.stretches[-1].at):
        if not any(map(isnan, values)):
            own[column] = [0.0] * len(stages)
            for number, advance_s in zip(at, values, strict=True):
                own[column][number] = advance_s
    return own


def table_of(rows: Sequence[WindowRow], axis: Axis, stages: Sequence[str]) -> tuple[TimelineColumn, ...]:
    """The timeline in as many rows of a table as a person reads."""
    coarse = Axis.of(axis.stretches, max(MAX_TABLE_ROWS, len(axis.stretches)))
    return () if coarse is None else columns_of(rows, stages, coarse)


def _area(
    columns: Sequence[TimelineColumn], below: Sequence[float], above: Sequence[float], width: float, top_s: float
) -> str:
    """The outline of one stage's area: along its upper edge in steps, and back along the lower one.

    Where no window is, there is a gap.
    """
    outline = []

    def y(seconds: float) -> str:
        return f"V{max(0.0, HEIGHT - seconds * HEIGHT / top_s):.1f}"

    ends = [n + 1 for n in range(len(columns)) if n + 1 == len(columns) or _apart(columns[n], columns[n + 1])]
    for start, end in pairwise([0, *ends]):
        there = (f"{y(above[n])}H{(columns[n].at + columns[n].width) * width:.1f}" for n in range(start, end))
        back = (f"{y(below[n])}H{columns[n].at * width:.1f}" for n in reversed(range(start, end)))
        outline.append(f"M{columns[start].at * width:.1f} {''.join(there)[1:]}{''.join(back)}Z")
    return "".join(outline)


def _apart(one: TimelineColumn, following: TimelineColumn) -> bool:
    return one.at + one.width != following.at


def _bands(columns: Sequence[TimelineColumn], width: float) -> list[Band]:
    changes = range(1, len(columns))
    starts = [n for n in changes if columns[n].label != columns[n - 1].label or _apart(columns[n - 1], columns[n])]
    return [
        Band(
            columns[start].label,
            round(columns[start].at * width, 2),
            round((columns[end - 1].at + columns[end - 1].width - columns[start].at) * width, 2),
            columns[start].first_step,
            columns[end - 1].last_step,
        )
        for start, end in pairwise([0, *starts, len(columns)] if columns else [])
    ]


def _markers(
    rows: Sequence[WindowRow], asks: Sequence[RequestRow], results: Mapping[str, CaptureResult], axis: Axis
) -> Iterator[Marker]:
    asking: Iterable[WindowRow | RequestRow] = (*rows, *asks)
    for row in asking:
        for one in row.requests:
            became, steps = results.get(one.capture_id), None
            if became is not None and became.first_step is not None and became.last_step is not None:
                steps = became.first_step, became.last_step
            elif isinstance(row, WindowRow):
                steps = row.last_step, row.last_step
            ends = [axis.column(row.attempt, step) for step in steps or ()]
            begin, end = ends if ends else (None, None)
            if steps is not None and begin is not None and end is not None:
                x = round((begin + end + 1) / 2 * WIDTH / axis.columns, 2)
                yield Marker(one.capture_id, one.rank, x, *steps)


def ticks_of(axis: Axis) -> tuple[Tick, ...]:
    """The steps that are named: where each attempt begins, the last one, and round numbers where there is room."""
    begin = [Tick(one.at / axis.columns, one.first_step) for one in axis.stretches]
    steps = sum(one.last_step - one.first_step + 1 for one in axis.stretches)
    each = max(1, round(_nice(steps / TRIED_TICKS)))
    named = [begin[0], Tick(1.0, axis.stretches[-1].last_step), *begin[1:]]
    for one in axis.stretches:
        round_steps = range(-(-one.first_step // each) * each, one.last_step, each)
        named += [Tick(((axis.column(one.attempt, step) or 0) + 0.5) / axis.columns, step) for step in round_steps]
    kept: list[Tick] = []
    for tick in named:
        # (the first one is written with the word, and a phone is narrow)
        if all(abs(tick.at - other.at) >= (0.3 if other.at == 0.0 else 0.2) for other in kept):
            kept.append(tick)
    return tuple(sorted(kept, key=lambda tick: tick.at))


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
    top_s, bars = max(sum(_seconds(side)) for _, side in sides), []
    for title, side in sides:
        parts, x = [], 0.0
        for (name, _), seconds in zip(PARTS, _seconds(side), strict=True):
            width = seconds / top_s * WIDTH if top_s > 0.0 else 0.0
            parts.append(Part(name, round(x, 2), round(width, 2), seconds))
            x += width
        bars.append(Bar(title, side.rank, side.stage_s, tuple(parts)))
    return tuple(bars)


def _seconds(side: StageProfile) -> list[float]:
    """How long each part took; a manifest may say anything, and a width is not below nothing, nor without end."""
    return [min(max(float(getattr(side, field)), 0.0), 1e9) for _, field in PARTS]
