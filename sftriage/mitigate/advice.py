"""Models of the remedies against a straggler: what each would save, and from which lateness on. Pure.

`sftriage.mitigate.loop` tries what a policy allows; `sftriage advise` and a run's summary show the rest as advice.

All-reduce with a late rank: the α-β model (arXiv 2505.23523, section 4). A message of b bytes takes α + bβ; a rank
sends and receives one message at a time. Seconds count from the straggler's arrival.

Pipeline with slow links, after Adaptra (arXiv 2504.19232): in 1F1B, stage i of S starts S - i microbatches before its
first backward, one more than the next stage, so a link's delay is paid for every microbatch. A stage that runs further
ahead absorbs the delay, and holds more activations. Simulated with `stragglers.graph`. Axes: S stages, L links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import ceil
from statistics import median
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from sftriage.errors import UsageError
from sftriage.mitigate.schedule import ScheduledStep, fewest_rounds, order_of, schedule_of
from sftriage.mitigate.switching import SwitchStatus
from sftriage.model.events import Pipeline, RemedyChanged
from sftriage.stragglers.graph import Operations, graph_of, timeline
from sftriage.stragglers.pipeline import BACKWARD, BACKWARD_RECV, FORWARD, FORWARD_RECV

AHEAD = 2
"""Extra microbatches a stage runs ahead beyond what absorbs its link's delay, from the paper."""
STANDS_OUT, NOTICED = 2.0, 0.1
"""A link is slow if its delay is this many times the median of the others, and this share of a microbatch's work."""
NEARLY = 1e-3
"""Share of a step below which a saving does not justify more activations."""


def undelayed(pipeline: Pipeline) -> Pipeline:
    """The same pipeline without delays."""
    return msgspec.structs.replace(pipeline, delay_L=(0.0,) * len(pipeline.delay_L))


def slow_link(pipeline: Pipeline) -> int | None:
    """The slowest link, by the number of the stage before it; None if none stands out.

    A slow stage does not make its link slow: a delay counts from the end of the stage's computation.
    """
    if not any(pipeline.delay_L):
        return None
    delay_s, link = max((delay_s, -link) for link, delay_s in enumerate(pipeline.delay_L))
    others_s = [other_s for other, other_s in enumerate(pipeline.delay_L) if other != -link]
    work_s = max(forward_s + back_s for forward_s, back_s in zip(pipeline.forward_S, pipeline.backward_S, strict=True))
    least_s = max(NOTICED * work_s, STANDS_OUT * median(others_s) if others_s else 0.0)
    return -link if delay_s >= least_s else None


def measured_pipeline(status: SwitchStatus) -> Pipeline | None:
    """The pipeline that a group's ranks measured; None if the group is no pipeline, or a stage has not measured yet."""
    stages = status.stages
    delays = [max(after.there_s, before.back_s) for before, after in pairwise(stages)]
    measured = (min(stage.forward_s, stage.backward_s, stage.most) for stage in stages)
    if not delays or min(measured) <= 0 or min(delays) <= 0:
        return None
    return Pipeline(
        tuple(stage.forward_s for stage in stages),
        tuple(stage.backward_s for stage in stages),
        tuple(delays),
        status.microbatches,
        tuple(stage.most for stage in stages),
    )


def one_f_one_b(pipeline: Pipeline) -> tuple[int, ...]:
    """How far ahead each stage runs in 1F1B: one microbatch more than the next."""
    return _bounded(pipeline, [1] * len(pipeline.delay_L))


def absorbing(pipeline: Pipeline) -> tuple[int, ...]:
    """How far ahead each stage runs to absorb its link's delay: x_(S-1) = 1, x_i = x_(i+1) + ⌈c_i / t_F,i⌉ + 2."""
    return _bounded(pipeline, _slack(pipeline))


def planned(pipeline: Pipeline) -> tuple[int, ...]:
    """The best plan within the stages' memory: of the fastest plans, within `NEARLY`, the one with fewest activations.

    Candidates run ahead of all links as in `absorbing`, or of delayed links only, by as much or less: down to 1F1B.
    """
    slack_L = _slack(pipeline)
    candidates = {absorbing(pipeline)}
    for most in range(1, min(max(slack_L, default=1), pipeline.microbatches) + 1):
        slack = [min(slack, most) if delay_s else 1 for slack, delay_s in zip(slack_L, pipeline.delay_L, strict=True)]
        candidates.add(_bounded(pipeline, slack))
    took = {ahead_S: step_s(pipeline, ahead_S) for ahead_S in candidates}
    nearly_s = min(took.values()) * (1.0 + NEARLY)
    fastest = [ahead_S for ahead_S in candidates if took[ahead_S] <= nearly_s]
    return min(fastest, key=lambda ahead_S: (sum(ahead_S), ahead_S))


def _slack(pipeline: Pipeline) -> list[int]:
    pairs = zip(pipeline.delay_L, pipeline.forward_S, strict=False)
    return [ceil(delay_s / forward_s) + AHEAD for delay_s, forward_s in pairs]


def _bounded(pipeline: Pipeline, slack_L: Sequence[int]) -> tuple[int, ...]:
    """How far ahead stages run, each by its slack more than the next, within the memory of all."""
    ahead = [*accumulate(reversed(slack_L), initial=1)]
    most_S = pipeline.most_S or (pipeline.microbatches,) * len(ahead)
    # A stage can run no further ahead than the stages before it.
    memory = accumulate((min(most, pipeline.microbatches) for most in most_S), min)
    return tuple(min(wanted, most) for wanted, most in zip(reversed(ahead), memory, strict=True))


def step_s(pipeline: Pipeline, ahead_S: Sequence[int]) -> float:
    """Seconds of a step, from the first start to the last end.

    Raises UsageError if a stage runs less far ahead than the next: the two would deadlock.
    """
    fits = len(ahead_S) == len(pipeline.forward_S) and ahead_S[-1] >= 1
    if not fits or any(before < after for before, after in pairwise(ahead_S)):
        raise UsageError(f"stages ahead by {list(ahead_S)}: each must be at least as far ahead as the next")
    number: dict[tuple[int, ScheduledStep], int] = {}
    work: list[float] = []
    dependencies: list[tuple[int, int]] = []
    for stage, ahead in enumerate(ahead_S):
        for step in order_of(ahead, pipeline.microbatches):
            number[stage, step] = len(work)
            work.append((pipeline.forward_S if step.kind == "F" else pipeline.backward_S)[stage])
        mine = range(number[stage, ScheduledStep("F", 0)], len(work))
        dependencies += pairwise(mine)
    for link, delay_s in enumerate(pipeline.delay_L):
        for microbatch in range(pipeline.microbatches):
            for step, source, target in (
                (ScheduledStep("F", microbatch), link, link + 1),
                (ScheduledStep("B", microbatch), link + 1, link),
            ):
                ends = number[source, step], number[target, step]
                dependencies += [(ends[0], len(work)), (len(work), ends[1])]
                work.append(delay_s)
    graph = graph_of(len(work), dependencies, [], [])
    _, end_TNW = timeline(graph, np.array(work)[:, None, None])
    return float(end_TNW.max())


def blocked(pipeline: Pipeline) -> Pipeline:
    """The same pipeline if each transfer blocks the sender's next computation, as in a device's queue."""
    sent_S = [*pipeline.delay_L, 0.0], [0.0, *pipeline.delay_L]
    forward_S, backward_S = (
        tuple(own + sent for own, sent in zip(computed, sending, strict=True))
        for computed, sending in zip((pipeline.forward_S, pipeline.backward_S), sent_S, strict=True)
    )
    return msgspec.structs.replace(undelayed(pipeline), forward_S=forward_S, backward_S=backward_S)


def pipeline_of(operations: Operations) -> Pipeline | None:
    """The pipeline of a recording, from median times; None if there is only one stage.

    Raises UsageError for an interleaved pipeline, which `planned` does not cover.
    """
    stages = operations.pp_ranks
    kinds = {operation.name: index for index, operation in enumerate(operations.types)}
    if len(stages) < 2 or not {FORWARD, BACKWARD} <= kinds.keys():
        return None
    if operations.chunk_T.max() > 0:
        raise UsageError("an interleaved pipeline: schedules are planned only for stages of one model chunk")

    def typical_s(kind: str, stage: int) -> float:
        of_TW = (operations.type_T == kinds[kind])[:, None] & (operations.pp_TW == stage) if kind in kinds else None
        if of_TW is None or not of_TW.any():
            return 0.0
        work_TNW = operations.work_TNW
        of_TW = np.broadcast_to(of_TW, (work_TNW.shape[0], work_TNW.shape[2]))
        return float(np.median(work_TNW.transpose(0, 2, 1)[of_TW]))

    forward = (operations.type_T == kinds[FORWARD])[:, None] & (operations.pp_TW == stages[0])
    return Pipeline(
        tuple(typical_s(FORWARD, stage) for stage in stages),
        tuple(typical_s(BACKWARD, stage) for stage in stages),
        tuple(
            max(typical_s(FORWARD_RECV, after), typical_s(BACKWARD_RECV, before), 0.0)
            for before, after in pairwise(stages)
        ),
        int(forward.any(axis=1).sum()),
    )


MOST_SCHEDULED = 64
"""With more ranks the cost assumes the fewest possible rounds; up to 128 ranks, schedules need at most three more."""


class Messages(NamedTuple):
    """Bytes that ranks exchange in a step; α in seconds per message, β in seconds per byte."""

    size_bytes: float
    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class UnderStraggler:
    """The cost of StragglAR among n ranks, one of them late.

    ``early_s`` is the others' ReduceScatter while they wait, ``after_s`` the rounds after the straggler's arrival, and
    ``ring_s`` a ring all-reduce, which can only begin then.
    """

    early_s: float
    after_s: float
    ring_s: float

    def exposed_s(self, delay_s: float) -> float:
        """Time left after the arrival of a straggler ``delay_s`` behind the others."""
        return max(0.0, self.early_s - delay_s) + self.after_s

    @property
    def break_even_s(self) -> float | None:
        """Lateness from which on a ring takes longer; None if it never does."""
        return max(0.0, self.early_s + self.after_s - self.ring_s) if self.after_s < self.ring_s else None


def under_straggler(n: int, messages: Messages) -> UnderStraggler:
    """The cost of one all-reduce among n ranks."""
    size_bytes, latency_s, s_per_byte = messages
    chunk_s = latency_s + size_bytes / (n - 1) * s_per_byte
    # 2(n - 1) messages of size/n.
    ring_s = 2 * (n - 1) * (latency_s + size_bytes / n * s_per_byte)
    rounds = len(schedule_of(n)) if n <= MOST_SCHEDULED else fewest_rounds(n)
    return UnderStraggler((n - 2) * chunk_s, rounds * chunk_s, ring_s)


def as_measured(n: int, ring_s: float) -> UnderStraggler:
    """The cost scaled to a measured ring, without latency."""
    of_one = under_straggler(n, Messages(1.0, 0.0, 1.0))
    scale = ring_s / of_one.ring_s
    return UnderStraggler(of_one.early_s * scale, of_one.after_s * scale, ring_s)


RemedyCode = Literal["take_out", "rebalance", "stragglar", "pipeline", "host_transfers"]

MIN_SHARE = 0.01
"""Minimum share of a step that a remedy must save to be advised."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The ranks that delay a job by ``late_s`` of each step, of its ``n_ranks`` (0: unknown)."""

    who: str
    where: str
    ranks: tuple[int, ...]
    n_ranks: int
    late_s: float
    step_s: float


RECENT_WINDOWS = 10
MIN_WINDOWS = 4
"""Minimum recent windows that must name a straggler; they must also be half of all recent windows."""


def straggler_in(recent: Sequence[Straggler | None], n_ranks: int) -> Straggler | None:
    """The chronic straggler by the last `RECENT_WINDOWS` informative windows; None if there is none.

    ``recent`` has the first suspect of each window if its pattern is chronic, else None. Half of the windows, or all of
    the last `MIN_WINDOWS`, must name the same ranks.
    """
    last = list(recent)[-MIN_WINDOWS:]
    if None not in last and len({named.ranks for named in last if named is not None}) == 1:
        recent = last
    most = Counter(named.ranks for named in recent if named is not None).most_common(1)
    if not most or most[0][1] < max(MIN_WINDOWS, len(recent) / 2):
        return None
    last_named = next(named for named in reversed(recent) if named is not None and named.ranks == most[0][0])
    late_s = min(last_named.late_s, last_named.step_s)
    return replace(last_named, n_ranks=max(n_ranks, 1 + max(last_named.ranks)), late_s=late_s)


def is_settled(recent: Sequence[Straggler | None]) -> bool:
    """Whether `straggler_in` has enough windows, and the last ones are not just beginning to name a rank."""
    last = list(recent)[-MIN_WINDOWS:]
    begins = None in last and last[-1] is not None
    return len(recent) == RECENT_WINDOWS and (straggler_in(recent, 0) is not None or not begins)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One possible remedy.

    It saves ``saves_s`` of each step (None: unknown; negative: it costs), and pays from a lateness or delay of
    ``pays_from_s`` on (None: never). ``numbers`` are the model's figures, by name.
    """

    code: RemedyCode
    saves_s: float | None
    pays_from_s: float | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()


class PipelineLink(NamedTuple):
    """A link, by the number of the stage before it, and its delay per microbatch."""

    link: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The remedies, most useful first; ``step_s`` is a step without any.

    ``tried`` has each group's last outcome of the remedies that a policy allows.
    """

    step_s: float | None
    straggler: Straggler | None
    remedies: tuple[Remedy, ...]
    slow_link: PipelineLink | None = None
    tried: tuple[RemedyChanged, ...] = ()

    @property
    def best(self) -> Remedy | None:
        """The remedy that saves most; None if none saves `MIN_SHARE` of a step."""
        first = next(iter(self.remedies), None)
        worth = first is not None and self.step_s and (first.saves_s or 0.0) >= MIN_SHARE * self.step_s
        return first if worth else None


def advice_of(
    straggler: Straggler | None,
    messages: Messages | None,
    pipeline: Pipeline | None,
    measured: UnderStraggler | None = None,
) -> Advice:
    """The remedies against a straggler and against slow links of a pipeline.

    Without ``messages``, the all-reduce costs what the job itself ``measured``.
    """
    found: list[Remedy] = []
    now_s = None if straggler is None else straggler.step_s
    if straggler is not None and len(straggler.ranks) < straggler.n_ranks:
        found += [_taken_out(straggler), _rebalanced(straggler), *_around(straggler, messages, measured)]
    named = None
    if pipeline is not None and any(pipeline.delay_L):
        found += _of_pipeline(pipeline)
        now_s = now_s or step_s(pipeline, one_f_one_b(pipeline))
        link = slow_link(pipeline)
        named = None if link is None else PipelineLink(link, pipeline.delay_L[link])
    return Advice(now_s, straggler, tuple(sorted(found, key=lambda remedy: -(remedy.saves_s or 0.0))), named)


def _taken_out(straggler: Straggler) -> Remedy:
    """The other ranks take over its work: (step - lateness) n / (n - k)."""
    n, k = straggler.n_ranks, len(straggler.ranks)
    after_s = (straggler.step_s - straggler.late_s) * n / (n - k)
    numbers = {"with_a_spare_s": straggler.late_s, "ranks": k}
    return Remedy("take_out", straggler.step_s - after_s, straggler.step_s * k / n, numbers)


def _rebalanced(straggler: Straggler) -> Remedy:
    """Work in proportion to speed: n / ((n - k) / w + k / (w + lateness)), where w is a step of the others."""
    n, k = straggler.n_ranks, len(straggler.ranks)
    others_s = straggler.step_s - straggler.late_s
    if others_s <= 0.0:
        return Remedy("rebalance", None, 0.0)
    after_s = n / ((n - k) / others_s + k / straggler.step_s)
    return Remedy("rebalance", straggler.step_s - after_s, 0.0, {"its_share": after_s / straggler.step_s})


def _around(straggler: Straggler, messages: Messages | None, measured: UnderStraggler | None) -> Iterator[Remedy]:
    n = straggler.n_ranks
    if len(straggler.ranks) != 1 or n < 3:
        return
    if messages is not None:
        measured = under_straggler(n, messages)
    if measured is not None:
        yield around(straggler, measured)
        return
    cost = under_straggler(n, Messages(1.0, 0.0, 1.0))
    if cost.break_even_s is not None:
        break_even, most = cost.break_even_s / cost.ring_s, 1.0 - cost.after_s / cost.ring_s
        yield Remedy("stragglar", None, None, {"break_even_of_ring": break_even, "most_of_ring": most})


def around(straggler: Straggler, cost: UnderStraggler) -> Remedy:
    """StragglAR, by the cost of an exchange of gradients."""
    numbers = {"ring_s": cost.ring_s, "after_s": cost.exposed_s(straggler.late_s), "early_s": cost.early_s}
    return Remedy("stragglar", cost.ring_s - cost.exposed_s(straggler.late_s), cost.break_even_s, numbers)


def _of_pipeline(pipeline: Pipeline) -> Iterator[Remedy]:
    usual, ahead = one_f_one_b(pipeline), planned(pipeline)
    now_s, ideal_s = step_s(pipeline, usual), step_s(undelayed(pipeline), usual)
    numbers = {"one_f_one_b_s": now_s, "ideal_s": ideal_s}
    adapted_s = step_s(pipeline, ahead)
    yield Remedy("pipeline", now_s - adapted_s, 0.0, {**numbers, "adapted_s": adapted_s}, ahead)
    # Helps only if transfers block the next computation, which the trace does not show.
    held_s = step_s(blocked(pipeline), ahead)
    yield Remedy("host_transfers", None, 0.0, {"held_up_s": held_s, "not_held_up_s": adapted_s}, ahead)
