"""The job the demo watches: a small Transformer trained with DDP over Gloo, as a user's own script would be.

Launched by torchrun. It knows the faults (it injects them) and tells nobody; all that leaves it is what the Monitor
records::

    python -m torch.distributed.run --nproc-per-node 4 -m sftriage.demo.train --cause slow-dataset:2 --fault-step 120
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sftriage
from sftriage.demo.faults import CausedFault, Fault, parse_cause, parse_fault
from sftriage.demo.trainer import SLOW_S, Trainer

VOCABULARY, CONTEXT, WIDTH, BATCH = 512, 48, 96, 8


class SmallTransformer(nn.Module):
    """Two causal Transformer layers over bytes-like tokens; `pause_s` is slept in the middle of its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.pause_s = 0.0

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (batch, token, vocabulary)."""
        hidden = self.tokens(tokens_BT) + self.positions
        if self.pause_s and hidden.requires_grad:
            hidden.register_hook(self._pause)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        logits: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits

    def _pause(self, grad: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        return grad


class Sequences(Dataset[Tensor]):
    """Sequences with something to learn in them: each token is the sum of the two before it, with noise.

    ``storage_s`` is how long the storage takes for a sample.
    """

    def __init__(self) -> None:
        self.storage_s = 0.0

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=generator).tolist()
        for t in range(2, CONTEXT + 1):
            tokens[t] = (tokens[t - 1] + tokens[t - 2]) % VOCABULARY
        if self.storage_s:
            time.sleep(self.storage_s)
        return torch.tensor(tokens)


def batches(samples: Sequences, rank: int, ranks: int) -> Iterator[Tensor]:
    """Endless batches of a rank's share of the samples."""
    yield from DataLoader(samples, BATCH, sampler=range(rank, len(samples), ranks))


def pause_for(faults: list[Fault], stage: str, *, rank: int) -> None:
    """Be slow here, if this rank is to be."""
    for fault in faults:
        if fault.stage == stage and fault.rank == rank:
            time.sleep(fault.delay_s)


def train(steps: int, faults: list[Fault], causes: list[CausedFault], fault_step: int, folder: Path) -> None:
    """Train for so many steps; from ``fault_step`` on, with the faults and the causes."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = SmallTransformer()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Sequences()
    source = batches(samples, rank, dist.get_world_size())
    mine = [one.name for one in causes if one.rank == rank]
    trainer, healthy = Trainer(mine, folder, network), Trainer((), folder, network)
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        for step in range(steps):
            active, its = (faults, trainer) if step >= fault_step else ([], healthy)
            samples.storage_s = SLOW_S / BATCH if its is trainer and "slow-dataset" in mine else 0.0
            network.pause_s = sum(fault.delay_s for fault in active if fault.stage == "backward" and fault.rank == rank)
            with monitor.step():
                with monitor.stage("data"):
                    tokens_BT = next(source)
                    its.be_slow_in("data")
                    pause_for(active, "data", rank=rank)
                with monitor.stage("forward"):
                    logits = model(tokens_BT[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
                    its.be_slow_in("forward")
                    pause_for(active, "forward", rank=rank)
                with monitor.stage("backward"):
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                with monitor.stage("optimizer"):
                    optimizer.step()
                    its.be_slow_in("optimizer")
                    pause_for(active, "optimizer", rank=rank)
                its.be_slow_in("other")
                pause_for(active, "other", rank=rank)
    # (its output goes into the run directory, whose disk may be full)
    with contextlib.suppress(OSError):
        if rank == 0:
            sys.stdout.write(f"trained {steps} steps, last loss {loss.item():.3f}\n")
        sys.stdout.flush()


def main() -> None:
    """Parse, join the process group, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fault", action="append", default=[], type=parse_fault, help="STAGE:RANK:MS")
    parser.add_argument("--cause", action="append", default=[], type=parse_cause, help="NAME:RANK")
    parser.add_argument("--fault-step", type=int, default=120)
    args = parser.parse_args()
    # Several ranks share few cores here: one thread each, or they fight over them.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        train(args.steps, args.fault, args.cause, args.fault_step, Path(folder))
    dist.destroy_process_group()
    # Gloo's threads live on. One that lets go of its last tensor while the interpreter is being torn down aborts the
    # process (pytorch/pytorch#179291; seen here in one job of a hundred on a busy machine), so it is not torn down.
    os._exit(0)


if __name__ == "__main__":
    main()
