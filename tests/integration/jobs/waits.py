"""Three ranks over Gloo that come to wait, each kind in its own way, until DIRECTORY/release exists.

``waits.py DIRECTORY KIND``, in the last step. ``file``: all ranks wait in data for a lock of DIRECTORY/shards that
another process holds. ``uneven``: rank 2 has no more batches, and the others wait for it in backward; ``left``: it has
closed its monitor, too. ``between``: all ranks are between two steps. ``first``: rank 1 is in its first forward.
"""

import fcntl
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import sftriage

STEPS = 60


def main() -> None:
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

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
                time.sleep(0.02)
                if last and kind == "file":
                    with (directory / "shards").open("w") as shards:
                        fcntl.flock(shards, fcntl.LOCK_SH)
            with monitor.stage("forward"):
                if step == 0 and kind == "first" and rank == 1:
                    wait()
            with monitor.stage("backward"):
                dist.all_reduce(torch.ones(3))
            with monitor.stage("optimizer"):
                pass
    if has_fewer:
        if kind == "left":
            monitor.close()
        wait()
        dist.all_reduce(torch.zeros(3))
    monitor.close()
    if rank == 0:
        sys.stdout.write("trained\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
