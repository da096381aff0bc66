"""What a step costs with sftriage off, on, and with a capture, and under other tools, on this machine.

    python bench/overhead.py [--json] [--peers PYTHON] [--tools NAME...] [--passes N]

Each tool has a process of its own, started as its documentation says, in which blocks of steps with and without it
follow one another in random order, each mode once a round; a round's time is divided by the same round's without.
No machine that is shared resolves ten microseconds in fifty milliseconds by comparing steps, so there are several
estimators, and each says what it cannot tell:

own work      what the tool adds to the training thread's processor time, over the length of a real step: from steps of
              the same operators on next to no data, which resolve some microseconds but find their caches warm, and
              from steps of a tenth of the length, which find them cold as a real step does (``cold``). Where a tool can
              be left out of a single step, these take turns with and without it, step by step in random order, and
              three thousand differences of neighbours resolve some 5 us; ``none`` has calls that do nothing.
calls         sftriage's calls timed one by one inside real steps, caches as the step leaves them; beside them calls
              that only read the clock and keep it: the least that a recorder written in Python can do.
real          blocks of real steps: processor time of the training thread, and wall clock. Everything is in it, and
              its interval says how little it resolves; ``control`` is ``off`` a second time.
threads,      shares of a core that the tool takes beside the training thread: in the trainer's process, and in
processes     processes of its own.
instructions  that a recorded step adds to an empty loop, counted by valgrind.

The other tools come from the environment of ``--peers``, which needs torch, traceml-ai and gpuprof; one that is not
there, or does not run, is reported as such. It takes about seven minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.overhead_modes import instructions, reporting
from bench.overhead_modes.running import NotRunError, measured

NAMES = ("sftriage", "sftriage --auto", "traceml-ai", "gpuprof", "torch.profiler")
EXPORT_STEPS = 50
"""torch.profiler runs without a schedule, and is exported and begun again after so many steps."""


def plan_of(tool: str, options: argparse.Namespace) -> dict[str, object]:
    """How much of what is measured of a tool in one pass."""
    plan: dict[str, object] = {
        "step_s": options.step_ms / 1e3,
        "block_steps": 10,
        "rounds": 8,
        "small_steps": EXPORT_STEPS,
        "small_rounds": 80,
        "cold_steps": 5,
        "cold_rounds": 60,
        "call_steps": options.call_steps,
        "steady_steps": 80,
        "cold_modes": ["off", "on"],
        "real_modes": ["off", "on"],
    }
    if tool in ("sftriage", "traceml-ai"):
        plan |= {"cold_steps": 1, "cold_rounds": options.turns}
    if tool == "sftriage":
        plan |= {"cold_modes": ["off", "none", "on"], "rounds": 16, "captures": options.captures}
        plan |= {"real_modes": ["off", "control", "on"]}
    elif tool == "sftriage --auto":
        # Each block puts the seams in anew, and waits until they are in their stride.
        plan |= {"small_steps": 200, "small_rounds": 60, "cold_steps": 20, "cold_rounds": 30, "rounds": 3}
    elif tool == "gpuprof":
        # Each block begins and ends a run of its own, with its threads and database.
        plan |= {"small_steps": 200, "small_rounds": 20, "cold_steps": 10, "cold_rounds": 25, "rounds": 6}
    elif tool == "torch.profiler":
        plan |= {
            "block_steps": EXPORT_STEPS,
            "rounds": 3,
            "small_rounds": 20,
            "cold_steps": EXPORT_STEPS,
            "cold_rounds": 8,
        }
    return plan


def measure(options: argparse.Namespace) -> dict[str, object]:
    order = random.Random(options.seed)
    passes: dict[str, list[dict[str, object]]] = {name: [] for name in options.tools}
    reasons: dict[str, str] = {}
    load_before = os.getloadavg()[0]
    for _ in range(options.passes):
        for name in order.sample(options.tools, len(options.tools)):
            if name in reasons:
                continue
            try:
                passes[name].append(measured(name, options.peers, plan_of(name, options) | {"seed": order.random()}))
            except NotRunError as error:
                reasons[name] = str(error)
            print(f"{name}: {reasons.get(name, 'done')}", file=sys.stderr)
    tools: dict[str, dict[str, object]] = {}
    for name, found in passes.items():
        step_s = options.step_ms / 1e3
        tools[name] = {"not_run": reasons[name]} if not found else reporting.figures(reporting.pooled(found), step_s)
    return {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__},
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "step_s": options.step_ms / 1e3,
        "passes": options.passes,
        "tools": tools,
        "targets": reporting.targets(tools),
        "instructions": None if options.no_instructions else instructions.measure(),
    }


def processor() -> str:
    named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return named[0].partition(":")[2].strip() if named else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="of the other tools' environment")
    parser.add_argument("--tools", nargs="+", choices=NAMES, default=list(NAMES), help="which to measure")
    parser.add_argument("--passes", type=int, default=1, help="how often each tool is started")
    parser.add_argument("--captures", type=int, default=8, help="captures a pass; 0 for none")
    parser.add_argument("--turns", type=int, default=4000, help="cold steps a pass of each mode, one by one")
    parser.add_argument("--call-steps", type=int, default=60, help="real steps a pass in which calls are timed")
    parser.add_argument("--step-ms", type=float, default=50.0, help="length of a real step")
    parser.add_argument("--seed", type=int, default=0, help="of the order of tools and modes")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions")
    options = parser.parse_args()
    report = measure(options)
    if options.json:
        print(json.dumps(reporting.plain(report)))
    else:
        print("\n".join(reporting.lines(report)))


if __name__ == "__main__":
    main()
