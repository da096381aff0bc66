"""How ranks of the demo's job become slow, as it is met in real jobs: a function each, named as a job would name it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn

SLOW_S = 0.04
"""About how long each takes of a step."""


class Trainer:
    """What a rank does besides its training, in some of its stages.

    Args:
        names: which of `sftriage.demo.faults.CAUSES`.
        folder: where it may write.
        network: what it trains.
    """

    def __init__(self, names: Collection[str], folder: Path, network: nn.Module) -> None:
        self._folder, self._network = folder, network
        self._cache_lock = threading.Lock()
        self._threads: set[str] = set()
        ways: dict[str, tuple[str, Callable[[], object]]] = {
            "python-decoding": ("data", self.decode),
            "slow-disk": ("data", self.copy_shard),
            "held-lock": ("data", self.from_cache),
            "subprocess": ("data", self.tokenize),
            "extra-operator": ("forward", self.regularized),
            "recompilation": ("forward", self.regularized_anew),
            "checkpoint": ("optimizer", self.save_checkpoint),
            "slow-logging": ("other", self.log_metrics),
            "garbage": ("other", self.log_memory),
            "gil-thread": ("other", self.count_statistics),
        }
        self._ways = [ways[name] for name in names if name in ways]

    def be_slow_in(self, stage: str) -> None:
        """Do what is to be done in a stage."""
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

    def _thread(self, what: Callable[[], None]) -> None:
        name = what.__name__
        if name not in self._threads:
            self._threads.add(name)
            threading.Thread(target=what, name=name, daemon=True).start()
