"""What the duration of a computation is made of: usual time, the level of its worker, the length of its microbatch.

A duration is taken for a product: what its layers usually take, the *level* of its worker in that step, and the
*length* of its microbatch, which all stages and both directions share; and a stall may be added. So a worker that is
slow in some steps does not pass for long sequences, nor do these for a slow worker. `kinds` calls this module.

Axes, besides those of `graph`: P stages, M operations; a *worker* is one column (W) of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from sftriage.stragglers.graph import AnyFloat, BoolArray, FloatArray, IndexArray, Operations

MIN_OVER = 0.05
"""A worker, a data-parallel rank or a link is slow if it takes longer than its peers by this fraction at least."""
MIN_SIGMAS = 5.0
"""Slow steps differ from the others by this many standard deviations at least."""
MIN_SLOW_STEPS = 2
MAX_SLOW_WORKERS = 0.5
"""If more than this fraction of the workers is slow now and then, it is not theirs."""
MIN_CORRELATION = 0.9
"""From this correlation on, a microbatch's forward and backward vary together, as sequence lengths cause."""
MIN_SHARED = 0.5
"""Below this correlation, two stages compute other microbatches."""
STALL_RATIO, STALL_SIGMAS = 0.2, 6.0
"""A computation stalls if it exceeds what is due by both this ratio and this many deviations."""
MANY_OPS = 8
"""With this many operations of a type in a step, the level of a worker is known for that step."""
MAD_TO_SIGMA, HALF_TO_SIGMA, _MEDIAN_TO_SIGMA = 1.4826, 1.349, 1.25

MIN_RATIO = 1e-9
"""A computation that took no time counts as this part of the usual time."""

Worker: TypeAlias = tuple[int, int]
Place = TypeVar("Place")


class Spell(NamedTuple):
    """The steps (N) in which something is slow, by which ratio, and whether these are all from one step on."""

    slow_N: BoolArray
    ratio: float
    from_step_on: bool


class Factors:
    """What computations usually take, the levels of workers, and the lengths of microbatches.

    Attributes:
        computes: the operations (M) of each type and stage, computations only.
        usual_T: what each operation usually takes: on the lower median data-parallel rank, in the median step.
        ratio_TNW: each computation over that; 1 for anything else.
        levels: the lower median ratio of a type on a worker in a step (N × W), by type and stage; usually 1.
        usual_P: what each stage usually computes in a step, in seconds.
        level_P: the level of each worker over all types of computations (N × W), by stage.
        common_NW: the level that the stages of a data-parallel rank share, as lengths do: the lower median of theirs.
        numbers_T: the microbatch of each computation, forward or backward; -1 for anything else.
        columns: W.
        has_several: whether a step has enough microbatches for their median to show the level of a worker.
        shares_lengths: whether a data-parallel rank has several stages, which compute the same microbatches.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.pp_T: IndexArray = operations.pp_TW[:, 0]
        self.numbers_T: IndexArray = np.where(operations.phase_T != "", operations.microbatch_T, -1)
        self.columns = operations.shape[2]
        self.has_several = len(np.unique(self.numbers_T)) > 3
        self.shares_lengths = self.has_several and len(operations.pp_ranks) > 1
        self.common_NW = np.ones(operations.shape[1:])
        self._compare()
        if self.shares_lengths and np.median(self.common_NW, axis=0).max() > 1.0 + MIN_OVER:
            # Of few data-parallel ranks, each may be the slower one in some stage.
            self._compare()

    def _compare(self) -> None:
        """Set usual durations and levels: each data-parallel rank counts as slow as its stages are together."""
        operations = self.operations
        self.usual_T = np.zeros(operations.shape[0])
        self.computes: dict[tuple[int, int], IndexArray] = {}
        for index, of_type in enumerate(operations.types):
            for pp in operations.pp_ranks if not of_type.communication else ():
                ops_M = np.flatnonzero((operations.type_T == index) & (self.pp_T == pp))
                for chunk in np.unique(operations.chunk_T[ops_M]):
                    layer_M = ops_M[operations.chunk_T[ops_M] == chunk]
                    work_MNW = operations.work_TNW[layer_M] / self.common_NW
                    self.usual_T[layer_M] = lower_median(np.median(work_MNW, axis=(0, 1)))
                if (self.usual_T[ops_M] > 0.0).any():
                    self.computes[index, pp] = ops_M
        due_T = np.where(self.usual_T > 0.0, self.usual_T, 1.0)[:, None, None].astype(operations.work_TNW.dtype)
        ratio_TNW = np.where(self.usual_T[:, None, None] > 0.0, operations.work_TNW / due_T, 1.0)
        self.ratio_TNW = np.maximum(ratio_TNW, MIN_RATIO)
        self.usual_P = {pp: float(self.usual_T[self.pp_T == pp].sum()) for pp in operations.pp_ranks}
        self.levels = {at: _level(self.ratio_TNW[ops_M], self.common_NW) for at, ops_M in self.computes.items()}
        self.level_P = {pp: np.full(operations.shape[1:], float(not self.usual_P[pp])) for pp in operations.pp_ranks}
        for (index, pp), ops_M in self.computes.items():
            self.level_P[pp] += self.levels[index, pp] * (float(self.usual_T[ops_M].sum()) / self.usual_P[pp])
        self.common_NW = lower_median(np.stack(list(self.level_P.values())))

    @cached_property
    def microbatches(self) -> tuple[IndexArray, ...]:
        """The computations of each microbatch: of all stages together, as they share its length."""
        numbers = np.unique(self.numbers_T[self.numbers_T >= 0])
        by_stage = [
            [np.flatnonzero((self.numbers_T == number) & (self.pp_T == pp)) for number in numbers]
            for pp in self.operations.pp_ranks
        ]
        if self.shares_lengths:
            # A recording of which the stages do not belong together: there each stage has its own lengths.
            ends = (np.stack([lower_median(self.ratio_TNW[ops_M]) for ops_M in by_stage[at]]) for at in (0, -1))
            both = next(([self.ratio_TNW[ops_M] for ops_M in pair] for pair in pairs_of(self.operations)), None)
            if both and correlation_of(*both) >= MIN_CORRELATION and correlation_of(*ends) < MIN_SHARED:
                return tuple(ops_M for stage in by_stage for ops_M in stage)
        return tuple(np.concatenate(stages) for stages in zip(*by_stage, strict=True))

    @cached_property
    def own_P(self) -> dict[int, FloatArray]:
        """The level of each worker over its data-parallel rank's (N × W), by stage."""
        common_NW = self.common_NW if self.shares_lengths else 1.0
        return {pp: level_NW / common_NW for pp, level_NW in self.level_P.items()}

    @cached_property
    def slow_workers(self) -> dict[Worker, Spell]:
        """By worker (column, stage), the steps in which it is slow."""
        return _spells({(at, pp): own_N for pp, own_NW in self.own_P.items() for at, own_N in enumerate(own_NW.T)})

    @cached_property
    def slow_columns(self) -> dict[int, Spell]:
        """The same of whole data-parallel ranks, by column."""
        return _spells(dict(enumerate(self.common_NW.T))) if self.shares_lengths else {}

    @cached_property
    def level_TNW(self) -> FloatArray:
        """The level of each computation's worker; with few microbatches, in its slow steps only."""
        level_TNW = np.ones_like(self.ratio_TNW)
        for (index, pp), ops_M in self.computes.items():
            if self.has_several:
                level_TNW[ops_M] = self.levels[index, pp]
                continue
            for (column, stage), spell in self.slow_workers.items():
                if stage == pp:
                    level_TNW[ops_M, :, column] = self.slowed_N(index, pp, column, spell)
        return level_TNW

    def slowed_N(self, index: int, pp: int, column: int, spell: Spell) -> FloatArray:
        """How much longer a type takes on a slow worker in each step (1: as usual)."""
        own_N = self.levels[index, pp][:, column]
        if self.shares_lengths and (column, pp) in self.slow_workers:
            own_N = own_N / self.common_NW[:, column]
        ratio = float(np.median(own_N[spell.slow_N]))
        if ratio < 1.0 + MIN_OVER / 2:
            return np.ones(len(own_N))
        several = len(self.computes[index, pp]) >= MANY_OPS and self.shares_lengths
        return np.where(spell.slow_N, np.maximum(own_N, 1.0) if several else ratio, 1.0)

    @cached_property
    def lengths(self) -> list[FloatArray]:
        """The length of each microbatch (N × W) over the median of its step: the lower median of its computations."""
        return [lower_median(self.ratio_TNW[ops_M] / self.level_TNW[ops_M]) for ops_M in self.microbatches]

    @cached_property
    def length_TNW(self) -> FloatArray:
        length_TNW = np.ones_like(self.ratio_TNW)
        for ops_M, length_NW in zip(self.microbatches, self.lengths, strict=True):
            length_TNW[ops_M] = length_NW
        return length_TNW

    @cached_property
    def stalled_TNW(self) -> FloatArray:
        """By how much each computation takes longer than due to its worker and its microbatch, as a ratio; else 0."""
        over_TNW = np.zeros_like(self.ratio_TNW)
        if not self.microbatches:
            return over_TNW
        phased_M = np.concatenate(self.microbatches)
        rest_MNW = self.ratio_TNW[phased_M] / (self.level_TNW[phased_M] * self.length_TNW[phased_M]) - 1.0
        least = max(STALL_RATIO, STALL_SIGMAS * MAD_TO_SIGMA * float(np.median(np.abs(rest_MNW))))
        over_TNW[phased_M] = np.where(rest_MNW > least, rest_MNW, 0.0)
        return over_TNW


def lower_median(values: AnyFloat) -> FloatArray:
    """Over the first axis; of two values it is the lesser, which no stall has prolonged."""
    middle = (len(values) - 1) // 2
    return np.asarray(np.partition(values, middle, axis=0)[middle])


def _level(ratio_MNW: AnyFloat, common_NW: FloatArray) -> FloatArray:
    level_NW = lower_median(ratio_MNW)
    # Where microbatches differ, the lower of two is less than the usual one: that is no faster worker.
    level_NW = level_NW * (np.median(ratio_MNW, axis=(0, 1)) / np.median(level_NW, axis=0))
    return level_NW / float(lower_median(np.median(level_NW / common_NW, axis=0)))


def _spells(levels: Mapping[Place, FloatArray]) -> dict[Place, Spell]:
    """The places whose level (N) is high, and when; none if these are most."""
    log_KN = np.log(list(levels.values()))
    sigma_K = np.array([_deviation(log_N) for log_N in log_KN])
    # A place that varies little is compared with others that vary more.
    sigma_K = np.maximum(sigma_K, np.sort(sigma_K)[len(sigma_K) // 2])
    spells = {place: _spell(*of_place) for place, *of_place in zip(levels, log_KN, sigma_K.tolist(), strict=True)}
    found = {place: spell for place, spell in spells.items() if spell is not None}
    return found if len(found) <= MAX_SLOW_WORKERS * len(levels) else {}


def _deviation(log_N: FloatArray) -> float:
    """How much a level varies from step to step, by the half of the steps that are nearest to each other.

    Slow steps are no part of it, be they less than half or more. Corrected for few steps (Rousseeuw and Leroy 1987).
    """
    sorted_N, n_steps, half = np.sort(log_N), len(log_N), (len(log_N) + 1) // 2
    shortest = float((sorted_N[half - 1 :] - sorted_N[: n_steps - half + 1]).min())
    return shortest / HALF_TO_SIGMA * (1.0 + 5.0 / max(1, n_steps - 1))


def _spell(log_N: FloatArray, sigma: float) -> Spell | None:
    """Since when, or in which steps, the logarithm of a level is high: in most, from a step on, or now and then."""
    n_steps, steps_N = len(log_N), np.arange(len(log_N))

    def least(*counts: int) -> float:
        error = _MEDIAN_TO_SIGMA * sigma * float(np.sqrt(sum(1.0 / count for count in counts)))
        return max(float(np.log1p(MIN_OVER)), MIN_SIGMAS * error)

    if (k := _change(log_N)) is not None:
        before, after = float(np.median(log_N[:k])), float(np.median(log_N[k:]))
        middle = (before + after) / 2
        steady = (log_N[:k] < middle).mean() >= 0.9 and (log_N[k:] > middle).mean() >= 0.9
        rises = after - before >= max(least(k, n_steps - k), after / 2)
        if steady and rises and after >= least(n_steps - k):
            return Spell(steps_N >= k, float(np.exp(after)), from_step_on=True)
    median = float(np.median(log_N))
    if median >= least(n_steps):
        return Spell(steps_N >= 0, float(np.exp(median)), from_step_on=False)
    slow_N = log_N > max(float(np.log1p(2 * MIN_OVER)), MIN_SIGMAS * sigma)
    if slow_N.sum() >= MIN_SLOW_STEPS:
        return Spell(slow_N, float(np.exp(np.median(log_N[slow_N]))), from_step_on=False)
    return None


def _change(log_N: FloatArray) -> int | None:
    """The step before which and from which on the means differ most, upwards."""
    n_steps = len(log_N)
    if n_steps < 2 * MIN_SLOW_STEPS:
        return None
    k_K = np.arange(MIN_SLOW_STEPS, n_steps - MIN_SLOW_STEPS + 1)
    sums_N = np.cumsum(log_N)
    rise_K = (sums_N[-1] - sums_N[k_K - 1]) / (n_steps - k_K) - sums_N[k_K - 1] / k_K
    scores_K = rise_K / np.sqrt(1.0 / k_K + 1.0 / (n_steps - k_K))
    return int(k_K[scores_K.argmax()])


def correlation_of(first_MNW: FloatArray, second_MNW: FloatArray) -> float:
    """The correlation of two computations of the same microbatches within a step.

    It is the median worker's, weighted by deviations: lengths may differ on one data-parallel rank only.
    With one or two microbatches, that over all steps.
    """
    axes = 0 if len(first_MNW) > 2 else (0, 1)
    first_MNW, second_MNW = (both - both.mean(axis=axes, keepdims=True) for both in (first_MNW, second_MNW))
    product_W = (first_MNW * second_MNW).sum(axis=(0, 1))
    scale_W = np.sqrt((first_MNW**2).sum(axis=(0, 1)) * (second_MNW**2).sum(axis=(0, 1)))
    correlation_W = product_W / np.where(scale_W > 0.0, scale_W, np.inf)
    order_W = correlation_W.argsort()
    upto_W = scale_W[order_W].cumsum()
    return float(correlation_W[order_W[upto_W.searchsorted(upto_W[-1] / 2)]])


def pairs_of(operations: Operations) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Forward and backward of the same microbatches, by stage and chunk."""
    by_layer: dict[tuple[int, int], dict[str, dict[int, int]]] = {}
    of_op = zip(operations.phase_T, operations.pp_TW[:, 0], operations.chunk_T, operations.microbatch_T, strict=True)
    for op, (phase, pp, chunk, number) in enumerate(of_op):
        if phase:
            by_layer.setdefault((int(pp), int(chunk)), {}).setdefault(phase, {})[int(number)] = op
    for phases in by_layer.values():
        forward, backward = phases.get("forward", {}), phases.get("backward", {})
        if both := [number for number in forward if number in backward]:
            yield (
                np.array([forward[number] for number in both], dtype=np.intp),
                np.array([backward[number] for number in both], dtype=np.intp),
            )
