"""A loop as Megatron-LM has it: a pipeline of two stages, micro-batches sent through it, several pipelines in parallel.

Ranks of one pipeline stage do the same work and are a cohort. A rank waits in many places: for activations, for
gradients, for the other pipelines. All of that is one sync stage, `exchange`; what is left is the rank's own work.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import sftriage

STEPS, MICRO_BATCHES, BATCH, WIDTH, PIPELINE = 150, 4, 4, 64, 2


class Samples(Dataset):
    """Vectors and their classes, drawn anew from their index."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return values, (values.sum() > 0).long()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    stage, pipelines = rank % PIPELINE, world // PIPELINE
    # As mpu.initialize_model_parallel does: with whom gradients are averaged.
    groups = [dist.new_group([pipeline * PIPELINE + one for pipeline in range(pipelines)]) for one in range(PIPELINE)]
    layers = [nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH if stage == 0 else 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(Samples(), batch_size=BATCH))

    monitor = sftriage.Monitor(
        stages=("data", "forward", "backward", "exchange", "optimizer"), sync=("exchange",), cohort=f"pp{stage}"
    )
    for _ in range(STEPS):
        with monitor.step():
            optimizer.zero_grad()
            run_pipeline(monitor, model, batches, rank, stage)
            with monitor.stage("exchange"):
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=groups[stage])
                    parameter.grad /= pipelines
                # The norm is that of the whole model.
                norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm() ** 2
                dist.all_reduce(norm)
            with monitor.stage("optimizer"):
                nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm.sqrt())
                optimizer.step()
    monitor.close()
    dist.destroy_process_group()


def run_pipeline(monitor, model, batches, rank, stage):
    """All micro-batches forward and then all of them backward: Megatron's schedules interleave the same calls."""
    passed = []
    for _ in range(MICRO_BATCHES):
        with monitor.stage("data"):
            values, labels = next(batches)
        if stage > 0:
            values = torch.empty(BATCH, WIDTH)
            with monitor.stage("exchange"):
                dist.recv(values, rank - 1)
            values.requires_grad_()
        with monitor.stage("forward"):
            output = model(values)
            if stage == PIPELINE - 1:
                output = nn.functional.cross_entropy(output, labels) / MICRO_BATCHES
        if stage < PIPELINE - 1:
            with monitor.stage("exchange"):
                dist.send(output.detach(), rank + 1)
        passed.append((values, output))
    for values, output in passed:
        gradient = None
        if stage < PIPELINE - 1:
            gradient = torch.empty_like(output)
            with monitor.stage("exchange"):
                dist.recv(gradient, rank + 1)
        with monitor.stage("backward"):
            output.backward(gradient)
        if stage > 0:
            with monitor.stage("exchange"):
                dist.send(values.grad, rank - 1)


if __name__ == "__main__":
    main()
    # Gloo's threads live on, and may crash what is ending.
    sys.stdout.flush()
    os._exit(0)
