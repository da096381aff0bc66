"""Windows as a synchronous job makes them: a small simulator, which keeps a clock for every rank.

A local stage moves its rank's clock alone. A sync stage computes on its own rank first (`ready`), then everybody waits
for the last one and exchanges (`exchange`), and all leave together. What comes after the last sync stage carries over
into the next step: the clocks are never set back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sftriage.records import OTHER, StageSchema, Window
from sftriage.verdicts import Settings, judge

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


class Drawn:
    """Noise of all steps, of which each takes so many numbers, as it would be had a step after the other drawn them."""

    def __init__(self, noise: Noise, seed: int, n_steps: int, n_numbers: int) -> None:
        self._noise_NK = noise(np.random.default_rng(seed), n_steps * n_numbers).reshape(n_steps, n_numbers)
        self._taken = 0

    def next(self, n_numbers: int) -> np.ndarray:
        """The next few numbers of each step."""
        self._taken += n_numbers
        return self._noise_NK[:, self._taken - n_numbers : self._taken]


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
        n_steps, n_ranks = self.n_steps, self.n_ranks
        schema = StageSchema(tuple(name for name, _ in self.stages), self.sync)
        durations_NRS = np.zeros((n_steps, n_ranks, len(self.stages)))
        outside_NRG = np.zeros((n_steps, n_ranks, len(self.sync)))
        # Drawn at once, in the order in which the steps use it.
        noise = Drawn(self.noise, seed, n_steps, n_ranks * (1 + len(self.stages) + len(self.sync)) + len(self.sync))

        def own(stage, seconds):
            own_NR = seconds * noise.next(n_ranks)
            for fault in faults:
                if fault.stage == stage:
                    late_NR = own_NR * fault.factor + fault.seconds
                    own_NR = np.where(fault.applies(n_steps, n_ranks), late_NR, own_NR)
            return own_NR

        between_NR, ready_NR, synced = own(BETWEEN, self.between_s), np.zeros((n_steps, n_ranks)), {}
        for s, (stage, seconds) in enumerate(self.stages):
            if stage in self.sync:
                first = f"{OUTSIDE}-{len(synced)}" if synced else OUTSIDE
                outside_NRG[:, :, len(synced)] = outside_NR = own(first, self.outside_s)
                own_NR = own(stage, seconds)
                ready_NR = ready_NR if synced else own_NR
                synced[s] = outside_NR, own_NR, self.exchange_s * noise.next(1)[:, 0]
            else:
                durations_NRS[:, :, s] = own(stage, seconds)

        clock_R = np.zeros(n_ranks)
        for n in range(n_steps):
            clock_R = clock_R + between_NR[n]
            for s in range(len(self.stages)):
                if s in synced:
                    outside_NR, own_NR, exchange_N = synced[s]
                    clock_R = clock_R + outside_NR[n]
                    left = (clock_R + own_NR[n]).max() + exchange_N[n]
                    durations_NRS[n, :, s] = left - clock_R
                    clock_R = np.full(n_ranks, left)
                else:
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


def classify(window, past=None, settings=None):
    """The verdict on one window."""
    return judge(window, past, settings or Settings())[0]
