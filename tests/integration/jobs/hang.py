"""Three ranks of DDP over Gloo that do what may be taken for a stall, and what is one.

``hang.py DIRECTORY PAUSE_S [compile] [evaluate] [save] [hang=STAGE]``: for so many seconds each, all ranks compile in
their first step, evaluate between two steps, and rank 0 saves while the others are in the next step. At last rank 1
hangs in STAGE: it leaves its pid in DIRECTORY/hung, and waits for DIRECTORY/release.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sftriage

STEPS, EVALUATE_AFTER, SAVE_AFTER, HANG_IN = 160, 40, 80, 120


def hang(directory: Path) -> None:
    note = directory / "hung.new"
    note.write_text(str(os.getpid()), encoding="ascii")
    note.rename(directory / "hung")
    while not (directory / "release").exists():
        time.sleep(0.02)


class Layers(torch.nn.Module):
    """Two layers, between which the backward pass may hang."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
        self.hangs_in = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        if self.hangs_in is not None:
            hidden.register_hook(lambda _: hang(self.hangs_in))
        return self.second(hidden)


def main() -> None:
    directory, pause_s, doing = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = Layers()
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        for step in range(STEPS):
            hangs = rank == 1 and step == HANG_IN
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(4, 64)
                with monitor.stage("forward"):
                    if step == 0 and "compile" in doing:
                        time.sleep(pause_s + rank)
                    if hangs and "hang=forward" in doing:
                        hang(directory)
                    layers.hangs_in = directory if hangs and "hang=backward" in doing else None
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                with monitor.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                time.sleep(0.005)
            if step == EVALUATE_AFTER and "evaluate" in doing:
                time.sleep(pause_s)
            if step == SAVE_AFTER and "save" in doing and rank == 0:
                time.sleep(pause_s)
    if rank == 0:
        sys.stdout.write("trained\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
