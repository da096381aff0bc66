"""What sftriage takes beside a job on one host: as a share of a core, and by part of a turn of its loop.

    python bench/agent_cost.py [--json] [--ranks N] [--steps-per-s N] [--seconds N]

One process stands for all trainers, with a monitor for each rank. The run is watched by the loop that `sftriage run`
has, in a process of its own, all of whose processor time is counted; its parts are timed on the loop's thread by
themselves, and so is what of them is the agent's: reading rings, keeping steps, looking after captures. A share of a
core is a ratio of processor time and wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from sftriage.policy.loading import load, shipped
from sftriage.recorder import Monitor
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.local import this_host
from sftriage.runtime.triage import Triage

TMPFS = Path("/dev/shm")
STAGES = ("data", "forward", "backward", "optimizer")
AGENT = ("rows", "statuses", "want", "reports")
PARTS = ("_hear", "_judge", "_see_stall", "_gather", "_take_asks", "_note", "_show")
WARM_S = 3.0


def train(rings: str, ranks: int, steps_per_s: float) -> None:
    monitors = [Monitor(STAGES, rank=rank, world_size=ranks, rings=rings) for rank in range(ranks)]
    parent, due_s = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        due_s += 1 / steps_per_s
        with contextlib.ExitStack() as steps:
            for monitor in monitors:
                steps.enter_context(monitor.step())
            for name in STAGES:
                with contextlib.ExitStack() as stages:
                    for monitor in monitors:
                        stages.enter_context(monitor.stage(name))
                    if name == "forward":
                        time.sleep(max(0.0, due_s - time.monotonic()))


def watch(rings: Path, run: Path, seconds: float) -> dict[str, Any]:
    """Watch for so long, and say what it took."""
    info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("true",), "default", "0" * 64, str(rings))
    directory = create(run, info, "")
    fleet = this_host(directory, info)
    spent_ns: defaultdict[str, int] = defaultdict(int)
    for name in AGENT:
        setattr(fleet, name, _timed(getattr(fleet, name), name, spent_ns))
    triage = Triage(directory, info, load(shipped()["default"]), fleet)
    for name in PARTS:
        setattr(triage, name, _timed(getattr(triage, name), name, spent_ns))
    triage.start()
    time.sleep(WARM_S)
    spent_ns.clear()
    began_ns, began_cpu_ns, began_steps = time.monotonic_ns(), time.process_time_ns(), triage.steps_seen
    time.sleep(seconds)
    wall_ns, cpu_ns = time.monotonic_ns() - began_ns, time.process_time_ns() - began_cpu_ns
    steps = triage.steps_seen - began_steps
    shares = {name.strip("_"): spent_ns[name] / wall_ns for name in (*AGENT, *PARTS)}
    triage.close()
    agent = sum(shares.pop(name) for name in AGENT)
    return {"core_fraction": cpu_ns / wall_ns, "agent_fraction": agent, "steps": steps, "parts": shares}


def _timed(act: Any, name: str, spent_ns: defaultdict[str, int]) -> Any:
    def timed(*given: Any, **named: Any) -> Any:
        before_ns = time.thread_time_ns()
        try:
            return act(*given, **named)
        finally:
            spent_ns[name] += time.thread_time_ns() - before_ns

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps-per-s", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=TMPFS) as rings, tempfile.TemporaryDirectory() as out:
        context = multiprocessing.get_context("spawn")
        trainers = context.Process(target=train, args=(rings, options.ranks, options.steps_per_s), daemon=True)
        trainers.start()
        try:
            found = watch(Path(rings), Path(out) / "run", options.seconds)
        finally:
            trainers.terminate()
            trainers.join()
    found |= {"ranks": options.ranks, "steps_per_s": options.steps_per_s}
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    rate = f"{options.ranks} ranks at {options.steps_per_s:g} steps a second"
    sys.stdout.write(f"{rate}: {found['core_fraction']:.2%} of a core, the agent {found['agent_fraction']:.2%}\n")
    for name, share in found["parts"].items():
        sys.stdout.write(f"  {name:10} {share:.2%}\n")


if __name__ == "__main__":
    main()
