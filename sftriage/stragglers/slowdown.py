"""The time that stragglers cost, by place: the figures of arXiv 2505.05713, equations 1 to 5.

A step is replayed with the measured durations (T_ori) and with ideal ones (T_ideal); S is their ratio. A replay with
one group's measured durations shows its cost; one with all others' (T_rem), what fixing the group would recover:
(T_ori - T_rem) / (T_ori - T_ideal).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from sftriage.errors import InputError
from sftriage.stragglers.graph import AnyFloat, BoolArray, FloatArray, Operations

MIN_SLOWDOWN = 1.03
"""Below this slowdown there is too little to attribute."""

WORST_PERCENT = 3
"""Percentage of the workers, and at least one, that M_W counts as slow."""


NONE_11: BoolArray = np.zeros((1, 1), dtype=np.bool_)
"""No operation of any worker."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A mean step with some operations at their ideal and all others as measured, and the recovered share."""

    step_s: float
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class Slowdown:
    """The cost of stragglers to a job, in seconds a step.

    Attributes:
        steps, measured_N, replayed_N: each step's number and durations: recorded, and replayed without idle gaps.
        ideal_s: any step without stragglers.
        by_part_N, by_dp_N, by_pp_N: each step's slowdown if only that group were as measured; empty if S is too small.
        worst: the workers (dp, pp) of M_W, the worst first.
        m_w, m_s: what fixing these workers, and what fixing the last stage would recover.
    """

    steps: tuple[int, ...]
    measured_N: FloatArray
    replayed_N: FloatArray
    ideal_s: float
    by_part_N: dict[str, FloatArray] = field(default_factory=dict)
    by_dp_N: dict[int, FloatArray] = field(default_factory=dict)
    by_pp_N: dict[int, FloatArray] = field(default_factory=dict)
    worst: tuple[tuple[int, int], ...] = ()
    m_w: Fix | None = None
    m_s: Fix | None = None

    @property
    def step_s(self) -> float:
        """A mean step, replayed as measured."""
        return float(self.replayed_N.mean())

    @property
    def s(self) -> float:
        """The slowdown S: a mean step as measured, over one without stragglers."""
        return self.step_s / self.ideal_s

    @property
    def slowdown_N(self) -> FloatArray:
        """The slowdown of each step."""
        return self.replayed_N / self.ideal_s

    @property
    def lost_s(self) -> float:
        return self.step_s - self.ideal_s

    @property
    def unexplained(self) -> float:
        """A measured step over a replayed one, less 1: the error of the replay."""
        return float(self.measured_N.mean() / self.replayed_N.mean()) - 1.0

    @property
    def by_part(self) -> dict[str, float]:
        """S_t: the slowdown by type of operation; empty if not attributed."""
        return {part: float(slowdown_N.mean()) for part, slowdown_N in self.by_part_N.items()}

    @property
    def by_dp(self) -> dict[int, float]:
        return {dp: float(slowdown_N.mean()) for dp, slowdown_N in self.by_dp_N.items()}

    @property
    def by_pp(self) -> dict[int, float]:
        return {pp: float(slowdown_N.mean()) for pp, slowdown_N in self.by_pp_N.items()}

    def by_worker(self) -> dict[tuple[int, int], float]:
        """S_w by (dp, pp): the lesser of the slowdowns of the worker's data-parallel rank and stage."""
        by_dp, by_pp = self.by_dp, self.by_pp
        return {(dp, pp): min(by_dp[dp], by_pp[pp]) for pp in by_pp for dp in by_dp}


def histogram_of(values: AnyFloat) -> dict[str, list[float]]:
    """How many of some values are in each of 20 bins: ``counts[k]`` from ``edges[k]`` to ``edges[k + 1]``."""
    counts, edges = np.histogram(values, bins=20)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def replayed_as_measured(operations: Operations) -> Slowdown:
    """The steps as measured and with all operations at their ideal; raises InputError if they take no time."""
    replayed_N, ideal_s = operations.replay(~NONE_11).whole_N, operations.ideal_step_s()
    if not (ideal_s > 0.0 and replayed_N.mean() > 0.0):
        raise InputError("the operations take no time")
    return Slowdown(operations.steps, operations.measured_N, replayed_N, ideal_s)


def slowdown_of(operations: Operations) -> Slowdown:
    """Compute all figures; raises InputError if the steps take no time."""
    found = replayed_as_measured(operations)
    ideal_s = found.ideal_s
    if not found.s >= MIN_SLOWDOWN:
        return found
    parts: dict[str, list[int]] = {}
    for index, of_type in enumerate(operations.types):
        parts.setdefault(of_type.part, []).append(index)

    def only(kept_TW: BoolArray) -> FloatArray:
        return operations.replay(kept_TW).finish_N / ideal_s

    if operations.dp_TW.shape[0] == 1:
        alone_NW = operations.each_column_alone() / ideal_s
        by_dp_N = {int(dp): alone_NW[:, column] for column, dp in enumerate(operations.dp_TW[0])}
    else:
        by_dp_N = {dp: only(operations.dp_TW == dp) for dp in operations.dp_ranks}
    found = replace(
        found,
        by_part_N={part: only(operations.of_types(*indices)) for part, indices in parts.items()},
        by_dp_N=by_dp_N,
        by_pp_N={pp: only(operations.pp_TW == pp) for pp in operations.pp_ranks},
    )
    by_worker = found.by_worker()
    # The first of equals, in the order of global ranks: all of one stage, then the next.
    slowest = sorted(by_worker, key=lambda worker: -by_worker[worker])
    worst = tuple(slowest[: ceil(len(by_worker) * WORST_PERCENT / 100)])
    return replace(
        found,
        worst=worst,
        m_w=mended(operations, found, operations.of_workers(worst)),
        m_s=mended(operations, found, operations.pp_TW == operations.pp_ranks[-1]),
    )


def mended(operations: Operations, found: Slowdown, ideal_TW: BoolArray) -> Fix:
    """What ideal durations of some operations would recover, with the others as measured."""
    step_s = float(operations.replay(~ideal_TW).whole_N.mean())
    return Fix(step_s, (found.step_s - step_s) / found.lost_s)
