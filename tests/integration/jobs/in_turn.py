"""Data-parallel ranks with one fault after the other, each far larger than what a busy machine does to a step.

``in_turn.py DIRECTORY FAULTS...``: FAULTS is what is slow at once, as ``data:2`` or ``data:2+forward:1``. The job is
healthy until DIRECTORY/next-0 is there, then has the first faults until DIRECTORY/next-1 is there, and so on; after the
last it ends.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from averaging import Layers, average_gradients, descend

import sftriage

DELAY_S = 0.15


def main() -> None:
    directory, turns = Path(sys.argv[1]), [set(one.split("+")) for one in sys.argv[2:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Layers()
    turn = torch.tensor(-1)
    slow: set[str] = set()

    def pause_in(stage: str) -> None:
        if f"{stage}:{rank}" in slow:
            time.sleep(DELAY_S)

    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        while turn < len(turns):
            slow = turns[turn] if turn >= 0 else set()
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(4, 64)
                    pause_in("data")
                with monitor.stage("forward"):
                    model.pause = (lambda _: time.sleep(DELAY_S)) if f"backward:{rank}" in slow else None
                    loss = model(batch).square().mean()
                    pause_in("forward")
                with monitor.stage("backward"):
                    # The ranks go on together, where they meet anyway: the first one says when.
                    if rank == 0 and (directory / f"next-{int(turn) + 1}").exists():
                        turn += 1
                    dist.broadcast(turn, 0)
                    loss.backward()
                    average_gradients(model)
                with monitor.stage("optimizer"):
                    descend(model)
                    pause_in("optimizer")
                pause_in("other")
                time.sleep(0.01)
    dist.barrier()


if __name__ == "__main__":
    main()
