"""A job without torch: ranks that meet at a barrier of files are not needed to see how a launcher is treated.

``loop.py RANKS STEPS STATUS [MODULE]`` starts its ranks itself, as any launcher would, and exits with the given status;
its ranks have imported the module, if there is one.
"""

import importlib
import multiprocessing
import os
import sys
import time


def train(rank: int, ranks: int, steps: int, barrier) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    import sftriage

    monitor = sftriage.Monitor()
    for _ in range(steps):
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(0.001)
            with monitor.stage("forward"):
                time.sleep(0.002)
            with monitor.stage("backward"):
                barrier.wait()
            with monitor.stage("optimizer"):
                time.sleep(0.001)


if __name__ == "__main__":
    ranks, steps, status = map(int, sys.argv[1:4])
    for module in sys.argv[4:]:
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(ranks)
    workers = [context.Process(target=train, args=(rank, ranks, steps, barrier)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    sys.stdout.write("started\n")
    sys.stdout.flush()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\n")
        for worker in workers:
            worker.terminate()
            worker.join()
        sys.exit(7)
    sys.exit(status)
