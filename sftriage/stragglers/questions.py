"""A question of one's own: other durations, other layers, workers like their peers, and what a step would take then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sftriage.errors import UsageError
from sftriage.stragglers.factors import Factors, Spell
from sftriage.stragglers.graph import AnyFloat, BoolArray, Operations
from sftriage.stragglers.kinds import OperationKind, ReplayedRemedy, remedied, remedies_of, replaced
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
    """What to change; all of it together.

    Attributes:
        durations: ``NAME=SECONDS``, ``NAME=0.5x`` (times as long) or ``NAME=ideal``.
        layers: the layers of each stage, ``13,11``; if they are not equal now, ``12,14:13,13`` (now, then).
        without: what is to be like its peers (``rank 3``, ``dp 0``, ``dp 0 stage 1``), or a kind that the job has.
    """

    durations: Sequence[str] = ()
    layers: str | None = None
    without: Sequence[str] = ()

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


def answered(operations: Operations, question: Question) -> Estimate:
    """Replay the changes; raises UsageError, with the names that there are, for an unknown one."""
    before_s = float(operations.replay(~NONE_11).whole_N.mean())
    changes = [_without(operations, name) for name in question.without]
    if question.layers is not None:
        changes.append(_layers(operations, question.layers))
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


def _layers(operations: Operations, layers: str) -> ReplayedRemedy:
    now, _, then = layers.rpartition(":")
    stages = operations.pp_ranks
    try:
        counts = [[float(count) for count in counts.split(",")] for counts in (then, now) if counts]
    except ValueError:
        counts = []
    if not counts or any(len(each) != len(stages) or min(each) <= 0 for each in counts):
        raise UsageError(
            f"--layers {layers}: expected the layers of {len(stages)} stages, such as 13,11 or 12,12:13,11"
        )
    after = np.array(counts[0])
    before = np.array(counts[1]) if len(counts) > 1 else np.full(len(stages), after.mean())
    times_P = dict(zip(stages, after / before, strict=True))
    phased_T = np.array([operations.types[index].phase != "" for index in operations.type_T])
    times_T = np.array([times_P[int(pp)] for pp in operations.pp_TW[:, 0]])
    times_T = np.where(phased_T, times_T, 1.0).astype(operations.work_TNW.dtype)
    return ReplayedRemedy(OperationKind("slow_stage"), times_TNW=times_T[:, None, None])


def _without(operations: Operations, name: str) -> ReplayedRemedy:
    dps, ranks = operations.dp_TW[0].tolist(), operations.ranks
    places = {f"rank {rank}": [worker] for worker, rank in ranks.items()}
    places |= {f"dp {dp}": [(dp, pp) for pp in operations.pp_ranks] for dp in dps}
    places |= {f"dp {dp} stage {pp}": [(dp, pp)] for dp in dps for pp in operations.pp_ranks}
    if name in places:
        whole = Spell(np.ones(len(operations.steps), dtype=np.bool_), 1.0, from_step_on=False)
        slow = {(dps.index(dp), pp): whole for dp, pp in places[name]}
        return replaced(Factors(operations), "slow_worker", slow)
    kinds = {remedy.kind.code: remedy for remedy in remedies_of(operations)}
    if name in kinds:
        return kinds[name]
    spans = [f"rank {', '.join(map(str, sorted(ranks.values())[:MAX_LISTED]))}"] if ranks else []
    known = [*spans, f"dp {dps[0]} to {dps[-1]}, also with stage 0 to {operations.pp_ranks[-1]}", *kinds]
    raise UsageError(f"--without {name}: no such worker or kind; there are {', '.join(known)}")
