"""What a hook on a parameter sees under FSDP2: a rank under fully_shard over Gloo; rank 1 pauses inside its backward.

``sharded.py DIRECTORY [PAUSE_S]``: prints a line of JSON: what `Monitor.watch` made
of the model, and, of the same steps, when a hook of this script's own saw the last gradient accumulated (``last_ns``,
and ``last_ms`` from the start of backward, as a median), how long backward took, and when the pauses were over. Without
arguments it runs both ranks, with the pause and without, and prints what the documentation cites.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sftriage
from sftriage.windows.rings import Ring

STEPS, WIDTH, SLOW = 16, 256, 1


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train(directory: Path, pause_s: float) -> dict[str, object]:
    warnings = Warnings()
    logging.getLogger("sftriage").addHandler(warnings)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(network, mesh=mesh)
    last_ns: list[int] = []
    paused_ns: list[int] = []
    took_ms: list[float] = []
    last_ms: list[float] = []

    def pause(grad: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)
        paused_ns.append(time.monotonic_ns())
        return grad

    def accumulated(parameter: torch.Tensor) -> None:
        last_ns[-1] = time.monotonic_ns()

    with sftriage.Monitor(stages=("forward", "backward"), sync=("backward",), rings=directory) as monitor:
        monitor.watch(model)
        hooks = sum(bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(accumulated)
        for _ in range(STEPS):
            with monitor.step():
                with monitor.stage("forward"):
                    hidden = network[1](network[0](torch.randn(8, WIDTH)))
                    if rank == SLOW:
                        hidden.register_hook(pause)
                    loss = network[3](network[2](hidden)).square().mean()
                dist.barrier()
                with monitor.stage("backward"):
                    began_ns = time.monotonic_ns()
                    last_ns.append(0)
                    loss.backward()
                    took_ms.append((time.monotonic_ns() - began_ns) / 1e6)
                    last_ms.append((last_ns[-1] - began_ns) / 1e6)
            model.zero_grad()
        with Ring(directory / f"rank-{rank}.0.ring") as ring:
            ready_ns = [record.ready_ns for record in ring.read().steps.records()]
    return {
        "rank": rank,
        "hooks": hooks,
        "warnings": warnings.said,
        "ready_ns": ready_ns,
        "last_ns": last_ns,
        "paused_ns": paused_ns,
        "last_ms": round(statistics.median(last_ms), 1),
        "backward_ms": round(statistics.median(took_ms), 1),
    }


def both() -> None:
    launcher = str(Path(__file__).with_name("launch.py"))
    for pause_s in (0.0, 0.2):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, launcher, "2", __file__, directory, str(pause_s)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        for found in sorted(map(json.loads, done.stdout.splitlines()), key=lambda found: found["rank"]):
            pause_ms = pause_s * 1e3 if found["rank"] == SLOW else 0.0
            sys.stdout.write(
                f"rank {found['rank']}, pausing {pause_ms:.0f} ms in its backward: backward {found['backward_ms']} ms,"
                f" last gradient after {found['last_ms']} ms\n"
            )


def main() -> None:
    if len(sys.argv) == 1:
        both()
        return
    directory, pause_s = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.01
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sys.stdout.write(json.dumps(train(directory, pause_s)) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
