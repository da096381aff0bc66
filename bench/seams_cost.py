"""What `sftriage run --auto` costs the processes of a job: to start, and a step.

    python bench/seams_cost.py [--json] [--starts N] [--turns N] [--step-ms MS]

starts  ``python -c pass``, and ``python -c "import torch"``, with the folder on PYTHONPATH and without, in turns: each
        pair's difference in wall clock, and in the process's own processor time, in milliseconds.
step    processor time of the training thread, in microseconds a step, over that of the same step without: one
        ordinary loop (a data loader, a small model, SGD), whose seams are put in and taken out every few steps, in
        turns in random order, once 80 steps have gone by. ``hot`` are these steps alone; ``cold`` have a product of
        large matrices between them, which leaves nothing of ours in the caches. ``by hand`` is `sftriage.Monitor`
        around the stages of the same loop, in the same turns.

Medians; of starts with the quartiles, of steps with their 95 % interval (bootstrap). It takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import sftriage
from bench.overhead_modes.estimating import median_of
from sftriage.recorder import monitor as recorder
from sftriage.runtime.carrying import carried
from sftriage.seams.patches import Seams

TMPFS = Path("/dev/shm")
MODES = ("without", "seams", "by hand")
WARM_STEPS = 80


def started_ms(command: str, environment: dict[str, str]) -> tuple[float, float]:
    """Wall clock and processor time of a process."""
    began_s = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", command], environment)
    _, status, used = os.wait4(pid, 0)
    assert status == 0, command
    return (time.perf_counter() - began_s) * 1e3, (used.ru_utime + used.ru_stime) * 1e3


def starts(how_often: int, command: str, directory: Path) -> dict[str, float]:
    """How much longer a process takes from start to end."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SFTRIAGE")}
    with carried(directory / "auto") as added:
        there = plain | {"SFTRIAGE_RINGS": str(directory)} | added
        took: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        for turn in range(how_often + 2):
            for which, environment in random.sample([("without", plain), ("with", there)], 2):
                one = started_ms(command, environment)
                if turn > 1:  # (the first ones write what is compiled)
                    took[which].append(one)
    found: dict[str, float] = {}
    for at, name in enumerate(("wall", "cpu")):
        more = [one[at] - other[at] for one, other in zip(took["with"], took["without"], strict=True)]
        found[f"{name}_ms"] = statistics.median(one[at] for one in took["without"])
        found |= spread(f"more_{name}_ms", more)
    return found


def spread(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


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
            (one.owner, one.name, getattr(one.owner, one.name), one.original) for one in self.seams.replaced.stages
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
        # (else it would end the seams, as it should)
        recorder._by_hand = False
        return monitor

    def take(self, mode: str) -> None:
        """Have the next steps be of this mode."""
        for owner, name, ours, original in self._replaced:
            setattr(owner, name, ours if mode == "seams" else original)
        for hooks, saved in self._hooked:
            hooks.clear()
            hooks.update(saved if mode == "seams" else {})

    def step_ns(self, mode: str) -> int:
        """Processor time of this thread in one step."""
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


def step_costs(turns: int, steps: int, between: Callable[[], object], directory: str) -> dict[str, dict[str, float]]:
    """What a step takes without, and how much more in the other modes: medians of differences within a turn.

    A turn has a few steps of each mode, in an order of its own, of which the first one is left out: what Python keeps
    of the classes that have just been changed is then there again.
    """
    took_us: dict[str, list[float]] = {mode: [] for mode in MODES}
    loop = Loop(turns * len(MODES) * (steps + 1), directory)
    for _ in range(turns):
        for mode in random.sample(MODES, len(MODES)):
            loop.take(mode)
            taken = []
            for _ in range(steps + 1):
                between()
                taken.append(loop.step_ns(mode))
            took_us[mode].append(statistics.mean(taken[1:]) / 1e3)
    loop.close()
    found = {"without": {"step_us": statistics.median(took_us["without"])}}
    for mode in MODES[1:]:
        more = median_of([one - other for one, other in zip(took_us[mode], took_us["without"], strict=True)])
        found[mode] = {"more_us": more.value, "more_us_low": more.low, "more_us_high": more.high}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--turns", type=int, default=1000, help="of the steps' modes; 0 leaves them out")
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
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
    if options.json:
        print(json.dumps(found))
        return
    for what in ("python -c pass", "import torch"):
        one = found[what]
        for name in ("wall", "cpu"):
            print(f"{what:<16}{name:<5}{one[f'{name}_ms']:9.1f} ms   {one[f'more_{name}_ms']:+.2f} ms", end="")
            print(f" ({one[f'more_{name}_ms_low']:+.2f} to {one[f'more_{name}_ms_high']:+.2f})")
    for what in ("hot", "cold") if options.turns else ():
        print(f"a step, {what:<8}{found[what]['without']['step_us']:9.1f} us")
        for mode in MODES[1:]:
            one = found[what][mode]
            print(f"  {mode:<14}{'':9}      {one['more_us']:+.1f} us", end="")
            print(f" ({one['more_us_low']:+.1f} to {one['more_us_high']:+.1f})")


if __name__ == "__main__":
    main()
