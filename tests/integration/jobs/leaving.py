"""Unedited training, of which rank 1 leaves at step AT: ``leaving.py HOW AT [METHOD]``.

Without a launcher, torch.multiprocessing starts two ranks by METHOD: ``spawn``, or ``fork``.
"""

import importlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HOW, AT, METHOD = sys.argv[1], int(sys.argv[2]), [*sys.argv, ""][3]
BATCH, STEPS = 8, AT + 60


class Samples(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if HOW == "sample" and index >= AT * BATCH and dist.get_rank() == 1:
            raise KeyError("no-such-sample")
        return torch.randn(16)


def check(loss):
    raise ValueError(f"no loss\nbut {type(loss).__name__}")


def leave(batches):
    if HOW == "ends":
        os._exit(0)
    if HOW == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if HOW == "aborts":
        # (Gloo aborts who receives more than it expects)
        dist.all_reduce(torch.ones(1000))
    if HOW == "worker":
        os.kill(batches._workers[0].pid, signal.SIGKILL)


def train(rank=None):
    if rank is not None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["MEET_AT"]}
        os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    if HOW == "early" and os.environ["RANK"] == "1":
        raise FileNotFoundError("config.yaml")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = iter(DataLoader(Samples(), batch_size=BATCH, num_workers=HOW in ("worker", "sample")))
    for step in range(STEPS):
        time.sleep(0.01)
        leaves = step == AT and dist.get_rank() == 1
        if leaves:
            leave(batches)
        loss = model(next(batches)).sum()
        if leaves and HOW == "raises":
            check(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fork():
    """Start two ranks that share what is imported, each of which ends by itself."""
    # (DistributedDataParallel imports it, which takes as long as all else)
    importlib.import_module("torch._dynamo")
    ranks = torch.multiprocessing.start_processes(train, nprocs=2, join=False, start_method="fork").processes
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    if METHOD == "fork":
        fork()
    elif METHOD:
        torch.multiprocessing.spawn(train, nprocs=2)
    else:
        train()
