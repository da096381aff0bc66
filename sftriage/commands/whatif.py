"""``sftriage whatif``: what a job would run at without its stragglers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text

from sftriage.commands.options import argument, option
from sftriage.commands.output import print_json, results, say, write
from sftriage.errors import InputError, UsageError
from sftriage.reports.tables import titled
from sftriage.runs.whatif import (
    HOTTEST,
    WhatIf,
    WorkerHeat,
    heat_of,
    step,
    timelines_of,
    trace_events,
    whatif_of,
    whatif_values,
)
from sftriage.runtime.whatif_inputs import load_operations
from sftriage.whatif.graph import Operations
from sftriage.whatif.slowdown import MIN_SLOWDOWN, Slowdown


def whatif(
    paths: Annotated[
        list[Path],
        argument(
            "TRACE.parquet|RUN|FILE.npz|TRACE...",
            "A recording of all ranks, or the heavy traces of all of them (as for sftriage reduce).",
        ),
    ],
    timeline: Annotated[
        Path | None,
        option(
            "FILE.json[.gz]", "Write a typical step, as measured and without stragglers, for Perfetto's viewer.", False
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", "One JSON object on stdout.")] = False,
) -> None:
    """Say what a job would run at without stragglers, whose they are, and of which kind.

    Replays the recorded steps with each operation at its ideal (arXiv 2505.05713): all of them, all but one worker's,
    and so on. Takes a trace of a hybrid-parallel job in Parquet, a row an operation; a run directory, an .npz or the
    heavy traces of all ranks, whose stages are the operations, and whose cohorts are the pipeline's stages.
    """
    operations = load_operations(paths)
    say(*(f"{paths[0]}: {note}" for note in operations.notes))
    try:
        shown = whatif_of(operations)
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error
    if timeline is not None:
        _write_timeline(shown, timeline)
    if as_json:
        print_json(whatif_values(operations, shown.found, shown.kinds))
        return
    write(*shown.lines)
    console = results()
    for table in whatif_tables(operations, shown.found):
        console.print(table)


def _write_timeline(shown: WhatIf, path: Path) -> None:
    told = json.dumps(trace_events(timelines_of(shown.operations, shown.found))).encode()
    try:
        path.write_bytes(gzip.compress(told) if path.suffix == ".gz" else told)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


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
    if slowdown < MIN_SLOWDOWN:
        return Text(f"{slowdown:.2f}")
    heat = min(1.0, (slowdown - 1.0) / (HOTTEST - 1.0))
    fade = round(200 * (1.0 - heat))
    return Text(
        f"{slowdown:.2f}",
        style=f"black on rgb(255,{fade},{fade})" if heat < 0.6 else f"bold white on rgb(200,{fade // 2},{fade // 2})",
    )
