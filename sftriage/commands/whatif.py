"""``sftriage whatif``: what a job would run at without its stragglers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.output import print_json, results, say, write
from sftriage.errors import InputError
from sftriage.reports.whatif import whatif_lines, whatif_tables, whatif_values
from sftriage.runtime.whatif_inputs import load_operations
from sftriage.whatif.kinds import kinds_of
from sftriage.whatif.slowdown import slowdown_of


def whatif(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE.parquet|RUN|FILE.npz|TRACE...",
            help="A recording of all ranks, or the heavy traces of all of them (as for sftriage reduce).",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what a job would run at without stragglers, whose they are, and of which kind.

    Replays the recorded steps with each operation at its ideal (arXiv 2505.05713): all of them, all but one worker's,
    and so on. Takes a trace of a hybrid-parallel job in Parquet, a row an operation; a run directory, an .npz or the
    heavy traces of all ranks, whose stages are the operations, and whose cohorts are the pipeline's stages.
    """
    operations = load_operations(paths)
    say(*(f"{paths[0]}: {note}" for note in operations.notes))
    try:
        found = slowdown_of(operations)
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error
    kinds = kinds_of(operations, found)
    if as_json:
        print_json(whatif_values(operations, found, kinds))
        return
    write(*whatif_lines(operations, found, kinds))
    console = results()
    for table in whatif_tables(operations, found):
        console.print(table)
