"""What Python stacks cost the step that is captured: blocks of steps with them and without, in turn.

    python bench/sampling_cost.py [--blocks 40] [--only STEPS ...] [--json]

Five ways: the sampler, torch.profiler as a capture has it, both (a capture by default), torch.profiler with its own
``with_stack``, and none, which is what two blocks differ by anyway. Four sorts of steps in the main thread: one that
sleeps, operators (matrix products), one loop in Python, and many calls of small Python functions; the last two never
wait, so that the sampler gets the interpreter only every 5 ms. For each: the median ratio of a block to the block
before it without any, with its 95 % interval (bootstrap); samples a second; and what the profiler's stop holds up
after the block, in milliseconds. A block's time is the clock's less what the thread waited for a core: what it ran,
slept, or waited for the interpreter. So others on the machine count little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from sftriage.sampling.sampler import StackSampler
from sftriage.sampling.stacks import Schedstat

BLOCK_STEPS = 5
"""As many as a capture has by default."""
STACK_EVERY = 5
"""Of so many blocks one is with ``with_stack``: the millions of calls that it traces take seconds to be let go of."""


def sleeps() -> None:
    time.sleep(0.03)


def operators() -> None:
    x = torch.ones(384, 384)
    for _ in range(24):
        x = (x @ x).clamp(max=1.0)


def loop() -> None:
    total = 0
    for number in range(900_000):
        total += number


def calls() -> None:
    def small(number: int) -> int:
        return number + 1

    total = 0
    for _ in range(600_000):
        total = small(total)


def waited_s() -> float:
    """How long this thread has waited for a core so far."""
    schedstat = Schedstat(threading.get_native_id())
    waited_ns = schedstat.times_ns()[1]
    schedstat.close()
    return waited_ns * 1e-9


@dataclass
class Block:
    """A block: how long it took less what it waited for a core, by the clock; its profiler's stop; and samples."""

    took_s: float
    wall_s: float
    stop_s: float
    samples: int


WAYS = {"none": (), "sampler": ("sampler",), "profiler": ("profiler",), "both": ("sampler", "profiler")}
WAYS |= {"with_stack": ("profiler", "stack")}


def block(step: Callable[[], None], way: tuple[str, ...]) -> Block:
    """A block of steps, watched in some way."""
    sampler = StackSampler(lambda: (0, "data", 0))
    profiler = torch.profiler.profile(with_stack="stack" in way) if "profiler" in way else None
    if profiler is not None:
        profiler.start()
    began_s, without_s = time.perf_counter(), waited_s()
    if "sampler" in way:
        sampler.start()
    for _ in range(BLOCK_STEPS):
        step()
    if "sampler" in way:
        sampler.stop()
    wall_s = time.perf_counter() - began_s
    took_s = wall_s - (waited_s() - without_s)
    if "sampler" in way:
        sampler._thread.join()
    began_s = time.perf_counter()
    if profiler is not None:
        profiler.stop()
    return Block(took_s, wall_s, time.perf_counter() - began_s, len(sampler))


STEPS = {step.__name__: step for step in (sleeps, operators, loop, calls)}


def interval(ratios: list[float]) -> dict[str, float]:
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"median": statistics.median(ratios), "low": medians[50], "high": medians[-51]}


def measured(step: Callable[[], None], blocks: int) -> dict[str, object]:
    plain_s: list[float] = []
    found: dict[str, list[Block]] = {name: [] for name in WAYS}
    ratios: dict[str, list[float]] = {name: [] for name in WAYS}
    for name, way in WAYS.items():
        if name != "with_stack":
            block(step, way)
    for number in range(blocks):
        for name, way in WAYS.items():
            if name == "with_stack" and number % STACK_EVERY:
                continue
            plain_s.append(block(step, ()).took_s)
            found[name].append(block(step, way))
            ratios[name].append(found[name][-1].took_s / plain_s[-1])
    sampled = found["sampler"]
    return {
        "step_ms": statistics.median(plain_s) / BLOCK_STEPS * 1e3,
        "per_s": sum(one.samples for one in sampled) / sum(one.wall_s for one in sampled),
        "ways": {
            name: interval(ratios[name]) | {"stop_ms": statistics.median(one.stop_s for one in found[name]) * 1e3}
            for name in WAYS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measured(STEPS[name], options.blocks) for name in options.only}
    if options.json:
        print(json.dumps(found))
        return
    for name, one in found.items():
        print(f"{name:10} {one['step_ms']:5.1f} ms a step, {one['per_s']:4.0f} samples a second")
        for way, its in one["ways"].items():
            took = f"{its['median']:.3f} [{its['low']:.3f}, {its['high']:.3f}]"
            print(f"  {way:10} {took}, stopped in {its['stop_ms']:.1f} ms")


if __name__ == "__main__":
    main()
