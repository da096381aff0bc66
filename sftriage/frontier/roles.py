"""Which ranks do the same work. Ranks are compared within their cohort; without cohorts, with everybody."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sftriage.frontier.arrays import BoolArray, RankArray
from sftriage.records import Window

SAMPLE_RANKS = 512
"""Statistics that many ranks have in common are taken from so many of them, drawn once: more would say the same."""

MEDIAN_RANKS = 2048
"""Of more ranks than these the median is that of a sample: its error is 1.25 / √2048, 3 %, of one rank's jitter."""


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """The cohorts of a window's ranks (C of them), by name: the role of each rank, and the ranks of each role.

    Hosts are told apart in the same way.
    """

    names: tuple[str, ...]
    role_R: RankArray
    members: tuple[RankArray, ...]


def roles_of(window: Window) -> Roles:
    """The window's cohorts; one nameless cohort where none are declared."""
    n_ranks = window.durations_NRS.shape[1]
    if window.cohorts is None:
        return Roles(("",), np.zeros(n_ranks, dtype=np.intp), (np.arange(n_ranks),))
    return grouped(window.cohorts)


@lru_cache(maxsize=8)
def grouped(names: tuple[str, ...]) -> Roles:
    """The ranks by the name that each of them has, in the order in which the names appear.

    Remembered, for a job's windows have the same names, and a large job has many.
    """
    number: dict[str, int] = {}
    role_R = np.asarray([number.setdefault(name, len(number)) for name in names], dtype=np.intp)
    by_role_R = np.argsort(role_R, kind="stable")
    ends = np.cumsum(np.bincount(role_R, minlength=len(number)))
    for shared in (role_R, by_role_R):
        shared.setflags(write=False)
    return Roles(tuple(number), role_R, tuple(np.split(by_role_R, ends[:-1])[: len(number)]))


def sampled(ranks: RankArray, at_most: int = SAMPLE_RANKS) -> RankArray:
    """The ranks themselves, or so many of them: always the same ones, in no step with any numbering of hosts."""
    return ranks if len(ranks) <= at_most else ranks[_sample(len(ranks), at_most)]


@lru_cache(maxsize=64)
def _sample(count: int, size: int) -> RankArray:
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))


def differ(window: Window, valid_N: BoolArray, local_S: BoolArray, min_s: float) -> bool:
    """Whether the ranks look like several roles: each is high in some local stage in which another is low.

    A straggler is high somewhere and low nowhere, and its peers are neither; of ranks with different roles (pipeline
    stages, a rank that also evaluates) every one is high in what is its own, and low in what is the others'. A local
    stage tells ranks apart where they differ by at least ``min_s`` in the complete steps, and by half.
    """
    ranks = sampled(np.arange(window.durations_NRS.shape[1]))
    # (stage by stage, as a window's times lie in memory)
    columns = (window.durations_NRS[:, :, s].take(ranks, axis=1) for s in np.flatnonzero(local_S))
    level_SR = [values_NX[valid_N].mean(axis=0) for values_NX in columns]
    level_RS = np.stack(level_SR, axis=1) if level_SR else np.zeros((len(ranks), 0))
    low_S, high_S = level_RS.min(axis=0, initial=np.inf), level_RS.max(axis=0, initial=0.0)
    tells_S = (high_S - low_S >= min_s) & (low_S <= 0.5 * high_S)
    if tells_S.sum() < 2:
        return False
    middle_S = (low_S + high_S) / 2
    high_RS = (level_RS > middle_S)[:, tells_S]
    return bool(high_RS.any(axis=1).all() and not high_RS.all(axis=1).any())
