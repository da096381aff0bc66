"""A job whose gradients go over slow links, and of which one rank is late in every step; it has taken StragglAR in.

``chronic.py SPEC``: JSON with ``whom``, a file that says which rank is late, by ``late_s``; ``whole_s``, which all
gradients take on a link; and ``steps``. Where it says so, what is reduced around a straggler takes ``worse_s`` more.
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
from slow_links import Ring, hold_back
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sftriage.mitigate import stragglar
from sftriage.recorder import Monitor

WIDTH = 64
TIMEOUT = timedelta(seconds=20)


def main(spec: dict) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    size_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    hold_back(0.0, spec["whole_s"] / size_bytes)
    # Gloo's own is as fast as memory.
    dist.all_reduce = lambda tensor, group: Ring(tensor, list(range(n)), group).run()
    around = stragglar._Exchange.run

    def worse(exchange: stragglar._Exchange) -> None:
        time.sleep(spec.get("worse_s", 0.0))
        around(exchange)

    stragglar._Exchange.run = worse  # type: ignore[method-assign]
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
