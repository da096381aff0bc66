"""Ranks of which one comes late to an all-reduce, over links on which a message takes as long as it is said to.

``late_rank.py SPEC``: JSON with ``size_bytes``, ``latency_s``, ``s_per_byte``, ``delays_s`` and ``rounds``. Messages
really go over Gloo, each held back for as long as its link takes: what cores and loopback take comes on top.
Of each delay, a ring and StragglAR take turns. The first rank says, in JSON, of each the seconds from where the last
rank was there to where all had the sum.
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

sys.path.append(str(Path(__file__).parents[2] / "tests" / "integration" / "jobs"))
from slow_links import Ring, hold_back

from sftriage.mitigate import stragglar


def main(spec: dict) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    hold_back(spec["latency_s"], spec["s_per_byte"])
    ranks, late = list(range(n)), n - 1
    gradient = torch.empty(spec["size_bytes"] // 4)
    told = []
    for delay_s in spec["delays_s"]:
        took: dict[str, list[float]] = {"ring": [], "stragglar": []}
        for _ in range(spec["rounds"]):
            for name, exchange in (("ring", Ring), ("stragglar", stragglar._Exchange)):
                gradient.fill_(rank + 1.0)
                dist.barrier()
                if rank == late:
                    time.sleep(delay_s)
                began_s = time.monotonic()
                exchange(gradient, ranks, dist.group.WORLD).run()
                moments: list = [None] * n
                dist.all_gather_object(moments, (began_s, time.monotonic()))
                assert torch.all(gradient == n * (n + 1) / 2), f"{name}: a wrong sum"
                took[name].append(max(ended_s for _, ended_s in moments) - moments[late][0])
        told.append({"delay_s": delay_s, **took})
    if rank == 0:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    main(json.loads(sys.argv[1]))
    os._exit(0)
