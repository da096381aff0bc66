"""What the detection of stages (`--auto`) costs the processes of a job: to start, and a step.

starts  ``python -c pass``, and ``python -c "import torch"``, with the folder on PYTHONPATH and without, in turns: each
        pair's difference in wall clock, and in the process's own processor time, in milliseconds.
step    processor time of the training thread, in microseconds a step, over that of the same step without: one
        ordinary loop (a data loader, a small model, SGD), whose seams are put in and taken out every few steps, in
        turns in random order, once 80 steps have gone by. ``hot`` are these steps alone; ``cold`` have a product of
        large matrices between them, which leaves nothing of ours in the caches. ``by hand`` is `sftriage.Monitor`
        around the stages of the same loop, in the same turns.

Medians with their 95 % intervals (bootstrap). It takes about four minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sftriage
from bench.estimates import added
from bench.runner import TMPFS, interleaved, used
from sftriage.runtime.carrying import carry
from sftriage.trainer import monitor as recorder
from sftriage.trainer.seams.patches import Seams

MODES = ("without", "seams", "by hand")
WARM_STEPS = 80
QUICK = {"starts": 6, "turns": 20}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--turns", type=int, default=1000, help="of the steps' modes; 0 leaves them out")
    parser.add_argument("--step-ms", type=float, default=20.0)


def starts(rounds: int, command: str, directory: Path) -> dict[str, Any]:
    """How much longer a process takes from start to end, in milliseconds."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SFTRIAGE")}
    variables = {"SFTRIAGE_RINGS": str(directory), "PYTHONPATH": str(carry(directory / "auto"))}
    environments = {"without": plain, "with": plain | variables}
    acts = {name: partial(used, "-c", command, environment=one) for name, one in environments.items()}
    interleaved(acts, 2)  # (these write what is compiled)
    took = interleaved(acts, rounds, random.Random())
    found: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        carrying, bare = ([getattr(one, f"{clock}_s") * 1e3 for one in took[name]] for name in ("with", "without"))
        found |= {f"{clock}_ms": statistics.median(bare), f"more_{clock}_ms": added(carrying, bare)}
    return found


class Loop:
    """An ordinary loop, whose next step is recorded as its mode says: nothing of the other modes is then in its way."""

    def __init__(self, steps: int, directory: str) -> None:
        self.by_hand = self._monitor(directory)
        os.environ[recorder.RINGS_ENV] = tempfile.mkdtemp(dir=directory)
        self.seams = Seams()
        self.seams.install()
        self._model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._batches = iter(DataLoader(TensorDataset(torch.randn(4 * (WARM_STEPS + steps), 16)), batch_size=4))
        # (until then each step looks whether a GPU is in use, and the seams are not in their stride)
        for _ in range(WARM_STEPS):
            self.step_ns("seams")
        assert self.seams.steps.rounds == WARM_STEPS - 1
        assert self.seams.steps.counting is not None, "the C form does what is left to do"
        self._replaced = [
            (owner, name, getattr(owner, name), original) for owner, name, _, original, _ in self.seams.replaced.stages
        ]
        hooks = sys.modules["torch.optim.optimizer"]
        self._hooked: list[tuple[dict[int, Any], dict[int, Any]]] = [
            (one, dict(one))
            for one in (
                *(hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks),
                *(self._model._forward_pre_hooks, self._model._forward_hooks),
            )
        ]
        assert all(saved for _, saved in self._hooked)

    @staticmethod
    def _monitor(directory: str) -> sftriage.Monitor:
        os.environ[recorder.RINGS_ENV] = tempfile.mkdtemp(dir=directory)
        monitor = sftriage.Monitor(sync=())
        # (otherwise no seams are installed, as intended)
        recorder.made_by_hand = False
        return monitor

    def take(self, mode: str) -> None:
        for owner, name, ours, original in self._replaced:
            setattr(owner, name, ours if mode == "seams" else original)
        for hooks, saved in self._hooked:
            hooks.clear()
            hooks.update(saved if mode == "seams" else {})

    def step_ns(self, mode: str) -> int:
        monitor = self.by_hand if mode == "by hand" else None
        step, stage = (monitor.step, monitor.stage) if monitor else (nullcontext, lambda name: nullcontext())
        began_ns = time.thread_time_ns()
        with step():
            with stage("data"):
                (batch,) = next(self._batches)
            with stage("forward"):
                loss = self._model(batch).square().mean()
            with stage("backward"):
                loss.backward()
            with stage("optimizer"):
                self._optimizer.step()
        took_ns = time.thread_time_ns() - began_ns
        self._optimizer.zero_grad()
        return took_ns

    def close(self) -> None:
        self.take("seams")
        self.seams.stop()
        self.by_hand.close()


def step_costs(turns: int, steps: int, between: Callable[[], object], directory: str) -> dict[str, Any]:
    """What a step takes without, and how much more in the other modes: medians of differences within a turn.

    A turn has a few steps of each mode, in an order of its own, of which the first is left out: what Python keeps of
    the classes that have just been changed is then there again.
    """
    loop = Loop(turns * len(MODES) * (steps + 1), directory)

    def taken_us(mode: str) -> float:
        loop.take(mode)
        taken = []
        for _ in range(steps + 1):
            between()
            taken.append(loop.step_ns(mode))
        return statistics.mean(taken[1:]) / 1e3

    took_us = interleaved({mode: partial(taken_us, mode) for mode in MODES}, turns, random.Random())
    loop.close()
    more = {mode: added(took_us[mode], took_us["without"]) for mode in MODES[1:]}
    return {"step_us": statistics.median(took_us["without"]), "more_us": more}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    large = torch.randn(1024, 1024)

    def product() -> None:
        until_s = time.perf_counter() + options.step_ms / 1e3
        while time.perf_counter() < until_s:
            torch.mm(large, large)

    with tempfile.TemporaryDirectory(dir=TMPFS) as directory, tempfile.TemporaryDirectory() as folder:
        found = {
            "python -c pass": starts(options.starts, "pass", Path(folder)),
            "import torch": starts(max(6, options.starts // 6), "import torch", Path(folder)),
        }
        if options.turns:
            found["hot"] = step_costs(options.turns, 20, lambda: None, directory)
            found["cold"] = step_costs(options.turns, 2, product, directory)
    return found


def show(found: dict[str, Any]) -> Iterator[str]:
    for what in ("python -c pass", "import torch"):
        for clock in ("wall", "cpu"):
            more = found[what][f"more_{clock}_ms"]
            yield f"{what:<16}{clock:<5}{found[what][f'{clock}_ms']:9.1f} ms   {more.words(2)} ms more"
    for what in ("hot", "cold"):
        if what in found:
            yield f"a step, {what:<8}{found[what]['step_us']:9.1f} us"
            for mode, more in found[what]["more_us"].items():
                yield f"  {mode:<29} {more.words(1)} us more"
