"""The job the demo watches: a small Transformer trained with DDP over Gloo, as a user's own script would be.

Launched by torchrun. It injects the faults itself; sftriage gets only what the Monitor records::

    python -m torch.distributed.run --nproc-per-node 4 -m sftriage.demo.train --cause slow-dataset:2 --fault-step 120
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sftriage
from sftriage.demo.faults import Fault, parse_cause, parse_fault

SLOW_S = 0.04
"""About how long each fault delays a step."""


class Trainer:
    """The faults of one rank. ``storage_s`` delays each sample, ``backward_s`` each backward pass."""

    def __init__(self, faults: Iterable[Fault], folder: Path, network: nn.Module) -> None:
        self._folder, self._network = folder, network
        self._cache_lock, self._index_lock = threading.Lock(), threading.Lock()
        self._threads: set[str] = set()
        self.storage_s = self.backward_s = 0.0
        self._gathers = False
        self._ways: list[tuple[str, Callable[[], object]]] = []
        for fault in faults:
            if fault.name == "slow-dataset":
                self.storage_s = SLOW_S / BATCH
            elif fault.name == "backward":
                self.backward_s += fault.delay_s
            elif fault.delay_s:
                self._ways.append((fault.name, partial(pause_for, fault)))
            elif fault.name == "hang-collective":
                self._gathers = True
            elif fault.name != "hang-worker":
                # (a fault in a background thread is in no stage, and in no line of the training thread)
                way = getattr(self, fault.cause.function or "count_statistics")
                self._ways.append((fault.cause.stage or "other", way))

    def be_slow_in(self, stage: str) -> None:
        """Run the faults of a stage."""
        for where, way in self._ways:
            if where == stage:
                way()

    def decode(self) -> int:
        data, checksum, end_s = os.urandom(512), 0, time.perf_counter() + SLOW_S
        while time.perf_counter() < end_s:
            for byte in data:
                checksum = (checksum * 31 + byte) % 1_000_003
        return checksum

    def copy_shard(self) -> None:
        end_s = time.perf_counter() + SLOW_S
        with (self._folder / "shard.bin").open("wb") as shard:
            while time.perf_counter() < end_s:
                shard.write(bytes(4 << 20))
                shard.flush()
                os.fsync(shard.fileno())

    def from_cache(self) -> None:
        self._thread(self.refresh_cache)
        with self._cache_lock:
            pass

    def refresh_cache(self) -> None:
        while True:
            with self._cache_lock:
                time.sleep(2 * SLOW_S)
            time.sleep(0.001)

    def tokenize(self) -> None:
        subprocess.run(["sleep", str(SLOW_S)], check=True)

    def regularized(self) -> torch.Tensor:
        end_s, weights = time.perf_counter() + SLOW_S, torch.randn(384, 384)
        while time.perf_counter() < end_s:
            weights = torch.tanh(weights @ weights.T)
        return weights.square().mean()

    def regularized_anew(self) -> torch.Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(lambda weights: weights.square().sin().mean(), backend="aot_eager")
        return compiled(torch.randn(64, 64))  # type: ignore[no-any-return]  # torch leaves it untyped

    def save_checkpoint(self) -> None:
        moments = torch.zeros(6 << 20)
        torch.save({"model": self._network.state_dict(), "moments": moments}, self._folder / "checkpoint.pt")

    def log_metrics(self) -> None:
        end_s = time.perf_counter() + SLOW_S
        with (self._folder / "metrics.jsonl").open("a") as metrics:
            while time.perf_counter() < end_s:
                metrics.write(json.dumps({"time_s": time.time()}) + "\n")
                metrics.flush()
                os.fsync(metrics.fileno())

    def log_memory(self) -> int:
        return gc.collect()

    def count_statistics(self) -> None:
        self._thread(self.statistics)

    def statistics(self) -> None:
        total = 0
        while True:
            time.sleep(0.01)
            for number in range(400_000):
                total += number * number

    def look_up(self) -> None:
        self._thread(self.refresh_index)
        with self._cache_lock:
            time.sleep(SLOW_S)
            with self._index_lock:
                pass

    def refresh_index(self) -> None:
        while True:
            with self._index_lock:
                time.sleep(SLOW_S)
                with self._cache_lock:
                    pass

    def validate(self, loss: Tensor) -> None:
        loss = loss.detach().reshape(1)
        if self._gathers:
            dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], loss)
        else:
            dist.all_reduce(loss)

    def _thread(self, target: Callable[[], None]) -> None:
        name = target.__name__
        if name not in self._threads:
            self._threads.add(name)
            threading.Thread(target=target, name=name, daemon=True).start()


VOCABULARY, CONTEXT, WIDTH, BATCH = 512, 48, 96, 8


class SmallTransformer(nn.Module):
    """Two causal Transformer layers over bytes-like tokens; `pause_s` delays the middle of its backward pass."""

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
    """Sequences that can be learnt: each token is the sum of the two before it.

    ``storage_s`` is how long the storage takes per sample; the ``missing`` one is never there.
    """

    def __init__(self, folder: Path) -> None:
        self.storage_s, self.missing = 0.0, -1
        self._folder = folder

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=generator).tolist()
        for t in range(2, CONTEXT + 1):
            tokens[t] = (tokens[t - 1] + tokens[t - 2]) % VOCABULARY
        if self.storage_s:
            time.sleep(self.storage_s)
        if index == self.missing:
            self.read_shard()
        return torch.tensor(tokens)

    def read_shard(self) -> bytes:
        shard = self._folder / "shard"
        os.mkfifo(shard)
        return shard.read_bytes()


def pause_for(fault: Fault) -> None:
    """Sleep for the fault's delay."""
    time.sleep(fault.delay_s)


def train(steps: int, faults: list[Fault], fault_step: int, folder: Path) -> None:
    """Train for ``steps`` steps, with the faults from ``fault_step`` on."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = SmallTransformer()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Sequences(folder)
    mine = [fault for fault in faults if fault.rank == rank]
    sampler, workers = range(rank, len(samples), dist.get_world_size()), 0
    if any(fault.name == "hang-worker" for fault in mine):
        samples.missing, workers = sampler[fault_step * BATCH], 1
    loader = DataLoader(samples, BATCH, sampler=sampler, num_workers=workers)
    slow = Trainer(mine, folder, network)
    healthy = Trainer((), folder, network)
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        source = iter(loader)  # (a worker that starts after the Monitor describes its own threads)
        for step in range(steps):
            trainer = slow if step >= fault_step else healthy
            samples.storage_s, network.pause_s = trainer.storage_s, trainer.backward_s
            with monitor.step():
                with monitor.stage("data"):
                    tokens_BT = next(source)
                    trainer.be_slow_in("data")
                with monitor.stage("forward"):
                    logits = model(tokens_BT[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
                    trainer.be_slow_in("forward")
                with monitor.stage("backward"):
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                with monitor.stage("optimizer"):
                    optimizer.step()
                    trainer.be_slow_in("optimizer")
                trainer.be_slow_in("other")
            if step == fault_step and any(fault.name == "hang-collective" for fault in faults):
                trainer.validate(loss)
    # (its output goes into the run directory, whose disk may be full)
    with contextlib.suppress(OSError):
        if rank == 0:
            sys.stdout.write(f"trained {steps} steps, last loss {loss.item():.3f}\n")
        sys.stdout.flush()


def main() -> None:
    """Parse, join the process group, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fault", dest="faults", action="append", type=parse_fault, help="STAGE:RANK:MS")
    parser.add_argument("--cause", dest="faults", action="append", type=parse_cause, help="NAME:RANK")
    parser.add_argument("--fault-step", type=int, default=120)
    args = parser.parse_args()
    # Several ranks share few cores here: one thread each, or they compete for them.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        train(args.steps, args.faults or [], args.fault_step, Path(folder))
    dist.destroy_process_group()
    # Gloo's threads live on. A thread that frees its last tensor while the interpreter is torn down aborts the
    # process (pytorch/pytorch#179291; in one job of a hundred on a busy machine), so skip the teardown.
    os._exit(0)


if __name__ == "__main__":
    main()
