"""Hosts as suspects: the ranks of a slow host are late together, so that mending one of them alone saves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sftriage.frontier.arrays import FloatArray, RankArray, medians
from sftriage.frontier.candidates import Unit, by_step
from sftriage.frontier.roles import LEAST_SAMPLE_RANKS, SAMPLE_RANKS, Roles, grouped, sampled
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import SegmentReplay

Peers = Sequence[FloatArray]
"""For each local column of a segment, the medians of the ranks on other hosts, by step and cohort."""


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
    settings: Settings,
) -> list[Unit]:
    """The units of those of some ``hosts`` that have several ranks, which are slow alike.

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
        parts = zip(replays, peers, strict=True)
        over_NXS = np.sum([one.over_NXS(some_X, roles, n_steps, mine) for one, mine in parts], axis=0)
        over_X = over_NXS.sum(axis=2).mean(axis=0)
        if not (over_X.max() > 0.0 and (over_X >= over_X.max() / 2).mean() >= settings.min_part_fraction):
            continue
        gain_NS, lateness_N = np.zeros((n_steps, over_NXS.shape[2] + 1)), np.zeros(n_steps)
        for one, mine, second_M in zip(replays, peers, elsewhere, strict=True):
            gain_MS = np.zeros((len(second_M), gain_NS.shape[1]))
            led_M = places.role_R[one.walk.leader_M] == h
            led_L = np.flatnonzero(led_M)
            lateness_N += (one.lateness_M * led_M)[:n_steps]
            gain_MS[led_L] = _gains(one, mine, ranks, roles, led_L, second_M[led_L])
            gain_NS += by_step(gain_MS, one.offset_S, n_steps)
        over_NS = medians(over_NXS.swapaxes(1, 2))
        units.append(Unit(places.names[h], tuple(ranks.tolist()), gain_NS, over_NS, lateness_N))
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
    one: SegmentReplay, peers: Peers, ranks: RankArray, roles: Roles, led_L: RankArray, second_L: FloatArray
) -> FloatArray:
    """What mending each stage of a host, and in the last column all of them, would have saved in the rows it led.

    L × (S + 1), seconds; X are the host's ranks. One stage at a time, as a host may have many ranks.
    """
    n_stages = one.excess_MS.shape[1]
    arrival_LX = np.array([one.walk.arrivals_M[m][ranks] for m in led_L]).reshape(len(led_L), len(ranks))
    total_LX = np.zeros(arrival_LX.shape)
    gain_LS = np.zeros((len(led_L), n_stages + 1))

    def saved(excess_LX: FloatArray) -> FloatArray:
        left_L = (arrival_LX - np.clip(excess_LX, 0.0, None)).max(axis=1)
        return np.asarray(np.clip(one.walk.last_M[led_L] - np.maximum(second_L, left_L), 0.0, None))

    for stage in sorted({column.stage for column in one.walk.segment.local}):
        excess_LX = np.zeros(arrival_LX.shape)
        for column, median_NC in zip(one.walk.segment.local, peers, strict=True):
            if column.stage == stage:
                step_L = led_L - column.offset
                there_L = (step_L >= 0) & (step_L < len(median_NC))
                step_L = step_L[there_L]
                own_LX = column.at(np.ix_(step_L, ranks))
                excess_LX[there_L] += own_LX - median_NC[np.ix_(step_L, roles.role_R[ranks])]
        gain_LS[:, stage] = saved(excess_LX)
        total_LX += excess_LX
    gain_LS[:, -1] = saved(total_LX)
    return gain_LS
