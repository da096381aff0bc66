"""A pipeline under slow links: how many microbatches each stage runs ahead, and what a step then takes.

After Adaptra (arXiv 2504.19232). In 1F1B, stage i of S starts S - i microbatches before it goes back and forth, one
more than the next stage: any delay between the two is waited for again and again. Further ahead, it is absorbed, at the
price of the activations held meanwhile. Simulated with `sftriage.whatif.graph`. Axes: S stages, L links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from statistics import median

import numpy as np

from sftriage.errors import UsageError
from sftriage.mitigate.ordering import ScheduledStep, order_of
from sftriage.mitigate.switch_state import SwitchStatus
from sftriage.whatif.graph import graph_of, timeline
from sftriage.whatif.operations import Operations
from sftriage.whatif.pipeline import BACKWARD, BACKWARD_RECV, FORWARD, FORWARD_RECV

AHEAD = 2
"""By how many microbatches more than its link's delay asks for a stage is ahead of the next, in the paper."""
STANDS_OUT, NOTICED = 2.0, 0.1
"""A link is slow that delays by so many times what others typically do, and by such a share of a microbatch's work."""
NEARLY = 1e-3
"""For less than this share of a step, no more activations are held."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a microbatch takes: seconds of a computation of each stage (S), and on each link (L).

    A delay is, either way, from the end of a computation to where its output can be used. Stage i holds the activations
    of ``most_S[i]`` microbatches (None: any).
    """

    forward_S: tuple[float, ...]
    backward_S: tuple[float, ...]
    delay_L: tuple[float, ...]
    microbatches: int
    most_S: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.forward_S)
        most = self.most_S if self.most_S is not None else (1,) * n
        if not n or (len(self.backward_S), len(self.delay_L), len(most)) != (n, n - 1, n) or self.microbatches < 1:
            raise UsageError("a pipeline has a forward, a backward and a bound for each stage, and a link between two")
        if min(self.forward_S) <= 0 or min((*self.backward_S, *self.delay_L)) < 0 or min(most) < 1:
            raise UsageError("a computation takes time, a delay none or some, and a stage holds a microbatch at least")

    @property
    def undelayed(self) -> Pipeline:
        """The same with no delay on any link."""
        return replace(self, delay_L=(0.0,) * len(self.delay_L))


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
        raise UsageError(f"stages ahead by {list(ahead_S)}: each is as far ahead as the next, at least")
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
    return replace(pipeline.undelayed, forward_S=forward_S, backward_S=backward_S)


def pipeline_of(operations: Operations) -> Pipeline | None:
    """A recorded pipeline, by the medians of what was measured; None for one stage.

    Raises UsageError where its stages are of several model chunks, for which there is no such schedule.
    """
    stages = operations.pp_ranks
    kinds = {one.name: index for index, one in enumerate(operations.types)}
    if len(stages) < 2 or not {FORWARD, BACKWARD} <= kinds.keys():
        return None
    if operations.chunk_T.max() > 0:
        raise UsageError("an interleaved pipeline: schedules are planned for stages of one model chunk")

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
