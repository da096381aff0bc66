"""Keeping the machine busy while a job is recorded, and seeing how busy others kept it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.hidden_rank_matrix.running import NEIGHBOUR

BURST_S = (2.0, 6.0)
"""How long a burst lasts, and how long it is quiet between two."""

NEIGHBOURS = {"alone": 0, "one busy": 1, "two busy": 2, "bursts": 2}


@contextmanager
def busy(load: str, seed: int) -> Iterator[None]:
    """Have a load on the machine."""
    neighbours = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(NEIGHBOURS[load])]
    over = threading.Event()
    turns = threading.Thread(target=_take_turns, args=(neighbours, over, random.Random(seed)))
    try:
        if load == "bursts":
            turns.start()
        yield
    finally:
        over.set()
        if turns.ident is not None:
            turns.join()
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def _take_turns(neighbours: list[subprocess.Popen[bytes]], over: threading.Event, rng: random.Random) -> None:
    """All of them stopped and all of them going, in turn."""
    while not over.is_set():
        for one in (signal.SIGSTOP, signal.SIGCONT):
            for neighbour in neighbours:
                os.kill(neighbour.pid, one)
            if over.wait(rng.uniform(*BURST_S)):
                return


class Watch:
    """How many cores the whole machine kept busy: what a recording says of its neighbours, whoever they are."""

    def __init__(self) -> None:
        self._began = _busy_and_all_ticks()

    @property
    def cores(self) -> float:
        """The mean since it was made."""
        busy_ticks, all_ticks = (now - then for now, then in zip(_busy_and_all_ticks(), self._began, strict=True))
        return (os.cpu_count() or 1) * busy_ticks / max(1, all_ticks)


def _busy_and_all_ticks() -> tuple[int, int]:
    """Of all cores together, since the machine began: user, nice, system, idle, iowait, irq, softirq, steal."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=10)[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
