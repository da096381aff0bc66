"""A DDP job over Gloo that sleeps instead of computing, with planted faults (`FAULTS`).

With ``--times`` it goes on unrecorded after its steps, in blocks with the faults and with only those that are left in
turn, and writes how long the steps of each block took. Its ranks have real-time priority if they may: other processes
then hardly delay the end of a sleep.

torchrun --nproc-per-node 4 bench/jobs/promises.py --fault data --steps 250 --times FILE --block-steps 20
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sftriage.trainer.monitor import Monitor

STAGES_S = {"data": 0.008, "forward": 0.012, "backward": 0.012, "optimizer": 0.003}
JITTER = 0.02
STEADY: dict[str, tuple[str, tuple[int, ...], float]] = {
    "data": ("data", (1,), 0.024),
    "forward": ("forward", (2,), 0.012),
    "backward": ("backward", (2,), 0.016),
    "host": ("forward", (2, 3), 0.016),
}
"""Faults of every step: their stage, their ranks, and how much longer it takes."""
STALL_STEPS, STALL_S = 25, 0.25
EVALUATION_STEPS, EVALUATION_S = 20, 0.4
COLLECT_STEPS, OBJECTS = 4, 300_000
FAULTS = (*STEADY, "stall", "evaluation", "shared", "gc", "lengths")
"""``evaluation``: of rank 0 alone, ``shared``: of all ranks."""


class Work(nn.Module):
    """A layer that takes time in forward and in backward."""

    def __init__(self, rank: int, n_ranks: int, faults: set[str]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self._rank, self._n_ranks, self.faults = rank, n_ranks, faults
        self._jitter = random.Random(rank)
        self._length = 1.0

    def begin(self, step: int) -> None:
        draw = random.Random(step)
        lengths = [draw.uniform(0.4, 1.6) for _ in range(self._n_ranks)]
        # The same sequences, packed evenly or not.
        self._length = lengths[self._rank] if "lengths" in self.faults else sum(lengths) / self._n_ranks

    def take(self, stage: str) -> None:
        took_s = STAGES_S[stage] * self._jitter.gauss(1.0, JITTER)
        took_s *= self._length if stage in ("forward", "backward") else 1.0
        of_stage = [STEADY[fault] for fault in self.faults & STEADY.keys() if STEADY[fault][0] == stage]
        time.sleep(max(0.0, took_s) + sum(more_s for _, ranks, more_s in of_stage if self._rank in ranks))

    def forward(self, x: Tensor) -> Tensor:
        self.take("forward")
        out: Tensor = self.layer(x)
        out.register_hook(lambda _: self.take("backward"))  # type: ignore[no-untyped-call]
        return out


class Job:
    def __init__(self, faults: set[str], rank: int, n_ranks: int) -> None:
        self.work, self._rank, self._n_ranks, self._step = Work(rank, n_ranks, faults), rank, n_ranks, 0
        self.model = DistributedDataParallel(self.work)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._objects = [[number] for number in range(OBJECTS)] if rank == 1 else []
        gc.disable()

    def train(self, monitor: Monitor, faults: set[str], n_steps: int) -> list[float]:
        """Take some steps, and return how long each took."""
        self.work.faults = faults
        # (the collector skips what is frozen)
        (gc.unfreeze if "gc" in faults else gc.freeze)()
        ended_s = [time.perf_counter()]
        for _ in range(n_steps):
            self._take_step(monitor, self._step)
            self._step += 1
            ended_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(ended_s)]

    def _take_step(self, monitor: Monitor, step: int) -> None:
        work, rank = self.work, self._rank
        work.begin(step)
        alone = "evaluation" in work.faults and rank == 0
        evaluates = step % EVALUATION_STEPS == EVALUATION_STEPS - 1 and (alone or "shared" in work.faults)
        with monitor.step(kind="evaluation" if evaluates else None):
            with monitor.stage("data"):
                work.take("data")
                if "stall" in work.faults and rank == 3 and step % STALL_STEPS == 0:
                    time.sleep(STALL_S)
                if self._objects and step % COLLECT_STEPS == 0:
                    gc.collect()
            with monitor.stage("forward"):
                loss = self.model(torch.ones(8, 64)).square().mean()
            with monitor.stage("backward"):
                loss.backward()
            with monitor.stage("optimizer"):
                self._optimizer.step()
                self._optimizer.zero_grad()
                work.take("optimizer")
            if evaluates:
                time.sleep(EVALUATION_S if alone else EVALUATION_S / self._n_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--fault", "--left"):
        parser.add_argument(name, action="append", default=[], choices=FAULTS)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--block-steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    rank, n_ranks, faults = dist.get_rank(), dist.get_world_size(), set(options.fault)
    job = Job(faults, rank, n_ranks)
    with Monitor(tuple(STAGES_S), host=f"node-{2 * rank // n_ranks}" if "host" in faults else None) as monitor:
        monitor.watch(job.model)
        job.train(monitor, faults, options.steps)
    if options.times is not None:
        of_blocks = [set(options.left) if number % 2 else faults for number in range(options.blocks)]
        taken_s = [job.train(monitor, some, options.block_steps) for some in of_blocks]
        if rank == 0:
            options.times.write_text(json.dumps(taken_s))
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
