"""``simulated.py DIRECTORY FIRST_RANK RANKS WORLD_SIZE BEGIN_S STEP_S SLOW RELEASE``: some ranks of a job in a process.

They take steps at the same moments as all others of the job, which is all they have to do with them: step N begins at
BEGIN_S + N * STEP_S of the epoch. From step 100 on rank SLOW is late in data; or, where that is a list of
``FIRST-LAST:RANK:STAGE``, that rank in that stage from one step to another. They end once RELEASE says after which
step, all of them with the same one. DIRECTORY is a host's, which has its name; or "-": where the environment says.
"""

import sys
import time
from pathlib import Path
from typing import Any

real_ns = time.monotonic_ns


class Now:
    """The clock of the recorder: that of the machine, but within a step, where it is as late as a stage says."""

    ns = real_ns()


time.monotonic_ns = lambda: Now.ns

# Not before the clock is the one that is told: modules take it by its name.
from sftriage.trainer.monitor import Monitor  # noqa: E402

STAGES = ("data", "forward", "backward", "optimizer")
SLOW_FROM, LATE_US = 100, 12_000


def slow_from(text: str) -> list[tuple[int, int, int, str]]:
    """First and last step, rank and stage of all that is slow."""
    if text.isdecimal():
        return [(SLOW_FROM, sys.maxsize, int(text), "data")]
    found = [one.replace("-", ":", 1).split(":") for one in text.split(",") if one]
    return [(int(first), int(last), int(rank), stage) for first, last, rank, stage in found]


def main() -> None:
    first, ranks, world_size = map(int, sys.argv[2:5])
    begin_s, step_s, slow, release = float(sys.argv[5]), float(sys.argv[6]), slow_from(sys.argv[7]), Path(sys.argv[8])
    about: dict[str, Any] = {"world_size": world_size}
    if sys.argv[1] != "-":
        directory = Path(sys.argv[1])
        for name in ("rings", "spool"):
            about[name] = directory / name
            about[name].mkdir(parents=True, exist_ok=True)
        about["host"] = directory.name
    monitors = {rank: Monitor(STAGES, ("backward",), rank=rank, **about) for rank in range(first, first + ranks)}
    # (when a busy machine lets them begin a step is no part of it)
    begin_ns = real_ns() + int((begin_s - time.time()) * 1e9)
    step = 0
    while not release.exists() or step <= int(release.read_text() or "0"):
        time.sleep(max(0.0, begin_s + step * step_s - time.time()))
        began_ns = begin_ns + int(step * step_s * 1e9)
        late_us = {(one, stage): LATE_US for first, last, one, stage in slow if first <= step <= last}
        usual_us = [(2000 + (step * 7 + rank * 3) % 5 * 40, 4000) for rank in range(world_size)]
        local_us = [
            (data_us + late_us.get((rank, "data"), 0), forward_us + late_us.get((rank, "forward"), 0))
            for rank, (data_us, forward_us) in enumerate(usual_us)
        ]
        arrived_us = max(map(sum, local_us))
        for rank, monitor in monitors.items():
            Now.ns = began_ns
            took_us = (*local_us[rank], 6000 + arrived_us - sum(local_us[rank]), 1000)
            with monitor.step(step):
                for stage, stage_us in zip(STAGES, took_us, strict=True):
                    with monitor.stage(stage):
                        if stage == "backward":
                            # (stacks that are sampled meanwhile are of this step)
                            time.sleep(step_s / (4 * ranks))
                        Now.ns += stage_us * 1000
        step += 1
    for monitor in monitors.values():
        monitor.close()


if __name__ == "__main__":
    main()
