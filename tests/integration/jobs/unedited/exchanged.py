"""Train with exchanges of one's own: by hand, in hooks, sharded in the optimizer, now and then, in a ring."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

STEPS, BATCH = 180, 8
LOCAL_STEPS, LOCAL_FROM = 8, 20


class Sharded(torch.optim.SGD):
    """ZeRO: each rank reduces its part of the gradients, and takes the step of that."""

    @torch.no_grad()
    def step(self, closure=None):
        world, rank = dist.get_world_size(), dist.get_rank()
        works = []
        for group in self.param_groups:
            for param in group["params"]:
                flat = param.grad.reshape(-1)
                shard = torch.empty(flat.numel() // world)
                dist.reduce_scatter_tensor(shard, flat)
                part = param.view(-1).chunk(world)[rank]
                part.add_(shard, alpha=-group["lr"] / world)
                works.append((dist.all_gather_into_tensor(flat, part.clone(), async_op=True), param, flat))
        for work, param, flat in works:
            work.wait()
            param.copy_(flat.view_as(param))


class Hooked(torch.optim.SGD):
    """Horovod: hooks begin to reduce gradients in backward, and the optimizer waits for that."""

    works = ()

    def step(self, closure=None):
        for work in self.works:
            work.wait()
        self.works.clear()
        return super().step(closure)


def around_a_ring(model):
    """Gradients go from rank to rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for param in model.parameters():
        passed = param.grad.clone()
        for _ in range(world - 1):
            received = torch.empty_like(passed)
            sent = dist.isend(passed, (rank + 1) % world)
            dist.recv(received, (rank - 1) % world)
            sent.wait()
            param.grad += received
            passed = received


def main(way):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 252), nn.ReLU(), nn.Linear(252, 12))
    kind = {"sharded": Sharded, "hooks": Hooked}.get(way, torch.optim.SGD)
    optimizer = kind(model.parameters(), lr=0.01)
    if way == "hooks":
        optimizer.works = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(
                lambda one: optimizer.works.append(dist.all_reduce(one.grad, async_op=True))
            )
    if way == "local":
        # As Accelerate's LocalSGD: DDP, which never exchanges anything, and the mean of the parameters now and then.
        model = DistributedDataParallel(model)
        model.require_backward_grad_sync = False
    dataset = samples(dist.get_world_size() * BATCH * STEPS, 64)
    for step, (values, labels) in enumerate(DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(values), labels)
        loss.backward()
        if way == "ring":
            around_a_ring(model)
        if way == "averaged":
            for param in model.parameters():
                dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
                param.grad.data /= dist.get_world_size()
        optimizer.step()
        if way == "local" and step >= LOCAL_FROM and step % LOCAL_STEPS == 0:
            for param in model.parameters():
                dist.all_reduce(param.data)
                param.data /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(loss.item().hex())
    dist.destroy_process_group()
    # Gloo's threads live on: they may crash what is ending, and hang a model that goes after its group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]).name)
