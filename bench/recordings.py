"""Healthy jobs that are recorded under loads, and their recordings: run directories that keep how they were made.

Nothing that a job does is any single rank's fault. So a checkpoint, which rank 0 alone writes, is marked as such
(`kind`): else it would be true that rank 0 holds up the others.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.crew import LOADS, Crew, busy
from bench.resampled import OwnTimes, own_times
from bench.rows import WARMUP_STEPS, Row, Truth
from bench.runner import say
from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Shape

ABOUT = "long-run.json"
USUAL_S = 15.0
LEAST_STEPS, MOST_STEPS = 300, 20_000
"""Steps of a job recorded for the usual time, however fast or slow it is: fewer leave no blocks to choose from."""
OF_EVERY_SIZE = ("plain", "evaluates")
"""The jobs that are recorded with 2 and 8 ranks too, and not only with 4."""
MOVING_TIMES = 4
"""Recordings under a load that moves are longer by this factor, and of fewer jobs: what makes one rank the slow one for
some seconds, because its core has to be shared, comes once in some minutes."""

PERIODS = {"evaluates": 20, "says kinds": 50}
"""After this many steps a job does the same again; blocks of it begin at multiples of this."""
JOB_TYPES: dict[str, dict[str, Any]] = {
    "plain": {"profile": "brisk"},
    "evaluates": {"profile": "brisk", "evaluate_every": 20, "says_kinds": False},
    "says kinds": {"profile": "brisk", "evaluate_every": 25, "checkpoint_every": 50},
    "uneven lengths": {"profile": "busy", "work": "uneven"},
    # Without the moment of the last ready gradient, as a job that does not have its model watched.
    "collects garbage": {"profile": "busy", "collect_every": 60, "split": False},
}
"""Of each sort of job what its row is beside the usual."""


@dataclass(frozen=True, slots=True)
class Cell:
    job: str
    load: str
    n_ranks: int

    @property
    def period_steps(self) -> int:
        return PERIODS.get(self.job, 1)

    @property
    def split(self) -> bool:
        return bool(JOB_TYPES[self.job].get("split", True))


def cells(*, quick: bool) -> list[Cell]:
    """What is recorded, by number of ranks: one crew of processes does all of the same number."""
    if quick:
        return [Cell(job, load, 4) for job in OF_EVERY_SIZE for load in ("alone", "two busy", "bursts")]
    return [
        Cell(job, load, n_ranks)
        for n_ranks, jobs in {2: OF_EVERY_SIZE, 4: tuple(JOB_TYPES), 8: OF_EVERY_SIZE}.items()
        for job in jobs
        for load in LOADS
        if load != "moving" or (job in OF_EVERY_SIZE and n_ranks <= 4)
    ]


def row_of(cell: Cell, number: int, lasts_s: float, seed: int) -> Row:
    lasts_s *= MOVING_TIMES if cell.load == "moving" else 1
    values: dict[str, Any] = {"split": True, "checkpoint_ranks": (0,), "seed": seed + number, "lasts_s": lasts_s}
    values |= {"least_steps": min(LEAST_STEPS, int(LEAST_STEPS * lasts_s / USUAL_S)), **JOB_TYPES[cell.job]}
    name = cell.job.replace(" ", "-")
    return Row(number, "healthy", name, cell.n_ranks, MOST_STEPS, truth=Truth("healthy"), **values)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    cell: Cell
    about: dict[str, Any]
    own: OwnTimes

    @property
    def step_s(self) -> float:
        return float(np.median(self.own.exposed_N()))


def record(planned: list[Cell], lasts_s: float, seed: int, out: Path) -> None:
    """Run and keep all cells, each about this long; one whose job fails is reported, and left out."""
    numbered = enumerate(planned)
    for n_ranks, alike in groupby(numbered, lambda numbered: numbered[1].n_ranks):
        crew = Crew(n_ranks, out)
        try:
            for number, cell in alike:
                outcome = _record(crew, cell, number, lasts_s, seed)
                say(f"recorded {number + 1} of {len(planned)}: {cell.job}, {n_ranks} ranks, {cell.load}: {outcome}")
        finally:
            crew.close()


def _record(crew: Crew, cell: Cell, number: int, lasts_s: float, seed: int) -> str:
    about: dict[str, Any] = {"cell": asdict(cell), "load_average_before": os.getloadavg(), "cores": os.cpu_count()}
    began_s = time.monotonic()
    with busy(cell.load, seed + number):
        path = crew.run(row_of(cell, number, lasts_s, seed))
    about |= {"load_average_after": os.getloadavg(), "took_s": round(time.monotonic() - began_s, 1)}
    outcome = json.loads((path / "row.json").read_text(encoding="utf-8"))["outcome"]
    if outcome["failed"]:
        return f"FAILED: {outcome['failed']}"
    (path / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return f"{about['took_s']} s, step {1e3 * outcome['healthy_step_s']:.1f} ms"


def kept(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.rglob(ABOUT))


def by_cell(directory: Path) -> dict[Cell, list[Recording]]:
    found: dict[Cell, list[Recording]] = {}
    for recording in filter(None, map(read, kept(directory))):
        found.setdefault(recording.cell, []).append(recording)
    return found


def read(path: Path) -> Recording | None:
    """A kept recording without its warm-up; None where too little is left to take blocks from."""
    about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    cell = Cell(**about["cell"])
    document = json.loads((path / "row.json").read_text(encoding="utf-8"))
    n_steps = msgspec.convert(document["row"], Row).steps_at(document["outcome"]["healthy_step_s"])
    (whole,) = load_recording(path).windows(Shape(n_steps, n_steps, 0))
    # What is left begins with a period, so that step 0 of it is one of the job's own step 0.
    first = -(-max(WARMUP_STEPS, 1) // cell.period_steps) * cell.period_steps
    own = own_times(whole)
    return Recording(cell, about, own.steps(slice(first, None))) if len(own) >= first + 4 * cell.period_steps else None
