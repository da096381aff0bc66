"""Two ranks in one process tree, rank 1 late in data from step 40 on; after 80 steps neither takes another one.

``stuck.py END``: the ranks end when the file END appears.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path


def train(rank: int, barrier, end: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    import sftriage

    monitor = sftriage.Monitor()
    for step in range(80):
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(0.012 if rank == 1 and step >= 40 else 0.002)
            with monitor.stage("backward"):
                barrier.wait()
    while not end.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    workers = [context.Process(target=train, args=(rank, barrier, Path(sys.argv[1]))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
