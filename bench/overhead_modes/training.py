"""A training step of a chosen length on one thread of a processor: the same operators whatever its size."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

STAGES = ("data", "forward", "backward", "optimizer")
WIDTH = 512
SMALL_WIDTH, SMALL_BATCH = 8, 4
FIRST_BATCH = 512
BATCH_STEP = 16
SIZING_STEPS = 15


class Training:
    """A model of five layers, its optimiser, and batches that are made beforehand."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(5):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = batch
        self._batches = [torch.randn(batch, width) for _ in range(2)]
        self._next = 0

    def data(self) -> Tensor:
        self._next ^= 1
        return self._batches[self._next]

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def step(self) -> None:
        """A step without anybody watching: what all else is compared with."""
        batch = self.data()
        loss = self.forward(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def sized(step_s: float) -> Training:
    """A training whose step takes about so long here, now."""
    trial = Training(WIDTH, FIRST_BATCH)
    taken_s = median(timed_s(trial.step) for _ in range(SIZING_STEPS))
    return Training(WIDTH, max(BATCH_STEP, round(FIRST_BATCH * step_s / taken_s / BATCH_STEP) * BATCH_STEP))


def small() -> Training:
    """The same operators on next to nothing: what a tool adds for each of them stands out."""
    return Training(SMALL_WIDTH, SMALL_BATCH)


def timed_s(step: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s
