"""The charts of the run page and of reports: timeline, verdict bands, capture marks, and a capture's bars. Pure.

`run_page` and `commands.report` build them; the templates draw them. A drawing is stretched to the page's width, so it
contains no text. All charts over steps share one axis: a column holds a power of two of steps, so that a column of a
longer run is the sum of columns of a shorter one. A job that restarts counts its steps anew; its attempts follow one
another on the axis.

Windows overlap, and a step is in several of them. The charts show steps: the stack is what each step took, as far as
step logs have it, and a verdict begins at the step at which its fault began.
"""

from __future__ import annotations

from collections import defaultdict
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
    """The steps of one attempt, ``last_step`` included. Its columns begin at ``at``."""

    attempt: int
    first_step: int
    last_step: int
    at: int = 0

    def columns(self, column_steps: int) -> int:
        return self.last_step // column_steps - self.first_step // column_steps + 1


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
        column_steps = 1
        while sum(stretch.columns(column_steps) for stretch in stretches) > max_columns and column_steps < 2**62:
            column_steps *= 2
        placed, at = [], 0
        for stretch in stretches:
            placed.append(replace(stretch, at=at))
            at += stretch.columns(column_steps)
        return cls(column_steps, at, tuple(placed))

    def stretch(self, attempt: int) -> Stretch | None:
        return next((stretch for stretch in self.stretches if stretch.attempt == attempt), None)

    def column(self, attempt: int, step: int) -> int | None:
        stretch = self.stretch(attempt)
        if stretch is None or not stretch.first_step <= step <= stretch.last_step:
            return None
        return stretch.at + step // self.column_steps - stretch.first_step // self.column_steps

    def columns_in(self, attempt: int, first_step: int, last_step: int) -> range:
        """The columns of some steps, as far as they are on the axis."""
        stretch = self.stretch(attempt)
        if stretch is None or last_step < stretch.first_step or first_step > stretch.last_step:
            return range(0)
        first = self.column(attempt, max(first_step, stretch.first_step))
        last = self.column(attempt, min(last_step, stretch.last_step))
        return range(first or 0, (last or 0) + 1)

    def steps(self, column: int) -> tuple[int, int, int]:
        """The attempt, the first and the last step of a column."""
        stretch = next(stretch for stretch in reversed(self.stretches) if stretch.at <= column)
        first = (stretch.first_step // self.column_steps + column - stretch.at) * self.column_steps
        last = min(first + self.column_steps - 1, stretch.last_step)
        return stretch.attempt, max(first, stretch.first_step), last


def axis_of(rows: Sequence[WindowRow], first_step: int, last_step: int, max_columns: int = MAX_COLUMNS) -> Axis | None:
    """The axis of the windows' steps from ``first_step`` to ``last_step``."""
    stretches: dict[int, Stretch] = {}
    for attempt, of_attempt in groupby(rows, key=lambda row: row.attempt):
        judged = list(of_attempt)
        first = max(first_step, min(row.first_step for row in judged))
        last = min(last_step, max(row.last_step for row in judged))
        # (rows of one attempt may be repeated after those of another)
        if first <= last:
            stretches.setdefault(attempt, Stretch(attempt, first, last))
    return Axis.of(list(stretches.values()), max_columns)


def newest_steps(rows: Sequence[WindowRow]) -> list[tuple[int, int]]:
    """The steps at which each window is drawn, the last one included: those that no earlier window had.

    A stall is drawn at its step.
    """
    drawn, attempt, last = [], -1, -1
    for row in rows:
        if row.attempt != attempt:
            attempt, last = row.attempt, row.first_step - 1
        if row.label == "stalled":
            drawn.append((row.first_step, row.last_step))
        else:
            drawn.append((min(max(row.first_step, last + 1), row.last_step), row.last_step))
            last = max(last, row.last_step)
    return drawn


@dataclass(frozen=True, slots=True)
class Judged:
    """Steps with one verdict, ``last_step`` included. ``row`` is the window that judged them last."""

    first_step: int
    last_step: int
    row: WindowRow
    label: Label
    named: str


def judged_steps(rows: Sequence[WindowRow]) -> list[Judged]:
    """The verdict on each step, in order.

    A window is judged over more steps than its newest. Where it says at which step its fault began, its verdict goes
    back to that step, and the newest steps before it keep the verdict of the window before. It does not go back past
    another suspect, a stall, or a window that began after the fault and was healthy.
    """
    spans: list[Judged] = []
    for row, (first, last) in zip(rows, newest_steps(rows), strict=True):
        began = _began(row)
        if began is not None and first < began <= last:
            before = spans[-1] if spans and spans[-1].row.attempt == row.attempt else None
            if before is None or before.last_step != first - 1 or before.label == "stalled":
                spans.append(Judged(first, began - 1, row, "healthy", ""))
            else:
                spans[-1] = replace(before, last_step=began - 1)
            first = began
        at = len(spans)
        while began is not None and at and spans[at - 1].last_step >= began and _gives_way(spans[at - 1], row, began):
            at -= 1
            if spans[at].first_step < began:
                spans.insert(at, replace(spans[at], last_step=began - 1))
                at += 1
            begin = max(spans[at].first_step, began)
            spans[at] = Judged(begin, spans[at].last_step, row, row.label, row.named)
        spans.append(Judged(first, last, row, row.label, row.named))
    return spans


def _began(row: WindowRow) -> int | None:
    if row.label == "suspect":
        return row.onset_step
    slower = row.regression if row.label == "needs_evidence" and "regressed" in row.reasons else None
    return None if slower is None else slower.since_step


def _gives_way(span: Judged, row: WindowRow, began: int) -> bool:
    """Whether the verdict of a later window, on a fault that began at a step, replaces the one on some steps."""
    if span.row.attempt != row.attempt:
        return False
    if span.label == "healthy":
        return span.row.first_step < began
    return span.label == "needs_evidence" or span.row is row or span.row.is_trouble_of(row)


@dataclass(frozen=True, slots=True)
class TimelineColumn:
    """Steps drawn as one, over ``width`` columns of the axis from ``at`` on.

    ``advances_s`` are means over the steps, one per stage of the chart, and sum to ``exposed_s``. ``named`` is the
    suspect, or "". ``windows`` are the windows of which these are the newest steps.
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

    @property
    def end(self) -> int:
        return self.at + self.width


def columns_of(
    rows: Sequence[WindowRow], stages: Sequence[str], axis: Axis, advances: Mapping[int, Sequence[float]] = {}
) -> tuple[TimelineColumn, ...]:
    """The columns of the axis in which steps were judged; those of the same windows and verdict are merged.

    ``advances`` are what the stages took in the steps of a column, by its number. Where they are unknown, a column
    shows the mean of the windows whose newest steps it has.
    """
    windows, verdicts = defaultdict[int, list[int]](list), dict[int, Judged]()
    for number, (row, (first, last)) in enumerate(zip(rows, newest_steps(rows), strict=True)):
        for at in axis.columns_in(row.attempt, first, last):
            windows[at].append(number)
    for span in judged_steps(rows):
        for at in axis.columns_in(span.row.attempt, span.first_step, span.last_step):
            if at not in verdicts or _SEVERITY.index(span.label) > _SEVERITY.index(verdicts[at].label):
                verdicts[at] = span
    drawn: list[TimelineColumn] = []
    before: list[int] = []
    for at, numbers in sorted(windows.items()):
        attempt, first, last = axis.steps(at)
        verdict = verdicts[at]
        like = drawn[-1] if drawn and before == numbers and drawn[-1].end == at else None
        same = like is not None and (like.attempt, like.label, like.named) == (attempt, verdict.label, verdict.named)
        if like is not None and same and not advances:
            drawn[-1] = replace(like, width=like.width + 1, last_step=last)
        else:
            own_s = tuple(advances[at]) if at in advances else _mean_of([rows[number] for number in numbers], stages)
            about = attempt, len(numbers), verdict.label, verdict.named
            drawn.append(TimelineColumn(first, last, *about, sum(own_s), own_s, at))
        before = numbers
    return tuple(drawn)


def _mean_of(rows: Sequence[WindowRow], stages: Sequence[str]) -> tuple[float, ...]:
    # A step that hangs has no frontier yet: it is in the label, not in the stack.
    timed = [row.advances_s for row in rows if row.advances_s]
    return tuple(sum(advances_s.get(stage, 0.0) for advances_s in timed) / max(1, len(timed)) for stage in stages)


WIDTH, HEIGHT = 1000.0, 300.0
MAX_OVER = 3.0
"""How much higher than nearly all columns the chart may be."""

MAX_TABLE_ROWS = 40
TRIED_TICKS = 8
"""Round steps tried as ticks; those that keep their distance are drawn."""

PARTS = (("working", "working_s"), ("waiting", "waiting_s"), ("not profiled", "unseen_s"))

CHOICES: tuple[int, ...] = (200, 1000, 10_000)
"""Numbers of last steps that one click selects."""

_PROBLEMS = {
    "last": "last must be a whole number of steps, 1 or more",
    "from": "from must be the number of a step",
    "to": "to must be the number of a step",
}


@dataclass(frozen=True, slots=True)
class StepRange:
    """A part of a run: a number of ``last`` steps, or those from ``first_step`` to ``last_step``, both included.

    ``problems`` explain each ignored value of the query.
    """

    last: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    problems: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, query: Mapping[str, str]) -> StepRange:
        numbers = {
            name: int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None
            for name in _PROBLEMS
            if (text := query.get(name, "").strip())
        }
        problems = tuple(
            _PROBLEMS[name] for name, number in numbers.items() if number is None or (name, number) == ("last", 0)
        )
        last = numbers.get("last")
        if last:
            return cls(last=last, problems=problems)
        return cls(first_step=numbers.get("from"), last_step=numbers.get("to"), problems=problems)

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
    """One stage: the outline of its area, and its share of the time in the chart."""

    stage: str
    path: str
    share: float


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive columns with one label; x and width are in the drawing's units."""

    label: Label
    x: float
    width: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Marker:
    """A capture at the steps that it recorded; one without any is at the end of the window that led to it."""

    capture_id: str
    rank: int
    x: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled step of the axis, ``at`` a fraction of its width."""

    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The whole chart.

    Attributes:
        table: the columns, merged into at most `MAX_TABLE_ROWS`.
        restarts: where another attempt begins.
        top_s: the time at the upper edge.
        stepwise: every column shows its own steps, none the mean of windows.
        cut: some columns are higher than the chart.
    """

    axis: Axis
    columns: tuple[TimelineColumn, ...]
    table: tuple[TimelineColumn, ...]
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
    requests: Sequence[RequestRow] = (),
    maps: Iterable[HeatMap] = (),
) -> Timeline | None:
    """The chart of some windows and captures; None if no step of them has ended.

    Its columns are the steps of ``maps`` (one per attempt) that are on the clock by which windows are judged.
    """
    # All stages, in the order of the newest window's step.
    kinds = dict.fromkeys(tuple(row.advances_s) for row in reversed(rows))
    stages = tuple(dict.fromkeys(stage for of_row in kinds for stage in of_row))
    if axis is None or not stages:
        return None
    advances: dict[int, list[float]] = {}
    for map_ in maps:
        clock = next((row.clock for row in reversed(rows) if row.attempt == map_.attempt), None)
        if map_.clock == clock and set(map_.stages) <= set(stages):
            advances |= _advances_of(axis, stages, map_)
    columns = columns_of(rows, stages, axis, advances)
    times_s = sorted(column.exposed_s for column in columns) or [0.0]
    # A few very long steps must not flatten all others.
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
        table=_table(rows, axis, stages, advances),
        series=tuple(series),
        bands=tuple(_bands(columns, WIDTH / axis.columns)),
        markers=tuple(_markers(rows, requests, results or {}, axis)),
        restarts=tuple(round(stretch.at * WIDTH / axis.columns, 2) for stretch in axis.stretches[1:]),
        ticks=ticks_of(axis),
        top_s=top_s,
        stepwise=all(column.at in advances or not column.exposed_s for column in columns),
        cut=highest_s > top_s,
    )


def _advances_of(axis: Axis, stages: Sequence[str], map_: HeatMap) -> dict[int, list[float]]:
    """What each stage of the chart took in the steps of each column of the axis, as far as the map has it."""
    own: dict[int, list[float]] = {}
    columns = axis.columns_in(map_.attempt, map_.first_step, map_.last_step)
    for column, values in zip(columns, map_.advances_CS.tolist(), strict=False):
        if not any(map(isnan, values)):
            by_stage = dict(zip(map_.stages, values, strict=True))
            own[column] = [by_stage.get(stage, 0.0) for stage in stages]
    return own


def _table(
    rows: Sequence[WindowRow], axis: Axis, stages: Sequence[str], advances: Mapping[int, Sequence[float]]
) -> tuple[TimelineColumn, ...]:
    coarse = Axis.of(axis.stretches, max(MAX_TABLE_ROWS, len(axis.stretches)))
    if coarse is None:
        return ()
    merged = defaultdict[int, list[Sequence[float]]](list)
    for column, advances_s in advances.items():
        attempt, first, _ = axis.steps(column)
        merged[coarse.column(attempt, first) or 0].append(advances_s)
    means = {at: [sum(of_stage) / len(found) for of_stage in zip(*found, strict=True)] for at, found in merged.items()}
    return columns_of(rows, stages, coarse, means)


def _area(
    columns: Sequence[TimelineColumn], below: Sequence[float], above: Sequence[float], width: float, top_s: float
) -> str:
    """The outline of one stage's area: along its upper edge, and back along the lower one, with a gap without steps."""
    outline = []

    def y(seconds: float) -> str:
        return f"V{max(0.0, HEIGHT - seconds * HEIGHT / top_s):.1f}"

    ends = [n + 1 for n in range(len(columns)) if n + 1 == len(columns) or columns[n].end != columns[n + 1].at]
    for start, end in pairwise([0, *ends]):
        there = (f"{y(above[n])}H{columns[n].end * width:.1f}" for n in range(start, end))
        back = (f"{y(below[n])}H{columns[n].at * width:.1f}" for n in reversed(range(start, end)))
        outline.append(f"M{columns[start].at * width:.1f} {''.join(there)[1:]}{''.join(back)}Z")
    return "".join(outline)


def _bands(columns: Sequence[TimelineColumn], width: float) -> list[Band]:
    changes = range(1, len(columns))
    starts = [n for n in changes if columns[n].label != columns[n - 1].label or columns[n - 1].end != columns[n].at]
    return [
        Band(
            columns[start].label,
            round(columns[start].at * width, 2),
            round((columns[end - 1].end - columns[start].at) * width, 2),
            columns[start].first_step,
            columns[end - 1].last_step,
        )
        for start, end in pairwise([0, *starts, len(columns)] if columns else [])
    ]


def _markers(
    rows: Sequence[WindowRow], requests: Sequence[RequestRow], results: Mapping[str, CaptureResult], axis: Axis
) -> Iterator[Marker]:
    decisions: Iterable[WindowRow | RequestRow] = (*rows, *requests)
    for row in decisions:
        for request in row.requests:
            result, steps = results.get(request.capture_id), None
            if result is not None and result.first_step is not None and result.last_step is not None:
                steps = result.first_step, result.last_step
            elif isinstance(row, WindowRow):
                steps = row.last_step, row.last_step
            ends = [axis.column(row.attempt, step) for step in steps or ()]
            begin, end = ends if ends else (None, None)
            if steps is not None and begin is not None and end is not None:
                x = round((begin + end + 1) / 2 * WIDTH / axis.columns, 2)
                yield Marker(request.capture_id, request.rank, x, *steps)


def ticks_of(axis: Axis) -> tuple[Tick, ...]:
    """The labelled steps: where each attempt begins, the last one, and round numbers at some distance."""
    begin = [Tick(stretch.at / axis.columns, stretch.first_step) for stretch in axis.stretches]
    steps = sum(stretch.last_step - stretch.first_step + 1 for stretch in axis.stretches)
    every = max(1, round(_nice(steps / TRIED_TICKS)))
    ticks = [begin[0], Tick(1.0, axis.stretches[-1].last_step), *begin[1:]]
    for stretch in axis.stretches:
        round_steps = range(-(-stretch.first_step // every) * every, stretch.last_step, every)
        columns = ((axis.column(stretch.attempt, step) or 0, step) for step in round_steps)
        ticks += [Tick((column + 0.5) / axis.columns, step) for column, step in columns]
    kept: list[Tick] = []
    for tick in ticks:
        # (the first label has the word "step" in it, and a phone is narrow)
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
    """A part of a bar; x and width are in the drawing's units."""

    name: str
    x: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Bar:
    """What filled a stage of a rank in a trace; ``title`` is the role of its capture."""

    title: str
    rank: int | None
    stage_s: float
    parts: tuple[Part, ...]


def bars_of(findings: Findings | None) -> tuple[Bar, ...]:
    """The bars of a capture's findings, on one scale, the captured rank first."""
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
    """How long each part took. A manifest may contain any number; a width is finite and not negative."""
    return [min(max(float(getattr(side, field)), 0.0), 1e9) for _, field in PARTS]


def heat_svg(slowdowns: Mapping[tuple[int, int], float], hottest: float) -> str:
    """A heat map of workers (dp, pp) as a file: data-parallel ranks across, stages down."""
    dps, pps = (sorted(set(places)) for places in zip(*slowdowns, strict=True))
    every = 1 + len(dps) // 32
    drawn = [f'<text x="{40 + 14 * at}" y="12">{dp}</text>' for at, dp in enumerate(dps) if not at % every]
    for row, pp in enumerate(pps):
        y = 18 + 14 * row
        drawn.append(f'<text x="0" y="{y + 11}">pp {pp}</text>')
        for at, dp in enumerate(dps):
            fade = round(255 * (1.0 - min(1.0, max(0.0, (slowdowns[dp, pp] - 1.0) / (hottest - 1.0)))))
            box = f'x="{40 + 14 * at}" y="{y}" width="13" height="13" fill="rgb(255,{fade},{fade})" stroke="#ccc"'
            drawn.append(f"<rect {box}><title>dp {dp}, pp {pp}: {slowdowns[dp, pp]:.2f}</title></rect>")
    size = f'width="{44 + 14 * len(dps)}" height="{20 + 14 * len(pps)}" font-family="sans-serif" font-size="10"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>' + "\n".join(drawn) + "</svg>\n"
