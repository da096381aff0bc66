"""Recording the cells, and reading kept recordings again. A recording is a run directory that says how it was made."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.hidden_rank_matrix.rows import Row
from bench.hidden_rank_matrix.running import Runner
from bench.long_run_parts.jobs import JOB_TYPES, WARMUP_STEPS, Cell, row_of
from bench.long_run_parts.loads import Watch, busy
from bench.long_run_parts.synchronous import OwnTimes, own_times
from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Shape

ABOUT = "long-run.json"


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A kept recording: what it is of, how it went, and what its ranks did by themselves."""

    cell: Cell
    about: dict[str, Any]
    own: OwnTimes

    @property
    def period_steps(self) -> int:
        return JOB_TYPES[self.cell.job].period_steps

    @property
    def step_s(self) -> float:
        """A typical step."""
        return float(np.median(self.own.exposed_N()))


def record(cells: list[Cell], lasts_s: float, seed: int, out: Path, say: Callable[[str], None]) -> None:
    """Run and keep all cells, each about so long; one whose job fails is told, and left out."""
    done = 0
    for n_ranks, alike in groupby(cells, lambda cell: cell.n_ranks):
        runner = Runner(n_ranks, out)
        try:
            for cell in alike:
                said = _record(runner, cell, done, lasts_s, seed)
                done += 1
                say(f"recorded {done} of {len(cells)}: {cell.words}: {said}")
        finally:
            runner.close()


def _record(runner: Runner, cell: Cell, number: int, lasts_s: float, seed: int) -> str:
    about: dict[str, Any] = {"cell": asdict(cell), "load_average_before": os.getloadavg()}
    began_s, watch = time.monotonic(), Watch()
    with busy(cell.load, seed + number):
        path = runner.run(row_of(cell, number, lasts_s, seed))
    about |= {
        "load_average_after": os.getloadavg(),
        # Of the recorded job, its load and everybody else together.
        "busy_cores_mean": round(watch.cores, 2),
        "cores": os.cpu_count(),
        "took_s": round(time.monotonic() - began_s, 1),
    }
    outcome = json.loads((path / "row.json").read_text(encoding="utf-8"))["outcome"]
    if outcome["failed"]:
        return f"FAILED: {outcome['failed']}"
    (path / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return f"{about['took_s']} s, step {1e3 * outcome['healthy_step_s']:.1f} ms, {about['busy_cores_mean']} cores busy"


def kept(directory: Path) -> list[Path]:
    """The recordings in a directory, or in directories in it."""
    return sorted(path.parent for path in directory.rglob(ABOUT))


def read(path: Path) -> Recording | None:
    """A kept recording without its warm-up; None where too little is left to take blocks from."""
    about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    cell = Cell(**about["cell"])
    document = json.loads((path / "row.json").read_text(encoding="utf-8"))
    n_steps = msgspec.convert(document["row"], Row).steps_at(document["outcome"]["healthy_step_s"])
    (whole,) = load_recording(path).windows(Shape(n_steps, n_steps, 0))
    period = JOB_TYPES[cell.job].period_steps
    # What is left begins with a period, so that step 0 of it is one of the job's own step 0.
    first = -(-max(WARMUP_STEPS, 1) // period) * period
    own = own_times(whole)
    return Recording(cell, about, own.steps(slice(first, None))) if len(own) >= first + 4 * period else None
