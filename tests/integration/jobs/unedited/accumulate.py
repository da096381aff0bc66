"""Train under DDP in bfloat16, with gradients accumulated over micro-batches: only the last one is exchanged."""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

MICRO_BATCHES, STEPS = 4, 110


def main(directory):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = samples(dist.get_world_size() * 4 * MICRO_BATCHES * STEPS, 64)
    batches = iter(DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            values, labels = next(batches)
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(values), labels) / MICRO_BATCHES
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        print(loss.item().hex())
        torch.save([one.detach() for one in model.parameters()], directory / "trained.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
