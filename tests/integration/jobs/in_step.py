"""``in_step.py FIRST_RANK RANKS WORLD_SIZE BEGIN_S RELEASE``: some ranks of a job in a process, without torch.

Step N begins at BEGIN_S + N * STEP_S of the epoch. They end once RELEASE is there.
"""

import sys
import time
from pathlib import Path

from sftriage.trainer.monitor import Monitor

STEP_S = 0.05


def main() -> None:
    first, ranks, world_size, begin_s, release = *map(int, sys.argv[1:4]), float(sys.argv[4]), Path(sys.argv[5])
    stages = ("data", "backward")
    monitors = [Monitor(stages, ("backward",), rank=first + n, world_size=world_size) for n in range(ranks)]
    step = 0
    while not release.exists():
        time.sleep(max(0.0, begin_s + step * STEP_S - time.time()))
        for monitor in monitors:
            with monitor.step(step):
                for stage in stages:
                    with monitor.stage(stage):
                        time.sleep(STEP_S / 4 / ranks / len(stages))
        step += 1
    for monitor in monitors:
        monitor.close()


if __name__ == "__main__":
    main()
