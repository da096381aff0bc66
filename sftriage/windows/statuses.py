"""What the ranks of a job are doing, as the columns of a `JobStatus`: of the ranks of a host, and of those of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np

from sftriage.model.windows import JobStatus, RankStatus, StageSchema
from sftriage.recorder.layout import MAX_COUNT
from sftriage.windows.decoding import IntArray

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


def together(statuses: Sequence[JobStatus], older_ns: Sequence[int]) -> JobStatus | None:
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
