"""Train a pipeline of two stages through a device mesh; with four ranks each stage is sharded over two of them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, DistributedSampler

STEPS, BATCH, MICRO_BATCHES, WIDTH = 130, 16, 4, 64


class Front(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))


class Back(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))


def main(directory):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp = mesh["dp"], mesh["pp"]
    torch.manual_seed(pp.get_local_rank())
    first = pp.get_local_rank() == 0
    model = Front() if first else Back()
    if dp.size() > 1:
        fully_shard(model, mesh=dp)
    stage = PipelineStage(model, pp.get_local_rank(), 2, torch.device("cpu"), group=pp.get_group())
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = samples(dp.size() * BATCH * STEPS, WIDTH)
    sampler = DistributedSampler(dataset, dp.size(), dp.get_local_rank())
    for values, labels in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
        optimizer.zero_grad()
        losses = []
        if first:
            schedule.step(values)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
    whole = [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]
    if dist.get_rank() == 1:
        print(torch.stack(losses).mean().item().hex())
        torch.save(whole, directory / "trained.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
