"""Which healthy jobs are recorded, under which loads. Pure values.

Every job is healthy: nothing that it does is any one rank's fault. So a checkpoint, which rank 0 alone writes, is said
to be one (`kind`): untold, it would be true that rank 0 holds up the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.hidden_rank_matrix.rows import Row, Truth

LOADS = ("alone", "one busy", "two busy", "bursts", "moving")
"""What else runs on the machine: nothing of ours; one or two processes that are always busy; two in bursts; or two that
come and go, each for itself, and are moved from core to core."""

WARMUP_STEPS = 20
USUAL_S = 15.0
LEAST_STEPS, MOST_STEPS = 300, 20_000
"""Steps of a job recorded for the usual time, however fast or slow it is: fewer leave no blocks to choose from."""


@dataclass(frozen=True, slots=True)
class JobType:
    """A sort of healthy job.

    Attributes:
        period_steps: after so many steps the job does the same again; blocks of it begin at multiples of this.
        values: what its row is beside the usual.
    """

    name: str
    period_steps: int
    values: dict[str, object]


JOB_TYPES = {
    job.name: job
    for job in (
        JobType("plain", 1, {"profile": "brisk"}),
        JobType("evaluates", 20, {"profile": "brisk", "evaluate_every": 20, "says_kinds": False}),
        JobType("says kinds", 50, {"profile": "brisk", "evaluate_every": 25, "checkpoint_every": 50}),
        JobType("uneven lengths", 1, {"profile": "busy", "work": "uneven"}),
        # Without the moment of the last ready gradient, as a job that does not have its model watched.
        JobType("collects garbage", 1, {"profile": "busy", "collect_every": 60, "split": False}),
    )
}

OF_EVERY_SIZE = ("plain", "evaluates")
"""The jobs that are recorded with 2 and 8 ranks too, and not only with 4."""

MOVING_TIMES = 4
"""Recordings under a load that moves are as many times as long, and of fewer jobs: what makes one rank the slow one for
some seconds, because its core has to be shared, comes once in some minutes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One recording: a sort of job, of so many ranks, under a load."""

    job: str
    load: str
    n_ranks: int

    @property
    def words(self) -> str:
        return f"{self.job}, {self.n_ranks} ranks, {self.load}"


def cells(*, quick: bool) -> list[Cell]:
    """What is recorded, those of as many ranks together: one crew of processes does them all."""
    if quick:
        return [Cell(job, load, 4) for job in OF_EVERY_SIZE for load in ("alone", "two busy", "bursts")]
    sizes = {2: OF_EVERY_SIZE, 4: tuple(JOB_TYPES), 8: OF_EVERY_SIZE}
    return [
        Cell(job, load, n_ranks)
        for n_ranks, jobs in sizes.items()
        for job in jobs
        for load in LOADS
        if load != "moving" or (job in OF_EVERY_SIZE and n_ranks <= 4)
    ]


def row_of(cell: Cell, number: int, lasts_s: float, seed: int) -> Row:
    """The job that a recording is of."""
    lasts_s *= MOVING_TIMES if cell.load == "moving" else 1
    least_steps = min(LEAST_STEPS, int(LEAST_STEPS * lasts_s / USUAL_S))
    usual: dict[str, object] = {"split": True, "checkpoint_ranks": (0,), "seed": seed + number}
    usual |= {"lasts_s": lasts_s, "least_steps": least_steps}
    name, truth = cell.job.replace(" ", "-"), Truth("healthy")
    values = {**usual, **JOB_TYPES[cell.job].values}
    return Row(number, "healthy", name, cell.n_ranks, MOST_STEPS, truth=truth, **values)  # type: ignore[arg-type]
