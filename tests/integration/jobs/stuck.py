"""Ranks in one process tree, of which rank 1 is late in data from step 40 on; after 80 steps none takes another one.

(Four: of two, 40 steps that are late, some of which a busy machine disturbs, are not always enough to name one.)

``stuck.py END``: the ranks end when the file END appears, or after `LONGEST_S`.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path

RANKS, LONGEST_S = 4, 180.0


def train(rank: int, barrier, end: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    import sftriage

    monitor = sftriage.Monitor()
    for step in range(80):
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(0.012 if rank == 1 and step >= 40 else 0.002)
            with monitor.stage("backward"):
                barrier.wait()
    given_up_s = time.monotonic() + LONGEST_S
    while not end.exists() and time.monotonic() < given_up_s:
        time.sleep(0.02)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(RANKS)
    workers = [context.Process(target=train, args=(rank, barrier, Path(sys.argv[1]))) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
