"""How much time stragglers cost, and whose: the figures of arXiv 2505.05713, equations 1 to 5.

A step is replayed with the measured durations (T_ori) and with ideal ones (T_ideal); S is the one over the other. One
group's measured durations alone show what it costs; all others (T_rem), what mending it would recover:
(T_ori - T_rem) / (T_ori - T_ideal).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

import numpy as np

from sftriage.errors import InputError
from sftriage.whatif.graph import BoolArray, FloatArray
from sftriage.whatif.operations import Operations

MIN_SLOWDOWN = 1.03
"""Under it there is too little to be shared out among anybody."""

WORST_PERCENT = 3
"""So many of the workers, and at least one, may be the slow ones of M_W."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A mean step with some operations mended and all else as it was measured, and the share that recovers."""

    step_s: float
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class Slowdown:
    """What stragglers cost a job; seconds are of a step.

    Attributes:
        steps, measured_N, replayed_N: each step as recorded, and replayed without the gaps of no operation.
        ideal_s: any step without stragglers.
        by_part_N, by_dp_N, by_pp_N: each step's slowdown if only they were as measured; None where S is too small.
        worst: the workers (dp, pp) that M_W is of, the worst first.
        m_w, m_s: what mending these, and what mending the last stage would recover.
    """

    steps: tuple[int, ...]
    measured_N: FloatArray
    replayed_N: FloatArray
    ideal_s: float
    by_part_N: dict[str, FloatArray] | None = None
    by_dp_N: dict[int, FloatArray] | None = None
    by_pp_N: dict[int, FloatArray] | None = None
    worst: tuple[tuple[int, int], ...] = ()
    m_w: Fix | None = None
    m_s: Fix | None = None

    @property
    def s(self) -> float:
        """The slowdown S: a mean step as measured, over one without stragglers."""
        return float(self.replayed_N.mean()) / self.ideal_s

    @property
    def lost_s(self) -> float:
        """What stragglers cost a mean step."""
        return float(self.replayed_N.mean()) - self.ideal_s

    @property
    def unexplained(self) -> float:
        """A measured step over a replayed one, less 1: how far the replay is off."""
        return float(self.measured_N.mean() / self.replayed_N.mean()) - 1.0

    @property
    def by_part(self) -> dict[str, float]:
        """S_t: the slowdown by type of operation; empty where it is not shared out."""
        return _means(self.by_part_N)

    @property
    def by_dp(self) -> dict[int, float]:
        """The slowdown by data-parallel rank; empty where it is not shared out."""
        return _means(self.by_dp_N)

    @property
    def by_pp(self) -> dict[int, float]:
        """The slowdown by stage; empty where it is not shared out."""
        return _means(self.by_pp_N)

    def by_worker(self) -> dict[tuple[int, int], float]:
        """S_w by (dp, pp): what of both its data-parallel rank's slowdown and its stage's may be the worker's."""
        by_dp, by_pp = self.by_dp, self.by_pp
        return {(dp, pp): min(by_dp[dp], by_pp[pp]) for pp in by_pp for dp in by_dp}


Key = TypeVar("Key", int, str)


def _means(slowdowns: dict[Key, FloatArray] | None) -> dict[Key, float]:
    return {key: float(slowdown_N.mean()) for key, slowdown_N in (slowdowns or {}).items()}


def slowdown_of(operations: Operations) -> Slowdown:
    """Work out all figures; raises InputError where the steps take no time."""
    everything = np.ones((1, 1), dtype=np.bool_)
    replayed_N, ideal_s = operations.replay(everything).whole_N, operations.ideal_step_s()
    if not (ideal_s > 0.0 and replayed_N.mean() > 0.0):
        raise InputError("the operations take no time")
    found = Slowdown(operations.steps, operations.measured_N, replayed_N, ideal_s)
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
    # Of equals the first: global ranks go through all of one stage, and to the next.
    slowest = sorted(by_worker, key=lambda worker: -by_worker[worker])
    worst = tuple(slowest[: ceil(len(by_worker) * WORST_PERCENT / 100)])
    return replace(
        found,
        worst=worst,
        m_w=mended(operations, found, operations.of_workers(worst)),
        m_s=mended(operations, found, operations.pp_TW == operations.pp_ranks[-1]),
    )


def mended(operations: Operations, found: Slowdown, ideal_TW: BoolArray) -> Fix:
    """What giving some operations their ideal durations would recover."""
    return _fix(found, operations.replay(~ideal_TW).whole_N)


def replaced(operations: Operations, found: Slowdown, work_TNW: FloatArray) -> Fix:
    """What other durations in place of those measured would recover."""
    return _fix(found, operations.replay(np.ones((1, 1), dtype=np.bool_), work_TNW).whole_N)


def _fix(found: Slowdown, step_N: FloatArray) -> Fix:
    step_s = float(step_N.mean())
    return Fix(step_s, (float(found.replayed_N.mean()) - step_s) / found.lost_s)
