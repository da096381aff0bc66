"""``train.py STEPS SLOW_MS RESULT``: ranks average gradients over Gloo; rank 1 is slow in data.

A stage takes its time without a CPU, as on an accelerator of its own. The first rank writes into RESULT what a step
took in the mean, from step `FROM` on, by a clock of its own.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "integration" / "jobs"))
from averaging import average_gradients, descend

import sftriage

FROM = 20
"""The first step that is judged: those before it are warm-up."""

FORWARD_S, DATA_S = 0.012, 0.002


def main() -> None:
    steps, slow_s, result = int(sys.argv[1]), float(sys.argv[2]) / 1e3, Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model, began_s = torch.nn.Linear(128, 128), 0.0
    with sftriage.Monitor() as monitor:
        for step in range(steps):
            if step == FROM:
                began_s = time.perf_counter()
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(64, 128)
                    time.sleep(DATA_S + (slow_s if rank == 1 else 0.0))
                with monitor.stage("forward"):
                    loss = model(batch).square().mean()
                    time.sleep(FORWARD_S * (0.95 + 0.1 * torch.rand(()).item()))
                with monitor.stage("backward"):
                    loss.backward()
                    average_gradients(model)
                with monitor.stage("optimizer"):
                    descend(model)
    if rank == 0:
        result.write_text(str((time.perf_counter() - began_s) / (steps - FROM)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
