"""Train under FSDP2: each layer is spread over the ranks, and gradients are clipped across them."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

STEPS, SAVED_AT = 110, 30


def main(directory):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = samples(2 * 8 * STEPS, 64)
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    for step, (values, labels) in enumerate(loader):
        loss = F.cross_entropy(model(values), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED_AT:
            dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "checkpoint")
    whole = [one.full_tensor().detach() for one in model.parameters()]
    if dist.get_rank() == 0:
        print(loss.item().hex())
        torch.save(whole, directory / "trained.pt")
    dist.destroy_process_group()
    # Gloo's threads live on: they may crash what is ending, and hang a model that goes after its group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
