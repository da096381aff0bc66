"""Ranks and hosts as units that may be slow: what mending each alone would have saved, step by step.

Only the rank that arrives last can have a gain, so that only units that did are examined. The ranks of a slow host are
late together: mending one of them alone saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from sftriage.model.verdicts import Scope
from sftriage.verdict.accounting import BoolArray, FloatArray, RankArray, medians
from sftriage.verdict.whatif import LEAST_SAMPLE_RANKS, SAMPLE_RANKS, Roles, SegmentReplay, grouped, sampled

UnitName: TypeAlias = "int | str"
"""A rank by its number, or a host by its name."""

Peers = Sequence[FloatArray]
"""For each local column of a segment, the medians of the ranks on other hosts, by step and cohort."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One rank, or the ranks of one host, in seconds.

    Attributes:
        gain_NS: what mending each stage would have saved; the last column is of all local stages together.
        over_NS: its local time over its peers'.
        lateness_N: its lateness in the steps in which it arrived last, 0 in the others.
        starved: most of its lateness is waiting for a CPU, which is no single stage's fault.
    """

    name: UnitName
    ranks: tuple[int, ...]
    gain_NS: FloatArray
    over_NS: FloatArray
    lateness_N: FloatArray
    starved: bool = False

    @property
    def scope(self) -> Scope:
        """``rank`` or ``host``."""
        return "host" if isinstance(self.name, str) else "rank"


def rank_units(replays: Sequence[SegmentReplay], ranks: Sequence[int], roles: Roles, n_steps: int) -> list[Unit]:
    """The units of some ranks."""
    over_NXS = np.sum([one.over_NXS(np.asarray(ranks, np.intp), roles, n_steps) for one in replays], axis=0)
    units = []
    for x, rank in enumerate(ranks):
        led = [one.walk.leader_M == rank for one in replays]
        gains = [
            np.column_stack([one.gain_MS, one.whole_gain_M]) * led_M[:, None]
            for one, led_M in zip(replays, led, strict=True)
        ]
        units.append(_unit(rank, (rank,), over_NXS[:, x], zip(replays, led, gains, strict=True)))
    return units


def _unit(
    name: UnitName,
    ranks: tuple[int, ...],
    over_NS: FloatArray,
    parts: Iterable[tuple[SegmentReplay, BoolArray, FloatArray]],
) -> Unit:
    """A unit of what it is in each segment: the rows (M) that it led, and the gains of its stages there (M × S + 1).

    A delay after a step's last sync shows in the next step's row. The whole is of the step that most of it is of.
    """
    n_steps, n_stages = over_NS.shape
    gain_NS, lateness_N = np.zeros((n_steps, n_stages + 1)), np.zeros(n_steps)
    for one, led_M, gain_MS in parts:
        lateness_N += (one.lateness_M * led_M)[:n_steps]
        offset_S = np.append(one.offset_S, one.offset_S[gain_MS[:, :-1].sum(axis=0).argmax()])
        step_MS = np.clip(np.arange(len(gain_MS))[:, None] - offset_S, 0, n_steps - 1)
        np.add.at(gain_NS, (step_MS, np.arange(n_stages + 1)), gain_MS)
    return Unit(name, ranks, gain_NS, over_NS, lateness_N)


def places_of(hosts: tuple[str, ...] | None) -> Roles | None:
    """The ranks by host; None if hosts are not known, or there is only one."""
    places = None if hosts is None else grouped(hosts)
    return None if places is None or len(places.names) < 2 else places


def host_units(
    replays: Sequence[SegmentReplay],
    places: Roles,
    elsewhere: Sequence[FloatArray],
    hosts: Sequence[int],
    roles: Roles,
    n_steps: int,
    alike_fraction: float,
) -> list[Unit]:
    """The units of those of some ``hosts`` that have several ranks, of which ``alike_fraction`` at least are slow.

    ``elsewhere`` is `last_elsewhere` of each segment.
    """
    units = []
    for h in hosts:
        ranks = places.members[h]
        apart = _apart(ranks, roles)
        if len(ranks) < 2 or apart is None:
            continue
        peers = [_peers(one, apart, n_steps) for one in replays]
        some_X = sampled(ranks, LEAST_SAMPLE_RANKS)
        over_NXS = np.sum(
            [one.over_NXS(some_X, roles, n_steps, mine) for one, mine in zip(replays, peers, strict=True)], axis=0
        )
        over_X = over_NXS.sum(axis=2).mean(axis=0)
        if not (over_X.max() > 0.0 and (over_X >= over_X.max() / 2).mean() >= alike_fraction):
            continue
        led = [places.role_R[one.walk.leader_M] == h for one in replays]
        gains = [_gains(*parts, ranks, roles) for parts in zip(replays, peers, led, elsewhere, strict=True)]
        over_NS = medians(over_NXS.swapaxes(1, 2))
        units.append(_unit(places.names[h], tuple(ranks.tolist()), over_NS, zip(replays, led, gains, strict=True)))
    return units


def last_elsewhere(one: SegmentReplay, places: Roles) -> FloatArray:
    """The last arrival of each row (M) on any host but the leader's, which is the only one with a gain in that row.

    It is mostly the second last of all ranks; where that is on the leader's host too, the host is masked meanwhile.
    """
    host_M, last_M = places.role_R[one.walk.leader_M], one.walk.second_M.copy()
    for m in np.flatnonzero(places.role_R[one.walk.runner_up_M] == host_M):
        arrival_R, ranks = one.walk.arrivals_M[m], places.members[host_M[m]]
        arrival_X = arrival_R[ranks]
        arrival_R[ranks] = -np.inf
        last_M[m] = arrival_R.max()
        arrival_R[ranks] = arrival_X
    return last_M


def _apart(ranks: RankArray, roles: Roles) -> dict[int, RankArray] | None:
    """The ranks on other hosts, for each cohort that the host is a large part of; None if a cohort has none there.

    A small part of a large cohort hardly moves its median, and is not left out of it.
    """
    apart = {}
    elsewhere_R = np.ones(len(roles.role_R), dtype=np.bool_)
    elsewhere_R[ranks] = False
    for c in np.flatnonzero(np.bincount(roles.role_R[ranks])).tolist():
        members = roles.members[c]
        if len(members) <= SAMPLE_RANKS or len(ranks) > len(members) // 10:
            apart[c] = sampled(members[elsewhere_R[members]])
            if not len(apart[c]):
                return None
    return apart


def _peers(one: SegmentReplay, apart: dict[int, RankArray], n_steps: int) -> Peers:
    peers = [median_NC.copy() for median_NC in one.references(n_steps)]
    for column, median_NC in zip(one.walk.segment.local, peers, strict=True):
        for c, ranks in apart.items():
            times_NX = column.of(ranks)
            median_NC[:, c] = medians(times_NX if len(ranks) < SAMPLE_RANKS else times_NX.astype(np.float32))
    return peers


def _gains(
    one: SegmentReplay, peers: Peers, led_M: BoolArray, second_M: FloatArray, ranks: RankArray, roles: Roles
) -> FloatArray:
    """What mending each stage of a host, and in the last column all of them, would have saved in the rows it led.

    M × (S + 1), seconds; X are the host's ranks, L the rows that it led.
    """
    led_L, n_stages = np.flatnonzero(led_M), one.excess_MS.shape[1]
    arrival_LX = np.array([one.walk.arrivals_M[m][ranks] for m in led_L]).reshape(len(led_L), len(ranks))
    excess_LXS = np.zeros((len(led_L), len(ranks), n_stages + 1))
    for column, median_NC in zip(one.walk.segment.local, peers, strict=True):
        step_L = led_L - column.offset
        there_L = (step_L >= 0) & (step_L < len(median_NC))
        step_L = step_L[there_L]
        over_LX = column.at(np.ix_(step_L, ranks)) - median_NC[np.ix_(step_L, roles.role_R[ranks])]
        excess_LXS[there_L, :, column.stage] += over_LX
    excess_LXS[:, :, -1] = excess_LXS.sum(axis=2)
    left_LS = (arrival_LX[:, :, None] - np.maximum(excess_LXS, 0.0)).max(axis=1)
    saved_LS = one.walk.last_M[led_L, None] - np.maximum(second_M[led_L, None], left_LS)
    gain_MS = np.zeros((len(led_M), n_stages + 1))
    gain_MS[led_L] = np.maximum(saved_LS, 0.0)
    return gain_MS
