"""What a step costs with sftriage off, on, and with a capture, on this machine.

A job under `sftriage run` takes blocks of steps with and without the recorder in random order, each mode once a round;
a round's time is divided by the same round's without. No machine that is shared resolves ten microseconds in fifty
milliseconds by comparing steps, so there are several estimators, each with its own limits:

own work      what the recorder adds to the training thread's processor time, over the length of a real step: from steps
              of the same operators on next to no data, which resolve some microseconds but find their caches warm, and
              from steps of a tenth of the length, which find them cold as a real step does (``cold``). These take turns
              step by step in random order, and three thousand differences of neighbours resolve some 5 us; ``none`` has
              calls that do nothing.
calls         sftriage's calls timed one by one inside real steps, caches as the step leaves them.
real          blocks of real steps: processor time of the training thread, and wall clock. Everything is in it, and
              its interval shows how little it resolves; ``control`` is ``off`` a second time.
threads,      shares of a core that sftriage takes beside the training thread: in the trainer's process, and in
processes     processes of its own.
instructions  that a recorded step adds to an empty loop, counted by valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench import overhead_figures
from bench.runner import HERE, environment_of, run
from sftriage.runs.directory import RunDirectory

LIMIT_S = 480.0
POLICY = """\
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: overhead}
spec:
  rules: [{name: never, match: {label: suspect, scope: [rank], gain: ">= 100%"}}]
  limits: {captures_per_run: 1000, captures_per_hour: 1000, overhead_budget: 100%}
"""
"""It starts no capture by itself, and delays none that is requested."""
FEW, MANY = 1000, 5000
_COUNTED = re.compile(r"I\s+refs:\s+([\d,]+)")
_LOOP = "import sys; from bench.monitors import steps; steps(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
QUICK = {"captures": 1, "turns": 100, "call_steps": 10, "no_instructions": True}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--passes", type=int, default=1, help="how often the job is started")
    parser.add_argument("--captures", type=int, default=8, help="captures a pass; 0 for none")
    parser.add_argument("--turns", type=int, default=4000, help="cold steps a pass of each mode, one by one")
    parser.add_argument("--call-steps", type=int, default=60, help="real steps a pass in which calls are timed")
    parser.add_argument("--step-ms", type=float, default=50.0, help="length of a real step")
    parser.add_argument("--seed", type=int, default=0, help="of the order of modes")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions")


def one_pass(options: argparse.Namespace, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="overhead-") as directory:
        place = Path(directory)
        policy, out, log = place / "policy.yaml", place / "found.json", place / "run"
        policy.write_text(POLICY)
        plan = vars(options) | {"root_pid": os.getpid(), "out": str(out), "seed": f"{options.seed}-{number}"}
        plan["requests"] = str(RunDirectory(log).requests)
        job = ("--policy", policy, "--out", log, "--", sys.executable, HERE / "jobs" / "overhead.py")
        variables = {"OVERHEAD_PLAN": json.dumps(plan), "KINETO_LOG_LEVEL": "6", "TMPDIR": directory}
        run("-m", "sftriage", "run", *job, timeout_s=LIMIT_S, **variables)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def counted(report: str) -> int:
    """The count in cachegrind's report.

    Raises:
        ValueError: there is none.
    """
    found = _COUNTED.search(report)
    if found is None:
        raise ValueError(f"valgrind counted nothing: {report.strip()[-200:]}")
    return int(found.group(1).replace(",", ""))


def instructions() -> dict[str, object]:
    """Instructions a step with four stages adds to an empty loop, or why they are not known."""
    if shutil.which("valgrind") is None:
        return {"not_run": "there is no valgrind"}

    def count(mode: str, steps: int) -> int:
        with tempfile.TemporaryDirectory(prefix="overhead-") as rings:
            valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
            loop = [sys.executable, "-c", _LOOP, mode, str(steps), rings]
            environment = environment_of(PYTHONHASHSEED="0")
            done = subprocess.run(
                [*valgrind, *loop], env=environment, capture_output=True, text=True, timeout=120, check=True
            )
        return counted(done.stderr)

    wanted = [(mode, steps) for mode in ("on", "none") for steps in (FEW, MANY)]
    try:
        with ThreadPoolExecutor(2) as pool:
            counts = dict(zip(wanted, pool.map(lambda one: count(*one), wanted), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"not_run": str(error)[-300:]}
    on, none = ((counts[mode, MANY] - counts[mode, FEW]) / (MANY - FEW) for mode in ("on", "none"))
    return {"on": on, "none": none, "added": on - none}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    step_s = options.step_ms / 1e3
    passes = [one_pass(options, number) for number in range(options.passes)]
    figures = overhead_figures.figures(overhead_figures.pooled(passes), step_s)
    return {
        "torch": torch.__version__,
        "step_s": step_s,
        "passes": options.passes,
        **figures,
        "targets": overhead_figures.targets(figures),
        "instructions": None if options.no_instructions else instructions(),
    }


def show(found: dict[str, Any]) -> Iterator[str]:
    return overhead_figures.lines(found)
