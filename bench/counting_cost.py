"""What it costs the agent to read what the kernel counts of the ranks, for each rank and look.

    python bench/counting_cost.py [--json] [--ranks N] [--looks N]

Real processes record steps of 35 ms each, and an agent reads their rings four times a second. Its turns are timed, in
processor time of its thread, with the looks at their threads and, every second time, without; ``read`` is what the
reads of ``/proc`` and of the cgroup take by themselves. Figures are medians, in microseconds a rank
and look. The trainers do nothing for it: nothing of theirs is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from sftriage.agent.counting import Counting, RankCounters
from sftriage.agent.reading import RankRings
from sftriage.recorder import Monitor

STEP_S, LOOK_S = 0.035, 0.25
TMPFS = Path("/dev/shm")


def train(rank: int, ranks: int, rings: str) -> None:
    monitor = Monitor(("data", "backward"), ("backward",), rank=rank, world_size=ranks, rings=rings)
    parent = os.getppid()
    while os.getppid() == parent:
        with monitor.step(), monitor.stage("data"):
            time.sleep(STEP_S)


@contextlib.contextmanager
def trainers(ranks: int, rings: Path) -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=train, args=(rank, ranks, str(rings)), daemon=True) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def turns_us(agent: RankRings, looks: int) -> dict[str, list[float]]:
    """Processor time of turns with and without a look at the ranks' threads, in microseconds."""
    took: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(2 * looks):
        which = "without" if turn % 2 else "with"
        time.sleep(LOOK_S)
        with contextlib.ExitStack() as patched:
            if which == "without":
                patched.enter_context(mock.patch.object(Counting, "look"))
                patched.enter_context(mock.patch.object(Counting, "laid_over", lambda self, attempt, steps: steps))
            before_ns = time.thread_time_ns()
            agent.rows()
            took[which].append((time.thread_time_ns() - before_ns) / 1e3)
    return took


def reads_us(agent: RankRings, looks: int) -> list[float]:
    """What reading its files of each rank's thread takes, four times a second: with cold caches."""
    threads = [RankCounters(info) for info in agent.ranks.values()]
    took = []
    for _ in range(looks):
        time.sleep(LOOK_S)
        for thread in threads:
            before_ns = time.perf_counter_ns()
            thread.read()
            took.append((time.perf_counter_ns() - before_ns) / 1e3)
    for thread in threads:
        thread.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--looks", type=int, default=40)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=TMPFS) as rings,
        tempfile.TemporaryDirectory() as steps,
        trainers(options.ranks, Path(rings)),
    ):
        agent = RankRings(Path(rings), Path(steps))
        while len(agent.ranks) < options.ranks:
            time.sleep(LOOK_S)
            agent.rows()
        took, reads = turns_us(agent, options.looks), reads_us(agent, options.looks)
        agent.close()
    of_rank = {which: statistics.median(times) / options.ranks for which, times in took.items()}
    found = {
        "ranks": options.ranks,
        "read_us": round(statistics.median(reads), 1),
        **{f"turn_{which}_us": round(one, 1) for which, one in of_rank.items()},
        "more_us": round(of_rank["with"] - of_rank["without"], 1),
        "core_fraction": (of_rank["with"] - of_rank["without"]) * 1e-6 * options.ranks / LOOK_S,
    }
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(
        f"{options.ranks} ranks, a rank and look: its files {found['read_us']} us; the agent's turn "
        f"{found['turn_with_us']} us with it, {found['turn_without_us']} us without: {found['more_us']} us more, "
        f"{found['core_fraction']:.3%} of a core for all ranks\n"
    )


if __name__ == "__main__":
    main()
