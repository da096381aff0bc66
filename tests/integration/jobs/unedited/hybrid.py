"""Train with tensors shared by pairs of ranks, each pair's part sharded over the others: a mesh of two dimensions."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

STEPS, BATCH = 130, 8


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 4)

    def forward(self, values):
        return self.head(values + self.down(F.gelu(self.up(values))))


def main(directory):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Network(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    dataset = samples(mesh["dp"].size() * BATCH * STEPS, 64)
    sampler = DistributedSampler(dataset, mesh["dp"].size(), mesh["dp"].get_local_rank())
    for values, labels in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
        loss = F.cross_entropy(model(values), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [one.full_tensor().detach() for one in model.parameters()]
    if dist.get_rank() == 0:
        print(loss.item().hex())
        torch.save(whole, directory / "trained.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
