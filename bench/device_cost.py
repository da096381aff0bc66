"""What device time costs the host: the monitor's calls in steps on a GPU, with it and without, and by a boundary.

One process takes steps of some milliseconds of kernels, which its host launches ahead of the GPU and waits for at the
end. Steps take turns, in random order, with calls that do nothing, with a monitor without device time, with one that
has it, and with one that watches the last gradient too; the calls themselves are timed. Figures are medians over the
turns, in microseconds a step over the calls that do nothing, with 95 % intervals (bootstrap). On ``cpu`` no device time
is taken: that shows what is left when it is not in use.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.estimates import added
from bench.monitors import STAGES, NoMonitor, TimedMonitor
from bench.runner import TMPFS, interleaved
from sftriage.trainer.monitor import Monitor

MODES = ("host", "device", "watched")
BOUNDARIES = 2 * len(STAGES) + 2
WARM_UP_TURNS = 25
QUICK = {"steps": 100}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="steps in all (2000)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


@contextlib.contextmanager
def monitors(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as rings, contextlib.ExitStack() as held:
        made: dict[str, Any] = {"nothing": NoMonitor()}
        for rank, mode in enumerate(MODES):
            about = {"rank": rank, "world_size": len(MODES), "rings": rings}
            made[mode] = held.enter_context(Monitor(STAGES, ("backward",), device_time=mode != "host", **about))
        made["watched"].watch(model)
        yield made


def calls_us(device: str, steps: int) -> dict[str, list[float]]:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2048 if device == "cuda" else 64, 1024, device=device)

    def step(monitor: Any) -> float:
        # (the hooks of the watched mode are there in any mode, and return at once in others)
        timed = TimedMonitor(monitor)
        with timed.step():
            with timed.stage("data"):
                inputs = batch + 1.0
            with timed.stage("forward"):
                loss = model(inputs).square().mean()
            with timed.stage("backward"):
                loss.backward()
            with timed.stage("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        loss.item()
        return timed.spent_ns / 1e3

    with monitors(model) as made:
        acts, order = {name: partial(step, monitor) for name, monitor in made.items()}, random.Random(0)
        interleaved(acts, WARM_UP_TURNS, order)
        return interleaved(acts, max(1, steps // len(acts)), order)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU that torch can use; --device cpu shows what is left without device time")
    took = calls_us(options.device, options.steps)
    over = {mode: added(took[mode], took["nothing"]) for mode in MODES}
    return {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "none",
        "torch": torch.__version__,
        "nothing_us": statistics.median(took["nothing"]),
        "boundaries": BOUNDARIES,
        "us_a_step": over,
        "us_a_boundary": {mode: one.map(lambda us: us / BOUNDARIES) for mode, one in over.items()},
    }


def show(found: dict[str, Any]) -> Iterator[str]:
    for mode in MODES:
        step, boundary = found["us_a_step"][mode], found["us_a_boundary"][mode]
        yield f"{mode:8} {step.words(1)} us a step, {boundary.value:.2f} us a boundary"
