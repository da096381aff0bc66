"""Keeping the machine busy while a job is recorded, and seeing how busy others kept it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.hidden_rank_matrix.running import NEIGHBOUR

BURST_S = (2.0, 6.0)
"""How long a burst lasts, and how long it is quiet between two."""

MOVING_S = (8.0, 10.0)
"""How long a process that comes and goes is busy, and how long it is gone, in the mean."""

NEIGHBOURS = {"alone": 0, "one busy": 1, "two busy": 2, "bursts": 2, "moving": 2}


@contextmanager
def busy(load: str, seed: int) -> Iterator[None]:
    """Have a load on the machine."""
    neighbours = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(NEIGHBOURS[load])]
    over, rng = threading.Event(), random.Random(seed)
    together = {"bursts": [neighbours], "moving": [[one] for one in neighbours]}.get(load, [])
    draw = _of_burst if load == "bursts" else _of_one_that_moves
    turns = [
        threading.Thread(target=_take_turns, args=(some, over, draw, random.Random(rng.random()))) for some in together
    ]
    try:
        for one in turns:
            one.start()
        yield
    finally:
        over.set()
        for one in turns:
            if one.ident is not None:
                one.join()
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def _of_burst(rng: random.Random, busy: bool) -> float:
    return rng.uniform(*BURST_S)


def _of_one_that_moves(rng: random.Random, busy: bool) -> float:
    return rng.expovariate(1.0 / MOVING_S[0 if busy else 1])


def _take_turns(
    neighbours: list[subprocess.Popen[bytes]],
    over: threading.Event,
    draw_s: Callable[[random.Random, bool], float],
    rng: random.Random,
) -> None:
    """All of them stopped and all of them going, in turn."""
    while not over.is_set():
        for busy, one in ((False, signal.SIGSTOP), (True, signal.SIGCONT)):
            for neighbour in neighbours:
                os.kill(neighbour.pid, one)
            if over.wait(draw_s(rng, busy)):
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
