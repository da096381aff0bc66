"""How a what-if replay is shown in a terminal: a heat map and tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from sftriage.reports.tables import titled
from sftriage.runs.whatif import HOTTEST, WorkerHeat, heat_of
from sftriage.whatif.operations import Operations
from sftriage.whatif.slowdown import MIN_SLOWDOWN, Slowdown
from sftriage.words.whatif import step

MAX_PARTS = 5


def whatif_tables(operations: Operations, found: Slowdown) -> Iterator[Table]:
    """Whose the slowdown is: by worker, and by type of operation. None where there is none to share out."""
    heat = heat_of(operations, found)
    if heat is None:
        return
    yield _heat_map(heat)
    slowest = sorted(found.by_part.items(), key=lambda one: -one[1])[:MAX_PARTS]
    table = titled("Slowdown by operation, all others at their ideal", ["operations"], ["slowdown", "a step"])
    for part, slowdown in slowest:
        table.add_row(part, f"{slowdown:.3f}", step(slowdown * found.ideal_s))
    table.add_section()
    table.add_row("all", f"{found.s:.3f}", step(found.s * found.ideal_s))
    yield table


def _heat_map(shown: WorkerHeat) -> Table:
    title = "Slowdown by worker" + (
        f", the slowest {shown.shown} of {shown.there}" if shown.shown < shown.there else ""
    )
    table = titled(title, ["stage"], [f"dp {dp}" for dp in shown.dps])
    for row in shown.rows:
        table.add_row(f"pp {row.pp}", *map(_cell, row.slowdowns))
    return table


def _cell(slowdown: float) -> Text:
    """The redder, the slower; plain where it is under what counts as slow."""
    if slowdown < MIN_SLOWDOWN:
        return Text(f"{slowdown:.2f}")
    heat = min(1.0, (slowdown - 1.0) / (HOTTEST - 1.0))
    fade = round(200 * (1.0 - heat))
    return Text(
        f"{slowdown:.2f}",
        style=f"black on rgb(255,{fade},{fade})" if heat < 0.6 else f"bold white on rgb(200,{fade // 2},{fade // 2})",
    )
