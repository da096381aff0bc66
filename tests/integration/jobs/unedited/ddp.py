"""Train under DDP, as the tutorials have it: a checkpoint an epoch by the first rank, and an evaluation by all."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def evaluate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for values, labels in loader:
            right += (model(values).argmax(1) == labels).sum().item()
    model.train()
    return right


def main(directory, epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    train, test = samples(640, 64), samples(64, 64)
    sampler = DistributedSampler(train)
    loader, tests = DataLoader(train, batch_size=8, sampler=sampler), DataLoader(test, batch_size=32)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    model = DDP(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for values, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(values), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        right = evaluate(model, tests)
        if rank == 0:
            torch.save({"model": network.state_dict(), "epoch": epoch}, directory / "checkpoint.pt")
            print(epoch, loss.item().hex(), right)
    if rank == 0:
        torch.save([one.detach() for one in network.parameters()], directory / "trained.pt")
    dist.destroy_process_group()
    # Gloo's threads live on: they may crash what is ending, and hang a model that goes after its group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
