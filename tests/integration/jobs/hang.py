"""Three data-parallel ranks over Gloo that do what may be taken for a stall, and what is one.

``hang.py DIRECTORY PAUSE_S``: for so many seconds each, all ranks compile in their first step, evaluate between two
steps, and rank 0 saves while the others are in the next step. After that rank 1 hangs in one stage after the other of
`HANGS`: it leaves its pid in DIRECTORY/hung-STEP, and waits for DIRECTORY/release-STEP.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from averaging import Layers, average_gradients, descend

import sftriage

STEPS, EVALUATE_AFTER, SAVE_AFTER = 160, 40, 80
HANGS = {120: "forward", 130: "backward", 140: "forward"}


def hang(directory: Path, step: int) -> None:
    note = directory / "hung.new"
    note.write_text(str(os.getpid()), encoding="ascii")
    note.rename(directory / f"hung-{step}")
    while not (directory / f"release-{step}").exists():
        time.sleep(0.02)


def main() -> None:
    directory, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Layers()
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        for step in range(STEPS):
            hangs_in = HANGS.get(step) if rank == 1 else None
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(4, 64)
                with monitor.stage("forward"):
                    if step == 0:
                        time.sleep(pause_s + rank)
                    if hangs_in == "forward":
                        hang(directory, step)
                    model.pause = (lambda _, step=step: hang(directory, step)) if hangs_in == "backward" else None
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                    average_gradients(model)
                with monitor.stage("optimizer"):
                    descend(model)
                time.sleep(0.005)
            if step == EVALUATE_AFTER:
                time.sleep(pause_s)
            if step == SAVE_AFTER and rank == 0:
                time.sleep(pause_s)
    if rank == 0:
        sys.stdout.write("trained\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
