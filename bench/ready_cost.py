"""What `Monitor.watch` adds to a backward pass: plain, watched, and while it learns with all hooks on.

    python bench/ready_cost.py [--json] [--ranks N] [--rounds N]

DDP over Gloo, on 40 small parameters in 20 buckets and on the demo's Transformer. It is one and the same model that is
watched or not (two copies differ by some per cent, from where they lie in memory), recorded in any case, in rounds that
are interleaved; each round's time is divided by the plain one of the same round. ``control`` is plain a second time: as
far as it is from 1.000, so far the others mean nothing. Figures are medians over rounds, from rank 0: by the wall
clock,
and of the processor time of the thread that calls backward().
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sftriage.demo.train import CONTEXT, VOCABULARY, SmallTransformer
from sftriage.recorder import Monitor
from sftriage.recorder.gradients import LEARNING_STEPS

TMPFS = Path("/dev/shm")
VARIANTS = ("plain", "control", "watched", "learning")
BACKWARDS_A_ROUND = LEARNING_STEPS
"""All of them have all hooks on, where that is wanted; as many, and one more, come before and are not timed."""


def small_layers() -> tuple[nn.Module, Callable[[], Tensor], float]:
    """20 layers of a weight and a bias, each with a bucket of its own."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(20))), lambda: torch.randn(4, 16), 0.001


def transformer() -> tuple[nn.Module, Callable[[], Tensor], float]:
    return SmallTransformer(), lambda: torch.randint(VOCABULARY, (8, CONTEXT)), 25


MODELS = {"40 parameters, 20 buckets": small_layers, "demo's Transformer": transformer}


class Job:
    """The model, and a monitor that watches it or not."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Callable[[], Tensor], float]], rings: Path) -> None:
        network, self.batch, bucket_mb = make()
        self.model = DistributedDataParallel(network, bucket_cap_mb=bucket_mb)
        self.monitor = Monitor(("forward", "backward"), ("backward",), rings=rings)
        self.taken_ns = dict.fromkeys(("wall", "cpu", "end"), 0)

    def round(self, variant: str) -> dict[str, float]:
        """The times of one round in microseconds a step."""
        # What has no parameters is not watched, nor is what was watched before.
        self.monitor.watch(self.model if variant == "watched" else None)
        for _ in range(LEARNING_STEPS + 1):
            self.step()
        if variant == "learning":
            self.monitor.watch(self.model)
        self.taken_ns = dict.fromkeys(self.taken_ns, 0)
        for _ in range(BACKWARDS_A_ROUND):
            self.step()
        return {clock: ns / BACKWARDS_A_ROUND / 1e3 for clock, ns in self.taken_ns.items()}

    def step(self) -> None:
        """One step; adds what its backward took, and what ending the step took."""
        step, stage = self.monitor.step(), self.monitor.stage("backward")
        step.__enter__()
        loss = self.model(self.batch()).square().mean()
        stage.__enter__()
        began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        loss.backward()
        ended_cpu_ns, ended_ns = time.thread_time_ns(), time.perf_counter_ns()
        stage.__exit__(None, None, None)
        step.__exit__(None, None, None)
        self.taken_ns["end"] += time.perf_counter_ns() - ended_ns
        self.taken_ns["wall"] += ended_ns - began_ns
        self.taken_ns["cpu"] += ended_cpu_ns - began_cpu_ns
        self.model.zero_grad()


def measure(make: Callable[[], tuple[nn.Module, Callable[[], Tensor], float]], rounds: int, rings: Path) -> object:
    job = Job(make, rings)
    taken_us: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": [], "end": []} for name in VARIANTS}
    # The same order on every rank: they meet in every backward.
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(VARIANTS, len(VARIANTS)):
            for clock, us in job.round(name).items():
                taken_us[name][clock].append(us)
    job.monitor.close()

    def over_plain(name: str, clock: str) -> float:
        pairs = zip(taken_us[name][clock], taken_us["plain"][clock], strict=True)
        return round(statistics.median(mine / plain for mine, plain in pairs), 3)

    return {
        name: {
            "backward_us": round(statistics.median(taken_us[name]["wall"]), 1),
            "best_us": round(min(taken_us[name]["wall"]), 1),
            "over_plain": over_plain(name, "wall"),
            "cpu_us": round(statistics.median(taken_us[name]["cpu"]), 1),
            "cpu_over_plain": over_plain(name, "cpu"),
            "step_end_us": round(statistics.median(taken_us[name]["end"]), 1),
        }
        for name in VARIANTS
    }


def run(rank: int, ranks: int, rounds: int, directory: str) -> None:
    logging.getLogger("sftriage").disabled = True
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=ranks)
    found = {}
    for index, (name, make) in enumerate(MODELS.items()):
        rings = Path(directory) / str(index)
        rings.mkdir(exist_ok=True)
        found[name] = measure(make, rounds, rings)
    if rank == 0:
        (Path(directory) / "found").write_text(json.dumps(found))
    dist.barrier()
    # Gloo's threads live on; see the demo.
    os._exit(0)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", type=int, default=1, help="processes; 1 leaves the noise of the others out")
    parser.add_argument("--rounds", type=int, default=150, help=f"rounds of {BACKWARDS_A_ROUND} backward passes each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=TMPFS if TMPFS.is_dir() else None) as directory:
        arguments = (options.ranks, options.rounds, directory)
        torch.multiprocessing.spawn(run, arguments, nprocs=options.ranks)
        models = json.loads((Path(directory) / "found").read_text())
    machine = {"processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__, "ranks": options.ranks}
    if options.json:
        print(json.dumps({"machine": machine, "rounds": options.rounds, "models": models}))
        return
    print(f"backward over Gloo, medians of {options.rounds} rounds; {machine}")
    for model, variants in models.items():
        print(f"  {model}")
        for name, figures in variants.items():
            print(
                f"    {name:<9}{figures['backward_us']:>9} us, {figures['over_plain']:.3f} of plain;"
                f" processor {figures['cpu_us']:>8} us, {figures['cpu_over_plain']:.3f} of plain;"
                f" ending the step {figures['step_end_us']} us"
            )


if __name__ == "__main__":
    main()
