"""What the demo ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.reports.tables import frontier_table
from sftriage.words import milliseconds, place, size, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from sftriage.demo.outcome import DemoOutcome


def print_outcome(outcome: DemoOutcome, console: Console) -> None:
    """Tell a person what happened."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

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
        steps = f"steps {capture.first_step} to {capture.last_step}"
        say(f"Captured    rank {capture.rank}, {steps}, {size(trace.size_bytes)}")
        say(
            f"Because of  window {trigger.window.first_step} to {trigger.window.last_step}: "
            f"{trigger.stage or 'all local stages'} of rank {', '.join(map(str, trigger.ranks))}, "
            f"rule {trigger.rule} of policy {trigger.policy}"
        )
        if manifest.findings is not None and manifest.findings.cause is not None:
            say(f"Why         {manifest.findings.cause.sentence}")
        say(f"Manifest    {place(outcome.directory.path / 'captures' / manifest.capture_id / 'manifest.json')}")
        say(f"Fetch it    sftriage traces get {manifest.capture_id} {run}")
        say(f"Open it     sftriage traces open {manifest.capture_id} {run}")
    for result in outcome.failures:
        say(f"No trace    of rank {result.rank}: {result.state}, {result.detail}")
    if not outcome.manifests and not outcome.failures:
        say(f"No capture was started. Why, window by window: sftriage decisions {run}")
    times = {name: milliseconds(s) for name, s in outcome.step_time_s.items() if s is not None}
    say("Step time   " + ", ".join(f"{name.replace('_', ' ')} {time}" for name, time in times.items()))
    injected = ", ".join(map(str, outcome.faults)) or "none"
    say(f"The fault   that the job had been given, and sftriage was not told: {injected}")
