"""Running rows and keeping them: a crew of ranks that does one row after the other, and the load beside it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from bench.rows import Outcome, Row
from bench.runner import HERE, TMPFS, environment_of
from sftriage.agent.counting import Counting
from sftriage.errors import RingError
from sftriage.policy.in_force import find
from sftriage.runs.directory import RunInfo, create
from sftriage.trainer.layout import find_rings
from sftriage.windows.rings import Ring
from sftriage.windows.steplog import StepLog

POLL_S = 0.02
START_S = 120.0
"""How long the ranks may take to import torch and find each other, on a machine with far fewer cores than ranks."""
STEP_S = 1.0
"""How long a step may take on average before a row has failed; a healthy one takes less than a tenth."""
READINGS_APART_S = 0.25

NEIGHBOURS = {"alone": 0, "one busy": 1, "two busy": 2, "bursts": 2, "moving": 2}
"""Loads: none; processes that are always busy; two in bursts; or two that come and go, each by itself, so that they are
moved from core to core. With each the number of its processes."""
LOADS = tuple(NEIGHBOURS)
NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
BURST_S = (2.0, 6.0)
"""How long a burst lasts, and the pause between two."""
MOVING_S = (8.0, 10.0)
"""How long a process that comes and goes is busy, and how long it is gone, in the mean."""


class RowFailedError(Exception):
    """A row's job failed; the message says how."""


class Crew:
    """A process for each rank, in a process group of its own, that run rows until it is closed.

    A row is kept as a run directory with a ``row.json``, which says so where the row failed.
    """

    def __init__(self, n_ranks: int, out: Path) -> None:
        self._n_ranks, self._out = n_ranks, out
        self._ranks: list[subprocess.Popen[bytes]] = []

    def run(self, row: Row) -> Path:
        """Run a row; where it is kept."""
        path = self._out / f"row-{row.number:03d}"
        rings = Path(tempfile.mkdtemp(prefix="bench-rings-", dir=TMPFS))
        outcome, policy = Outcome(), find("default").read_text(encoding="utf-8")
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        about = (path.name, f"row-{row.number}", created, ("bench", row.words), "default")
        run = create(path, RunInfo(*about, sha256(policy.encode()).hexdigest(), str(rings)), policy)
        try:
            if not self._ranks:
                self._start()
            outcome.healthy_step_s = self._do(row, rings, run.steps)
            keep(rings, run.steps, row.steps_at(outcome.healthy_step_s))
        except RowFailedError as error:
            outcome.failed = str(error)
            self.close()
        finally:
            shutil.rmtree(rings, ignore_errors=True)
        document = {"row": asdict(row), "outcome": asdict(outcome)}
        (path / "row.json").write_text(json.dumps(document, indent=2) + "\n")
        return path

    def close(self) -> None:
        if not self._ranks:
            return
        (self._control / "stop").touch()
        deadline = time.monotonic() + 10.0
        for process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._ranks = []
        shutil.rmtree(self._control, ignore_errors=True)

    def _start(self) -> None:
        self._control = Path(tempfile.mkdtemp(prefix="bench-crew-", dir=TMPFS))
        self._rows = 0
        environment = environment_of(MKL_NUM_THREADS="1", WORLD_SIZE=str(self._n_ranks))
        environment.pop("SFTRIAGE_RINGS", None)
        with (self._control / "log").open("wb") as log:
            self._ranks = [
                subprocess.Popen(
                    [sys.executable, str(HERE / "jobs" / "rows.py"), str(self._control)],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=os.setpgrp,
                )
                for rank in range(self._n_ranks)
            ]

    def _do(self, row: Row, rings: Path, steps: Path) -> float:
        """Have the ranks run a row; the healthy step it measured, in seconds.

        What the scheduler did with the ranks meanwhile is kept in ``steps``, as an agent keeps it.
        """
        number, self._rows = self._rows, self._rows + 1
        deadline = time.monotonic() + (START_S if number == 0 else 0.0) + 30.0 + STEP_S * row.n_steps
        partial = self._control / f".{number}"
        partial.write_text(json.dumps({"row": asdict(row), "rings": str(rings)}))
        partial.replace(self._control / f"{number}.json")
        done = [self._control / f"{number}.{rank}.done" for rank in range(self._n_ranks)]
        counting, due_s = Counting(steps, lambda _: None), 0.0
        try:
            while not all(path.exists() for path in done):
                self._check(deadline)
                time.sleep(POLL_S)
                if time.monotonic() >= due_s:
                    for path in find_rings(rings):
                        with suppress(RingError), Ring(path) as ring:
                            counting.read(ring.info)
                    due_s = time.monotonic() + READINGS_APART_S
        finally:
            counting.close()
        return float((self._control / f"{number}.healthy").read_text())

    def _check(self, deadline: float) -> None:
        ended = [rank for rank, process in enumerate(self._ranks) if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            what = f"rank {ended[0]} ended" if ended else "took too long"
            lines = (self._control / "log").read_text(errors="replace").strip().splitlines()
            raise RowFailedError(f"{what}: {lines[-1] if lines else 'no output'}")


def keep(rings: Path, steps: Path, n_steps: int) -> None:
    """Copy every step out of the rings into step logs.

    Raises:
        RowFailedError: some are missing.
    """
    for path in find_rings(rings):
        with Ring(path) as ring:
            batch = ring.read()
            if len(batch.steps) != n_steps:
                raise RowFailedError(f"{path.name}: {len(batch.steps)} steps of {n_steps}, {batch.torn} torn")
            log = StepLog(steps, ring.info)
            log.append(batch.steps)
            log.close()


@contextmanager
def busy(load: str, seed: int) -> Iterator[None]:
    neighbours = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(NEIGHBOURS[load])]
    over, rng = threading.Event(), random.Random(seed)
    together = {"bursts": [neighbours], "moving": [[one] for one in neighbours]}.get(load, [])

    def take_turns(some: list[subprocess.Popen[bytes]], draw_s: Callable[[bool], float]) -> None:
        while not over.is_set():
            for running, signum in ((False, signal.SIGSTOP), (True, signal.SIGCONT)):
                for neighbour in some:
                    os.kill(neighbour.pid, signum)
                if over.wait(draw_s(running)):
                    return

    turns = []
    for some in together:
        own = random.Random(rng.random())
        draw_s: Callable[[bool], float] = (
            (lambda running, own=own: own.uniform(*BURST_S))
            if load == "bursts"
            else (lambda running, own=own: own.expovariate(1.0 / MOVING_S[0 if running else 1]))
        )
        turns.append(threading.Thread(target=take_turns, args=(some, draw_s)))
    try:
        for thread in turns:
            thread.start()
        yield
    finally:
        over.set()
        for thread in turns:
            if thread.ident is not None:
                thread.join()
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
