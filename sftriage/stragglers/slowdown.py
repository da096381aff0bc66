"""The time that stragglers cost, by place and kind: the figures of arXiv 2505.05713, equations 1 to 5.

A step is replayed with the measured durations (T_ori) and with ideal ones (T_ideal); S is their ratio. A replay with
one group's measured durations shows its cost; one with all others' (T_rem), what fixing the group would recover:
(T_ori - T_rem) / (T_ori - T_ideal). That, and the shape of the durations, distinguishes the kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, TypeAlias

import numpy as np

from sftriage.errors import InputError
from sftriage.stragglers.graph import AnyFloat, BoolArray, FloatArray, IndexArray, Operations

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
    def s(self) -> float:
        """The slowdown S: a mean step as measured, over one without stragglers."""
        return float(self.replayed_N.mean()) / self.ideal_s

    @property
    def lost_s(self) -> float:
        return float(self.replayed_N.mean()) - self.ideal_s

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


def mended(operations: Operations, found: Slowdown, ideal_TW: BoolArray, work_TNW: FloatArray | None = None) -> Fix:
    """What ideal durations of some operations would recover, with the others as in ``work_TNW``."""
    step_s = float(operations.replay(~ideal_TW, work_TNW).whole_N.mean())
    return Fix(step_s, (float(found.replayed_N.mean()) - step_s) / found.lost_s)


Code: TypeAlias = Literal[
    "slow_worker", "last_stage", "sequence_lengths", "garbage_collection", "communication", "in_sync"
]

MIN_MAIN_SHARE = 0.5
"""From this share on, M_W is a worker's fault, and M_S the last stage's."""
MIN_SHARE = 0.25
"""Share of the slowdown that another kind must account for to be named."""
MIN_OF_ALL = 0.1
"""A kind that shows only once others are fixed is named from this share of the whole slowdown on."""
MIN_CORRELATION = 0.9
"""From this correlation on, a microbatch's forward and backward vary together, as sequence lengths cause."""

SPIKE_RATIO = 0.2
SPIKE_SIGMAS = 6.0
"""A forward computation stalls if it exceeds the worker's median by both this ratio and this many deviations."""
MAX_ONE_WORKERS_SPIKES = 0.5
"""If one worker has more than this fraction of the stalls, they are that worker's own."""
_MAD_TO_SIGMA = 1.4826

GC_TYPE = "gc"

SYNCS: Mapping[Code, bool] = {"communication": False, "in_sync": True}
"""Kinds of joint work, and whether each includes what workers compute meanwhile."""

Worker: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OperationKind:
    """A kind of stragglers that the job has.

    Fixing it alone would remove ``share`` of the slowdown; shares of several kinds overlap. ``numbers`` decided.
    ``workers`` (dp, pp) have it; it shows most in operations of type ``part``, once the kinds in ``hidden_by`` are
    fixed.
    """

    code: Code
    share: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()
    part: str = ""
    hidden_by: tuple[str, ...] = ()


Candidate: TypeAlias = tuple[OperationKind, AnyFloat]
"""A kind, and the durations with it fixed."""


def kinds_of(operations: Operations, found: Slowdown) -> tuple[OperationKind, ...]:
    """The kinds, first the verdict's, then by share; none if the slowdown is small."""
    kinds, named = _by_replay(operations, found), operations.named
    if named is None or found.m_w is None:
        return kinds
    own = OperationKind("slow_worker", min(1.0, named.saves_s / found.lost_s), workers=named.workers, part=named.part)
    known = {own.code, *(SYNCS if named.held_back else ())}
    return own, *(kind for kind in kinds if kind.code not in known)


def _by_replay(operations: Operations, found: Slowdown) -> tuple[OperationKind, ...]:
    """The kinds that operations show. One hides another, so the largest is fixed before the next pass."""
    named: dict[str, OperationKind] = {}
    fixed: set[str] = set()
    lost_s = found.lost_s
    while found.m_w is not None:
        varying = [*_lengths(operations, found), *_stalls(operations, found)]
        places = _places(operations, found, varying=bool(varying))
        candidates = [
            (kind, fixed_TNW)
            for kind, fixed_TNW in (*varying, *places, *_transfers(operations, found))
            if kind.code not in fixed and kind.share * found.lost_s >= MIN_OF_ALL * lost_s
        ]
        if not candidates:
            break
        candidates.sort(key=lambda candidate: -candidate[0].share)
        for kind, _ in candidates:
            share = kind.share * found.lost_s / lost_s
            named.setdefault(kind.code, replace(kind, share=share, hidden_by=tuple(sorted(fixed))))
        (largest, fixed_TNW), *_ = candidates
        fixed.add(largest.code)
        operations = replace(operations, work_TNW=fixed_TNW)
        found = slowdown_of(operations)
    return tuple(named.values())


def _places(operations: Operations, found: Slowdown, *, varying: bool) -> Iterator[Candidate]:
    """A slow worker, and a last stage that is slow beyond the slowest workers.

    If durations vary from microbatch to microbatch, some worker is always the worst: then it must usually be slow, too.
    """
    assert found.m_w is not None
    assert found.m_s is not None
    m_w, m_s = found.m_w.share, found.m_s.share
    last, several = operations.pp_ranks[-1], len(operations.pp_ranks) > 1
    # With one data-parallel rank the last stage is one worker; far more often it is overloaded than broken.
    alone = several and len(operations.dp_ranks) == 1 and all(pp == last for _, pp in found.worst)
    if m_w >= MIN_MAIN_SHARE and not alone:
        by_worker = found.by_worker()
        half = 1.0 + (max(by_worker[worker] for worker in found.worst) - 1.0) / 2
        workers = tuple(worker for worker in found.worst if by_worker[worker] >= half)
        if not varying or _steadily(operations, found, workers, of_stage=False) >= MIN_SHARE:
            kind = OperationKind("slow_worker", m_w, {"M_W": m_w}, workers, _slow_in(operations, workers))
            yield kind, operations.at_ideal(operations.of_workers(found.worst))
    if several and m_s >= MIN_MAIN_SHARE:
        of_last = operations.pp_TW == last
        beyond = m_s if alone else mended(operations, found, operations.of_workers(found.worst) | of_last).share - m_w
        workers = tuple((dp, last) for dp in operations.dp_ranks)
        if beyond >= MIN_SHARE and (not varying or _steadily(operations, found, workers, of_stage=True) >= MIN_SHARE):
            kind = OperationKind("last_stage", m_s, {"M_S": m_s, "beyond_worst_workers": beyond})
            yield kind, operations.at_ideal(of_last)


def _steadily(operations: Operations, found: Slowdown, workers: tuple[Worker, ...], *, of_stage: bool) -> float:
    """What it would recover if these workers' median computation took as long as others', and varied as it does now.

    The others are those of the same stage; for a whole stage, or if there are none, those of other stages.
    """
    work_TNW = operations.work_TNW.copy()
    dps = operations.dp_TW[0].tolist()
    across = of_stage or len(dps) == 1
    for phase in ("forward", "backward"):
        layers = _layers(operations, phase)
        ops_of = {pp: np.concatenate([ops_M for layer, ops_M in layers.items() if layer[0] == pp]) for pp, _ in layers}
        median_W = {pp: np.median(operations.work_TNW[ops_M], axis=(0, 1)) for pp, ops_M in ops_of.items()}
        for dp, pp in workers:
            column = dps.index(dp)
            same_W = np.delete(median_W[pp], column) if pp in median_W else np.zeros(0)
            others = [other_W for at, other_W in median_W.items() if at != pp] if across else [same_W]
            if pp not in median_W or not others:
                continue
            usual_s, own_s = float(np.median(np.concatenate(others))), float(median_W[pp][column])
            if own_s > usual_s:
                work_TNW[ops_of[pp], :, column] *= usual_s / own_s
    return mended(operations, found, NONE_11, work_TNW).share


def _slow_in(operations: Operations, workers: tuple[Worker, ...]) -> str:
    of_TW = np.broadcast_to(operations.of_workers(workers), (len(operations.type_T), operations.shape[2]))
    measured_TW = operations.work_TNW.mean(axis=1, dtype=np.float64)
    over_T = np.where(of_TW, measured_TW - operations.ideal_T[:, None], 0.0).sum(axis=1)
    parts: dict[str, float] = {}
    for index, over_s in zip(operations.type_T, over_T, strict=True):
        part = operations.types[index].part
        parts[part] = parts.get(part, 0.0) + float(over_s)
    return max(parts, key=lambda part: parts[part])


def _layers(operations: Operations, phase: str) -> dict[tuple[int, int], IndexArray]:
    """The operations of a phase by stage and chunk: on one worker, these compute the same layers."""
    if operations.pp_TW.shape[1] != 1:
        return {}
    layers: dict[tuple[int, int], list[int]] = {}
    for op, (index, pp, chunk) in enumerate(
        zip(operations.type_T, operations.pp_TW[:, 0], operations.chunk_T, strict=True)
    ):
        if operations.types[index].phase == phase:
            layers.setdefault((int(pp), int(chunk)), []).append(op)
    return {layer: np.array(ops, dtype=np.intp) for layer, ops in layers.items()}


def _pairs(operations: Operations) -> Iterator[tuple[IndexArray, IndexArray]]:
    backwards = _layers(operations, "backward")
    for layer, forward_M in _layers(operations, "forward").items():
        of_microbatch = {int(operations.microbatch_T[op]): op for op in backwards.get(layer, ())}
        both = [(op, of_microbatch.get(int(operations.microbatch_T[op]))) for op in forward_M]
        paired = [(forward, backward) for forward, backward in both if backward is not None]
        if paired:
            ops_M2 = np.array(paired, dtype=np.intp)
            yield ops_M2[:, 0], ops_M2[:, 1]


def _lengths(operations: Operations, found: Slowdown) -> Iterator[Candidate]:
    correlations = []
    for forward_M, backward_M in _pairs(operations):
        over = [_over_mean(operations.work_TNW[ops_M]) for ops_M in (forward_M, backward_M)]
        scale = float(np.sqrt((over[0] ** 2).sum() * (over[1] ** 2).sum()))
        correlations.append(float((over[0] * over[1]).sum()) / scale if scale > 0.0 else 0.0)
    if not correlations or (correlation := float(np.median(correlations))) < MIN_CORRELATION:
        return
    work_TNW = operations.work_TNW.copy()
    for phase in ("forward", "backward"):
        for ops_M in _layers(operations, phase).values():
            work_TNW[ops_M] = operations.work_TNW[ops_M].mean(axis=(0, 1), keepdims=True, dtype=np.float64)
    share = mended(operations, found, NONE_11, work_TNW).share
    if share >= MIN_SHARE:
        kind = OperationKind("sequence_lengths", share, {"forward_backward_correlation": correlation})
        yield kind, work_TNW


def _over_mean(work_MNW: AnyFloat) -> FloatArray:
    mean_11W = work_MNW.mean(axis=(0, 1), keepdims=True, dtype=np.float64)
    return np.asarray(work_MNW / np.where(mean_11W > 0.0, mean_11W, 1.0) - 1.0)


def _stalls(operations: Operations, found: Slowdown) -> Iterator[Candidate]:
    """Forward computations, on many workers, that sometimes take long while their microbatch's backward does not."""
    work_TNW = operations.work_TNW.copy()
    n_columns = operations.shape[2]
    stalled_s: dict[Worker, float] = {}
    steps_N = np.zeros(len(operations.steps), dtype=np.bool_)
    for forward_M, backward_M in _pairs(operations):
        pp = int(operations.pp_TW[forward_M[0], 0])
        forward_MNW = operations.work_TNW[forward_M]
        median_11W, spikes_MNW = _spikes(forward_MNW, operations.work_TNW[backward_M])
        work_TNW[forward_M] = np.where(spikes_MNW, median_11W, forward_MNW)
        steps_N |= spikes_MNW.any(axis=(0, 2))
        lost_W = ((forward_MNW - median_11W) * spikes_MNW).sum(axis=(0, 1), dtype=np.float64)
        for column in range(n_columns):
            worker = int(operations.dp_TW[0, column]), pp
            stalled_s[worker] = stalled_s.get(worker, 0.0) + float(lost_W[column])
    for op, index in enumerate(operations.type_T):
        if operations.types[index].name == GC_TYPE and operations.work_TNW[op].any():
            # The collector's own operations.
            pp = int(operations.pp_TW[op, 0])
            steps_N |= (operations.work_TNW[op] > 0.0).any(axis=1)
            for column, lost_s in enumerate(operations.work_TNW[op].sum(axis=0, dtype=np.float64)):
                worker = int(operations.dp_TW[0, column]), pp
                stalled_s[worker] = stalled_s.get(worker, 0.0) + float(lost_s)
            work_TNW[op] = 0.0
    if (total_s := sum(stalled_s.values())) <= 0.0:
        return
    most = max(stalled_s.values()) / total_s
    if most > max(MAX_ONE_WORKERS_SPIKES, 1.5 / len(stalled_s)):
        return
    share = mended(operations, found, NONE_11, work_TNW).share
    if share >= MIN_SHARE:
        hit = sum(1 for lost_s in stalled_s.values() if lost_s > 0.0) / len(stalled_s)
        numbers = {"of_steps": float(steps_N.mean()), "of_workers": hit, "most_of_one_worker": most}
        yield OperationKind("garbage_collection", share, numbers), work_TNW


def _spikes(forward_MNW: AnyFloat, backward_MNW: AnyFloat) -> tuple[FloatArray, BoolArray]:
    median_11W, backward_11W = (np.median(values, axis=(0, 1), keepdims=True) for values in (forward_MNW, backward_MNW))
    over_MNW = forward_MNW - median_11W
    sigma_11W = _MAD_TO_SIGMA * np.median(np.abs(over_MNW), axis=(0, 1), keepdims=True)
    spikes_MNW = (over_MNW > SPIKE_RATIO * median_11W) & (over_MNW > SPIKE_SIGMAS * sigma_11W)
    # A long sequence takes long in both directions.
    backward_ratio = backward_MNW / np.where(backward_11W > 0.0, backward_11W, 1.0) - 1.0
    forward_ratio = over_MNW / np.where(median_11W > 0.0, median_11W, 1.0)
    return np.asarray(median_11W), np.asarray(spikes_MNW & (backward_ratio < forward_ratio / 2))


def _transfers(operations: Operations, found: Slowdown) -> Iterator[Candidate]:
    for code, mixed in SYNCS.items():
        types = {i: kind for i, kind in enumerate(operations.types) if kind.communication and kind.mixed == mixed}
        of_communication = operations.of_types(*types)
        share = mended(operations, found, of_communication).share if types else 0.0
        if share >= MIN_SHARE:
            slowdowns = {of_type.part: found.by_part[of_type.part] for of_type in types.values()}
            worst = max(slowdowns, key=lambda part: slowdowns[part])
            kind = OperationKind(code, share, {"slowdown": slowdowns[worst]}, part=worst)
            yield kind, operations.at_ideal(of_communication)
