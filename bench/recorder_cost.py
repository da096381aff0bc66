"""What a step with five stages costs with the recorder on, against the same loop with an inert monitor and with none.

The three loops are interleaved, so that a machine that slows down slows all of them; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.monitors import NoMonitor
from bench.runner import TMPFS, interleaved
from sftriage.trainer.monitor import Monitor

STAGES = ("data", "h2d", "forward", "backward", "optimizer")
QUICK = {"steps": 2000, "rounds": 3}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20_000, help="steps a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each loop")


def ns_a_step(monitor: Monitor | NoMonitor, steps: int) -> float:
    began_ns = time.perf_counter_ns()
    for _ in range(steps):
        with monitor.step():
            for name in STAGES:
                with monitor.stage(name):
                    pass
    return (time.perf_counter_ns() - began_ns) / steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as rings, Monitor(STAGES, rings=rings) as recording:
        loops = {"on": recording, "inert": Monitor(STAGES), "none": NoMonitor()}
        acts = {name: partial(ns_a_step, monitor, options.steps) for name, monitor in loops.items()}
        interleaved(acts, 1)
        taken = interleaved(acts, options.rounds)
    median = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "stages": len(STAGES),
        "steps": options.steps,
        "rounds": options.rounds,
        **{f"{name}_ns": round(ns, 1) for name, ns in median.items()},
        "on_best_ns": round(min(taken["on"]), 1),
        "on_over_none": round(median["on"] / median["none"], 2),
        "added_ns": round(median["on"] - median["none"], 1),
    }


def show(found: dict[str, Any]) -> Iterator[str]:
    yield f"a step with {found['stages']} stages, median of {found['rounds']} rounds of {found['steps']} steps"
    yield f"  recording   {found['on_ns']:>8} ns   (best round {found['on_best_ns']} ns)"
    yield f"  inert       {found['inert_ns']:>8} ns"
    yield f"  no monitor  {found['none_ns']:>8} ns"
    yield f"  added by recording: {found['added_ns']} ns a step, {found['on_over_none']} times the empty loop"
