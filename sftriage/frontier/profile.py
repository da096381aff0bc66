"""The profile of a window: what its steps take by stage where nobody is late, and how late the last rank is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.roles import Roles
from sftriage.frontier.whatif import SegmentReplay, arrivals, jitter_s


@dataclass(frozen=True, eq=False)
class Profile:
    """The times of a window's steps, in seconds. N steps, C cohorts, S stages.

    (Without slots, for the cached property.)

    Attributes:
        level_NCS: local time by stage of the median rank, without the one that arrived last.
        common_NCS: local time by stage that three quarters of the ranks at least take.
        sync_NS: the sync stages' own work, past the last arrival.
        lateness_N: the last arrival past the median one, summed over the step's segments.
        jitter_s: scale of a rank's ordinary jitter in arrival, summed over the step's segments as lateness is.
        own_NR: each rank's local time, if there is a cohort of two ranks; otherwise of no ranks.
    """

    level_NCS: FloatArray
    common_NCS: FloatArray
    sync_NS: FloatArray
    lateness_N: FloatArray
    jitter_s: float
    own_NR: FloatArray

    def of(self, steps_N: BoolArray) -> Profile:
        """The profile of some of the steps."""
        names = ("level_NCS", "common_NCS", "sync_NS", "lateness_N", "own_NR")
        return replace(self, **{name: getattr(self, name)[steps_N] for name in names})

    @cached_property
    def typical(self) -> Typical:
        """Medians over the steps; the mean of lateness, in which rare delays count."""
        level_CS, common_CS, sync_S = (medians(one, axis=0) for one in (self.level_NCS, self.common_NCS, self.sync_NS))
        return Typical(level_CS, common_CS, sync_S, self.lateness_s)

    @property
    def lateness_s(self) -> float:
        """The mean lateness of the last arrival."""
        return float(self.lateness_N.mean())


@dataclass(frozen=True, slots=True, eq=False)
class Typical:
    """A typical step, in seconds (see `Profile`)."""

    level_CS: FloatArray
    common_CS: FloatArray
    sync_S: FloatArray
    lateness_s: float

    @property
    def total_s(self) -> float:
        """Its length; cohorts run in parallel."""
        return float(self.level_CS.sum(axis=1).max() + self.sync_S.sum()) + self.lateness_s


def profile(replays: list[SegmentReplay], n_steps: int, roles: Roles) -> Profile:
    """The profile of a window's steps from its replay. What came after a step's last sync belongs to that step."""
    n_stages = replays[0].excess_MS.shape[1]
    level_NCS, common_NCS = (np.zeros((n_steps, len(roles.members), n_stages)) for _ in range(2))
    sync_NS, lateness_N = np.zeros((n_steps, n_stages)), np.zeros(n_steps)
    for one in replays:
        for k, column in enumerate(one.walk.segment.local):
            rows = slice(column.offset, column.offset + n_steps)
            level_NCS[:, :, column.stage] += one.reference_KMC[k][rows]
            common_NCS[:, :, column.stage] += one.common_KMC[k][rows]
        lateness_N += one.lateness_M[:n_steps]
        own = one.walk.segment.own
        if own is not None:
            sync_NS[:, own.stage] += (one.walk.end_M - one.walk.last_M)[:n_steps]
    pairs = any(len(ranks) == 2 for ranks in roles.members)
    own_NR = sum(one.walk.arrival_MR[:n_steps] for one in replays) if pairs else np.zeros((n_steps, 0))
    jitter_total_s = sum(jitter_s(arrivals(one.walk, roles)) for one in replays)
    return Profile(level_NCS, common_NCS, sync_NS, lateness_N, jitter_total_s, np.asarray(own_NR))
