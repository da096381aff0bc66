"""A job as users write them: torchrun, a DataLoader with a worker process, gradient accumulation with no_sync.

``accumulate.py STEPS SLOW_RANK [watched]``: that rank's data set is slow from the 40th step on. Steps are numbered from
1000, as those of a job that resumed from a checkpoint. With ``watched`` gradients are watched, and exchanged after each
micro-batch.
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sftriage

WATCHED = "watched" in sys.argv
MICRO_BATCHES = 4 if WATCHED else 2


class Samples(Dataset):
    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow and index >= 40 * MICRO_BATCHES:
            time.sleep(0.08)
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


def main() -> None:
    steps, slow_rank = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(dist.get_rank() == slow_rank), batch_size=1, num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        if WATCHED:
            monitor.watch(model)
        for number in range(1000, 1000 + steps):
            with monitor.step(number):
                for micro in range(MICRO_BATCHES):
                    last = WATCHED or micro == MICRO_BATCHES - 1
                    with monitor.stage("data"):
                        batch = next(batches)
                    with contextlib.nullcontext() if last else model.no_sync():
                        with monitor.stage("forward"):
                            loss = model(batch).square().mean()
                        with monitor.stage("backward"):
                            loss.backward()
                with monitor.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    del batches, loader
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
