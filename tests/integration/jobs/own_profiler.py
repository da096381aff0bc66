"""A job whose rank 1 is late with its data, and profiles itself all the time: it refuses to be captured.

``own_profiler.py END``: it goes on until the file END is there.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path

RANKS, SLOW = 3, 1


def train(rank: int, barrier, end: Path, over) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    import torch

    import sftriage

    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    if rank == SLOW:
        own.start()
    monitor = sftriage.Monitor()
    while not over.is_set():
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(0.03 if rank == SLOW else 0.01)
            with monitor.stage("forward"):
                time.sleep(0.01)
            with monitor.stage("backward"):
                barrier.wait()
        if rank == 0 and end.exists():
            over.set()
        # All of them know before the next step whether there is one.
        barrier.wait()
    if rank == SLOW:
        own.stop()


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier, over = context.Barrier(RANKS), context.Event()
    ranks = [context.Process(target=train, args=(rank, barrier, Path(sys.argv[1]), over)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
