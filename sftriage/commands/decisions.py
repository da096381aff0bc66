"""``sftriage decisions``: what was decided about each window of a run, and why."""

from __future__ import annotations

from typing import Annotated

from sftriage.commands.options import RunOption, option
from sftriage.commands.output import lists, notices, print_json
from sftriage.reports.tables import decisions_table
from sftriage.runs.directory import find_run


def decisions(
    run: RunOption = None, as_json: Annotated[bool, option("--json", "One array on stdout.")] = False
) -> None:
    """List the decision taken on each window, captures and hold-offs alike, with its reason."""
    from sftriage.runs.decisions import decisions_of, pauses_of
    from sftriage.words.run import pause_sentence

    directory = find_run(run)
    taken = decisions_of(directory)
    if as_json:
        print_json(taken)
    elif taken:
        lists().print(decisions_table(taken))
        for pause in pauses_of(directory):
            lists().print(pause_sentence(pause))
    else:
        notices().print(f"No window of {directory.path} has been decided yet.")
