"""A job of two ranks without torch, of which rank 1 becomes slow in data: what `make wheels-check` runs."""

import multiprocessing
import time

import sftriage

STEPS, SLOW_FROM = 180, 60


def train(rank: int, together) -> None:
    monitor = sftriage.Monitor(("data", "backward"), sync=("backward",), rank=rank, world_size=2)
    for number in range(STEPS):
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(0.08 if rank == 1 and number >= SLOW_FROM else 0.002)
            with monitor.stage("backward"):
                time.sleep(0.004)
                together.wait(60)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2)
    ranks = [context.Process(target=train, args=(rank, together)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in ranks))
