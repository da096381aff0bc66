"""Train without DDP: gradients are averaged by hand, as the tutorial on distributed applications has it."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

STEPS, BATCH = 150, 8


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def main(directory):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    dataset = samples(dist.get_world_size() * BATCH * STEPS, 64)
    for values, labels in DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(values), labels)
        loss.backward()
        average_gradients(model)
        optimizer.step()
    if dist.get_rank() == 0:
        print(loss.item().hex())
        torch.save([one.detach() for one in model.parameters()], directory / "trained.pt")
    dist.destroy_process_group()
    # Gloo's threads live on: they may crash what is ending, and hang a model that goes after its group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
