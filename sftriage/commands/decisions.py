"""``sftriage decisions``: what was decided about each window of a run, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.output import notices, print_json, results
from sftriage.commands.runs import find_run
from sftriage.commands.tables import decisions_table
from sftriage.controller import read_journal

RunOption = Annotated[Path | None, typer.Option("--run", help="Run directory.", show_default="the newest run")]


def decisions(
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One array on stdout.")] = False,
) -> None:
    """List the decision taken on each window, captures and hold-offs alike, with its reason."""
    directory = find_run(run)
    taken = [entry["decision"] for entry in read_journal(directory.decisions) if entry["type"] == "window"]
    if as_json:
        print_json(taken)
    elif taken:
        results().print(decisions_table(taken))
    else:
        notices().print(f"No window of {directory.path} has been decided yet.")
