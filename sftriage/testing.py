"""For tests of your own loops and policies: synthetic jobs with a planted delay, and checks of who is named.

::

    recording = SyntheticJob(n_steps=200).run(Delay("data", rank=2, seconds=0.03))
    assert_named(recording, rank=2, stage="data")
    assert [one.rank for decision in decisions(recording, "policy.yaml") for one in decision.requests] == [2]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sftriage.controller.controller import shape_of
from sftriage.controller.replay import replay, verdicts_and_pauses
from sftriage.model.captures import Decision
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import OTHER, StageSchema, Window
from sftriage.policy.in_force import load_set
from sftriage.policy.schema import Detection
from sftriage.runs.recordings import RecordedRun
from sftriage.verdict.accounting import BoolArray, FloatArray
from sftriage.windows.npz import save_npz
from sftriage.words.verdicts import verdict_sentence

__all__ = [
    *("BETWEEN", "CALM", "OUTSIDE", "Delay", "Noise", "Steps", "SyntheticJob", "Windows"),
    *("always", "assert_named", "assert_none_named", "at", "decisions"),
    *("every", "from_step", "gaussian", "heavy_tailed", "save"),
]

OUTSIDE = "outside"
"""As a `Delay`'s stage: in no stage, before the first sync stage (``outside-1``: before the second one)."""
BETWEEN = "between"
"""As a `Delay`'s stage: between one step and the next."""

Noise = Callable[[np.random.Generator, int], FloatArray]
"""Factors around 1, this many, that durations are multiplied with."""
Steps = Callable[[int], BoolArray]
"""For each of this many steps, whether it is meant."""


def gaussian(fraction: float) -> Noise:
    """Normal jitter: every stage of every rank varies by this fraction of itself."""
    return lambda rng, n: np.clip(1.0 + fraction * rng.standard_normal(n), 0.05, None)


def heavy_tailed(fraction: float) -> Noise:
    """Jitter with a median of 1 that is sometimes several times as long (Student t, 2.5 degrees of freedom)."""
    return lambda rng, n: np.clip(1.0 + fraction * np.abs(rng.standard_t(2.5, n)), None, 20.0)


def every(period: int, start: int = 0) -> Steps:
    """One step per period."""
    return lambda n: (np.arange(n) - start) % period == 0


def from_step(first: int, last: int | None = None) -> Steps:
    """All steps from ``first`` to before ``last``."""
    return lambda n: (np.arange(n) >= first) & (np.arange(n) < (n if last is None else last))


def at(*steps: int) -> Steps:
    """These steps."""
    return lambda n: np.isin(np.arange(n), steps)


always = from_step(0)

CALM = gaussian(0.03)


@dataclass(frozen=True)
class Delay:
    """A stage takes ``factor`` times as long and ``seconds`` more, on some ranks (None: all), in some steps."""

    stage: str
    rank: int | tuple[int, ...] | None
    seconds: float = 0.0
    steps: Steps = always
    factor: float = 1.0

    def applies(self, n_steps: int, n_ranks: int) -> BoolArray:
        """Where the delay is: steps × ranks."""
        on_NR = np.zeros((n_steps, n_ranks), dtype=np.bool_)
        ranks = range(n_ranks) if self.rank is None else np.atleast_1d(self.rank)
        on_NR[:, list(ranks)] = self.steps(n_steps)[:, None]
        return on_NR


class DrawnNoise:
    """The noise of all steps, drawn at once, as if each step drew its factors after the one before."""

    def __init__(self, noise: Noise, seed: int, n_steps: int, n_factors: int) -> None:
        self._noise_NK = noise(np.random.default_rng(seed), n_steps * n_factors).reshape(n_steps, n_factors)
        self._n_taken = 0

    def next(self, n_factors: int) -> FloatArray:
        self._n_taken += n_factors
        return self._noise_NK[:, self._n_taken - n_factors : self._n_taken]


@dataclass(frozen=True)
class SyntheticJob:
    """A synchronous job; by default a step takes 100 ms: 20 data, 30 forward, 40 backward, 8 optimizer, 2 other.

    Every rank has a clock. A local stage moves its rank's clock alone. In a sync stage each rank does its own work,
    waits for the last rank, and exchanges for ``exchange_s``; all leave together. What comes after the last sync stage
    carries over into the next step.

    Attributes:
        stages: the stages of a step in order, with the seconds of a rank's own work.
        outside_s, between_s: seconds in no stage before the first sync stage, and between steps.
        noise: jitter; calm by default (3 %).
        hosts, cohorts: of each rank its host and its role; ``kinds``: of each step its kind; ``work``: of every step.
    """

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

    def run(self, *delays: Delay, seed: int = 0, split: bool = False, first_step: int = 0) -> Window:
        """All steps of the job as one window; with ``split``, with the moment the last gradient was ready."""
        n_steps, n_ranks = self.n_steps, self.n_ranks
        schema = StageSchema(tuple(name for name, _ in self.stages), self.sync)
        durations_NRS = np.zeros((n_steps, n_ranks, len(self.stages)))
        outside_NRG = np.zeros((n_steps, n_ranks, len(self.sync)))
        # Drawn at once, in the order in which the steps use it.
        n_factors = n_ranks * (1 + len(self.stages) + len(self.sync)) + len(self.sync)
        noise = DrawnNoise(self.noise, seed, n_steps, n_factors)

        def own(stage: str, seconds: float) -> FloatArray:
            own_NR = seconds * noise.next(n_ranks)
            for delay in delays:
                if delay.stage == stage:
                    late_NR = own_NR * delay.factor + delay.seconds
                    own_NR = np.where(delay.applies(n_steps, n_ranks), late_NR, own_NR)
            return own_NR

        between_NR, ready_NR = own(BETWEEN, self.between_s), np.zeros((n_steps, n_ranks))
        synced: dict[int, tuple[FloatArray, FloatArray, FloatArray]] = {}
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


def save(recording: Window, path: str | os.PathLike[str]) -> Path:
    """Write a recording as an ``.npz`` that `sftriage.load`, ``sftriage analyze`` and ``policy test`` read."""
    return save_npz(recording, Path(path))


Windows = Window | Iterable[Window]
"""A recording, cut into windows as `sftriage.load` cuts it; or windows."""


def assert_named(windows: Windows, *, rank: int, stage: str | None, settings: Settings | None = None) -> Verdict:
    """Check that this rank is named with this stage (None: all local stages alike), and no other rank or host.

    Returns:
        The first verdict that names it.

    Raises:
        AssertionError: with the sentences of the verdicts.
    """
    verdicts = _judged(windows, settings)
    named = [(verdict, verdict.named) for verdict in verdicts if verdict.named is not None]
    found = [verdict for verdict, suspect in named if (suspect.ranks, suspect.stage) == ((rank,), stage)]
    if not found or any(suspect.ranks != (rank,) for _, suspect in named):
        raise AssertionError(_expected(f"rank {rank} and no other, in {stage or 'all local stages'}", verdicts))
    return found[0]


def assert_none_named(windows: Windows, *, settings: Settings | None = None) -> None:
    """Check that no window names a suspect.

    Raises:
        AssertionError: with the sentences of the verdicts.
    """
    verdicts = _judged(windows, settings)
    if any(verdict.named is not None for verdict in verdicts):
        raise AssertionError(_expected("no suspect", verdicts))


def decisions(windows: Windows, *policies: str | os.PathLike[str]) -> list[Decision]:
    """What policies (files, or names of shipped ones) would have decided on each window, as ``sftriage policy test``.

    Raises:
        SftriageError: a policy is missing or invalid.
    """
    policy_set = load_set(policies)
    return [one.decision for one in replay(_cut(windows, policy_set.detection), policy_set, 0.0)]


def _judged(windows: Windows, settings: Settings | None) -> list[Verdict]:
    return [verdict for verdict, _ in verdicts_and_pauses(_cut(windows, Detection()), settings or Settings())]


def _cut(windows: Windows, detection: Detection) -> Iterator[Window]:
    if not isinstance(windows, Window):
        return iter(windows)
    return RecordedRun(Path(), windows, {}).windows(shape_of(detection, warmup_steps=0))


def _expected(expected: str, verdicts: list[Verdict]) -> str:
    sentences = dict.fromkeys(map(verdict_sentence, verdicts)) or ["no window: there are too few steps"]
    return "\n  ".join([f"expected {expected}; the verdicts:", *sentences])
