"""The one axis that every chart of a run is drawn on: its steps, a column for one or several of them. Pure.

Attempts of a job follow one another on it, for a job that starts again counts its steps anew. Columns hold a power of
two of steps, so that those of a longer run are made of those of a shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sftriage.model.verdicts import Label
from sftriage.runs.following import WindowRow

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
        """As fine an axis of these steps as there is room for; None of none."""
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
        """The steps of one attempt."""
        return next((one for one in self.stretches if one.attempt == attempt), None)

    def column(self, attempt: int, step: int) -> int | None:
        """The column that a step is in; None of one that is not on the axis."""
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


def stages_of(rows: Sequence[WindowRow]) -> tuple[str, ...]:
    """Every stage that is named, in the order of the newest window's step."""
    kinds = dict.fromkeys(row.stages for row in reversed(rows))
    return tuple(dict.fromkeys(stage for stages in kinds for stage in stages))


def columns_of(rows: Sequence[WindowRow], stages: Sequence[str], axis: Axis) -> tuple[TimelineColumn, ...]:
    """The windows at the steps that they are drawn at; where several fall into a column of the axis, as their mean."""
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
    for column, numbers in sorted(of_column.items()):
        if before == (column - 1, numbers) and drawn[-1].attempt == rows[numbers[-1]].attempt:
            drawn[-1] = replace(drawn[-1], width=drawn[-1].width + 1)
        else:
            drawn.append(mean_of([rows[n] for n in numbers], stages, column))
        before = (column, numbers)
    return tuple(drawn)


def stepwise(
    columns: Sequence[TimelineColumn],
    axis: Axis,
    advances: Mapping[int, Sequence[float]],
) -> tuple[TimelineColumn, ...]:
    """Windows drawn by their steps: a column for each of the axis's whose own ``advances`` are known, by its number.

    Windows overlap, so a step is in the mean of several, and a fault that begins in one shows as a slope.
    """
    drawn: list[TimelineColumn] = []
    for one in columns:
        there = axis.stretch(one.attempt)
        for at in range(one.at, one.at + one.width):
            if there is None or (own := advances.get(at)) is None:
                drawn.append(replace(one, at=at, width=1))
                continue
            first = (there.first_step // axis.column_steps + at - there.at) * axis.column_steps
            last, stages_s = min(first + axis.column_steps - 1, there.last_step), tuple(map(float, own))
            of_step = replace(one, first_step=max(first, there.first_step), last_step=last, at=at, width=1)
            drawn.append(replace(of_step, advances_s=stages_s, exposed_s=sum(stages_s)))
    return tuple(drawn)


def mean_of(rows: Sequence[WindowRow], stages: Sequence[str], at: int = 0) -> TimelineColumn:
    """Some windows as one, which bears the gravest of their labels."""
    # A step that hangs has no frontier yet: it is in the label, not in the stack.
    timed = [row for row in rows if row.stages]
    sums = dict.fromkeys(stages, 0.0)
    for row in timed:
        for stage, advance_s in zip(row.stages, row.advances_s, strict=True):
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
