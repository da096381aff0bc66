"""What sftriage takes beside a job on one host, as a share of a core.

One process stands for all trainers, with a monitor for each rank. The run is watched by the loop of `sftriage run` in a
process of its own, all of whose processor time is counted; the agent's part (reading rings, keeping steps, looking
after captures) is timed on the loop's thread. A share of a core is a ratio of processor time and wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.runner import TMPFS
from sftriage.policy.in_force import load_set
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.local import ThisHost
from sftriage.runtime.triage import Triage
from sftriage.trainer.monitor import Monitor

STAGES = ("data", "forward", "backward", "optimizer")
AGENT = ("rows", "statuses", "want", "reports")
WARM_S = 3.0
QUICK = {"seconds": 3.0}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps-per-s", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)


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
    info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("true",), "default", "0" * 64, str(rings))
    directory = create(run, info, "")
    fleet, agent_ns = ThisHost(directory, info), [0]
    for name in AGENT:
        setattr(fleet, name, timed(getattr(fleet, name), agent_ns))
    triage = Triage(directory, info, load_set(["default"]), fleet)
    triage.start()
    time.sleep(WARM_S)
    agent_ns[0], began_steps = 0, triage.recorded_steps
    began_ns, began_cpu_ns = time.monotonic_ns(), time.process_time_ns()
    time.sleep(seconds)
    wall_ns, cpu_ns = time.monotonic_ns() - began_ns, time.process_time_ns() - began_cpu_ns
    shares = {"core_fraction": cpu_ns / wall_ns, "agent_fraction": agent_ns[0] / wall_ns}
    steps = triage.recorded_steps - began_steps
    triage.close()
    return {**shares, "steps": steps}


def timed(act: Callable[..., Any], spent_ns: list[int]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        before_ns = time.thread_time_ns()
        try:
            return act(*given, **named)
        finally:
            spent_ns[0] += time.thread_time_ns() - before_ns

    return call


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as rings, tempfile.TemporaryDirectory() as out:
        arguments = (rings, options.ranks, options.steps_per_s)
        trainers = multiprocessing.get_context("spawn").Process(target=train, args=arguments, daemon=True)
        trainers.start()
        try:
            found = watch(Path(rings), Path(out) / "run", options.seconds)
        finally:
            trainers.terminate()
            trainers.join()
    return {**found, "ranks": options.ranks, "steps_per_s": options.steps_per_s}
