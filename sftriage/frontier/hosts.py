"""Hosts as suspects: the ranks of a bad node are late together, so that mending one of them alone saves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sftriage.frontier.arrays import FloatArray, RankArray
from sftriage.frontier.candidates import MAX_LOOKED_AT, Unit, by_step
from sftriage.frontier.roles import Roles, numbered
from sftriage.frontier.whatif import LARGE_COHORT, SegmentReplay

ALIKE_FRACTION = 0.75
"""So many of a host's ranks must be slow for the host to be: its best candidates share what is wrong with it."""


def host_units(
    replays: Sequence[SegmentReplay], hosts: tuple[str, ...] | None, roles: Roles, n_steps: int
) -> list[Unit]:
    """The hosts of several ranks that held the others up most, each with its gains, if its ranks are slow alike."""
    if hosts is None:
        return []
    names, host_R = numbered(hosts)
    if len(names) < 2:
        return []
    order = np.argsort(host_R, kind="stable")
    starts = np.searchsorted(host_R[order], np.arange(len(names)))
    in_order = bool((order == np.arange(len(order))).all())
    led_H = np.zeros(len(names))
    others: list[tuple[RankArray, FloatArray]] = []
    for one in replays:
        arrival_MR = one.walk.arrival_MR if in_order else one.walk.arrival_MR[:, order]
        last_MH = np.maximum.reduceat(arrival_MR, starts, axis=1)
        first_M = last_MH.argmax(axis=1)
        rows = np.arange(len(first_M))
        last_M = last_MH[rows, first_M].copy()
        last_MH[rows, first_M] = -np.inf
        second_M = last_MH.max(axis=1)
        led_H += np.bincount(first_M, np.minimum(last_M - second_M, np.maximum(one.lateness_M, 0.0)), len(names))
        others.append((first_M, second_M))
    units = []
    for h in np.argsort(-led_H, kind="stable")[:MAX_LOOKED_AT]:
        ranks = np.flatnonzero(host_R == h)
        if len(ranks) < 2 or led_H[h] <= 0.0:
            continue
        unit = _unit(names[h], h, ranks, replays, others, roles, n_steps)
        if unit is not None:
            units.append(unit)
    return units


def _unit(
    name: str,
    host: int,
    ranks: RankArray,
    replays: Sequence[SegmentReplay],
    others: Sequence[tuple[RankArray, FloatArray]],
    roles: Roles,
    n_steps: int,
) -> Unit | None:
    """One host with its gains; None where its ranks have no peers elsewhere, or are not slow alike."""
    n_stages = replays[0].excess_MS.shape[1]
    gain_NS, over_NXS = np.zeros((n_steps, n_stages + 1)), np.zeros((n_steps, len(ranks), n_stages))
    for one, (first_M, second_M) in zip(replays, others, strict=True):
        excess_SMX = np.zeros((n_stages, one.walk.segment.n_rows, len(ranks)))
        for k, column in enumerate(one.walk.segment.local):
            at = slice(column.offset, column.offset + len(column.values_NR))
            reference_NX = _reference(one, k, ranks, roles, at)
            if reference_NX is None:
                return None
            excess_NX = column.values_NR[:, ranks] - reference_NX
            excess_SMX[column.stage, at] += excess_NX
            over_NXS[:, :, column.stage] += excess_NX
        arrival_MX = one.walk.arrival_MR[:, ranks]
        removed = [*np.clip(excess_SMX, 0.0, None), np.clip(excess_SMX.sum(axis=0), 0.0, None)]
        left_MS = np.stack([(arrival_MX - removed_MX).max(axis=1) for removed_MX in removed], axis=1)
        gain_MS = np.clip(one.walk.last_M[:, None] - np.maximum(second_M[:, None], left_MS), 0.0, None)
        gain_NS += by_step(gain_MS * (first_M == host)[:, None], one.offset_S, n_steps)
    over_X = over_NXS.sum(axis=2).mean(axis=0)
    if over_X.max() <= 0.0 or (over_X >= over_X.max() / 2).mean() < ALIKE_FRACTION:
        return None
    return Unit("host", tuple(int(rank) for rank in ranks), name, gain_NS, np.median(over_NXS, axis=1))


def _reference(one: SegmentReplay, k: int, ranks: RankArray, roles: Roles, at: slice) -> FloatArray | None:
    """For each of a host's ranks the median of its cohort on other hosts (N × X); None where there is nobody."""
    values_NR = one.walk.segment.local[k].values_NR
    reference_NX = np.empty((len(values_NR), len(ranks)))
    for c in np.unique(roles.role_R[ranks]):
        peers = roles.members[c]
        if len(peers) >= LARGE_COHORT and len(ranks) <= len(peers) // 10:
            reference_N = one.reference_KMC[k][at, c]
        else:
            elsewhere = np.setdiff1d(peers, ranks)
            if not len(elsewhere):
                return None
            reference_N = np.median(values_NR[:, elsewhere], axis=1)
        reference_NX[:, roles.role_R[ranks] == c] = reference_N[:, None]
    return reference_NX
