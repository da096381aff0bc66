"""Running rows: a crew of ranks that does one row after the other, what is done to them from outside, what is kept."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from bench.hidden_rank_matrix.rows import Outcome, Pressure, Row
from sftriage.agent.counting import Counting
from sftriage.errors import RingError
from sftriage.policy.loading import find
from sftriage.recorder import find_rings
from sftriage.runs.directory import RunDirectory, RunInfo, create
from sftriage.windows.rings import open_ring
from sftriage.windows.steplog import StepLog

JOB = Path(__file__).with_name("job.py")
POLL_S = 0.02
START_S = 120.0
"""How long the ranks may take to import torch and find each other, on a machine with far fewer cores than ranks."""
STEP_S = 1.0
"""How long a step may take on average before a row has failed; a healthy one takes less than a tenth."""
READINGS_APART_S = 0.25
PULSE_S = 0.010
"""One stop and one continuation: shorter than any stage that it is to slow."""
NICE_RANK, NICE_NEIGHBOUR = 10, 8
NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


class RowFailedError(Exception):
    """A row's job did not do what it should; the message says what."""


class Crew:
    """One process a rank, in one process group, doing rows until it is closed."""

    def __init__(self, n_ranks: int, shm: Path) -> None:
        self._control = Path(tempfile.mkdtemp(prefix="hidden-rank-", dir=shm))
        self._log = (self._control / "log").open("wb")
        self._rows = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "WORLD_SIZE": str(n_ranks)}
        environment.pop("SFTRIAGE_RINGS", None)
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(JOB), str(self._control)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # A group of its own to be killed by, but not a session: Linux may schedule sessions as units
                # (autogroup), and a rank's priority would count for nothing against its neighbours'.
                preexec_fn=os.setpgrp,
            )
            for rank in range(n_ranks)
        ]

    def do(self, row: Row, rings: Path, steps: Path) -> float:
        """Run one row's job, its steps going into ``rings``; the healthy step it measured, in seconds.

        What the scheduler did with the ranks meanwhile is kept in ``steps``, as an agent keeps it.

        Raises:
            RowFailedError: a rank ended, or it took too long. The crew is of no more use.
        """
        number, self._rows = self._rows, self._rows + 1
        deadline = time.monotonic() + (START_S if number == 0 else 0.0) + 30.0 + STEP_S * row.n_steps
        partial = self._control / f".{number}"
        partial.write_text(json.dumps({"row": asdict(row), "rings": str(rings)}))
        partial.replace(self._control / f"{number}.json")
        done = [self._control / f"{number}.{rank}.done" for rank in range(len(self._ranks))]
        with outside(row.pressure, self._ranks, rings, deadline) as press, _looking(rings, steps) as look:
            while not all(path.exists() for path in done):
                self._check(deadline)
                press()
                look()
        return float((self._control / f"{number}.healthy").read_text())

    def close(self) -> None:
        """Let the ranks go, and make sure of it."""
        (self._control / "stop").touch()
        deadline = time.monotonic() + 10.0
        for process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        for process in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()
        shutil.rmtree(self._control, ignore_errors=True)

    def _check(self, deadline: float) -> None:
        ended = [rank for rank, process in enumerate(self._ranks) if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            what = f"rank {ended[0]} ended" if ended else "took too long"
            lines = (self._control / "log").read_text(errors="replace").strip().splitlines()
            raise RowFailedError(f"{what}: {lines[-1] if lines else 'it said nothing'}")


@contextmanager
def _looking(rings: Path, steps: Path) -> Iterator[Callable[[], None]]:
    """Gives a function that takes readings of the ranks' training threads, where some are due."""
    counting, due_s = Counting(steps, lambda _: None), 0.0

    def look() -> None:
        nonlocal due_s
        if time.monotonic() < due_s:
            return
        for path in find_rings(rings):
            with suppress(RingError), open_ring(path) as ring:
                counting.look(ring.info)
        due_s = time.monotonic() + READINGS_APART_S

    try:
        yield look
    finally:
        counting.close()


@contextmanager
def outside(pressure: Pressure | None, ranks: list[subprocess.Popen], rings: Path, deadline: float) -> Iterator:
    """What is done to one rank from outside; gives a function that passes a little time, pressing once it is due."""
    if pressure is None:
        yield lambda: time.sleep(POLL_S)
        return
    pid, neighbours, due = ranks[pressure.rank].pid, [], False

    def press() -> None:
        nonlocal due
        if not due:
            due = _step_of(rings, pressure.rank) >= pressure.first
            if due and pressure.how != "pulses":
                neighbours.extend(_crowd(pid, pressure))
        if not due or pressure.how != "pulses":
            time.sleep(POLL_S / 4)
            return
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PULSE_S * pressure.strength)
        os.kill(pid, signal.SIGCONT)
        time.sleep(PULSE_S * (1.0 - pressure.strength))

    try:
        yield press
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _crowd(pid: int, pressure: Pressure) -> list[subprocess.Popen]:
    """Put a rank behind busy neighbours: on one core with its equals, or anywhere with some that come before it.

    The rank and its neighbours come after the other ranks either way, so that the others are hardly slowed by them.
    """
    cores = sorted(os.sched_getaffinity(0))
    core = {cores[pressure.rank % len(cores)]}
    for thread in (int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, NICE_RANK)
            if pressure.how == "squeeze":
                os.sched_setaffinity(thread, core)
    neighbours = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(int(pressure.strength))]
    for neighbour in neighbours:
        os.setpriority(os.PRIO_PROCESS, neighbour.pid, NICE_RANK if pressure.how == "squeeze" else NICE_NEIGHBOUR)
        if pressure.how == "squeeze":
            os.sched_setaffinity(neighbour.pid, core)
    return neighbours


def _step_of(rings: Path, rank: int) -> int:
    """The step a rank is in, by its ring; -1 where there is none yet."""
    path = rings / f"rank-{rank}.0.ring"
    if not path.exists():
        return -1
    with open_ring(path) as ring:
        status = ring.status()
    return status.step


class Runner:
    """Runs rows one at a time, with one crew for as long as it is fit for use."""

    def __init__(self, n_ranks: int, out: Path) -> None:
        self._n_ranks, self._out = n_ranks, out
        self._shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        self._crew: Crew | None = None
        self._machine = {
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }

    def run(self, row: Row) -> Path:
        """Run a row and keep it as a run directory with a ``row.json``; a row that failed says so there."""
        path = self._out / f"row-{row.number:03d}"
        rings = Path(tempfile.mkdtemp(prefix="hidden-rank-rings-", dir=self._shm))
        outcome = Outcome(machine=self._machine)
        try:
            run = create(path, _info(row, rings), find("default").read_text(encoding="utf-8"))
            if self._crew is None:
                self._crew = Crew(self._n_ranks, self._shm)
            outcome.healthy_step_s = self._crew.do(row, rings, run.steps)
            _keep(rings, run, row.steps_at(outcome.healthy_step_s))
        except RowFailedError as error:
            outcome.failed = str(error)
            self.close()
        finally:
            shutil.rmtree(rings, ignore_errors=True)
        if row.pressure is not None:
            self.close()  # a priority once lowered cannot be raised again by everybody
        document = {"row": asdict(row), "outcome": asdict(outcome)}
        (path / "row.json").write_text(json.dumps(document, indent=2) + "\n")
        return path

    def close(self) -> None:
        """Let the crew go."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None


def _info(row: Row, rings: Path) -> RunInfo:
    return RunInfo(
        run_id=f"row-{row.number:03d}",
        job=f"row-{row.number}",
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=("hidden_rank.py", row.words),
        policy="default",
        policy_sha256=sha256(find("default").read_bytes()).hexdigest(),
        rings=str(rings),
    )


def _keep(rings: Path, run: RunDirectory, n_steps: int) -> None:
    """Every step out of the rings into the run's step logs.

    Raises:
        RowFailedError: some are not there.
    """
    for path in find_rings(rings):
        with open_ring(path) as ring:
            batch = ring.read()
            if len(batch.steps) != n_steps:
                raise RowFailedError(f"{path.name}: {len(batch.steps)} steps of {n_steps}, {batch.torn} torn")
            log = StepLog(run.steps, ring.info)
            log.append(batch.steps)
            log.close()
