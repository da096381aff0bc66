"""A job without torch whose last rank has another busy process on its CPU.

``on_a_busy_cpu.py waits|sleeps STEPS``: three ranks that meet at a barrier, pinned, the last one to a CPU of its own
with a loop beside it. In ``data`` it computes for 20 ms (``waits``) or sleeps for 80 ms (``sleeps``); the others sleep
for 20 ms.
"""

import multiprocessing
import os
import sys
import time

RANKS, OWN_S = 3, 0.020


def busy() -> None:
    """Runs until it is ended, or whoever started it has."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))


def compute(seconds: float) -> None:
    """Has a CPU for so long, however long that takes."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        sum(range(1000))


def train(rank: int, what: str, steps: int, barrier, cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    import sftriage

    last = rank == RANKS - 1
    monitor = sftriage.Monitor()
    for _ in range(steps):
        with monitor.step():
            with monitor.stage("data"):
                if last and what == "waits":
                    compute(OWN_S)
                else:
                    time.sleep(4 * OWN_S if last else OWN_S)
            with monitor.stage("backward"):
                barrier.wait()
    monitor.close()


def main() -> None:
    what, steps = sys.argv[1], int(sys.argv[2])
    first, *_, last = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(RANKS)
    beside = context.Process(target=busy, daemon=True)
    beside.start()
    os.sched_setaffinity(beside.pid, {last})
    cpus = [first] * (RANKS - 1) + [last]
    workers = [context.Process(target=train, args=(rank, what, steps, barrier, cpus[rank])) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    beside.terminate()


if __name__ == "__main__":
    main()
