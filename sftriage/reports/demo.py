"""What the demo ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.reports.tables import frontier_table
from sftriage.words.amounts import milliseconds, place, size, some_ranks, span
from sftriage.words.captures import caused, cost_sentence
from sftriage.words.verdicts import verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from sftriage.demo.outcome import DemoOutcome


_PARTS = {
    "before_fault": "before the fault",
    "in_fault": "with the fault",
    "in_capture": "while captured",
    "after_capture": "after that",
}


_FOUND = {
    "right": "right: the rank, the cause and the line that the job was given.",
    "wrong": "wrong: the job was given something else.",
    "not named": "not named: no cause was said of the fault that the job was given.",
}


def print_outcome(outcome: DemoOutcome, console: Console) -> None:
    """Tell a person what happened."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    run = f"--run {place(outcome.directory.path)}"
    verdict = outcome.verdict_shown()
    if verdict is None:
        say("The run was too short for a window: nothing was decided. Give it more --steps.")
        return
    console.rule("what happened")
    say(verdict_sentence(verdict))
    console.print(frontier_table(verdict))
    for manifest in outcome.manifests:
        trigger, capture, trace = manifest.trigger, manifest.capture, manifest.artefacts[0]
        steps = span(capture.first_step, capture.last_step)
        beside = ", to compare with" if capture.role == "control" else ""
        say(f"Captured    rank {capture.rank}{beside}, {steps}, {size(trace.size_bytes)}")
        say(
            f"Because of  window {trigger.window.first_step} to {trigger.window.last_step}: "
            f"{trigger.stage or 'all local stages'} of {some_ranks(trigger.ranks)}, "
            f"rule {trigger.rule} of policy {trigger.policy}"
        )
        if (cost := manifest.cost) is not None:
            what = cost_sentence(cost.cost_s, cost.before_s, cost.first_step, cost.last_step, cost.captures)
            say(f"Cost        {what}")
        say(f"Manifest    {place(outcome.directory.path / 'captures' / manifest.capture_id / 'manifest.json')}")
        say(f"Fetch it    sftriage traces get {manifest.capture_id} {run}")
        say(f"Open it     sftriage traces open {manifest.capture_id} {run}")
    for result in outcome.failures:
        say(f"No trace    of rank {result.rank}: {result.state}, {result.detail}")
    if not outcome.manifests and not outcome.failures:
        say(f"No capture was started. Why, window by window: sftriage decisions {run}")
    times = [f"{_PARTS[name]} {milliseconds(s)}" for name, s in outcome.step_time_s.items() if s is not None]
    say(f"Step time   median {', '.join(times)}")
    given = "; ".join(f"{one} ({one.cause.says})" for one in outcome.faults) or "none"
    say(f"The fault   that the job was given, and sftriage was not told of: {given}")
    for _, cause in outcome.causes():
        say(f"Why         {caused(cause)}")
    if (judged := outcome.found) is not None:
        say(f"That is     {_FOUND[judged]}")
