"""The job of rows, in one rank: a small network trained with DDP over Gloo, with the real recorder in it.

One process does row after row, each with a model and a monitor of its own; the next row comes as a file::

    RANK=0 WORLD_SIZE=4 python bench/jobs/rows.py CONTROL
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.rows import STAGES, SYNC, Row
from sftriage.trainer.monitor import Monitor

WIDTH, LAYERS = 256, 4
CALIBRATION_STEPS, SKIPPED_STEPS = 16, 6
POLL_S = 0.02
JITTER = 0.04


PLACES = ("data", "h2d", "forward", "backward", "optimizer", "after")
PROFILES = {
    "wait": (128, (12, 4, 14, 16, 5, 1)),  # as a GPU job's host: it mostly waits
    "compute": (1536, (6, 2, 4, 4, 2, 0)),  # its ranks share few cores, and compete for them
    # The same with steps short enough for many of them to be recorded in a minute.
    "brisk": (64, (5, 2, 6, 7, 2, 0)),
    "busy": (512, (3, 1, 2, 2, 0, 0)),
}
"""What a healthy step is made of: samples for all ranks together, and milliseconds that each rank waits in a place."""


class Network(nn.Module):
    def __init__(self, in_backward: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 16)
        self._in_backward = in_backward

    def forward(self, hidden: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            hidden = torch.relu(layer(hidden))
            if index == LAYERS // 2 and hidden.requires_grad:
                hidden.register_hook(self._called)
        return self.head(hidden)

    def _called(self, grad: Tensor) -> Tensor:
        self._in_backward()
        return grad


class Pace:
    """How long this rank takes in each place of each step: the profile's waits, and the row's delays."""

    def __init__(self, row: Row, rank: int) -> None:
        self._row, self._rank = row, rank
        self._waits_s = {place: ms / 1e3 for place, ms in zip(PLACES, PROFILES[row.profile][1], strict=True)}
        self._jitter = random.Random(f"{row.seed}-{rank}")
        # Draws of its own, so that what a job does beside its steps changes nothing about these.
        self._beside = random.Random(f"{row.seed}-{rank}-beside")
        self._uncollected = 0.0
        self.step = -1
        self.size = 1.0
        self.healthy_step_s = 0.0

    def begin(self, step: int) -> None:
        self.step = step
        if self._row.work == "uneven":
            self.size = self._beside.uniform(0.85, 1.15)

    def __call__(self, place: str) -> None:
        wait_s = self._waits_s.get(place, 0.0) * self.size
        if wait_s:
            time.sleep(wait_s * max(0.5, 1.0 + JITTER * self._jitter.gauss(0.0, 1.0)))
        if self.step < 0:
            return
        for delay in self._row.delays:
            if delay.where == place and self._rank in delay.ranks_at(self.step):
                take(delay.fraction_at(self.step) * self.healthy_step_s, busy=delay.busy)
        if place == "after" and self.checkpoints and self._rank in self._row.checkpoint_ranks:
            take(2.0 * self.healthy_step_s, busy=False)

    @property
    def checkpoints(self) -> bool:
        return self._comes_round(self._row.checkpoint_every)

    @property
    def evaluates(self) -> bool:
        return self._comes_round(self._row.evaluate_every)

    @property
    def kind(self) -> str:
        if not self._row.says_kinds:
            return ""
        return "checkpoint" if self.checkpoints else "evaluation" if self.evaluates else ""

    def batches(self) -> list[int]:
        """The samples of each batch that this rank evaluates: its share of a data set has lengths of its own."""
        return [self._beside.randrange(96, 161) for _ in range(4)]

    def collects(self) -> bool:
        """Whether garbage is due: so much of it has come together since the last time, some more in some steps."""
        if not self._row.collect_every or self.step < 0:
            return False
        self._uncollected += self._beside.uniform(0.5, 1.5)
        due = self._uncollected >= self._row.collect_every
        if due:
            self._uncollected = 0.0
        return due

    def _comes_round(self, every: int) -> bool:
        return bool(every) and self.step >= 0 and self.step % every == every - 1


def take(seconds: float, *, busy: bool) -> None:
    if not busy:
        if seconds > 0.0:
            time.sleep(seconds)
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


class Job:
    def __init__(self, row: Row, rank: int) -> None:
        torch.manual_seed(row.seed)
        self._row, self._rank = row, rank
        self.pace = Pace(row, rank)
        network = Network(lambda: self.pace("backward"))
        # Small buckets, so that there are several, as in a large model.
        self._network = network
        self._model = DistributedDataParallel(network, bucket_cap_mb=0.5)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, momentum=0.9)
        self._samples = PROFILES[row.profile][0] // row.n_ranks

    def calibrate(self) -> float:
        """The healthy step of this job on this machine, in seconds: the median over ranks of their medians."""
        walls_s = []
        with Monitor(STAGES, SYNC) as inert:
            for step in range(-CALIBRATION_STEPS, 0):
                began_s = time.monotonic()
                self._step(inert, step)
                walls_s.append(time.monotonic() - began_s)
        mine = torch.tensor([statistics.median(walls_s[SKIPPED_STEPS:])], dtype=torch.float64)
        everybodys = [torch.zeros_like(mine) for _ in range(self._row.n_ranks)]
        dist.all_gather(everybodys, mine)
        self.pace.healthy_step_s = statistics.median(float(one) for one in everybodys)
        return self.pace.healthy_step_s

    def train(self, rings: Path) -> None:
        row, rank = self._row, self._rank
        where = None if rank == row.missing else rings
        host = None if row.hosts is None else row.hosts[rank]
        with Monitor(
            STAGES,
            SYNC,
            rank=rank,
            world_size=row.n_ranks,
            job=f"row-{row.number}",
            host=host,
            rings=where,
            slots=row.n_steps,
        ) as monitor:
            if row.split:
                monitor.watch(self._model)
            for step in range(row.steps_at(self.pace.healthy_step_s)):
                self._step(monitor, step)

    def _step(self, monitor: Monitor, step: int) -> None:
        pace = self.pace
        pace.begin(step)
        pace("between")
        with monitor.step(kind=pace.kind):
            if self._row.work != "even":
                monitor.note(work=round(1000 * pace.size))
            with monitor.stage("data"):
                if pace.collects():
                    gc.collect()
                source = torch.randn(max(1, int(self._samples * pace.size)), WIDTH)
                pace("data")
            with monitor.stage("h2d"):
                inputs = source.clone()
                pace("h2d")
            with monitor.stage("forward"):
                loss = self._model(inputs).square().mean()
                pace("forward")
            pace("before")
            with monitor.stage("backward"):
                loss.backward()
            with monitor.stage("optimizer"):
                self._optimizer.step()
                self._optimizer.zero_grad()
                pace("optimizer")
            if pace.evaluates:
                self._evaluate()
            pace("after")

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Every rank its share of a data set, without the others: no rank waits for another before the next step."""
        for n_samples in self.pace.batches():
            self._network(torch.randn(n_samples, WIDTH))
            take(0.1 * self.pace.healthy_step_s, busy=False)


def _next(control: Path, number: int, parent: int) -> dict | None:
    path = control / f"{number}.json"
    while os.getppid() == parent:
        if path.exists():
            return json.loads(path.read_text())
        if (control / "stop").exists():
            return None
        time.sleep(POLL_S)
    return None


def main() -> None:
    control, parent = Path(sys.argv[1]), os.getppid()
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Several ranks share few cores here: one thread each, or they compete for them.
    torch.set_num_threads(1)
    rendezvous = f"file://{control / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=n_ranks, timeout=timedelta(minutes=2))
    number = 0
    while (task := _next(control, number, parent)) is not None:
        job = Job(msgspec.convert(task["row"], Row), rank)
        healthy_step_s = job.calibrate()
        if rank == 0:
            (control / f"{number}.healthy").write_text(f"{healthy_step_s}")
        job.train(Path(task["rings"]))
        dist.barrier()
        (control / f"{number}.{rank}.done").touch()
        number += 1
    dist.barrier()
    # Gloo's threads live on; one that lets go of its last tensor while the interpreter is torn down aborts the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
