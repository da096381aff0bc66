"""A question of one's own: other durations, other layers, workers like their peers, and what a step would take then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from sftriage.errors import UsageError
from sftriage.stragglers.factors import Factors, lower_median
from sftriage.stragglers.graph import AnyFloat, BoolArray, FloatArray, Operations
from sftriage.stragglers.kinds import OperationKind, ReplayedRemedy, like_peers, remedied, remedies_of, step_with
from sftriage.stragglers.pipeline import ALL_GATHER, REDUCE_SCATTER, SEPARATE
from sftriage.stragglers.slowdown import NONE_11

GROUPS = {
    "dp-comm": {ALL_GATHER, REDUCE_SCATTER, SEPARATE},
    "pp-comm": {"forward-pp-comm", "backward-pp-comm"},
}
"""Names for several types of operations; there are also ``compute`` and ``comm``."""


MAX_LISTED = 16


@dataclass(frozen=True, slots=True)
class Question:
    """What to change, all of it together, and in which steps.

    Attributes:
        durations: ``NAME=SECONDS``, ``NAME=0.5x`` (times as long) or ``NAME=ideal``.
        layers: the layers of each stage, ``13,11``; if they are not equal now, ``12,14:13,13`` (now, then); the best
            then, ``12,14:``.
        without: what is to be like its peers (``rank 3``, ``dp 0``, ``dp 0 stage 1``), or a kind that the job has.
        steps: ``FIRST:LAST``, either of which may be missing.
    """

    durations: Sequence[str] = ()
    layers: str | None = None
    without: Sequence[str] = ()
    steps: str | None = None

    def __str__(self) -> str:
        changes = [*self.durations, *([] if self.layers is None else [f"layers {self.layers}"])]
        without = [f"without {' and '.join(self.without)}"] if self.without else []
        return " and ".join([*without, *([f"with {', '.join(changes)}"] if changes else [])])


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean step (seconds) with the changes of a question, and what that wins."""

    question: str
    step_s: float
    wins_s: float


def within(operations: Operations, steps: str) -> Operations:
    """The operations of some steps; raises UsageError if there are none."""
    steps_N, (first, colon, last) = np.array(operations.steps), steps.partition(":")
    try:
        kept_N = (steps_N >= int(first or steps_N[0])) & (steps_N <= int(last or steps_N[-1]))
    except (ValueError, OverflowError):
        colon = ""
    if not colon:
        raise UsageError(f"--steps: expected FIRST:LAST, got {steps!r}")
    if not kept_N.any():
        raise UsageError(f"no such steps; there are {steps_N[0]} to {steps_N[-1]}")
    return operations.of_steps(kept_N)


def answered(operations: Operations, question: Question) -> Estimate:
    """Replay the changes; raises UsageError, with the names that there are, for an unknown one."""
    before_s = float(operations.replay(~NONE_11).whole_N.mean())
    changes = [_without(operations, name) for name in question.without]
    if question.layers is not None:
        moved, layers = _layers(operations, question.layers)
        changes, question = [*changes, moved], replace(question, layers=layers)
    work_TNW = remedied(operations, changes)
    for setting in question.durations:
        work_TNW = _set(operations, setting, work_TNW)
    step_s = float(operations.replay(~NONE_11, work_TNW).whole_N.mean())
    return Estimate(str(question), step_s, before_s - step_s)


def _set(operations: Operations, setting: str, work_TNW: AnyFloat) -> AnyFloat:
    name, _, value = setting.partition("=")
    ops_T11 = _named(operations, name)[:, None, None]
    try:
        if value == "ideal":
            return np.where(ops_T11, operations.ideal_T[:, None, None].astype(work_TNW.dtype), work_TNW)
        number = float(value.removesuffix("x"))
        if not 0.0 <= number < float("inf"):
            raise ValueError
    except ValueError:
        raise UsageError(f"--set {setting}: expected {name}=SECONDS, {name}=0.5x or {name}=ideal") from None
    if value.endswith("x"):
        return np.where(ops_T11, work_TNW * number, work_TNW)
    return np.where(ops_T11, work_TNW.dtype.type(number), work_TNW)


def _named(operations: Operations, name: str) -> BoolArray:
    """The operations (T) of a type or a group of types."""
    groups = {
        part: [index for index, of_type in enumerate(operations.types) if part in (of_type.part, of_type.name)]
        for of_type in operations.types
        for part in (of_type.part, of_type.name)
    }
    for group, parts in GROUPS.items():
        groups[group] = [index for index, of_type in enumerate(operations.types) if of_type.part in parts]
    groups["comm"] = [index for index, of_type in enumerate(operations.types) if of_type.communication]
    groups["compute"] = [index for index, of_type in enumerate(operations.types) if not of_type.communication]
    if not groups.get(name):
        known = ", ".join(sorted(group for group, indices in groups.items() if indices))
        raise UsageError(f"--set {name}: no such operations; there are {known}")
    return operations.of_types(*groups[name])[:, 0]


def _layers(operations: Operations, layers: str) -> tuple[ReplayedRemedy, str]:
    """Layers moved between stages, and where they are then: as given, or until no layer moved shortens a mean step.

    All layers are alike: what a stage computes beyond the others per layer (the loss, an embedding) stays with it.
    """
    now, _, then = layers.rpartition(":")
    stages = operations.pp_ranks
    try:
        counts = [np.array([float(count) for count in each.split(",")]) for each in (then, now) if each]
    except ValueError:
        counts = []
    if not counts or any(len(each) != len(stages) or each.min() <= 0.0 for each in counts):
        raise UsageError(
            f"--layers {layers}: expected the layers of {len(stages)} stages, such as 13,11 or 12,12:13,11"
        )
    factors = Factors(operations)
    phased_T = operations.phase_T != ""
    work_P = np.array([factors.usual_T[phased_T & (factors.pp_T == pp)].sum() for pp in stages]) + 1e-9
    before_P = counts[-1] if now else np.full(len(stages), counts[0].mean())
    layer_P = np.minimum(work_P / before_P, lower_median(work_P / before_P))

    def moved(after_P: FloatArray) -> ReplayedRemedy:
        times_P = dict(zip(stages, 1.0 + (after_P - before_P) * layer_P / work_P, strict=True))
        times_T = np.where(phased_T, [times_P[int(pp)] for pp in factors.pp_T], 1.0)
        times_T11 = times_T.astype(operations.work_TNW.dtype)[:, None, None]
        return ReplayedRemedy(OperationKind("slow_stage"), times_TNW=times_T11)

    if then:
        return moved(counts[0]), layers
    # By replays of one step: a pipeline of few microbatches does not wait for its slowest stage alone.
    work_T1W, one = operations.work_TNW.mean(axis=1, keepdims=True), np.eye(len(stages))
    mean = replace(operations, work_TNW=work_T1W, steps=operations.steps[:1], measured_N=operations.measured_N[:1])
    best_s, best_P = step_with(mean, []), before_P
    while True:
        moves = [best_P + one[to] - one[of] for of, to in permutations(range(len(stages)), 2) if best_P[of] > 1.0]
        took_s = [step_with(mean, [moved(after_P)]) for after_P in moves]
        if not took_s or min(took_s) >= best_s:
            return moved(best_P), layers + ",".join(f"{count:g}" for count in best_P)
        best_s, best_P = min(took_s), moves[took_s.index(min(took_s))]


def _without(operations: Operations, name: str) -> ReplayedRemedy:
    dps, ranks = operations.dp_TW[0].tolist(), operations.ranks
    places = {f"rank {rank}": [worker] for worker, rank in ranks.items()}
    places |= {f"dp {dp}": [(dp, pp) for pp in operations.pp_ranks] for dp in dps}
    places |= {f"dp {dp} stage {pp}": [(dp, pp)] for dp in dps for pp in operations.pp_ranks}
    if name in places:
        return like_peers(operations, places[name])
    kinds = {remedy.kind.code: remedy for remedy in remedies_of(operations)}
    if name in kinds:
        return kinds[name]
    spans = [f"rank {', '.join(map(str, sorted(ranks.values())[:MAX_LISTED]))}"] if ranks else []
    known = [*spans, f"dp {dps[0]} to {dps[-1]}, also with stage 0 to {operations.pp_ranks[-1]}", *kinds]
    raise UsageError(f"--without {name}: no such worker or kind; there are {', '.join(known)}")
