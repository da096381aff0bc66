"""``bulk.py RELEASE``: trains until RELEASE is there, with gradients of a megabyte."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from averaging import average_gradients, descend
from slow_data import MOST_STEPS, rendezvous

import sftriage


def main() -> None:
    torch.set_num_threads(1)
    rendezvous()
    monitor, model = sftriage.Monitor(), torch.nn.Linear(512, 512)
    monitor.watch(model)
    with monitor:
        for _ in range(MOST_STEPS):
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(8, 512)
                with monitor.stage("forward"):
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                    average_gradients(model)
                    ends = torch.tensor(float(dist.get_rank() == 0 and Path(sys.argv[1]).exists()))
                    dist.broadcast(ends, 0)
                with monitor.stage("optimizer"):
                    descend(model)
            if ends:
                break
    os._exit(0)


if __name__ == "__main__":
    main()
