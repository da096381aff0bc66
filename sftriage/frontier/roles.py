"""Which ranks do the same work. Ranks are compared within their cohort; without cohorts, with everybody."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sftriage.frontier.arrays import RankArray
from sftriage.model.windows import Window

SAMPLE_RANKS = 512
"""Ranks of a large cohort that its medians are taken from, drawn once.

The error of such a median is 1.25 / √512, 6 %, of one rank's jitter; and numpy sorts up to this many single-precision
numbers several times faster than a few more (x86-simd-sort)."""

ALL_SAMPLES_RANKS, LEAST_SAMPLE_RANKS = 1024, 64
"""The most ranks of all samples together, and the fewest of one cohort: enough that neither one rank more or less nor
single precision moves the median."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The ranks that stand for their cohorts; of cohorts whose samples have the same size.

    Attributes:
        roles_C: the numbers of the cohorts.
        ranks_CX: the ranks of each.
        whole: whether these are all of their ranks.
    """

    roles_C: RankArray
    ranks_CX: RankArray
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """A grouping of a window's ranks, into cohorts or hosts.

    Attributes:
        names: of the groups (C).
        role_R: the number of each rank's group.
        members: the ranks of each group.
        samples: the ranks that stand for each group.
    """

    names: tuple[str, ...]
    role_R: RankArray
    members: tuple[RankArray, ...]
    samples: tuple[Sample, ...]

    @property
    def some_X(self) -> RankArray:
        """The ranks of the samples that are not whole, in their order."""
        parts = [one.ranks_CX.ravel() for one in self.samples if not one.whole]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp)


def roles_of(window: Window) -> Roles:
    """The window's cohorts; one nameless cohort if none are declared."""
    n_ranks = window.durations_NRS.shape[1]
    return _alike(n_ranks) if window.cohorts is None else grouped(window.cohorts)


@lru_cache(maxsize=8)
def _alike(n_ranks: int) -> Roles:
    ranks = np.arange(n_ranks)
    return _roles(("",), np.zeros(n_ranks, dtype=np.intp), (ranks,))


@lru_cache(maxsize=8)
def grouped(names: tuple[str, ...]) -> Roles:
    """The ranks grouped by name, in the order in which the names appear.

    Cached, because all windows of a job have the same names.
    """
    number: dict[str, int] = {}
    role_R = np.asarray([number.setdefault(name, len(number)) for name in names], dtype=np.intp)
    by_role_R = np.argsort(role_R, kind="stable")
    ends = np.cumsum(np.bincount(role_R, minlength=len(number)))
    return _roles(tuple(number), role_R, tuple(np.split(by_role_R, ends[:-1])[: len(number)]))


def _roles(names: tuple[str, ...], role_R: RankArray, members: tuple[RankArray, ...]) -> Roles:
    at_most = min(SAMPLE_RANKS, max(LEAST_SAMPLE_RANKS, ALL_SAMPLES_RANKS // max(1, len(members))))
    of_size: dict[tuple[int, bool], list[int]] = {}
    for c, ranks in enumerate(members):
        of_size.setdefault((min(len(ranks), at_most), len(ranks) <= at_most), []).append(c)
    samples = tuple(
        Sample(np.asarray(cohorts), np.stack([sampled(members[c], at_most) for c in cohorts]), whole)
        for (_, whole), cohorts in of_size.items()
    )
    for shared in (role_R, *members, *(one.ranks_CX for one in samples)):
        shared.setflags(write=False)
    return Roles(names, role_R, members, samples)


def sampled(ranks: RankArray, at_most: int = SAMPLE_RANKS) -> RankArray:
    """At most so many of the ranks: always the same random ones, so that they do not align with the hosts."""
    return ranks if len(ranks) <= at_most else ranks[_sample(len(ranks), at_most)]


@lru_cache(maxsize=64)
def _sample(count: int, size: int) -> RankArray:
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))
