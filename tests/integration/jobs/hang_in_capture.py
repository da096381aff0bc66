"""``hang_in_capture.py DIRECTORY``: rank 1 is slow in data, and hangs in forward once it is profiled.

It leaves DIRECTORY/hung, waits for DIRECTORY/release, and trains on until DIRECTORY/end is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from averaging import average_gradients, descend

import sftriage

SLOW_FROM, SLOW_S, MOST_STEPS = 60, 0.02, 20_000


def hang_here(directory: Path) -> None:
    (directory / "hung").touch()
    while not (directory / "release").exists():
        time.sleep(0.02)


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(64, 64)
    with sftriage.Monitor() as monitor:
        for step in range(MOST_STEPS):
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(8, 64)
                    if rank == 1 and step >= SLOW_FROM:
                        time.sleep(SLOW_S)
                with monitor.stage("forward"):
                    profiled = rank == 1 and torch._C._autograd._profiler_enabled()
                    if profiled and not (directory / "release").exists():
                        hang_here(directory)
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                    average_gradients(model)
                with monitor.stage("optimizer"):
                    descend(model)
                # The ranks have to leave at the same step: the first one says so.
                ends = torch.tensor(float(rank == 0 and (directory / "end").exists()))
                dist.broadcast(ends, 0)
            if ends:
                break
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
