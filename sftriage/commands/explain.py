"""``sftriage explain``: why a window was decided as it was."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from sftriage.commands.options import RunOption
from sftriage.commands.output import print_json, results
from sftriage.errors import InputError, UsageError
from sftriage.frontier import Check, explain
from sftriage.policy.reasons import resolves
from sftriage.records import Verdict
from sftriage.runs.directory import RunDirectory
from sftriage.runs.finding import find_run
from sftriage.runs.journal import read_journal
from sftriage.words import milliseconds, verdict_sentence, when, where, who


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
    entry = _entry(find_run(run), what)
    try:
        verdict = TypeAdapter(Verdict).validate_python(entry["verdict"])
    except (ValidationError, KeyError) as error:
        raise InputError(f"the record of {what} is damaged: {str(error).splitlines()[0]}") from error
    explanation, decision = explain(verdict), entry["decision"]
    advice = resolves(verdict.reasons) if verdict.reasons else decision.get("resolves", "")
    if as_json:
        print_json({"verdict": verdict, "explanation": explanation, "decision": decision, "resolves": advice})
        return
    console = results()

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    say(verdict_sentence(verdict))
    for check in explanation.checks:
        reaches = "reaches" if check.met else "is under"
        say(f"  {check.what}: {_amount(check.value, check)} {reaches} {_amount(check.threshold, check)}")
    if verdict.suspects:
        first = verdict.suspects[0]
        gain = f"{milliseconds(first.gain_s)} a step ({first.share:.1%})"
        say(f"First:     {who(first)}, {where(first)}, {when(first)}: {gain}")
    if verdict.suspects and explanation.runner_up is None:
        say("Runner-up: nobody; mending another alone would save next to nothing")
    if explanation.runner_up is not None:
        second = explanation.runner_up
        say(f"Runner-up: {who(second)}, {where(second)}: {milliseconds(second.gain_s)} a step ({second.share:.1%})")
    for change in explanation.changes:
        say(f"It would be {change}.")
    if advice:
        say(f"What would resolve it: {advice}")
    say(f"Decided: {decision['outcome']}: {decision['reason']}")


def _amount(value: float, check: Check) -> str:
    if check.unit == "s":
        return milliseconds(value)
    return f"{value:.1%}" if check.unit == "fraction" else f"{value:g}"


def _entry(directory: RunDirectory, what: str) -> dict[str, Any]:
    """The journal's entry of a window or of the window that a capture came from.

    Raises:
        UsageError: there is no such window or capture.
    """
    entries = [entry for entry in read_journal(directory.decisions) if entry["type"] == "window"]
    for entry in reversed(entries):
        decision = entry["decision"]
        first, last = decision["first_step"], decision["last_step"]
        captures = {request["capture_id"] for request in decision["requests"]}
        if what in captures or what == f"{first}-{last}" or (what.isdecimal() and first <= int(what) <= last):
            return entry
    asked = next((one for one in read_journal(directory.decisions) if _asked_for(one, what)), None)
    if asked is not None:
        raise UsageError(f"{what} was not led to by a window: {asked['decision']['reason']}")
    raise UsageError(f"{directory.path} has no window or capture {what}; `sftriage decisions` lists its windows")


def _asked_for(entry: dict[str, Any], capture_id: str) -> bool:
    """Whether a person asked for a capture."""
    return entry["type"] == "ask" and any(one["capture_id"] == capture_id for one in entry["decision"]["requests"])
