"""What Python stacks cost the step that is captured: blocks of steps with them and without, in turn.

Five ways: the sampler, torch.profiler as a capture has it, both (a capture by default), torch.profiler with its own
``with_stack``, and none, which is what two blocks differ by anyway. Four sorts of steps in the main thread: one that
sleeps, operators (matrix products), one loop in Python, and many calls of small Python functions; the last two never
wait, so that the sampler gets the interpreter only every 5 ms. For each: the median ratio of a block to the block
before it without any, with its 95 % interval (bootstrap); samples a second; and for how long the profiler's stop holds
up the rank, in milliseconds. A block's time is the clock's less what the thread waited for a core: what it ran, slept,
or waited for the interpreter. So others on the machine count little.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.estimates import ratio
from sftriage.sampling.sampler import StackSampler
from sftriage.sampling.stacks import Schedstat

BLOCK_STEPS = 5
"""As many as a capture has by default."""
STACK_EVERY = 5
"""Of this many blocks one is with ``with_stack``: it takes seconds to release the millions of calls that it traces."""
WAYS = {"none": (), "sampler": ("sampler",), "profiler": ("profiler",), "both": ("sampler", "profiler")}
WAYS |= {"with_stack": ("profiler", "stack")}
QUICK = {"blocks": 2}


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


STEPS = {step.__name__: step for step in (sleeps, operators, loop, calls)}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))


def waited_s() -> float:
    """How long this thread has waited for a core so far."""
    schedstat = Schedstat(threading.get_native_id())
    waited_ns = schedstat.times_ns()[1]
    schedstat.close()
    return waited_ns * 1e-9


@dataclass
class Block:
    """A block: its time less waiting for a core, by the clock; its profiler's stop; and its samples."""

    took_s: float
    wall_s: float
    stop_s: float
    samples: int


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


def measured(step: Callable[[], None], blocks: int) -> dict[str, Any]:
    base: dict[str, list[Block]] = {name: [] for name in WAYS}
    found: dict[str, list[Block]] = {name: [] for name in WAYS}
    for name, way in WAYS.items():
        if name != "with_stack":
            block(step, way)
    for number in range(blocks):
        for name, way in WAYS.items():
            if name != "with_stack" or number % STACK_EVERY == 0:
                base[name].append(block(step, ()))
                found[name].append(block(step, way))
    sampled = found["sampler"]
    return {
        "step_ms": statistics.median(one.took_s for blocks in base.values() for one in blocks) / BLOCK_STEPS * 1e3,
        "per_s": sum(one.samples for one in sampled) / sum(one.wall_s for one in sampled),
        "ratio": {
            name: ratio([one.took_s for one in found[name]], [one.took_s for one in base[name]]) for name in WAYS
        },
        "stop_ms": {name: statistics.median(one.stop_s for one in found[name]) * 1e3 for name in WAYS},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"steps": {name: measured(STEPS[name], options.blocks) for name in options.only}}


def show(found: dict[str, Any]) -> Iterator[str]:
    for name, one in found["steps"].items():
        yield f"{name:10} {one['step_ms']:5.1f} ms a step, {one['per_s']:4.0f} samples a second"
        for way in WAYS:
            yield f"  {way:10} {one['ratio'][way].words(3)}, stopped in {one['stop_ms'][way]:.1f} ms"
