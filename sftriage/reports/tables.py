"""Tables a person reads. They take records and give rich renderables; nothing here prints."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from sftriage.model.verdicts import Verdict
from sftriage.traces.manifest import Findings
from sftriage.words.amounts import every, milliseconds, moment, numbers, size, span
from sftriage.words.decisions import stage_suspected
from sftriage.words.verdicts import CLOCKS, verdict_sentence, where, who

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sftriage.reduce.stages import Reduction
    from sftriage.reduce.together import Agreement
    from sftriage.runtime.reducing import Confirmation
    from sftriage.traces.catalogue import CaptureRow
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
        label, suspected = ": ".join(filter(None, (verdict.label, ", ".join(verdict.reasons)))), list[str]()
        for suspect in verdict.suspects[:1]:
            how_often = every(suspect.period_steps) if suspect.period_steps else f"{suspect.persistence:.0%}"
            named = f"{who(suspect)}, {where(suspect)}{'' if verdict.named else ' (candidate)'}"
            suspected = [named, f"{milliseconds(suspect.gain_s)} ({suspect.share:.0%})", how_often]
        table.add_row(
            *(str(verdict.attempt + 1) for _ in started_again),
            numbers(verdict.first_step, verdict.last_step),
            Text(label, LABEL_STYLES[verdict.label]),
            milliseconds(verdict.step_s),
            *suspected,
        )
    return table


def _started_again(attempts: Iterable[int]) -> tuple[str, ...]:
    return ("attempt",) if any(attempts) else ()


_Cell = Callable[["CaptureRow"], str]
_FOLDED = {"job": 12, "cause": 32}
_DISPENSABLE = frozenset({"host", "reproduced", "size", "because of window", "created (UTC)"})


def decisions_table(decisions: Sequence[dict[str, Any]]) -> Table:
    """A line a decision, as `decision_values` gives them."""
    started_again = _started_again(one["attempt"] for one in decisions)
    table = titled("Decisions", ["time (UTC)", *started_again, "steps", "label", "outcome", "reason"])
    for decision in decisions:
        became = [
            f"rank {one['rank']}: {one['state']}" + (f", {one['detail']}" if one["detail"] else "")
            for one in decision["results"]
        ]
        table.add_row(
            f"{moment(decision['time_s']):%H:%M:%S}",
            *(str(decision["attempt"] + 1) for _ in started_again),
            numbers(decision["first_step"], decision["last_step"]),
            Text(decision["label"], LABEL_STYLES.get(decision["label"], "")),
            Text(decision["outcome"], OUTCOME_STYLES[decision["outcome"]]),
            "; ".join([decision["words"], *became]),
        )
    return table


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


ORIGINS = {
    "sftriage": "marked by sftriage",
    "names": "told by the names of the field",
    "map": "told by the map of names",
}


def trace_values(one: Reduction) -> dict[str, Any]:
    """A reduction as JSON values."""
    trace, steps = one.trace, one.steps
    return {
        "source": trace.source,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "job": trace.job,
        "capture_id": trace.capture_id,
        "origin": one.origin,
        "stages": one.schema.stages,
        "sync": one.schema.sync,
        "steps": steps.number_N.tolist(),
        "start_ns": steps.start_N.tolist(),
        "step_ns": (steps.end_N - steps.start_N).tolist(),
        "durations_ns": one.durations_ns_NS.tolist(),
        "mean_s": one.mean_s,
        "absolute": trace.absolute,
        "notes": one.notes,
    }


def stages_table(one: Reduction) -> Table:
    """What each stage of a trace took."""
    steps = one.steps
    whose = "a trace of no known rank" if one.trace.rank is None else f"rank {one.trace.rank}"
    title = f"Stages of {whose}, steps {steps.number_N[0]} to {steps.number_N[-1]}, {ORIGINS[one.origin]}"
    caption = {"caption": one.trace.source, "caption_justify": "left"}
    table = titled(title, ["stage"], ["mean", "least", "most", "share"], **caption)
    lasts_N = steps.end_N - steps.start_N
    for stage, its_N in zip(one.schema.stages, one.durations_ns_NS.T, strict=True):
        name = f"{stage} (sync)" if stage in one.schema.sync else stage
        table.add_row(name, *_times(its_N), f"{its_N.mean() / lasts_N.mean():.0%}")
    table.add_section()
    table.add_row("step", *_times(lasts_N), "100%")
    return table


def _times(ns_N: NDArray[Any]) -> list[str]:
    return [milliseconds(float(value) * 1e-9) for value in (ns_N.mean(), ns_N.min(), ns_N.max())]


def agreement_table(agreement: Agreement) -> Table:
    """Trace against signal, stage by stage."""
    title = f"Rank {agreement.rank}, trace against signal, steps {agreement.first_step} to {agreement.last_step}"
    table = titled(title, ["stage"], ["trace", "signal", "difference", "allowed"])
    table.add_column("agrees")
    for one in agreement.stages:
        times = (milliseconds(one.trace_s), milliseconds(one.signal_s), f"{one.difference_s * 1e3:+.2f} ms")
        table.add_row(
            one.stage, *times, milliseconds(one.allowed_s), Text("yes") if one.agrees else Text("no", "bold red")
        )
    return table


def confirmation_sentence(confirmation: Confirmation) -> str:
    """Whether the heavy trace agrees with the coarse signal."""
    parts = []
    for agreement in confirmation.ranks:
        off = [one for one in agreement.stages if not one.agrees]
        asked = next((one for one in agreement.stages if one.stage == agreement.stage), None)
        said = f"rank {agreement.rank}: {agreement.agrees}"
        if asked is not None:
            said += f", {asked.stage} {milliseconds(asked.trace_s)} against {milliseconds(asked.signal_s)}"
        if off:
            said += f"; apart: {', '.join(f'{one.stage} {one.difference_s * 1e3:+.1f} ms' for one in off)}"
        parts.append(said)
    if confirmation.verdict is not None:
        same = "the same" if confirmation.verdicts_agree else f"another: {verdict_sentence(confirmation.verdict)}"
        parts.append(f"the signal's verdict on these steps is {same}")
    return f"agrees: {confirmation.agrees} ({'; '.join(parts)})"


def shares_table(findings: Findings) -> Table:
    """What took the suspect stage's time, as self time."""
    rank = "" if findings.suspect.rank is None else f" of rank {findings.suspect.rank}"
    beside = "control" if findings.beside == "rank" else "other steps"
    numbers = ["self", beside, "calls"] if findings.control else ["self", "calls"]
    table = titled(f"What filled {findings.stage}{rank}, self time a step", ["name", "what"], numbers)
    table.columns[0].overflow = "fold"
    for share in findings.shares:
        control = [] if findings.control is None else [milliseconds(share.control_self_s or 0.0)]
        what = f"{share.kind}, waits" if share.waits else share.kind
        calls = f"{share.calls:.1f}" if share.calls else ""
        table.add_row(share.name, what, milliseconds(share.self_s), *control, calls)
    return table
