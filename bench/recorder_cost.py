"""What a step with five stages costs with the recorder on, against the same loop with an inert monitor and with none.

    python bench/recorder_cost.py [--json] [--steps N] [--rounds N]

The three loops are interleaved, so that a machine that slows down slows all of them; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.overhead_modes.monitored import NoMonitor
from sftriage.recorder import Monitor

STAGES = ("data", "h2d", "forward", "backward", "optimizer")
TMPFS = Path("/dev/shm")


def ns_a_step(monitor: Monitor | NoMonitor, steps: int) -> float:
    began_ns = time.perf_counter_ns()
    for _ in range(steps):
        with monitor.step():
            for name in STAGES:
                with monitor.stage(name):
                    pass
    return (time.perf_counter_ns() - began_ns) / steps


def measure(steps: int, rounds: int) -> dict[str, object]:
    directory = TMPFS if TMPFS.is_dir() else None
    with tempfile.TemporaryDirectory(dir=directory) as rings, Monitor(STAGES, rings=rings) as recording:
        loops = {"on": recording, "inert": Monitor(STAGES), "none": NoMonitor()}
        for monitor in loops.values():
            ns_a_step(monitor, steps)
        taken: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(rounds):
            for name, monitor in loops.items():
                taken[name].append(ns_a_step(monitor, steps))
    median = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "stages": len(STAGES),
        "steps": steps,
        "rounds": rounds,
        "python": platform.python_version(),
        "on_ns": round(median["on"], 1),
        "on_best_ns": round(min(taken["on"]), 1),
        "inert_ns": round(median["inert"], 1),
        "none_ns": round(median["none"], 1),
        "on_over_none": round(median["on"] / median["none"], 2),
        "added_ns": round(median["on"] - median["none"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=20_000, help="steps a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each loop")
    options = parser.parse_args()
    found = measure(options.steps, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    print(f"a step with {found['stages']} stages, median of {found['rounds']} rounds of {found['steps']} steps")
    print(f"  recording   {found['on_ns']:>8} ns   (best round {found['on_best_ns']} ns)")
    print(f"  inert       {found['inert_ns']:>8} ns")
    print(f"  no monitor  {found['none_ns']:>8} ns")
    print(f"  added by recording: {found['added_ns']} ns a step, {found['on_over_none']} times the empty loop")


if __name__ == "__main__":
    main()
