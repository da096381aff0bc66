"""Four ranks train a small model; from step SLOW_FROM on, the batches of one of them come SLOW_S seconds late."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

STEPS = int(os.environ.get("STEPS", "2000"))
SLOW_RANK, SLOW_FROM, SLOW_S = 3, int(os.environ.get("SLOW_FROM", "200")), float(os.environ.get("SLOW_S", "0.1"))


class Batches(IterableDataset):
    """A rank's batches."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        for step in range(STEPS):
            if self.rank == SLOW_RANK and step >= SLOW_FROM:
                time.sleep(SLOW_S)
            yield torch.randn(256, 64), torch.randint(4, (256,))


def main():
    """Train, as one of the ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (values, labels) in enumerate(DataLoader(Batches(dist.get_rank()), batch_size=None)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(values), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(step, loss.item(), flush=True)
    dist.destroy_process_group()
    # Gloo's threads live on: they may crash what is ending, and hang a model that goes after its group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
