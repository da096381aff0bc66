"""DistributedDataParallel on a GPU: ``gpu_ddp.py STEPS SLOW_RANK STAGE [DEVICE]`` under torchrun.

From the middle of the steps on, kernels of one rank are slow in ``forward`` or ``backward``: the host launches them and
goes on. Where there are as many GPUs as ranks each has one of its own and NCCL between them; otherwise they share one,
with Gloo. DEVICE is ``cuda``, or ``cpu`` to see whether the job itself works.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import sftriage

SLOW_S, CYCLES = 0.030, 5_000_000
DEPTH = 12
"""How often the layers are gone through: kernels of some milliseconds, beside which a host is not late by launching."""


class Slow(torch.autograd.Function):
    """Nothing, but that the device is held up in its forward, in its backward, or not at all."""

    @staticmethod
    def forward(context, value, hold, where):
        context.held = hold if where == "backward" else None
        if where == "forward":
            hold()
        return value.view_as(value)

    @staticmethod
    def backward(context, grad):
        if context.held is not None:
            context.held()
        return grad, None, None


def held_up(device: str):
    """What holds the device up for `SLOW_S`, and not the host that launches it."""
    if device == "cpu":
        return lambda: time.sleep(SLOW_S)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):  # the first ones find the clock low
        began.record()
        torch.cuda._sleep(CYCLES)
        ended.record()
        torch.cuda.synchronize()
    cycles = int(SLOW_S * 1e3 / began.elapsed_time(ended) * CYCLES)
    return lambda: torch.cuda._sleep(cycles)


def main() -> None:
    steps, slow_rank, slow_stage = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = sys.argv[4] if len(sys.argv) > 4 else "cuda"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    own = device == "cuda" and torch.cuda.device_count() >= ranks
    if own:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if own else "gloo")
    width, samples = (1024, 4096) if device == "cuda" else (64, 256)
    layers = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    model = nn.Sequential(*(layers * (DEPTH // 2))).to(device)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    hold, batch = held_up(device), torch.randn(samples, width, device=device)
    with sftriage.Monitor() as monitor:
        monitor.watch(ddp)
        for step in range(steps):
            slow = slow_stage if rank == slow_rank and step >= steps // 2 else ""
            with monitor.step():
                with monitor.stage("data"):
                    inputs = batch + 1.0
                with monitor.stage("forward"):
                    loss = Slow.apply(ddp(inputs), hold, slow).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                with monitor.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    loss.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
