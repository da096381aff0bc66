"""The job that is measured, in the process in which the tool wants it: writes what it took, and decides nothing.

Started by `bench/overhead.py`, as a script; ``OVERHEAD_PLAN`` holds a JSON object, see `Plan`.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.overhead_modes.capturing import capture_rounds, phases_s
from bench.overhead_modes.modes import TOOLS, Mode, Sftriage
from bench.overhead_modes.processes import beside_ns
from bench.overhead_modes.training import STAGES, Training, sized, small

SMALL_WARM_STEPS = 5
COLD_DIVISOR = 10
"""Steps so much shorter still push everything else out of the caches, and their noise is so much smaller."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        tool: which tool this process is for.
        seed: of the order of modes.
        root_pid: who started the tool: its descendants, this process excepted, are the tool's.
        out: where the figures go.
        step_s: how long a real step is to be.
        block_steps, rounds: steps in a block of real steps, and blocks of each mode.
        small_steps, small_rounds: the same for small steps.
        cold_steps, cold_rounds: the same for steps of a tenth of a real one; of 1 step, the modes take turns in them.
        cold_modes, real_modes: which modes take these steps, and real ones.
        call_steps: real steps in which the monitor's calls are timed, and as many in which calls that do nothing are.
        steady_steps: real steps without a break, for what runs beside the training thread.
        captures: captures to ask for.
        asks: where to ask for captures.
    """

    tool: str
    seed: int
    root_pid: int
    out: str
    step_s: float
    block_steps: int
    rounds: int
    small_steps: int
    small_rounds: int
    cold_steps: int
    cold_rounds: int
    call_steps: int
    steady_steps: int
    cold_modes: list[str]
    real_modes: list[str]
    captures: int = 0
    asks: str = ""


def block(mode: Mode, steps: int, warm_steps: int) -> dict[str, float]:
    """Mean times of a step in nanoseconds: by the wall clock, and of the processor by the training thread."""
    mode.enter()
    try:
        for _ in range(max(warm_steps, mode.warm_steps)):
            mode.step()
        began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        mode.begin()
        for _ in range(steps):
            mode.step()
        mode.finish()
        ended_cpu_ns, ended_ns = time.thread_time_ns(), time.perf_counter_ns()
    finally:
        mode.leave()
    return {"wall_ns": (ended_ns - began_ns) / steps, "cpu_ns": (ended_cpu_ns - began_cpu_ns) / steps}


def blocks(modes: dict[str, Mode], names: list[str], size: tuple[int, int, int], order: random.Random) -> object:
    """Blocks of each mode, the i-th of each near to one another in time. ``size``: steps, rounds, steps to warm up."""
    steps, rounds, warm_steps = size
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            taken[name].append(block(modes[name], steps, warm_steps))
    return taken


def turns(modes: dict[str, Mode], names: list[str], rounds: int, order: random.Random) -> object:
    """Steps of each mode, the i-th of each next to one another: what the machine is busy with is the same for all."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            step = modes[name].step
            began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            step()
            ended_cpu_ns, ended_ns = time.thread_time_ns(), time.perf_counter_ns()
            taken[name].append({"wall_ns": ended_ns - began_ns, "cpu_ns": ended_cpu_ns - began_cpu_ns})
    return taken


def steady(mode: Mode, steps: int, root_pid: int) -> dict[str, float]:
    """What runs beside the training thread, as shares of a core: other threads of the trainer, and other processes."""
    mode.enter()
    try:
        mode.step()
        began = time.perf_counter_ns(), time.process_time_ns() - time.thread_time_ns(), beside_ns(root_pid, os.getpid())
        mode.begin()
        for _ in range(steps):
            mode.step()
        mode.finish()
        ended = time.perf_counter_ns(), time.process_time_ns() - time.thread_time_ns(), beside_ns(root_pid, os.getpid())
    finally:
        mode.leave()
    wall_ns = ended[0] - began[0]
    return {
        "seconds": wall_ns / 1e9,
        "threads_share": (ended[1] - began[1]) / wall_ns,
        "processes_share": (ended[2] - began[2]) / wall_ns,
    }


def calls_ns(monitor: object, training: Training) -> int:
    """One real step; how long the calls of the monitor in it took, with caches as the step's own work leaves them."""
    clock = time.perf_counter_ns
    spent_ns = 0
    loss = batch = training.data()

    def act(name: str) -> None:
        nonlocal batch, loss
        if name == "data":
            batch = training.data()
        elif name == "forward":
            loss = training.forward(batch)
        elif name == "backward":
            loss.backward()
        else:
            training.optimizer.step()
            training.optimizer.zero_grad()

    began_ns = clock()
    step = monitor.step()  # type: ignore[attr-defined]
    step.__enter__()
    spent_ns += clock() - began_ns
    for name in STAGES:
        began_ns = clock()
        stage = monitor.stage(name)  # type: ignore[attr-defined]
        stage.__enter__()
        spent_ns += clock() - began_ns
        act(name)
        began_ns = clock()
        stage.__exit__(None, None, None)
        spent_ns += clock() - began_ns
    began_ns = clock()
    step.__exit__(None, None, None)
    return spent_ns + clock() - began_ns


def measure(plan: Plan) -> dict[str, object]:
    torch.set_num_threads(1)
    order = random.Random(plan.seed)
    tool = TOOLS[plan.tool]()
    tiny = small()
    middling, real = sized(plan.step_s / COLD_DIVISOR), sized(plan.step_s)
    few, some, many = (tool.modes(training) for training in (tiny, middling, real))
    names = [name for name in many if name in plan.real_modes]
    small_size = (plan.small_steps, plan.small_rounds, SMALL_WARM_STEPS)
    found: dict[str, object] = {"torch": torch.__version__, "batch": real.batch}

    def small_blocks() -> object:
        return blocks(few, list(few), small_size, order)

    def cold() -> object:
        if plan.cold_steps == 1:
            return turns(some, plan.cold_modes, plan.cold_rounds, order)
        return blocks(some, plan.cold_modes, (plan.cold_steps, plan.cold_rounds, 1), order)

    phases: dict[str, Callable[[], object]] = {
        "small": small_blocks,
        "cold": cold,
        "real": lambda: blocks(many, names, (plan.block_steps, plan.rounds, 1), order),
        "steady": lambda: steady(many["on"], plan.steady_steps, plan.root_pid),
    }
    if isinstance(tool, Sftriage):
        from bench.overhead_modes.monitored import ClockMonitor, NoMonitor

        monitors = {"on": tool.monitor, "none": NoMonitor(), "clock": ClockMonitor()}

        def of_each() -> list[int]:
            took = {name: calls_ns(monitors[name], real) for name in order.sample(list(monitors), len(monitors))}
            return [took[name] for name in monitors]

        phases["calls"] = lambda: {"ns": [of_each() for _ in range(plan.call_steps)]}
        if plan.captures:
            phases["captures"] = lambda: capture_rounds(tool, real, plan.captures, Path(plan.asks))
            phases["capture_phases"] = lambda: phases_s(Path(plan.asks).parent, plan.captures)
            phases["small_after"] = small_blocks
    for name, phase in phases.items():
        began_s = time.monotonic()
        found[name] = phase()
        print(f"overhead: {plan.tool}: {name} in {time.monotonic() - began_s:.0f} s", flush=True)
    return found


def main() -> None:
    plan = Plan(**json.loads(os.environ["OVERHEAD_PLAN"]))
    found = measure(plan)
    part = Path(plan.out + ".part")
    part.write_text(json.dumps(found))
    part.replace(plan.out)


if __name__ == "__main__":
    main()
