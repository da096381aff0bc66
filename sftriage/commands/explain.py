"""``sftriage explain``: why a window was decided as it was."""

from __future__ import annotations

from typing import Annotated

import typer

from sftriage.commands.options import RunOption
from sftriage.commands.output import print_json, write
from sftriage.frontier.explaining import Check, explain
from sftriage.runs.decisions import window_of
from sftriage.runs.directory import find_run
from sftriage.words.amounts import milliseconds
from sftriage.words.decisions import advice, decision_values, reason_sentence, resolution
from sftriage.words.verdicts import system_sentence, verdict_sentence, when, where, who


def explain_decision(
    what: Annotated[
        str, typer.Argument(metavar="WINDOW|CAPTURE", help="A step of the window, its FIRST-LAST, or a capture's id.")
    ],
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout.")] = False,
) -> None:
    """Say why: the numbers against their thresholds, the runner-up, and what would have changed the label.

    A step means the last window that holds it. The verdict is explained from what was recorded when it was taken.
    """
    event = window_of(find_run(run), what)
    verdict, decision = event.verdict, event.decision
    explanation = explain(verdict)
    resolves = advice(verdict.reasons) if verdict.reasons else resolution(decision)
    if as_json:
        values = {"verdict": verdict, "explanation": explanation, "decision": decision_values(decision)}
        print_json({**values, "resolves": resolves})
        return
    write(verdict_sentence(verdict))
    # (what is asked of nothing is no threshold)
    for check in (one for one in explanation.checks if one.threshold):
        value, threshold = (_amount(amount, check) for amount in (check.value, check.threshold))
        write(f"  {check.what}: {value}, {'reaches' if check.met else 'is under'} the threshold of {threshold}")
    if verdict.suspects:
        first = verdict.suspects[0]
        gain = f"{milliseconds(first.gain_s)} of each slow step ({first.share:.1%})"
        write(f"{'Suspect:  ' if verdict.named else 'Candidate:'} {who(first)}, {where(first)}, {when(first)}: {gain}")
        if done := system_sentence(verdict):
            write(f"System:    {done}")
    if verdict.suspects and explanation.runner_up is None:
        write("Runner-up: nobody else would save much if mended alone")
    if explanation.runner_up is not None:
        second = explanation.runner_up
        write(f"Runner-up: {who(second)}, {where(second)}: {milliseconds(second.gain_s)} of each ({second.share:.1%})")
    for change in explanation.changes:
        write(f"It would be {change}.")
    if resolves:
        write(f"What would resolve it: {resolves}")
    write(f"Decided: {decision.outcome}: {reason_sentence(decision)}")


def _amount(value: float, check: Check) -> str:
    if check.unit == "s":
        return milliseconds(value)
    return f"{value:.1%}" if check.unit == "fraction" else f"{value:.1f}"
