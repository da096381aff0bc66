"""Windows as a synchronous job makes them: a small simulator, which keeps a clock for every rank.

A local stage moves its rank's clock alone. A sync stage computes on its own rank first (`ready`), then everybody waits
for the last one and exchanges (`exchange`), and all leave together. What comes after the last sync stage carries over
into the next step: the clocks are never set back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sftriage.records import OTHER, StageSchema, Window

OUTSIDE = "outside"  # in `other`, before the (first) sync stage
BETWEEN = "between"  # between one step and the next
STEP_S = 0.100

Noise = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(fraction):
    """Factors around one: every stage of every rank jitters by this fraction of itself."""
    return lambda rng, n: np.clip(1.0 + fraction * rng.standard_normal(n), 0.05, None)


def heavy_tailed(fraction):
    """Factors with a median of one and now and then several times as long (Student t, 2.5 degrees of freedom)."""
    return lambda rng, n: np.clip(1.0 + fraction * np.abs(rng.standard_t(2.5, n)), None, 20.0)


def every(period, start=0):
    return lambda n: (np.arange(n) - start) % period == 0


def from_step(first, last=None):
    return lambda n: (np.arange(n) >= first) & (np.arange(n) < (n if last is None else last))


def at(*steps):
    return lambda n: np.isin(np.arange(n), steps)


always = from_step(0)


@dataclass(frozen=True)
class Fault:
    """So many seconds more in a stage, for some ranks, in some steps. Ranks None: all of them."""

    stage: str
    rank: int | tuple[int, ...] | None
    seconds: float = 0.0
    steps: Callable[[int], np.ndarray] = always
    factor: float = 1.0

    def applies(self, n_steps, n_ranks):
        on_NR = np.zeros((n_steps, n_ranks), dtype=bool)
        ranks = range(n_ranks) if self.rank is None else np.atleast_1d(self.rank)
        on_NR[:, list(ranks)] = self.steps(n_steps)[:, None]
        return on_NR


CALM = gaussian(0.03)


@dataclass(frozen=True)
class Job:
    """A step of 100 ms: 20 data, 30 forward, 40 backward (35 of its own and 5 of exchange), 8 optimizer, 2 other."""

    n_ranks: int = 4
    n_steps: int = 50
    stages: tuple[tuple[str, float], ...] = (
        ("data", 0.020),
        ("forward", 0.030),
        ("backward", 0.035),
        ("optimizer", 0.008),
        (OTHER, 0.001),
    )
    sync: tuple[str, ...] = ("backward",)
    exchange_s: float = 0.005
    outside_s: float = 0.001
    between_s: float = 0.0
    noise: Noise = CALM
    hosts: tuple[str, ...] | None = None
    cohorts: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    work: float | None = None

    def run(self, *faults, seed=0, split=False, first_step=0):
        """A window of the job with these faults in it; with ``split``, the moment the last gradient was ready too."""
        rng = np.random.default_rng(seed)
        n_steps, n_ranks = self.n_steps, self.n_ranks
        schema = StageSchema(tuple(name for name, _ in self.stages), self.sync)
        durations_NRS = np.zeros((n_steps, n_ranks, len(self.stages)))
        outside_NRG = np.zeros((n_steps, n_ranks, len(self.sync)))
        between_NR, ready_NR = np.zeros((n_steps, n_ranks)), np.zeros((n_steps, n_ranks))
        extra = [(fault, fault.applies(n_steps, n_ranks)) for fault in faults]
        clock_R = np.zeros(n_ranks)

        def own(stage, seconds, n):
            own_R = seconds * self.noise(rng, n_ranks)
            for fault, on_NR in extra:
                if fault.stage == stage:
                    own_R = np.where(on_NR[n], own_R * fault.factor + fault.seconds, own_R)
            return own_R

        for n in range(n_steps):
            between_NR[n] = own(BETWEEN, self.between_s, n)
            clock_R = clock_R + between_NR[n]
            n_sync = 0
            for s, (stage, seconds) in enumerate(self.stages):
                if stage in self.sync:
                    first = OUTSIDE if n_sync == 0 else f"{OUTSIDE}-{n_sync}"
                    outside_NRG[n, :, n_sync] = own(first, self.outside_s, n)
                    clock_R = clock_R + outside_NRG[n, :, n_sync]
                    ready_R = own(stage, seconds, n)
                    left = (clock_R + ready_R).max() + self.exchange_s * float(self.noise(rng, 1)[0])
                    durations_NRS[n, :, s] = left - clock_R
                    if n_sync == 0:
                        ready_NR[n] = ready_R
                    clock_R = np.full(n_ranks, left)
                    n_sync += 1
                else:
                    durations_NRS[n, :, s] = own(stage, seconds, n)
                    clock_R = clock_R + durations_NRS[n, :, s]
        if OTHER in schema.stages:
            durations_NRS[:, :, -1] += outside_NRG.sum(axis=2)
        return Window(
            schema,
            first_step,
            durations_NRS,
            outside_NRG=outside_NRG if self.sync else None,
            between_NR=between_NR,
            ready_NR=ready_NR if split else None,
            hosts=self.hosts,
            cohorts=self.cohorts,
            kinds=self.kinds,
            work_NR=None if self.work is None else np.full((n_steps, n_ranks), self.work),
        )


def exactly(durations_NRS, stages, sync=(), **optional):
    """A window of just these numbers."""
    return Window(StageSchema(stages, sync), 0, np.asarray(durations_NRS, dtype=float), **optional)
