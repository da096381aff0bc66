"""A job whose gradients go over slow links, and of which one rank is late in every step; it has taken StragglAR in.

``chronic.py SPEC``: JSON with ``whom``, a file that says which rank is late, by ``late_s``; ``whole_s``, which all
gradients take on a link; and ``steps``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sftriage.mitigate import stragglar
from sftriage.trainer.monitor import Monitor

WIDTH = 64
TIMEOUT = timedelta(seconds=20)


def hold_back(latency_s: float, s_per_byte: float) -> None:
    """Have every exchange of StragglAR's, and of the ring below, take what its message takes on such a link."""

    def transfer(self, sent, received):  # type: ignore[no-untyped-def]
        works = [dist.irecv(chunk, peer, self._group) for peer, chunk in received]
        for peer, chunk in sent:
            time.sleep(latency_s + s_per_byte * chunk.numel() * chunk.element_size())
            works.append(dist.isend(chunk, peer, self._group))
        for work in works:
            work.wait()

    stragglar._Exchange._transfer = transfer  # type: ignore[method-assign]


class Ring(stragglar._Exchange):
    """An all-reduce in a ring: each rank's sums go once around, and then the whole sums."""

    def __init__(self, gradient: torch.Tensor, ranks: list[int], group: dist.ProcessGroup) -> None:
        super().__init__(gradient, ranks, group)
        self._chunks = gradient.tensor_split(len(ranks))
        self._received = torch.empty_like(self._chunks[0])

    def run(self) -> None:
        n, me = len(self._ranks), self._ranks.index(dist.get_rank())
        after, before = self._ranks[(me + 1) % n], self._ranks[(me - 1) % n]
        for number in range(2 * (n - 1)):
            sent, own = self._chunks[(me - number) % n], self._chunks[(me - number - 1) % n]
            received = self._received[: own.numel()]
            self._transfer([(after, sent)], [(before, received)])
            if number < n - 1:
                own.add_(received)
            else:
                own.copy_(received)


def main(spec: dict) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    size_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    hold_back(0.0, spec["whole_s"] / size_bytes)
    # Gloo's own is as fast as memory.
    dist.all_reduce = lambda tensor, group: Ring(tensor, list(range(n)), group).run()
    assert stragglar.attach(model, TIMEOUT) is not None
    whom = Path(spec["whom"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor() as monitor:
        for _ in range(spec["steps"]):
            with monitor.step():
                with monitor.stage("data"):
                    if whom.read_text() == str(rank):
                        time.sleep(spec["late_s"])
                    batch = torch.randn(4, WIDTH)
                with monitor.stage("forward"):
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                with monitor.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=TIMEOUT)
    main(json.loads(sys.argv[1]))
    os._exit(0)
