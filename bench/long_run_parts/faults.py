"""Faults put into healthy jobs: who is slow, where in the step, by how much, and in which steps. Drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.hidden_rank_matrix.drawing import Deck
from bench.hidden_rank_matrix.rows import STAGE_OF
from bench.long_run_parts.synchronous import FloatArray, OwnTimes
from sftriage.records import OTHER

SIZES = (0.02, 0.05, 0.10, 0.20, 0.50)
COURSES = ("constant", "recurring", "growing", "bursts")
SCOPES = ("rank", "host")
GROWS_STEPS = 400
"""How long a growing fault grows before it has its size."""
BURST_STEPS = (20, 60)
PERIODS = range(5, 31)
LEAD_STEPS = (300, 500)
"""The job is healthy for so many steps before."""
LASTS_STEPS = 800
JITTER = 0.1
"""A delay varies from step to step by so much of itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is put into a job.

    Attributes:
        size: the delay in the steps that have it, as a fraction of the typical step; of a growing one, once it is full.
        course: ``constant``, ``recurring`` (every ``period_steps``), ``growing`` or ``bursts``.
        scope: ``rank`` or ``host``.
        place: where in the step, a key of `STAGE_OF`.
        ranks: who is slow.
        onset: the first step that has it.
        seed: of its bursts and its jitter.
    """

    size: float
    course: str
    scope: str
    place: str
    ranks: tuple[int, ...]
    onset: int
    period_steps: int = 1
    seed: int = 0

    @property
    def stage(self) -> str:
        """The stage that is to be named."""
        return STAGE_OF[self.place]

    def fractions_N(self, n_steps: int) -> FloatArray:
        """The size in each step before its jitter."""
        since_N = np.arange(n_steps) - self.onset
        there_N = since_N >= 0
        if self.course == "recurring":
            there_N &= since_N % self.period_steps == 0
        if self.course == "bursts":
            there_N &= _bursts_N(n_steps, self.onset, random.Random(self.seed))
        grown_N = np.clip((since_N + 1) / GROWS_STEPS, 0.0, 1.0) if self.course == "growing" else np.ones(n_steps)
        return np.where(there_N, self.size * grown_N, 0.0)

    def delay_NR(self, n_steps: int, n_ranks: int, step_s: float) -> FloatArray:
        """Seconds that each rank takes longer in each step, where a typical one takes ``step_s``."""
        rng = np.random.default_rng(self.seed)
        delay_NR = np.zeros((n_steps, n_ranks))
        jitter_NR = np.clip(1.0 + JITTER * rng.standard_normal((n_steps, len(self.ranks))), 0.0, 2.0)
        delay_NR[:, list(self.ranks)] = self.fractions_N(n_steps)[:, None] * jitter_NR * step_s
        return delay_NR


def _bursts_N(n_steps: int, onset: int, rng: random.Random) -> NDArray[np.bool_]:
    """On from the onset for some steps, off for some, and so on."""
    on_N = np.zeros(n_steps, dtype=np.bool_)
    first = onset
    while first < n_steps:
        length = rng.randint(*BURST_STEPS)
        on_N[first : first + length] = True
        first += length + rng.randint(*BURST_STEPS)
    return on_N


def slowed(own: OwnTimes, place: str, delay_NR: FloatArray) -> OwnTimes:
    """The ranks' own times with a delay in one place of the step. The waits for it are put in by `OwnTimes.window`.

    Raises:
        ValueError: the place is inside a sync stage of which nobody knows when the last gradient was ready.
    """
    stage, sync = STAGE_OF[place], own.sync_columns[0]
    if place == "between":
        return replace(own, between_NR=own.between_NR + delay_NR)
    if place == "before":
        outside_NRG = own.outside_NRG.copy()
        outside_NRG[:, :, 0] += delay_NR
        return replace(own, outside_NRG=outside_NRG)
    column = own.schema.stages.index(stage)
    if column == sync and not own.split:
        raise ValueError(f"{stage} has no part of its own")
    local_NRS = own.local_NRS.copy()
    # What is outside the stages after the last sync is `other`, which is last.
    local_NRS[:, :, -1 if stage == OTHER else column] += delay_NR
    return replace(own, local_NRS=local_NRS)


class Dealer:
    """Faults of every size and course alike, dealt so that a few of each cover places, ranks and periods evenly."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"faults-{seed}")
        self._places = {split: Deck(_places(split=split), self.rng) for split in (False, True)}
        self._periods = Deck(PERIODS, self.rng)

    def deal(self, size: float, course: str, scope: str, hosts_R: NDArray[np.str_], *, split: bool) -> Fault:
        """A fault for a job whose ranks are on these hosts."""
        rank = self.rng.randrange(len(hosts_R))
        ranks = np.flatnonzero(hosts_R == hosts_R[rank]).tolist() if scope == "host" else [rank]
        return Fault(
            size=size,
            course=course,
            scope=scope,
            place=self._places[split].deal(),
            ranks=tuple(ranks),
            onset=self.rng.randint(*LEAD_STEPS),
            period_steps=self._periods.deal() if course == "recurring" else 1,
            seed=self.rng.randrange(1 << 30),
        )


def _places(*, split: bool) -> list[str]:
    return [place for place in STAGE_OF if split or place != "backward"]
