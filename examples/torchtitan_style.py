"""A loop as torchtitan has it: FSDP2, gradients accumulated over micro-batches, clipped by their norm, checkpoints.

Its Trainer is a class with a `train_step`; the Monitor's calls go to the same places there.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import sftriage

STEPS, MICRO_BATCHES, CHECKPOINT_STEPS = 150, 2, 60


class Sequences(Dataset):
    """Token sequences, drawn anew from their index."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.randint(256, (33,), generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    """One layer."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.mlp(self.norm(x)))


def main(directory):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = nn.Sequential(nn.Embedding(256, 32), Block(32), Block(32), nn.Linear(32, 256)).to(device)
    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data_iterator = iter(DataLoader(Sequences(), batch_size=4))

    # Under FSDP forward and backward gather parameters; clipping exchanges the norm.
    monitor = sftriage.Monitor(
        stages=("data", "h2d", "forward", "backward", "optimizer"), sync=("forward", "backward", "optimizer")
    )
    for step in range(1, STEPS + 1):
        saves = step % CHECKPOINT_STEPS == 0
        with monitor.step(number=step, kind="checkpoint" if saves else ""):
            train_step(monitor, model, optimizer, data_iterator, device)
            if saves:
                dcp.save({"model": model.state_dict()}, checkpoint_id=f"{directory}/step-{step}")
    monitor.close()
    dist.destroy_process_group()


def train_step(monitor, model, optimizer, data_iterator, device):
    """One step of the optimizer."""
    optimizer.zero_grad()
    for _ in range(MICRO_BATCHES):
        with monitor.stage("data"):
            tokens = next(data_iterator)
        monitor.note(work=MICRO_BATCHES * tokens[:, 1:].numel())
        with monitor.stage("h2d"):
            tokens = tokens.to(device)
        with monitor.stage("forward"):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
        with monitor.stage("backward"):
            loss.backward()
    with monitor.stage("optimizer"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
