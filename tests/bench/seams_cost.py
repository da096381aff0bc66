"""What `sftriage run --auto` costs the processes of a job: to start, and a step.

    python tests/bench/seams_cost.py [--json] [--starts N] [--rounds N] [--step-ms MS]

starts  ``python -c pass``, and ``python -c "import torch"``, with the folder on PYTHONPATH and without, in turns: each
        pair's difference in wall clock, and in the process's own processor time, in milliseconds.
step    processor time of the training thread, in microseconds a step, over that of the same step without: an ordinary
        loop (a data loader, a small model, SGD), its blocks with the seams and without in turns, once 80 steps have
        gone by. ``hot`` are these steps alone; ``cold`` have a product of large matrices between them, which leaves
        nothing of ours in the caches. ``by hand`` is a loop with `sftriage.Monitor` around its stages, in the same
        turns.

Medians, with the quartiles. It takes about three minutes.
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

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

import sftriage
from sftriage.recorder import monitor as recorder
from sftriage.runtime.carrying import carried
from sftriage.seams.patches import Seams

TMPFS = Path("/dev/shm")
MODES = ("without", "seams", "by hand")


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


def block_us(mode: str, steps: int, between: Callable[[], object], directory: str) -> float:
    """Processor time of this thread a step, of steps that are recorded as the mode says."""
    os.environ[recorder.RINGS_ENV] = tempfile.mkdtemp(dir=directory)
    recorder._by_hand = False
    seams = Seams() if mode == "seams" else None
    if seams is not None:
        seams.install()
    monitor = sftriage.Monitor(sync=()) if mode == "by hand" else None
    step, stage = (monitor.step, monitor.stage) if monitor else ((lambda: nullcontext()), (lambda name: nullcontext()))
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # (until then each step looks whether a GPU is in use, and the seams are not in their stride)
    warm_up = 80
    batches = iter(DataLoader(TensorDataset(torch.randn(4 * (steps + warm_up), 16)), batch_size=4))
    took_ns = []
    for step_number in range(steps + warm_up):
        if step_number >= warm_up:
            between()
        began_ns = time.thread_time_ns()
        with step():
            with stage("data"):
                (batch,) = next(batches)
            with stage("forward"):
                loss = model(batch).square().mean()
            with stage("backward"):
                loss.backward()
            with stage("optimizer"):
                optimizer.step()
        took_ns.append(time.thread_time_ns() - began_ns)
        optimizer.zero_grad()
    if seams is not None:
        assert seams.steps.rounds == steps + warm_up - 1
        seams.stop()
    if monitor is not None:
        monitor.close()
    return statistics.median(took_ns[warm_up:]) / 1e3


def step_costs(rounds: int, steps: int, between: Callable[[], object], directory: str) -> dict[str, dict[str, float]]:
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in random.sample(MODES, len(MODES)):
            took[mode].append(block_us(mode, steps, between, directory))
    return {
        mode: spread("more_us", [one - other for one, other in zip(took[mode], took["without"], strict=True)])
        for mode in MODES[1:]
    } | {"without": {"step_us": statistics.median(took["without"])}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=20, help="of the steps' blocks; 0 leaves them out")
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
        if options.rounds:
            found["hot"] = step_costs(options.rounds, 100, lambda: None, directory)
            found["cold"] = step_costs(options.rounds, 20, product, directory)
    if options.json:
        print(json.dumps(found))
        return
    for what in ("python -c pass", "import torch"):
        one = found[what]
        for name in ("wall", "cpu"):
            print(f"{what:<16}{name:<5}{one[f'{name}_ms']:9.1f} ms   {one[f'more_{name}_ms']:+.2f} ms", end="")
            print(f" ({one[f'more_{name}_ms_low']:+.2f} to {one[f'more_{name}_ms_high']:+.2f})")
    for what in ("hot", "cold") if options.rounds else ():
        print(f"a step, {what:<8}{found[what]['without']['step_us']:9.1f} us")
        for mode in MODES[1:]:
            one = found[what][mode]
            print(f"  {mode:<14}{'':9}      {one['more_us']:+.1f} us", end="")
            print(f" ({one['more_us_low']:+.1f} to {one['more_us_high']:+.1f})")


if __name__ == "__main__":
    main()
