"""What would help a job that has a straggler, and by how much: models, not measurements. Pure.

Each remedy says from where on it pays, and what it takes for granted (`sftriage.words.run`).

An all-reduce with a late rank costs by the α-β model (arXiv 2505.23523, section 4): a message of b bytes takes α + bβ;
each rank sends one and receives one at a time, to and from any other. Seconds count from when the straggler is there.

A pipeline under slow links, after Adaptra (arXiv 2504.19232): in 1F1B, stage i of S starts S - i microbatches before it
goes back and forth, one more than the next stage: any delay between the two is waited for again and again. Further
ahead, it is absorbed, at the price of the activations held meanwhile. Simulated with `stragglers.graph`. Axes: S
stages, L links.
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
"""By how many microbatches more than its link's delay asks for a stage is ahead of the next, in the paper."""
STANDS_OUT, NOTICED = 2.0, 0.1
"""A link is slow that delays by so many times what others typically do, and by such a share of a microbatch's work."""
NEARLY = 1e-3
"""For less than this share of a step, no more activations are held."""


def undelayed(pipeline: Pipeline) -> Pipeline:
    """The same pipeline where no link delays anything."""
    return msgspec.structs.replace(pipeline, delay_L=(0.0,) * len(pipeline.delay_L))


def slow_link(pipeline: Pipeline) -> int | None:
    """The link that delays most, by the number of the stage before it; None where none stands out.

    A slow stage is no slow link: a delay counts from the end of the computation that is sent.
    """
    if not any(pipeline.delay_L):
        return None
    delay_s, link = max((delay_s, -link) for link, delay_s in enumerate(pipeline.delay_L))
    others_s = [other_s for other, other_s in enumerate(pipeline.delay_L) if other != -link]
    work_s = max(forward_s + back_s for forward_s, back_s in zip(pipeline.forward_S, pipeline.backward_S, strict=True))
    least_s = max(NOTICED * work_s, STANDS_OUT * median(others_s) if others_s else 0.0)
    return -link if delay_s >= least_s else None


def pipeline_seen(status: SwitchStatus) -> Pipeline | None:
    """A pipeline as its ranks have measured it; None where they have not yet, or it is none."""
    stages = status.stages
    delays = [max(after.there_s, before.back_s) for before, after in pairwise(stages)]
    if not delays or min(min(one.forward_s, one.backward_s, one.most) for one in stages) <= 0 or min(delays) <= 0:
        return None
    return Pipeline(
        tuple(one.forward_s for one in stages),
        tuple(one.backward_s for one in stages),
        tuple(delays),
        status.microbatches,
        tuple(one.most for one in stages),
    )


def one_f_one_b(pipeline: Pipeline) -> tuple[int, ...]:
    """How far ahead each stage is in 1F1B: a microbatch more than the next."""
    return _bounded(pipeline, [1] * len(pipeline.delay_L))


def absorbing(pipeline: Pipeline) -> tuple[int, ...]:
    """How far ahead each stage is to absorb its link's delay: x_(S-1) = 1, x_i = x_(i+1) + ⌈c_i / t_F,i⌉ + 2."""
    return _bounded(pipeline, _slack(pipeline))


def planned(pipeline: Pipeline) -> tuple[int, ...]:
    """How far ahead each stage best is within its memory: the one that holds least of those that are about the fastest.

    Candidates absorb all delays, or are ahead of delayed links alone, by as much or less: down to 1F1B.
    """
    slack_L = _slack(pipeline)
    candidates = {absorbing(pipeline)}
    for most in range(1, min(max(slack_L, default=1), pipeline.microbatches) + 1):
        slack = [min(slack, most) if delay_s else 1 for slack, delay_s in zip(slack_L, pipeline.delay_L, strict=True)]
        candidates.add(_bounded(pipeline, slack))
    took = {ahead_S: step_s(pipeline, ahead_S) for ahead_S in candidates}
    nearly_s = min(took.values()) * (1.0 + NEARLY)
    return min((ahead_S for ahead_S in candidates if took[ahead_S] <= nearly_s), key=lambda one: (sum(one), one))


def _slack(pipeline: Pipeline) -> list[int]:
    pairs = zip(pipeline.delay_L, pipeline.forward_S, strict=False)
    return [ceil(delay_s / forward_s) + AHEAD for delay_s, forward_s in pairs]


def _bounded(pipeline: Pipeline, slack_L: Sequence[int]) -> tuple[int, ...]:
    """How far ahead stages are from the last one up, each by its slack, and no further than they all have room for."""
    ahead = [*accumulate(reversed(slack_L), initial=1)]
    most_S = pipeline.most_S or (pipeline.microbatches,) * len(ahead)
    # A stage that waits for another is no further ahead than that one.
    room = accumulate((min(most, pipeline.microbatches) for most in most_S), min)
    return tuple(min(one, most) for one, most in zip(reversed(ahead), room, strict=True))


def step_s(pipeline: Pipeline, ahead_S: Sequence[int]) -> float:
    """Seconds of a step, from the first begin to the last end.

    Raises UsageError where a stage is less ahead than the next: they would wait for each other.
    """
    fits = len(ahead_S) == len(pipeline.forward_S) and ahead_S[-1] >= 1
    if not fits or any(one < after for one, after in pairwise(ahead_S)):
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
    """The same where what is sent holds up the sender's next computation: a slow transfer in a device's queue."""
    sent_S = [*pipeline.delay_L, 0.0], [0.0, *pipeline.delay_L]
    forward_S, backward_S = (
        tuple(own + sent for own, sent in zip(computed, sending, strict=True))
        for computed, sending in zip((pipeline.forward_S, pipeline.backward_S), sent_S, strict=True)
    )
    return msgspec.structs.replace(undelayed(pipeline), forward_S=forward_S, backward_S=backward_S)


def pipeline_of(operations: Operations) -> Pipeline | None:
    """A recorded pipeline, by the medians of what was measured; None for one stage.

    Raises UsageError where its stages are of several model chunks, for which there is no such schedule.
    """
    stages = operations.pp_ranks
    kinds = {one.name: index for index, one in enumerate(operations.types)}
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
"""For more ranks, rounds are the fewest that there can be; schedules are within three of them for up to 128."""


class Messages(NamedTuple):
    """What ranks exchange in a step, in bytes; α in seconds a message, β in seconds a byte."""

    size_bytes: float
    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class UnderStraggler:
    """StragglAR's cost among n ranks, one of them late.

    ``early_s`` is what the others take to share out their sums while they wait, ``after_s`` the rounds once the
    straggler is there, ``ring_s`` an all-reduce in a ring, all of it once the straggler is there.
    """

    early_s: float
    after_s: float
    ring_s: float

    def exposed_s(self, delay_s: float) -> float:
        """What is left to do when the straggler comes ``delay_s`` after the others."""
        return max(0.0, self.early_s - delay_s) + self.after_s

    @property
    def break_even_s(self) -> float | None:
        """How late the straggler must be for a ring to take longer; None where it never does."""
        return max(0.0, self.early_s + self.after_s - self.ring_s) if self.after_s < self.ring_s else None


def under_straggler(n: int, messages: Messages) -> UnderStraggler:
    """The cost of one all-reduce among n ranks."""
    size_bytes, latency_s, s_per_byte = messages
    chunk_s = latency_s + size_bytes / (n - 1) * s_per_byte
    # 2(n - 1) messages of one n-th each.
    ring_s = 2 * (n - 1) * (latency_s + size_bytes / n * s_per_byte)
    rounds = len(schedule_of(n)) if n <= MOST_SCHEDULED else fewest_rounds(n)
    return UnderStraggler((n - 2) * chunk_s, rounds * chunk_s, ring_s)


def as_measured(n: int, ring_s: float) -> UnderStraggler:
    """The cost where a ring takes so long, and bytes are all that takes time."""
    of_one = under_straggler(n, Messages(1.0, 0.0, 1.0))
    scale = ring_s / of_one.ring_s
    return UnderStraggler(of_one.early_s * scale, of_one.after_s * scale, ring_s)


RemedyCode = Literal["take_out", "rebalance", "stragglar", "pipeline", "host_transfers"]

MIN_SHARE = 0.01
"""What saves less of a step than this is not worth the trouble."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Who holds a job up, and by how much of a step: ``late_s``, of ``ranks`` of the job's ``n_ranks`` (0: unknown)."""

    who: str
    where: str
    ranks: tuple[int, ...]
    n_ranks: int
    late_s: float
    step_s: float


RECENT_WINDOWS = 10
MIN_WINDOWS = 4
"""Of the recent windows at least so many, and half of them, name who is there to stay."""


def straggler_in(recent: Sequence[Straggler | None], n_ranks: int) -> Straggler | None:
    """The rank that has been slow for long, and is still, by the last `RECENT_WINDOWS` informative windows; or None.

    ``recent`` has the first suspect of each if that is a chronic one. Half of them name it, or the last `MIN_WINDOWS`
    do.
    """
    last = list(recent)[-MIN_WINDOWS:]
    if None not in last and len({one.ranks for one in last if one is not None}) == 1:
        recent = last
    most = Counter(one.ranks for one in recent if one is not None).most_common(1)
    if not most or most[0][1] < max(MIN_WINDOWS, len(recent) / 2):
        return None
    last_named = next(one for one in reversed(recent) if one is not None and one.ranks == most[0][0])
    late_s = min(last_named.late_s, last_named.step_s)
    return replace(last_named, n_ranks=max(n_ranks, 1 + max(last_named.ranks)), late_s=late_s)


def is_settled(recent: Sequence[Straggler | None]) -> bool:
    """Whether the windows of `straggler_in` decide: not while they are few, nor where the last begin to name a rank."""
    last = list(recent)[-MIN_WINDOWS:]
    begins = None in last and last[-1] is not None
    return len(recent) == RECENT_WINDOWS and (straggler_in(recent, 0) is not None or not begins)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do.

    It saves ``saves_s`` of a step (None: unknown; negative: it costs), and pays from a lateness or a delay of
    ``pays_from_s`` on (None: never). ``numbers`` are what that was worked out from, by name.
    """

    code: RemedyCode
    saves_s: float | None
    pays_from_s: float | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()


class SlowLink(NamedTuple):
    """A link of a pipeline, by the number of the stage before it, and what it delays a microbatch by."""

    link: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The remedies, the most useful first; ``step_s`` is a step without any.

    ``tried`` is the last outcome, for each group of ranks, of those that a policy allows.
    """

    step_s: float | None
    straggler: Straggler | None
    remedies: tuple[Remedy, ...]
    slow_link: SlowLink | None = None
    tried: tuple[RemedyChanged, ...] = ()

    @property
    def best(self) -> Remedy | None:
        """What helps most; None where nothing is worth the trouble."""
        first = next(iter(self.remedies), None)
        worth = first is not None and self.step_s and (first.saves_s or 0.0) >= MIN_SHARE * self.step_s
        return first if worth else None


def advice_of(
    straggler: Straggler | None,
    messages: Messages | None,
    pipeline: Pipeline | None,
    measured: UnderStraggler | None = None,
) -> Advice:
    """What would help against a straggler, and a pipeline with slow links.

    Without ``messages``, ``measured`` is what an all-reduce takes by the job's own measurement.
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
        named = None if link is None else SlowLink(link, pipeline.delay_L[link])
    return Advice(now_s, straggler, tuple(sorted(found, key=lambda one: -(one.saves_s or 0.0))), named)


def _taken_out(straggler: Straggler) -> Remedy:
    """The others do its work too, and wait for nobody: (step - lateness) n / (n - k)."""
    n, k = straggler.n_ranks, len(straggler.ranks)
    after_s = (straggler.step_s - straggler.late_s) * n / (n - k)
    numbers = {"with_a_spare_s": straggler.late_s, "ranks": k}
    return Remedy("take_out", straggler.step_s - after_s, straggler.step_s * k / n, numbers)


def _rebalanced(straggler: Straggler) -> Remedy:
    """Each does what it can in the same time: n / ((n - k) / w + k / (w + lateness)), w being a step of the others."""
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
    """StragglAR, of what an exchange of gradients costs."""
    numbers = {"ring_s": cost.ring_s, "after_s": cost.exposed_s(straggler.late_s), "early_s": cost.early_s}
    return Remedy("stragglar", cost.ring_s - cost.exposed_s(straggler.late_s), cost.break_even_s, numbers)


def _of_pipeline(pipeline: Pipeline) -> Iterator[Remedy]:
    usual, ahead = one_f_one_b(pipeline), planned(pipeline)
    now_s, ideal_s = step_s(pipeline, usual), step_s(undelayed(pipeline), usual)
    numbers = {"one_f_one_b_s": now_s, "ideal_s": ideal_s}
    adapted_s = step_s(pipeline, ahead)
    yield Remedy("pipeline", now_s - adapted_s, 0.0, {**numbers, "adapted_s": adapted_s}, ahead)
    # Only where transfers hold up what is computed next, which the trace does not show.
    held_s = step_s(blocked(pipeline), ahead)
    yield Remedy("host_transfers", None, 0.0, {"held_up_s": held_s, "not_held_up_s": adapted_s}, ahead)
