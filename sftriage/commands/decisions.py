"""``sftriage decisions`` and ``explain``: the decisions about each window of a run, and their reasons."""

from __future__ import annotations

from typing import Annotated

from sftriage.commands.options import JsonOption, RunOption, argument
from sftriage.commands.output import lists, notices, print_json, write
from sftriage.reports.texts import decisions_table
from sftriage.runs.directory import find_run


def decisions(run: RunOption = None, as_json: JsonOption = False) -> None:
    """List the decision about each window (capture, hold, throttle or ignore), with its reason."""
    from sftriage.model.events import JobPaused
    from sftriage.runs.decisions import decisions_of
    from sftriage.runs.journal import read_journal
    from sftriage.words.run import event_sentence

    directory = find_run(run)
    taken = decisions_of(directory)
    if as_json:
        print_json(taken)
    elif taken:
        lists().print(decisions_table(taken))
        for event in read_journal(directory.decisions):
            if isinstance(event, JobPaused):
                lists().print(event_sentence(event))
    else:
        notices().print(f"No decisions in {directory.path} yet.")


def explain_decision(
    target: Annotated[str, argument("WINDOW|CAPTURE", "A step in the window, its FIRST-LAST, or a capture's id.")],
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a verdict: its numbers and thresholds, the runner-up, and what would have changed the label.

    A step selects the last window that contains it. The explanation uses the numbers recorded with the verdict.
    """
    import msgspec

    from sftriage.reports.texts import explanation_lines, resolves
    from sftriage.runs.decisions import differences_of, remedies_by, window_of
    from sftriage.runs.hangs import hang_in
    from sftriage.words.decisions import decision_values
    from sftriage.words.run import event_sentence
    from sftriage.words.verdicts import explain

    directory = find_run(run)
    event = window_of(directory, target)
    remedies, hang = remedies_by(directory, event), hang_in(directory, event)
    differing = differences_of(directory, event.verdict)
    if as_json:
        verdict, decision = event.verdict, event.decision
        values = {"verdict": verdict, "explanation": explain(verdict), "decision": decision_values(decision)}
        tried = [{"says": event_sentence(remedy), **msgspec.to_builtins(remedy)} for remedy in remedies]
        values |= {"hang": msgspec.to_builtins(hang), "differences": msgspec.to_builtins(differing)}
        print_json({**values, "resolves": resolves(verdict, decision), "remedies": tried})
        return
    write(*explanation_lines(event, remedies, hang, differing))
