"""A DDP rank over Gloo that watches its gradients; rank 1 is slow in the middle of its backward pass.

``ready.py DIRECTORY ROW...``: each ROW is one of `moments.ROWS`, whose rings, and the files by which the ranks hear
each other, lie in DIRECTORY/ROW. Rank 1 pauses for PAUSE_S *after* rank 0 has all its gradients of that step, so that
their order is certain whatever the machine is doing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sftriage
from tests.integration.jobs.moments import PAUSE_S, SLOW, STEPS, THAWED_AT

BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")
"""What takes the graphs, which are cut where DDP exchanges; `make soak` has `inductor`, which compiles for a minute."""
DEADLINE_S, WIDTH = 60.0, 32


class Meeting:
    """In the middle of backward: rank 0 says when it has all its gradients, rank 1 waits for that and then pauses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.step = 0
        self.on = False

    def said(self) -> Path:
        return self.directory / f"step-{self.step}"

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        if self.on and dist.get_rank() == SLOW:
            end_s = time.monotonic() + DEADLINE_S
            while not self.said().exists():
                assert time.monotonic() < end_s, "rank 0 did not say that it has its gradients"
                time.sleep(0.001)
            time.sleep(PAUSE_S)
        elif self.on:
            # Called when every gradient is there, and before DDP's own callback, which waits for the reduction.
            torch.autograd.Variable._execution_engine.queue_callback(self.said().touch)
        return grad


class Network(nn.Module):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.meeting = meeting
        self.skip_first = False

    @torch.compiler.disable
    def meet(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.register_hook(self.meeting)
        return hidden

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        hidden = second(value if self.skip_first else first(value).relu()).relu()
        return fourth(third(self.meet(hidden)).relu())


def compiles() -> bool:
    try:
        return bool(torch.compile(lambda value: value + 1, backend=BACKEND)(torch.zeros(2)).sum() == 2)
    except Exception as error:
        sys.stdout.write(f"torch.compile does not work here: {str(error).splitlines()[0]}\n")
        return False


def train(row: str, directory: Path) -> None:
    torch.manual_seed(0)
    meeting = Meeting(directory)
    network = Network(meeting)
    # Several small buckets, which a compiled model does not take.
    bucket_mb = 25 if row == "compile" else 0.005
    ddp = DistributedDataParallel(network, bucket_cap_mb=bucket_mb, find_unused_parameters=row in ("unused", "thawed"))
    model = torch.compile(ddp, backend=BACKEND) if row == "compile" else ddp
    if row == "thawed":
        network.layers[0].requires_grad_(False)
    batches = 3 if row == "accumulate" else 1
    with sftriage.Monitor(stages=("forward", "backward"), sync=("backward",), rings=directory) as monitor:
        monitor.watch(ddp)
        for step in range(STEPS):
            meeting.step = step
            network.skip_first = row == "unused" and step % 3 == 2
            if row == "thawed" and step == THAWED_AT:
                network.layers[0].requires_grad_(True)
            with monitor.step():
                for batch in range(batches):
                    meeting.on = last = batch == batches - 1
                    with contextlib.nullcontext() if last else ddp.no_sync():
                        with monitor.stage("forward"):
                            loss = model(torch.randn(8, WIDTH)).square().mean()
                        with monitor.stage("backward"):
                            loss.backward()
            ddp.zero_grad()


def main() -> None:
    directory, rows = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for row in rows:
        (directory / row).mkdir(exist_ok=True)
        if row != "compile" or compiles():
            train(row, directory / row)
        dist.barrier()


if __name__ == "__main__":
    main()
