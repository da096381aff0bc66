"""Tables a person reads. They take records and give rich renderables; nothing here prints."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from sftriage.model.verdicts import Verdict
from sftriage.words.amounts import every, milliseconds, moment, numbers, size, span
from sftriage.words.captures import stage_suspected
from sftriage.words.verdicts import CLOCKS, where, who

if TYPE_CHECKING:
    from sftriage.traces.databases import CaptureRow
    from sftriage.traces.stores import StoreCondition

LABEL_STYLES = {"healthy": "green", "suspect": "bold red", "stalled": "bold red", "needs_evidence": "yellow"}
OUTCOME_STYLES = {"capture": "bold red", "hold": "yellow", "throttle": "magenta", "ignore": "dim"}


def titled(title: str, left: Sequence[str], right: Sequence[str] = (), **options: Any) -> Table:
    """A table with a title over its left edge, whose ``left`` columns come first, and the ``right`` are numbers."""
    table = Table(title=title, title_justify="left", **options)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def frontier_table(verdict: Verdict) -> Table:
    """Where a window's exposed time went, stage by stage."""
    clock = f", {verdict.clock} clock" if CLOCKS[verdict.clock] else ""
    title = f"Frontier, {span(verdict.first_step, verdict.last_step)}{clock}"
    table = titled(title, ["stage"], ["advance", "share", "leader"])
    for stage, advance_s in verdict.advances_s.items():
        share, leader = advance_s / verdict.exposed_s if verdict.exposed_s else 0.0, verdict.leaders[stage]
        led = "(together)" if stage in verdict.sync else "" if leader is None else f"rank {leader}"
        table.add_row(stage, milliseconds(advance_s), f"{share:.0%}", led)
    table.add_section()
    table.add_row("exposed", milliseconds(verdict.exposed_s), "100%", "")
    return table


def windows_table(verdicts: Iterable[Verdict]) -> Table:
    """A line a window."""
    seen = list(verdicts)
    table = Table(title="Windows", title_justify="left")
    started_again = _started_again(one.attempt for one in seen)
    for column in (*started_again, "steps", "verdict", "a step", "suspect", "gain", "how often"):
        table.add_column(column, justify="right" if column in ("a step", "gain", "how often") else "left")
    for verdict in seen:
        label = ": ".join(filter(None, (verdict.label, ", ".join(verdict.reasons))))
        table.add_row(
            *(str(verdict.attempt + 1) for _ in started_again),
            numbers(verdict.first_step, verdict.last_step),
            Text(label, LABEL_STYLES[verdict.label]),
            milliseconds(verdict.step_s),
            *(_suspected(verdict) if verdict.suspects else ()),
        )
    return table


def _started_again(attempts: Iterable[int]) -> tuple[str, ...]:
    """The column that says which attempt of its job a row is of: where there are others than the first."""
    return ("attempt",) if any(attempts) else ()


def _suspected(verdict: Verdict) -> tuple[str, str, str]:
    suspect, role = verdict.suspects[0], "" if verdict.named else " (candidate)"
    how_often = every(suspect.period_steps) if suspect.period_steps else f"{suspect.persistence:.0%}"
    gain = f"{milliseconds(suspect.gain_s)} ({suspect.share:.0%})"
    return f"{who(suspect)}, {where(suspect)}{role}", gain, how_often


_Cell = Callable[["CaptureRow"], str]
_FOLDED = {"job": 12, "cause": 32}
_DISPENSABLE = frozenset({"host", "reproduced", "size", "because of window", "created (UTC)"})


def decisions_table(decisions: Sequence[dict[str, Any]]) -> Table:
    """A line a decision, as `decision_values` gives them."""
    started_again = _started_again(one["attempt"] for one in decisions)
    table = titled("Decisions", ["time (UTC)", *started_again, "steps", "label", "outcome", "reason"])
    for decision in decisions:
        table.add_row(
            f"{moment(decision['time_s']):%H:%M:%S}",
            *(str(decision["attempt"] + 1) for _ in started_again),
            numbers(decision["first_step"], decision["last_step"]),
            Text(decision["label"], LABEL_STYLES.get(decision["label"], "")),
            Text(decision["outcome"], OUTCOME_STYLES[decision["outcome"]]),
            "; ".join([decision["words"], *map(_became, decision["results"])]),
        )
    return table


def _became(result: dict[str, Any]) -> str:
    return f"rank {result['rank']}: {result['state']}" + (f", {result['detail']}" if result["detail"] else "")


def captures_table(rows: Sequence[CaptureRow], conditions: Sequence[StoreCondition | None], width: int) -> Table:
    """A line a capture, with its run where there are several, and its host where that is another one than this.

    Ids of captures and runs are copied: none is ever broken.

    Args:
        rows: the captures.
        conditions: whether each is there as it was put; the column is there once one is not.
        width: characters in a line; what finds no room there is left to `sftriage traces show`.
    """
    several = len({(row.job, row.run) for row in rows}) > 1
    states = {
        (row.store, row.reference): condition.state if condition else ""
        for row, condition in zip(rows, conditions, strict=True)
    }
    columns: dict[str, _Cell] = {
        **({"job": lambda row: row.job, "run": lambda row: row.run} if several else {}),
        "capture": lambda row: row.capture_id,
        **({"state": lambda row: states[row.store, row.reference]} if set(states.values()) - {"", "whole"} else {}),
        "rank": lambda row: str(row.rank),
        **({"host": lambda row: row.host} if {row.host for row in rows} - {socket.gethostname()} else {}),
        "suspect stage": _stage_of,
        **({"cause": lambda row: row.why_slow.short if row.why_slow else ""} if any(row.cause for row in rows) else {}),
        "captured steps": lambda row: numbers(row.first_step, row.last_step),
        "reproduced": lambda row: "" if row.role == "control" else row.reproduced or "",
        "size": lambda row: size(row.size_bytes),
        "because of window": _window_of,
        "created (UTC)": lambda row: row.created_at[:19].replace("T", " "),
    }
    # Every cell has a space on either side, and a line.
    left, widths = width - 1, {name: _width(name, map(cell, rows)) for name, cell in columns.items()}
    if left < sum(needed + 3 for name, needed in widths.items() if name not in _DISPENSABLE):
        return _captures_list(rows, columns)
    chosen: dict[str, int] = {}
    for name, needed in widths.items():
        if name not in _DISPENSABLE or needed + 3 <= left:
            left -= needed + 3
            chosen[name] = needed
    table = Table(title="Captures", title_justify="left")
    for name, needed in chosen.items():
        # What is left over goes to names that would otherwise take two lines.
        more = max(0, len(name) - needed)
        more = more if more <= left else 0
        left -= more
        right = name in ("rank", "size")
        table.add_column(name, justify="right" if right else "left", overflow="fold", width=needed + more)
    for row in rows:
        table.add_row(*(columns[str(column.header)](row) for column in table.columns))
    return table


def _stage_of(row: CaptureRow) -> str:
    if row.role == "control":
        return "(control)"
    return stage_suspected(row.label, row.stage) + (" (follow-up)" if row.follows_up else "")


def _window_of(row: CaptureRow) -> str:
    return "(asked for)" if row.label == "asked" else numbers(row.window_first_step, row.window_last_step)


def _width(name: str, cells: Iterable[str]) -> int:
    widest = max(map(cell_len, cells), default=0)
    return max(min(widest, _FOLDED.get(name, widest)), *map(len, name.split()))


def _captures_list(rows: Sequence[CaptureRow], columns: dict[str, _Cell]) -> Table:
    """The same where a line has no room for a table: some lines a capture, and nothing of them is cut off."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("name")
    table.add_column("value", overflow="fold")
    for row in rows:
        for name, cell in columns.items():
            if text := cell(row):
                table.add_row(name, text)
        table.add_section()
        table.add_row()
    return table
