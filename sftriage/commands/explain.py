"""``sftriage explain``: why a window was decided as it was."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sftriage.commands.options import RunOption, argument, option
from sftriage.commands.output import print_json, write
from sftriage.reports.texts import explanation_lines, resolves
from sftriage.runs.decisions import remedies_by, window_of
from sftriage.runs.directory import find_run
from sftriage.words.decisions import decision_values
from sftriage.words.run import remedy_told
from sftriage.words.verdicts import explain


def explain_decision(
    what: Annotated[str, argument("WINDOW|CAPTURE", "A step of the window, its FIRST-LAST, or a capture's id.")],
    run: RunOption = None,
    as_json: Annotated[bool, option("--json", "One object on stdout.")] = False,
) -> None:
    """Say why: the numbers against their thresholds, the runner-up, and what would have changed the label.

    A step means the last window that holds it. The verdict is explained from what was recorded when it was taken.
    """
    directory = find_run(run)
    event = window_of(directory, what)
    remedies = remedies_by(directory, event)
    if as_json:
        verdict, decision = event.verdict, event.decision
        values = {"verdict": verdict, "explanation": explain(verdict), "decision": decision_values(decision)}
        told = [{"says": remedy_told(one), **msgspec.to_builtins(one)} for one in remedies]
        print_json({**values, "resolves": resolves(verdict, decision), "remedies": told})
        return
    write(*explanation_lines(event, remedies))
