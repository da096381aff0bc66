"""``sftriage demo``: a real job with a fault hidden in it, and what sftriage makes of it."""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sftriage.commands.options import option
from sftriage.commands.output import notices, print_json, results, write
from sftriage.demo.faults import CAUSES, STAGE_NAMES, Fault, parse_cause, parse_fault
from sftriage.errors import UsageError
from sftriage.reports.texts import frontier_table
from sftriage.words.decisions import caused, cost_sentence
from sftriage.words.verdicts import milliseconds, place, size, some_ranks, span, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from sftriage.demo.outcome import DemoOutcome


DEFAULT_STEPS = 300
DEFAULT_CAUSE = "slow-dataset"
FAULT_AFTER_FRACTION = 0.4
"""Where in the job a fault begins: late enough for a baseline, early enough to fill a window."""


def demo(
    cause: list[str] | None = option(
        "NAME[:RANK]",
        "Make a rank slow, part-way through, by what slows down real jobs; without RANK one drawn by chance. "
        "Repeatable; `list` says which there are.",
        DEFAULT_CAUSE,
    ),
    fault: list[str] | None = option(
        "STAGE:RANK:MS",
        f"Delay a stage ({STAGE_NAMES}) of a rank by MS in every step, part-way through. "
        "Repeatable; `none` for a healthy run.",
        False,
    ),
    ranks: int = option("N", "Ranks of the job.", min=2, max=64, default=4),
    steps: int = option("N", "Steps to train.", min=10, max=1_000_000, default=DEFAULT_STEPS),
    out: Path | None = option("DIR", "Run directory to make.", "a new one under sftriage-runs"),
    policy: str = option("POLICY", "A policy file, or the name of one that ships with sftriage.", default="default"),
    as_json: bool = option("--json", "One object as the last line of stdout."),
) -> None:
    """Train a small Transformer with DDP over Gloo, make one rank slow, and watch sftriage find it.

    The job knows the fault; sftriage sees only the stage durations that each rank records.
    """
    from sftriage.demo.outcome import DemoOutcome
    from sftriage.policy.in_force import find
    from sftriage.runtime.local import LocalRun
    from sftriage.sinks.terminal import Progress

    if cause == ["list"]:
        for name, one in CAUSES.items():
            write(f"{name:16} {one.says}")
        return
    faults = _faults(cause, fault, ranks)
    if find_spec("torch") is None:
        raise UsageError("the demo trains with PyTorch, which is not installed here; install sftriage[demo], or torch")
    fault_step = int(steps * FAULT_AFTER_FRACTION)
    progress = Progress(notices(), steps)
    local = LocalRun(_command(ranks, steps, faults, fault_step), "demo", [find(policy)], lambda *_: [progress], out=out)
    trainer_log = local.directory.path / "trainer.log"
    progress.say(f"A job of {ranks} ranks trains {steps} steps; run directory {place(local.directory.path)}")
    with trainer_log.open("wb") as log_file, progress.live("starting the job"):
        # Gloo looks its own host up; that the demo stays on this host is nothing to ask a network about.
        environment = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"}
        status = local.execute(environment, output=log_file.fileno())
    if status:
        tail = trainer_log.read_text(encoding="utf-8", errors="replace")[-8000:]
        notices().print(f"The job failed with exit status {status}:\n{tail}")
        raise typer.Exit(status)
    progress.finish()
    outcome = DemoOutcome(local.directory, local.files.current.detection, steps, faults, fault_step, progress.ended)
    if as_json:
        print_json(outcome.values())
    else:
        print_outcome(outcome, results())


def _faults(causes: list[str] | None, delays: list[str] | None, ranks: int) -> list[Fault]:
    drawn = iter(random.sample(range(ranks), ranks) * (1 + len(causes or ()) // ranks))
    if delays is not None and "none" in delays:
        if len(delays) > 1 or causes:
            raise UsageError("--fault none stands alone: a run is healthy or it is not")
        return []
    asked = causes if causes or delays else [DEFAULT_CAUSE]
    faults = [*(parse_cause(text, drawn) for text in asked or ()), *map(parse_fault, delays or ())]
    for fault in faults:
        if fault.rank >= ranks:
            raise UsageError(f"{fault.option} {fault}: there is no rank {fault.rank} among {ranks} (0 to {ranks - 1})")
    return faults


def _command(ranks: int, steps: int, faults: list[Fault], fault_step: int) -> tuple[str, ...]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    script = ("-m", "sftriage.demo.train", f"--steps={steps}", f"--fault-step={fault_step}")
    return (*launcher, *script, *(f"{fault.option}={fault}" for fault in faults))


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
