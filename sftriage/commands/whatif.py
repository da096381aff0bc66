"""``sftriage whatif``: what a job would run at without its stragglers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

from sftriage.commands.options import argument, option
from sftriage.commands.output import print_json, results, say, write
from sftriage.errors import InputError, UsageError
from sftriage.reports.whatif import whatif_tables
from sftriage.runs.whatif import WhatIf, timelines_of, trace_events, whatif_of, whatif_values
from sftriage.runtime.whatif_inputs import load_operations


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
