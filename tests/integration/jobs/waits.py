"""Three ranks that come to wait, each kind in its own way, until DIRECTORY/release exists. They need no torch.

``waits.py DIRECTORY KIND``, in the last step. ``file``: all ranks wait in data for a lock of DIRECTORY/shards that
another process holds. ``uneven``: rank 2 has no more batches, and the others wait for it in backward; ``left``: it has
closed its monitor, too. ``between``: all ranks are between two steps. ``first``: rank 1 is in its first forward. Before
that they train for some seconds, in which sftriage learns how long a step takes.
"""

import fcntl
import multiprocessing
import os
import sys
import time
from pathlib import Path

import sftriage

RANKS, STEPS, STEP_S = 3, 60, 0.05


def train(rank: int, directory: Path, kind: str, meeting) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))

    def wait() -> None:
        while not (directory / "release").exists():
            time.sleep(0.02)

    has_fewer = kind in ("uneven", "left") and rank == 2
    monitor = sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",))
    for step in range(STEPS - has_fewer):
        last = step == STEPS - 1
        if last and kind == "between":
            wait()
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(STEP_S)
                if last and kind == "file":
                    with (directory / "shards").open("w") as shards:
                        fcntl.flock(shards, fcntl.LOCK_SH)
            with monitor.stage("forward"):
                if step == 0 and kind == "first" and rank == 1:
                    wait()
            with monitor.stage("backward"):
                meeting.wait()
            with monitor.stage("optimizer"):
                pass
    if has_fewer:
        if kind == "left":
            monitor.close()
        wait()
        meeting.wait()
    monitor.close()


def main() -> None:
    context = multiprocessing.get_context("fork")
    about = Path(sys.argv[1]), sys.argv[2], context.Barrier(RANKS)
    ranks = [context.Process(target=train, args=(rank, *about)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.stdout.write("trained\n")
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
