"""What device time costs the host: the monitor's calls in steps on a GPU, with it and without, and by a boundary.

    python bench/device_cost.py [--json] [--steps N] [--device cuda|cpu]

One process takes steps of some milliseconds of kernels, which its host launches ahead of the GPU and waits for at the
end. Each step is taken, in random order, with calls that do nothing, with a monitor without device time, with one that
has it, and with one that watches the last gradient too; the calls themselves are timed. Figures are medians over the
steps, in microseconds a step over the calls that do nothing, with 95 % intervals (bootstrap). On ``cpu`` no device time
is taken: that shows what is left when it is not in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from sftriage.recorder import Monitor

STAGES = ("data", "forward", "backward", "optimizer")
MODES = ("nothing", "host", "device", "watched")
BOUNDARIES = 2 * len(STAGES) + 2
WARM_UP, RESAMPLED = 100, 2000


class Nothing:
    """What a monitor's calls are where nothing is recorded."""

    def step(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def stage(self, name: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


class Timed:
    """A context manager whose calls are timed."""

    def __init__(self, make: Any, spent: list[int]) -> None:
        self._make, self._spent = make, spent

    def __enter__(self) -> None:
        before_ns = time.perf_counter_ns()
        self._inner = self._make()
        self._inner.__enter__()
        self._spent[0] += time.perf_counter_ns() - before_ns

    def __exit__(self, *error: Any) -> None:
        before_ns = time.perf_counter_ns()
        self._inner.__exit__(*error)
        self._spent[0] += time.perf_counter_ns() - before_ns


@contextlib.contextmanager
def monitors(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """One of each mode, all of this process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as rings, contextlib.ExitStack() as held:
        made: dict[str, Any] = {"nothing": Nothing()}
        for rank, mode in enumerate(MODES[1:]):
            about = {"rank": rank, "world_size": len(MODES) - 1, "rings": rings}
            made[mode] = held.enter_context(Monitor(STAGES, ("backward",), device_time=mode != "host", **about))
        made["watched"].watch(model)
        yield made


def calls_us(device: str, steps: int) -> dict[str, list[float]]:
    """What the calls of each mode took in each of its steps."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2048 if device == "cuda" else 64, 1024, device=device)
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    with monitors(model) as made:
        for number in range(WARM_UP + steps):
            # (the hooks of the watched one are there in any mode, and leave at once in others)
            mode = random.choice(MODES)
            monitor, spent = made[mode], [0]
            with Timed(monitor.step, spent):
                with Timed(partial(monitor.stage, "data"), spent):
                    inputs = batch + 1.0
                with Timed(partial(monitor.stage, "forward"), spent):
                    loss = model(inputs).square().mean()
                with Timed(partial(monitor.stage, "backward"), spent):
                    loss.backward()
                with Timed(partial(monitor.stage, "optimizer"), spent):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            loss.item()
            if number >= WARM_UP:
                took[mode].append(spent[0] / 1e3)
    return took


def over(took: list[float], nothing: list[float]) -> dict[str, float]:
    """The difference of two medians, and between which it lies."""
    draws = np.random.default_rng(0)
    resampled = [
        np.median(draws.choice(took, len(took))) - np.median(draws.choice(nothing, len(nothing)))
        for _ in range(RESAMPLED)
    ]
    low, high = np.quantile(resampled, [0.025, 0.975])
    us = statistics.median(took) - statistics.median(nothing)
    return {"us": us, "low_us": float(low), "high_us": float(high), "boundary_us": us / BOUNDARIES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="steps in all (2000)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; --device cpu shows what is left without device time")
    random.seed(0)
    took = calls_us(given.device, given.steps)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "none"
    report: dict[str, Any] = {"gpu": name, "cpus": os.cpu_count(), "python": platform.python_version()}
    report |= {"torch": torch.__version__, "nothing_us": statistics.median(took["nothing"]), "boundaries": BOUNDARIES}
    report |= {mode: over(took[mode], took["nothing"]) for mode in MODES[1:]}
    if given.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    for mode in MODES[1:]:
        one = report[mode]
        interval = f"[{one['low_us']:.1f}, {one['high_us']:.1f}]"
        sys.stdout.write(f"{mode:8} {one['us']:7.1f} us a step {interval}, {one['boundary_us']:.2f} us a boundary\n")


if __name__ == "__main__":
    main()
