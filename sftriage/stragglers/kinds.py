"""The kinds of stragglers: the pattern of each in the durations, the replay of its remedy, and its share.

The remedy of a kind changes one of the `factors` of the durations and keeps the others, with their variance. Shares are
Shapley values over the replays of all sets of remedies: they add up to what all remedies together win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import factorial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from sftriage.stragglers.factors import (
    MAD_TO_SIGMA,
    MIN_CORRELATION,
    STALL_RATIO,
    STALL_SIGMAS,
    Factors,
    Spell,
    Worker,
    correlation_of,
    lower_median,
    pairs_of,
)
from sftriage.stragglers.graph import AnyFloat, FloatArray, IndexArray, Operations
from sftriage.stragglers.slowdown import NONE_11, Slowdown, histogram_of

Code: TypeAlias = Literal[
    "slow_worker",
    "slow_dp_rank",
    "last_stage",
    "slow_stage",
    "sequence_lengths",
    "garbage_collection",
    "stalls",
    "communication",
    "in_sync",
]

MIN_SHARE = 0.1
"""Share of the slowdown that a kind must account for to be named."""
MIN_LINK_SHARE = 0.25
MIN_LINK_OF_STEP = 0.02
"""The same of communication, which jitters most, and the part of an ideal step that it must cost."""
MIN_STAGE_OVER = 0.1
"""A stage is slow if it computes longer than the median of the others by this fraction at least."""
MAX_ONE_WORKERS_STALLS = 0.5
"""If one worker has more than this fraction of the stalls, they are that worker's own."""
SLOW_PLACES = ("slow_worker", "slow_dp_rank")
GC_TYPE = "gc"
FIXED = ("optimizer", GC_TYPE)
"""Computations that take as long however much work a rank has."""
SYNCS: Mapping[Code, bool] = {"communication": False, "in_sync": True}
"""Kinds of joint work, and whether each includes what workers compute meanwhile."""


class LessWork(NamedTuple):
    """What slow data-parallel ranks win a step if they get less work, and the others more: no other host is needed.

    ``work`` is what they get over what each of the others does: 0 if they are dropped; of several, the least.
    """

    wins_s: float
    work: float


@dataclass(frozen=True, slots=True)
class OperationKind:
    """A kind of stragglers that the job has.

    Attributes:
        share: its part of the slowdown, if the remedies of all kinds are applied in any order.
        wins_s: what its remedy alone wins a step.
        wins_last_s: what its remedy wins a step once those of all other kinds are applied.
        numbers: the figures that decided.
        lengths: the histogram of the microbatches' lengths over their median, for sequence lengths.
        workers: those (dp, pp) that have it.
        part: the type of operations in which it shows most.
        since: the number of the step from which it shows; None if from the first one, or now and then.
        instead: for slow workers, what is won without a replacement, the most first.
    """

    code: Code
    share: float = 0.0
    wins_s: float = 0.0
    wins_last_s: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[str, list[float]] | None = None
    workers: tuple[Worker, ...] = ()
    part: str = ""
    since: int | None = None
    instead: tuple[LessWork, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedRemedy:
    """A kind, and its remedy: first ``less_TNW`` seconds less, then ``times_TNW`` as long; None changes nothing."""

    kind: OperationKind
    less_TNW: AnyFloat | None = None
    times_TNW: AnyFloat | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The kinds, the largest share first, and the step (seconds) that all their remedies leave."""

    kinds: tuple[OperationKind, ...]
    step_s: float

    @property
    def jitter(self) -> float:
        """The share of the slowdown that no kind accounts for."""
        return 1.0 - sum(kind.share for kind in self.kinds)


def attributed(operations: Operations, found: Slowdown) -> Attribution:
    """The kinds that the job has; none if the slowdown is small."""
    step_s = found.step_s
    if found.m_w is None:
        return Attribution((), step_s)
    remedies = list(remedies_of(operations))
    if (named := operations.named) is not None:
        own = like_peers(operations, named.workers, named.part)
        known = {"slow_worker", *(SYNCS if named.held_back else ())}
        remedies = [own, *(remedy for remedy in remedies if remedy.kind.code not in known)]
    n_named = int(named is not None)
    while True:
        kinds, left_s = _shared_out(operations, found, remedies)
        # What wins little both beside the others and after them is jitter, and its remedy is not applied.
        worth = [max(kind.share, kind.wins_last_s / found.lost_s) for kind in kinds]
        small = [index for index in range(n_named, len(kinds)) if worth[index] < _least(kinds[index], found)]
        if not small:
            break
        remedies.pop(min(small, key=worth.__getitem__))
    kinds = tuple(
        replace(kind, instead=_less_work(operations, remedy, step_s)) if kind.code in SLOW_PLACES else kind
        for kind, remedy in zip(kinds, remedies, strict=True)
    )
    return Attribution((*kinds[:n_named], *sorted(kinds[n_named:], key=lambda kind: -kind.share)), left_s)


def _less_work(operations: Operations, remedy: ReplayedRemedy, before_s: float) -> tuple[LessWork, ...]:
    """Slow data-parallel ranks with as much work as they do in the time of the others, and without any.

    A rank's pipeline gets smaller or larger microbatches: all that it computes takes as much less or more.
    """
    assert remedy.times_TNW is not None
    work_TNW, since = operations.work_TNW, remedy.kind.since
    slow_W = np.isin(operations.dp_TW[0], [dp for dp, _ in remedy.kind.workers])
    if slow_W.all():
        return ()
    kept_N = np.array(operations.steps) >= (operations.steps[0] if since is None else since)
    scales = [index for index, kind in enumerate(operations.types) if not (kind.communication or kind.name in FIXED)]
    scales_T = operations.of_types(*scales)[:, 0]
    ratio_W = np.ones(len(slow_W))
    for pp in operations.pp_ranks:
        stage = np.ix_(scales_T & (operations.pp_TW[:, 0] == pp), kept_N)
        then_W = (work_TNW[stage] * remedy.times_TNW[stage]).sum(axis=(0, 1))
        ratio_W = np.maximum(ratio_W, work_TNW[stage].sum(axis=(0, 1)) / np.where(then_W > 0.0, then_W, np.inf))
    found = []
    for work_W in (np.where(slow_W, 1.0 / ratio_W, 1.0), np.where(slow_W, 0.0, 1.0)):
        times_TNW = np.ones_like(work_TNW)
        times_TNW[np.ix_(scales_T, kept_N)] = work_W / work_W.mean()
        step_s = step_with(operations, [replace(remedy, times_TNW=times_TNW)])
        found.append(LessWork(before_s - step_s, float(work_W[slow_W].min())))
    return tuple(sorted((less for less in found if less.wins_s > 0.0), reverse=True))


def _least(kind: OperationKind, found: Slowdown) -> float:
    return max(MIN_LINK_SHARE, MIN_LINK_OF_STEP / (found.s - 1.0)) if kind.code in SYNCS else MIN_SHARE


def step_with(operations: Operations, remedies: Sequence[ReplayedRemedy]) -> float:
    """A mean step (seconds) with some remedies applied."""
    return float(operations.replay(~NONE_11, remedied(operations, remedies)).whole_N.mean())


def remedied(operations: Operations, remedies: Sequence[ReplayedRemedy]) -> AnyFloat:
    """The durations with some remedies applied."""
    work_TNW = operations.work_TNW
    for remedy in remedies:
        if remedy.less_TNW is not None:
            work_TNW = work_TNW - remedy.less_TNW
    for remedy in remedies:
        if remedy.times_TNW is not None:
            work_TNW = work_TNW * remedy.times_TNW
    return work_TNW


def _shared_out(
    operations: Operations, found: Slowdown, remedies: Sequence[ReplayedRemedy]
) -> tuple[tuple[OperationKind, ...], float]:
    """Each kind with its Shapley share and what its remedy wins, and the step with all remedies."""
    n, before_s = len(remedies), found.step_s
    every = range(n)
    won: dict[frozenset[int], float] = {frozenset(): 0.0}
    for size in range(1, n + 1):
        for some in combinations(every, size):
            won[frozenset(some)] = before_s - step_with(operations, [remedies[index] for index in some])
    whole = frozenset(every)
    # Remedies may win more than the ideal: it is a mean that has the stragglers in it.
    lost_s = max(found.lost_s, won[whole])
    kinds = []
    for index, remedy in enumerate(remedies):
        share_s = sum(
            factorial(len(some)) * factorial(n - len(some) - 1) / factorial(n) * (won[some | {index}] - won[some])
            for some in won
            if index not in some
        )
        last_s = won[whole] - won[whole - {index}]
        kinds.append(replace(remedy.kind, share=share_s / lost_s, wins_s=won[frozenset({index})], wins_last_s=last_s))
    return tuple(kinds), before_s - won[whole]


def remedies_of(operations: Operations) -> Iterator[ReplayedRemedy]:
    """The remedy of each kind whose pattern the durations show."""
    factors, dps = Factors(operations), operations.dp_TW[0].tolist()
    stalls = list(_stalls(factors))
    yield from _slow_places(factors, [(dps.index(dp), pp) for remedy in stalls for dp, pp in remedy.kind.workers])
    yield from _uneven_stages(factors)
    yield from _lengths(factors)
    yield from stalls
    yield from _slow_links(operations)


def _slow_places(factors: Factors, stalling: Sequence[Worker]) -> Iterator[ReplayedRemedy]:
    """Workers and data-parallel ranks that are slow: their levels become those of their peers."""
    pps, spells = factors.operations.pp_ranks, factors.slow_workers.items()
    # What is slow now and then where computations stall: a step of few microbatches may consist of stalls.
    slow = {at: spell for at, spell in spells if at not in stalling or spell.from_step_on or spell.slow_N.all()}
    if slow:
        yield _replaced(factors, "slow_worker", slow)
    if columns := {(column, pp): spell for column, spell in factors.slow_columns.items() for pp in pps}:
        yield _replaced(factors, "slow_dp_rank", columns)


def _replaced(factors: Factors, code: Code, slow: Mapping[Worker, Spell], part: str = "") -> ReplayedRemedy:
    """Workers (column, stage) that take in their slow steps what their peers take."""
    operations = factors.operations
    times_TNW = np.ones_like(factors.ratio_TNW)
    over_s: dict[str, float] = {}
    for (column, pp), spell in slow.items():
        for (index, stage), ops_M in factors.computes.items():
            if stage != pp:
                continue
            slowed_N = factors.slowed_N(index, pp, column, spell)
            times_TNW[ops_M, :, column] = 1.0 / slowed_N
            name = operations.types[index].part
            over_s[name] = over_s.get(name, 0.0) + float(factors.usual_T[ops_M].sum() * (slowed_N - 1.0).mean())
    dps = operations.dp_TW[0]
    worst = sorted(slow, key=lambda worker: (-slow[worker].ratio * slow[worker].slow_N.mean(), worker[1], worker[0]))
    first = slow[worst[0]]
    numbers = {"times": first.ratio, "of_steps": float(first.slow_N.mean())}
    since = operations.steps[int(first.slow_N.argmax())] if first.from_step_on else None
    workers = tuple((int(dps[column]), pp) for column, pp in worst)
    part = part or max(over_s, key=lambda name: over_s[name])
    return ReplayedRemedy(
        OperationKind(code, numbers=numbers, workers=workers, part=part, since=since), times_TNW=times_TNW
    )


def like_peers(operations: Operations, workers: Sequence[tuple[int, int]], part: str = "") -> ReplayedRemedy:
    """Workers (dp, pp) that take what their peers take; ``part`` is where they are slow.

    One that is slow in some steps does so in these, and any other in all steps.
    """
    whole = Spell(np.ones(len(operations.steps), dtype=np.bool_), 1.0, from_step_on=False)
    factors, dps = Factors(operations), operations.dp_TW[0].tolist()
    places = [(dps.index(dp), pp) for dp, pp in workers]
    spells = {place: factors.slow_workers.get(place, whole) for place in places}
    remedy = _replaced(factors, "slow_worker", spells, part)
    return replace(remedy, kind=replace(remedy.kind, numbers={}))


def _uneven_stages(factors: Factors) -> Iterator[ReplayedRemedy]:
    """A stage that has more to compute: layers move until all stages have equal work."""
    operations, usual_P = factors.operations, factors.usual_P
    if len(usual_P) < 2:
        return
    slowest = max(usual_P, key=lambda pp: usual_P[pp])
    times = usual_P[slowest] / float(np.median([usual_s for pp, usual_s in usual_P.items() if pp != slowest]))
    if times < 1.0 + MIN_STAGE_OVER:
        return
    code: Code = "last_stage" if slowest == operations.pp_ranks[-1] else "slow_stage"
    mean_s = float(np.mean(list(usual_P.values())))
    times_T = np.array([mean_s / usual_P[int(pp)] for pp in factors.pp_T])
    workers = tuple((int(dp), slowest) for dp in operations.dp_ranks)
    if factors.columns == 1 and code == "slow_stage":
        # One worker: far more often it is broken than its stage has more to compute.
        code, times_T = "slow_worker", np.where(factors.pp_T == slowest, 1.0 / times, 1.0)
    numbers = {"times": times, "of_steps": 1.0}
    times_TNW = np.where(factors.usual_T > 0.0, times_T, 1.0).astype(factors.ratio_TNW.dtype)[:, None, None]
    yield ReplayedRemedy(OperationKind(code, numbers=numbers, workers=workers), times_TNW=times_TNW)


def _lengths(factors: Factors) -> Iterator[ReplayedRemedy]:
    """Microbatches whose forward and backward vary together: their work is shared out evenly, also across ranks."""
    lengths = factors.lengths
    if not lengths or (correlation := _correlation(factors)) < MIN_CORRELATION:
        return
    length_MNW = np.stack(lengths)
    if factors.has_several:
        # Beyond what slow workers explain, a rank whose steps take longer has more to compute.
        more_NW = factors.common_NW.copy()
        for column, spell in factors.slow_columns.items():
            more_NW[spell.slow_N, column] /= spell.ratio
        if not factors.shares_lengths:
            for (column, _), spell in factors.slow_workers.items():
                more_NW[spell.slow_N, column] /= spell.ratio
        length_MNW = length_MNW * more_NW
    even_1N1 = length_MNW.mean(axis=(0, 2), keepdims=True)
    times_TNW = np.ones_like(factors.ratio_TNW)
    for ops_M, length_NW in zip(factors.microbatches, length_MNW, strict=True):
        times_TNW[ops_M] = even_1N1[0] / length_NW
    over_MNW = length_MNW / np.median(length_MNW)
    numbers = {
        "forward_backward_correlation": correlation,
        "spread": float(length_MNW.std() / length_MNW.mean()),
        "longest_tenth": float(np.quantile(over_MNW, 0.9)),
    }
    kind = OperationKind("sequence_lengths", numbers=numbers, lengths=histogram_of(over_MNW))
    yield ReplayedRemedy(kind, times_TNW=times_TNW)


def _correlation(factors: Factors) -> float:
    """Of forward and backward of one microbatch on one worker within a step, without stalls: the median worker's."""
    operations = factors.operations
    rest_TNW = factors.ratio_TNW / factors.level_TNW
    rest_TNW = np.where(factors.stalled_TNW > 0.0, factors.length_TNW, rest_TNW)
    found = [
        correlation_of(rest_TNW[forward_M], rest_TNW[backward_M]) for forward_M, backward_M in pairs_of(operations)
    ]
    return float(np.median(found)) if found else 0.0


def _stalls(factors: Factors) -> Iterator[ReplayedRemedy]:
    """Computations that now and then take long, their microbatch's other ones not.

    Those in forward on many workers are the collector's: it pauses all of them in the same step. The others go.
    """
    operations = factors.operations
    usual_T11 = factors.usual_T.astype(factors.ratio_TNW.dtype)[:, None, None]
    stalled_TNW = factors.stalled_TNW * factors.level_TNW * factors.length_TNW * usual_T11
    collector_T = np.array([operations.types[index].name == GC_TYPE for index in operations.type_T])
    for phase in ("forward", "backward"):
        less_TNW = np.where((operations.phase_T == phase)[:, None, None], stalled_TNW, 0.0)
        if phase == "forward":
            less_TNW[collector_T] = operations.work_TNW[collector_T]
        lost_PW = np.stack([less_TNW[factors.pp_T == pp].sum(axis=(0, 1)) for pp in operations.pp_ranks])
        if not lost_PW.any():
            continue
        stage, column = divmod(int(lost_PW.argmax()), factors.columns)
        most = float(lost_PW.max() / lost_PW.sum())
        own = most > max(MAX_ONE_WORKERS_STALLS, 1.5 / lost_PW.size)
        code: Code = "garbage_collection" if phase == "forward" and not own else "stalls"
        numbers = {
            "of_steps": float((less_TNW > 0.0).any(axis=(0, 2)).mean()),
            "of_workers": float((lost_PW > 0.0).mean()),
            "most_of_one_worker": most,
        }
        part = next(kind.part for kind in operations.types if kind.phase == phase)
        if code == "garbage_collection":
            less_TNW = less_TNW - _in_same_steps(factors, less_TNW)
        workers = ((int(operations.dp_TW[0, column]), operations.pp_ranks[stage]),) if own else ()
        yield ReplayedRemedy(OperationKind(code, numbers=numbers, workers=workers, part=part), less_TNW=less_TNW)


def _in_same_steps(factors: Factors, less_TNW: FloatArray) -> FloatArray:
    """Each worker's pauses, moved to the end of the steps in which the worker with the most of them has its own."""
    moved_TNW = np.zeros_like(less_TNW)
    pauses: dict[Worker, tuple[IndexArray, FloatArray]] = {}
    last: dict[int, int] = {}
    for pp in factors.operations.pp_ranks:
        of_stage_NWM = np.moveaxis(less_TNW[factors.pp_T == pp], 0, -1)
        for column in range(factors.columns):
            pausing = np.nonzero(of_stage_NWM[:, column])
            pauses[column, pp] = pausing[0], of_stage_NWM[:, column][pausing]
    steps = max((at for at, _ in pauses.values()), key=len)
    for level in factors.operations.graph.levels:
        last |= {int(factors.pp_T[op]): int(op) for op in level.ops}
    for (column, pp), (at, took_s) in pauses.items():
        np.add.at(moved_TNW[last[pp], :, column], steps[: len(at)], took_s)
    return moved_TNW


def _slow_links(operations: Operations) -> Iterator[ReplayedRemedy]:
    """Transfers that take longer than on other ranks, or now and then longer than usual: they take the median."""
    for code, mixed in SYNCS.items():
        types = {i: kind for i, kind in enumerate(operations.types) if kind.communication and kind.mixed == mixed}
        ops_T = operations.of_types(*types)[:, 0]
        less_TNW = np.zeros_like(operations.work_TNW)
        lost_s: dict[str, float] = {}
        for op in np.flatnonzero(ops_T):
            work_NW = operations.work_TNW[op]
            median_W = np.median(work_NW, axis=0)
            # Transfers of other stages may have more to carry: only the same transfer on other ranks is comparable.
            usual_s = float(lower_median(median_W))
            sigma_W = MAD_TO_SIGMA * np.median(np.abs(work_NW - median_W), axis=0)
            slow_W = median_W > usual_s * (1.0 + STALL_RATIO)
            spikes_NW = work_NW - median_W > np.maximum(STALL_RATIO * median_W, STALL_SIGMAS * sigma_W)
            usual_NW = np.where(spikes_NW, median_W, work_NW) - np.where(slow_W, median_W - usual_s, 0.0)
            less_TNW[op] = work_NW - np.maximum(usual_NW, 0.0)
            part = operations.types[operations.type_T[op]].part
            lost_s[part] = lost_s.get(part, 0.0) + float(less_TNW[op].mean())
        if sum(lost_s.values()) > 0.0:
            part = max(lost_s, key=lambda name: lost_s[name])
            yield ReplayedRemedy(OperationKind(code, part=part), less_TNW=less_TNW)
