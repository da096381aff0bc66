"""``sftriage decisions``: what was decided about each window of a run, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sftriage.commands.options import RunOption
from sftriage.commands.output import lists, notices, print_json
from sftriage.commands.tables import decisions_table
from sftriage.runs.directory import RunDirectory
from sftriage.runs.finding import find_run
from sftriage.runs.journal import read_journal


def decisions(
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One array on stdout.")] = False,
) -> None:
    """List the decision taken on each window, captures and hold-offs alike, with its reason."""
    directory = find_run(run)
    taken = decisions_of(directory)
    if as_json:
        print_json(taken)
    elif taken:
        lists().print(decisions_table(taken))
    else:
        notices().print(f"No window of {directory.path} has been decided yet.")


def decisions_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """A run's decisions in order, each with what became of the captures it asked for (``results``)."""
    entries = list(read_journal(directory.decisions))
    results_by_id = {entry["result"]["capture_id"]: entry["result"] for entry in entries if entry["type"] == "capture"}
    taken = [entry["decision"] for entry in entries if entry["type"] in ("window", "ask", "beside")]
    for decision in taken:
        ids = [request["capture_id"] for request in decision["requests"]]
        decision["results"] = [results_by_id[capture_id] for capture_id in ids if capture_id in results_by_id]
    return taken
