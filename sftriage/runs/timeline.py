"""Windows in a row as a bounded number of columns: the mean of exact stacks is an exact stack. Pure.

A column is one window, or the mean of several where there are many; its height is the mean step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sftriage.records import Label
from sftriage.runs.following import WindowRow

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


def columns_of(rows: Sequence[WindowRow], stages: Sequence[str], max_columns: int) -> tuple[Column, ...]:
    """Windows put together into columns of as many each, the last of the rest."""
    each = -(-len(rows) // max_columns)
    return tuple(_column(rows[start : start + each], stages) for start in range(0, len(rows), each))


def stages_of(rows: Sequence[WindowRow]) -> tuple[str, ...]:
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
