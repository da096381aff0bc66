"""Ranks that share gradients under a switch of one host, and of several, in turn: what it takes to begin a backward.

``votes.py SPEC``: JSON with ``hosts``, as which ranks are taken, by directories of their own; ``steps``, and the
seconds that each sleeps, ``step_s``. The first rank says, in JSON, of each rank the microseconds that each backward's
beginning has taken it: on one host, on several, and on several with a vote in each; and in how many of the second kind
it has voted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sftriage.mitigate import stragglar, switching

SECOND_NS = 1_000_000_000
WIDTH = 64


class Kind:
    """A model whose gradients are exchanged, and what beginning that has taken."""

    def __init__(self, rings: Path) -> None:
        rings.mkdir(exist_ok=True)
        os.environ["SFTRIAGE_RINGS"] = str(rings)
        self.model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        self.state = stragglar.attach(self.model)
        self.took_us: list[float] = []
        self._begin, self.state.begin = self.state.begin, self.begin

    def begin(self) -> None:
        began_ns = time.perf_counter_ns()
        self._begin()
        self.took_us.append((time.perf_counter_ns() - began_ns) / 1e3)


def main(spec: dict) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    directory: list = [None]
    with TemporaryDirectory() as scratch:
        directory[0] = scratch
        dist.broadcast_object_list(directory)
        shared, host = Path(directory[0]), f"host-{rank * spec['hosts'] // n}"
        kinds = {"one_host": Kind(shared / "all"), "several": Kind(shared / host), "each_round": Kind(shared / host)}
        # (a round takes a second by this clock)
        kinds["each_round"].state._switch.clock = count(1, SECOND_NS).__next__
        assert [isinstance(one.state._switch, switching.MultiHostSwitch) for one in kinds.values()] == [
            False,
            True,
            True,
        ]
        votes, cast = [0], kinds["several"].state._switch.cast

        def counting(words: Sequence[int]) -> Callable[[], Sequence[int]]:
            votes[0] += 1
            return cast(words)

        kinds["several"].state._switch.cast = counting
        batch = torch.randn(4, WIDTH)
        for step in range(spec["steps"]):
            if step == (warmup := spec["steps"] // 10):
                votes[0] = 0
            for one in kinds.values():
                time.sleep(spec["step_s"])
                one.model(batch).square().mean().backward()
        took: list = [None] * n
        # (the first exchanges set up what the others have)
        took_us = {name: one.took_us[warmup:] for name, one in kinds.items()}
        dist.all_gather_object(took, {"took_us": took_us, "votes": votes[0]})
        if rank == 0:
            sys.stdout.write(json.dumps(took) + "\n")
            sys.stdout.flush()
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(json.loads(sys.argv[1]))
    os._exit(0)
