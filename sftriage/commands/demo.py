"""``sftriage demo``: a real job with a hidden fault, and sftriage's diagnosis."""

from __future__ import annotations

import os
import random
import sys
import tempfile
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
    from sftriage.demo.outcome import DemoOutcome


DEFAULT_STEPS = 300
DEFAULT_CAUSE = "slow-dataset"
FAULT_AFTER_FRACTION = 0.4
"""Where in the job a fault begins: late enough for a baseline, early enough to fill a window."""


def demo(
    cause: list[str] | None = option(
        "NAME[:RANK]",
        "Make a rank slow, or hang (hang-collective, hang-lock, hang-worker), part-way through, by a cause from real "
        "jobs; without RANK, a random rank. Repeatable; `list` prints all causes.",
        DEFAULT_CAUSE,
    ),
    fault: list[str] | None = option(
        "STAGE:RANK:MS",
        f"Delay a stage ({STAGE_NAMES}) of a rank by MS in every step, part-way through. "
        "Repeatable; `none` for a healthy run.",
        False,
    ),
    ranks: int = option("N", "Number of ranks.", min=2, max=64, default=4),
    steps: int = option("N", "Steps to train.", min=10, max=1_000_000, default=DEFAULT_STEPS),
    out: Path | None = option("DIR", "Run directory to create.", "a new one under sftriage-runs"),
    policy: str = option("POLICY", "A policy file, or the name of one that ships with sftriage.", default="default"),
    as_json: bool = option("--json", "Print one JSON object as the last line of stdout."),
) -> None:
    """Train a small Transformer with DDP over Gloo, make one rank slow or hang, and watch sftriage find it.

    sftriage does not know the fault: it gets only the stage durations that each rank records. Needs no GPU.
    """
    from sftriage.demo.hanging import HangEnd, write_policy
    from sftriage.demo.outcome import DemoOutcome
    from sftriage.policy.in_force import find
    from sftriage.runtime.local import LocalRun
    from sftriage.sinks.terminal import Progress

    if cause == ["list"]:
        write(*(f"{name:16} {known.says}" for name, known in CAUSES.items()))
        return
    faults = _faults(cause, fault, ranks)
    if find_spec("torch") is None:
        raise UsageError("the demo needs PyTorch: pip install 'sftriage[demo]', or torch")
    fault_step, hangs = int(steps * FAULT_AFTER_FRACTION), any(fault.cause.hangs for fault in faults)
    progress, hang_end = Progress(notices(), steps), HangEnd()
    sinks = [progress, hang_end] if hangs else [progress]
    with tempfile.TemporaryDirectory(prefix="sftriage-demo-", ignore_cleanup_errors=True) as folder:
        file = write_policy(find(policy), Path(folder)) if hangs else find(policy)
        local = LocalRun(_command(ranks, steps, faults, fault_step), "demo", [file], lambda *_: sinks, out=out)
        trainer_log = local.directory.path / "trainer.log"
        progress.say(f"Training {steps} steps on {ranks} ranks; run directory {place(local.directory.path)}")
        # (on the loopback interface, Gloo need not resolve the name of this host)
        environment = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"}
        with trainer_log.open("wb") as log_file, progress.live("starting the job"):
            # (ranks that are ended leave their files here)
            status = local.execute({**environment, "TMPDIR": folder}, output=log_file.fileno())
    if status and not hang_end.done:
        tail = trainer_log.read_text(encoding="utf-8", errors="replace")[-8000:]
        notices().print(f"The job failed with exit status {status}:\n{tail}")
        raise typer.Exit(status)
    progress.finish()
    outcome = DemoOutcome(local.directory, local.files.current.detection, steps, faults, fault_step, progress.ended)
    if as_json:
        print_json(outcome.values())
    else:
        (_print_hang if hangs else _print_outcome)(outcome)


def _faults(causes: list[str] | None, delays: list[str] | None, ranks: int) -> list[Fault]:
    drawn = iter(random.sample(range(ranks), ranks) * (1 + len(causes or ()) // ranks))
    if delays is not None and "none" in delays:
        if len(delays) > 1 or causes:
            raise UsageError("--fault none cannot be combined with other faults or causes")
        return []
    chosen = causes if causes or delays else [DEFAULT_CAUSE]
    faults = [*(parse_cause(text, drawn) for text in chosen or ()), *map(parse_fault, delays or ())]
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
    "in_capture": "during the capture",
    "after_capture": "after it",
}
_FOUND = {
    "right": "correct (rank, cause and line)",
    "wrong": "wrong (the injected fault is another one)",
    "not named": "incomplete (no cause was found for the injected fault)",
}


def _print_outcome(outcome: DemoOutcome) -> None:
    """Print the verdict, the captures with the commands that show them, and whether the fault was found."""
    run = f"--run {place(outcome.directory.path)}"
    verdict = outcome.verdict_shown()
    if verdict is None:
        write("The run was too short for a window, so there is no verdict. Use more --steps.")
        return
    results().rule("what happened")
    write(verdict_sentence(verdict))
    results().print(frontier_table(verdict))
    for manifest in outcome.manifests:
        trigger, capture, trace = manifest.trigger, manifest.capture, manifest.artefacts[0]
        steps = span(capture.first_step, capture.last_step)
        beside = ", for comparison" if capture.role == "control" else ""
        write(
            f"Captured    rank {capture.rank}{beside}, {steps}, {size(trace.size_bytes)}",
            f"Because of  window {trigger.window.first_step} to {trigger.window.last_step}: "
            f"{trigger.stage or 'all local stages'} of {some_ranks(trigger.ranks)}, "
            f"rule {trigger.rule} of policy {trigger.policy}",
        )
        if (cost := manifest.cost) is not None:
            sentence = cost_sentence(cost.cost_s, cost.before_s, cost.first_step, cost.last_step, cost.captures)
            write(f"Cost        {sentence}")
        write(
            f"Manifest    {place(outcome.directory.path / 'captures' / manifest.capture_id / 'manifest.json')}",
            f"Fetch it    sftriage traces get {manifest.capture_id} {run}",
            f"Open it     sftriage traces open {manifest.capture_id} {run}",
        )
    write(*(f"No trace    of rank {each.rank}: {each.state}, {each.detail}" for each in outcome.failures))
    if not outcome.manifests and not outcome.failures:
        write(f"No capture was started. For the reasons, run: sftriage decisions {run}")
    times = [f"{_PARTS[name]} {milliseconds(s)}" for name, s in outcome.step_time_s.items() if s is not None]
    write(f"Step time   median {', '.join(times)}")
    _print_fault(outcome, *(f"Why         {caused(cause)}" for _, cause in outcome.causes()))


def _print_hang(outcome: DemoOutcome) -> None:
    """Print the stall, why the job hangs and what to do, and whether the fault was found."""
    results().rule("what happened")
    if outcome.stall is None:
        write("No stall was reported. Use more --steps: a hang needs some steps before it to compare with.")
    else:
        write(verdict_sentence(outcome.stall))
    why = []
    if (cause := outcome.hang_cause) is not None:
        write(f"Show it     sftriage traces show {cause.capture_id} --run {place(outcome.directory.path)}")
        write(f"Next step   {cause.next_step}")
        why.append(f"Why         {caused(cause)}")
    _print_fault(outcome, *why)


def _print_fault(outcome: DemoOutcome, *why: str) -> None:
    """Print the injected fault, why sftriage says the job is slow or hangs, and whether that is right."""
    injected = "; ".join(f"{fault} ({fault.cause.says})" for fault in outcome.faults) or "none"
    write(f"Injected    {injected}", *why)
    if (found := outcome.found) is not None:
        write(f"Result      {_FOUND[found]}")
