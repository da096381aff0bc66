"""Train under DDP in a process that nobody may look into, until one rank waits for a lock that is never let go."""

import ctypes
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import Samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

PR_SET_DUMPABLE, HANGS_AT = 4, 800


class Guarded(Samples):
    """Its samples are read under a lock."""

    def __init__(self, n_samples, width):
        super().__init__(n_samples, width)
        self.lock = threading.Lock()

    def __getitem__(self, index):
        with self.lock:
            return super().__getitem__(index)


def main(directory):
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = Guarded(8000, 64)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (values, labels) in enumerate(DataLoader(dataset, batch_size=8)):
        F.cross_entropy(model(values), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == HANGS_AT and dist.get_rank() == 1:
            (directory / "hangs").write_text(str(os.getpid()))
            dataset.lock.acquire()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
