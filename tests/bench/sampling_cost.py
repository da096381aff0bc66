"""What sampling Python stacks costs the step that is captured: blocks of steps with it and without, in turn.

    python tests/bench/sampling_cost.py [--blocks 40] [--json]

Three sorts of steps in the main thread: operators (matrix products), one loop in Python, and many calls of small Python
functions; the last two never wait, so that the sampler gets the interpreter only every 5 ms. For each: the median ratio
of a block with it to the block before without, with its 95 % interval (bootstrap), the same of two blocks without, and
samples a second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from sftriage.recorder.sampling import StackSampler

BLOCK_STEPS = 5
"""As many as a capture has by default."""


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


def block_s(step: Callable[[], None], *, sampled: bool) -> tuple[float, int]:
    """How long a block of steps takes, and how many samples were taken."""
    sampler = StackSampler(lambda: (0, "data", 0))
    began_s = time.perf_counter()
    if sampled:
        sampler.start()
    for _ in range(BLOCK_STEPS):
        step()
    if sampled:
        sampler.stop()
    took_s = time.perf_counter() - began_s
    if sampled:
        sampler._thread.join()
    return took_s, len(sampler._rows)


def interval(ratios: list[float]) -> dict[str, float]:
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"median": statistics.median(ratios), "low": medians[50], "high": medians[-51]}


def measured(step: Callable[[], None], blocks: int) -> dict[str, object]:
    on, null, samples, seconds = [], [], 0, 0.0
    block_s(step, sampled=False)
    for _ in range(blocks):
        (first_s, _), (second_s, _), (sampled_s, taken) = (
            block_s(step, sampled=False),
            block_s(step, sampled=False),
            block_s(step, sampled=True),
        )
        null.append(second_s / first_s)
        on.append(sampled_s / second_s)
        samples, seconds = samples + taken, seconds + sampled_s
    return {
        "step_ms": seconds / blocks / BLOCK_STEPS * 1e3,
        "on": interval(on),
        "null": interval(null),
        "per_s": samples / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {step.__name__: measured(step, options.blocks) for step in (operators, loop, calls)}
    if options.json:
        print(json.dumps(found))
        return
    for name, one in found.items():
        on, null = one["on"], one["null"]
        print(f"{name:10} {one['step_ms']:5.1f} ms a step, {one['per_s']:4.0f} samples a second")
        for what, its in (("sampled", on), ("null", null)):
            print(f"  {what:8} {its['median']:.3f} [{its['low']:.3f}, {its['high']:.3f}]")


if __name__ == "__main__":
    main()
