"""What the agents of a job send: new steps in columns, where their ranks are, and what these are doing now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np

from sftriage.model.windows import JobStatus, RankStatus, StageSchema
from sftriage.trainer.layout import MAX_COUNT
from sftriage.windows.decoding import IntArray, StepArrays


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is, and what role it has."""

    host: str
    cohort: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """New steps of some ranks of one agent; without steps, that the ranks are there.

    Attributes:
        generation: which start of the job the ranks are of.
        schema: the stages of every rank.
        world_size: how many ranks the job says it has.
        ranks: where each of the agent's ranks is.
        steps: by the clocks of the hosts.
        device_steps: the same steps, or earlier ones, by the clocks of the devices; None where none of the ranks runs
            on a device that its host does not wait for.
        device_over: the ranks that will have no device times any more.
        away: silent ranks, which windows do not wait for until they report again.
        wall_ns: what is to be added to the times of these steps to have nanoseconds since the epoch.
        agent: whose stream of rows they are of.
        position: where that stream has got to with these.
    """

    generation: int
    schema: StageSchema
    world_size: int
    ranks: Mapping[int, RankLocation]
    steps: StepArrays
    device_steps: StepArrays | None = None
    device_over: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    wall_ns: int = 0
    agent: str = ""
    position: int = 0


@dataclass(slots=True)
class ReadCounts:
    """What has come in so far, and what has not."""

    steps: int = 0
    missed: int = 0
    torn: int = 0
    problems: dict[str, str] = field(default_factory=dict)


N_VALUES = 10
"""Of each rank."""
_HOST, _AGES = 1, [3, 5]


@lru_cache(maxsize=64)
def bounds(world_size: int, n_hosts: int, n_stages: int) -> tuple[IntArray, IntArray]:
    """The least and the most that each value of ranks can be (V, 1)."""
    most = MAX_COUNT - 1
    least_V = np.array([0, 0, -1, -most, -most, -most, 0, 0, -1, 0])
    most_V = np.array([world_size - 1, n_hosts - 1, n_stages - 1, most, most, most, most, 1, 1, 1])
    return least_V[:, None], most_V[:, None]


def status_of(schema: StageSchema, world_size: int, ranks: Sequence[RankStatus], attempt: int = 0) -> JobStatus:
    """What some ranks of an attempt are doing, by rank; numbers no further than can be, whatever damage says."""
    ranks = sorted(ranks, key=lambda one: one.rank)
    hosts = {name: number for number, name in enumerate(dict.fromkeys(one.host for one in ranks))}
    doing_VR = np.empty((N_VALUES, len(ranks)), dtype=np.int64)
    for at, one in enumerate(ranks):
        numbers = (one.stage_age_ns, one.step, one.step_age_ns, one.published)
        doing_VR[:, at] = (
            *(one.rank, hosts[one.host], -1 if one.stage is None else schema.stages.index(one.stage)),
            *(max(1 - MAX_COUNT, min(number, MAX_COUNT - 1)) for number in numbers),
            *(one.closed, -1 if one.alive is None else one.alive, one.special),
        )
    return JobStatus(schema, world_size, tuple(hosts), doing_VR, attempt)


def joined_statuses(statuses: Sequence[JobStatus], older_ns: Sequence[int]) -> JobStatus | None:
    """What the ranks of several hosts are doing, by rank, each host's so much older than it says; None of none.

    Those count that have the stages, the number of ranks and the attempt of the first.
    """

    def about(one: JobStatus) -> tuple[object, ...]:
        return one.schema, one.world_size, one.attempt

    alike = [(one, age_ns) for one, age_ns in zip(statuses, older_ns, strict=True) if about(one) == about(statuses[0])]
    if not alike:
        return None
    doing_VR = np.concatenate([one.doing_VR for one, _ in alike], axis=1)
    sizes = [one.doing_VR.shape[1] for one, _ in alike]
    bases = list(accumulate((len(one.hosts) for one, _ in alike), initial=0))[:-1]
    doing_VR[_HOST] += np.repeat(np.array(bases, dtype=np.int64), sizes)
    doing_VR[_AGES] += np.repeat(np.array([age_ns for _, age_ns in alike], dtype=np.int64), sizes)
    hosts = tuple(chain.from_iterable(one.hosts for one, _ in alike))
    return replace(statuses[0], hosts=hosts, doing_VR=doing_VR[:, np.argsort(doing_VR[0], kind="stable")])
