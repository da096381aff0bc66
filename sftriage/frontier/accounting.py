"""The frontier: an exact, additive accounting of a window's exposed time.

At a stage boundary the frontier is the cumulative time of whichever rank is furthest along; a stage's advance is the
frontier's increment over it. Advances are never negative and sum to the exposed time (StageFrontier, arXiv 2606.06751).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import FloatArray, RankArray
from sftriage.frontier.segments import Column, Segment, complete_steps, segments
from sftriage.records import Window


@dataclass(frozen=True, slots=True, eq=False)
class Accounting:
    """Where a window's exposed time went, in seconds over all its complete steps.

    ``advances_S.sum() == exposed_s`` to floating-point precision. ``leaders_S`` is the rank that led each stage's
    boundary, weighted by what the frontier advanced there while it led (None where the frontier never advanced).
    """

    exposed_s: float
    advances_S: FloatArray
    leaders_S: tuple[int | None, ...]
    n_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """One pass through a segment, in seconds.

    Attributes:
        segment: what was walked.
        arrival_MR: when each rank was through with the local columns.
        leader_M: the rank that arrived last, at ``last_M``.
        end_M: when the segment ended: its exposed time.
        boundaries: for each column its stage, and row by row the frontier's advance over it and the rank in front.
    """

    segment: Segment
    arrival_MR: FloatArray
    leader_M: RankArray
    last_M: FloatArray
    end_M: FloatArray
    boundaries: tuple[tuple[int, FloatArray, RankArray], ...]


def walk(segment: Segment) -> Walk:
    """Go through a segment's columns once, keeping the frontier."""
    reached_MR = np.zeros((segment.n_rows, segment.n_ranks))
    frontier_M, leader_M = np.zeros(segment.n_rows), np.zeros(segment.n_rows, dtype=np.intp)
    boundaries: list[tuple[int, FloatArray, RankArray]] = []

    def through(column: Column, reached_MR: FloatArray) -> tuple[FloatArray, RankArray]:
        if not segment.n_ranks:
            return frontier_M, leader_M
        ahead_M = reached_MR.argmax(axis=1)
        at_M = np.take_along_axis(reached_MR, ahead_M[:, None], axis=1)[:, 0]
        boundaries.append((column.stage, at_M - frontier_M, ahead_M))
        return at_M, ahead_M

    for column in segment.local:
        reached_MR[column.offset : column.offset + len(column.values_NR)] += column.values_NR
        frontier_M, leader_M = through(column, reached_MR)
    last_M, last_leader_M = frontier_M, leader_M
    if segment.own is not None:
        ended_MR = reached_MR.copy()
        ended_MR[: len(segment.own.values_NR)] += segment.own.values_NR
        frontier_M, _ = through(segment.own, ended_MR)
    return Walk(segment, reached_MR, last_leader_M, last_M, frontier_M, tuple(boundaries))


def plain(window: Window) -> Accounting:
    """The paper's accounting: each rank measured from its own step start (design §3; arXiv 2606.06751).

    d[r,j] ≥ 0; c[r,j] = Σ_{i≤j} d[r,i]; f_j = max_r c[r,j]; a_j = f_j - f_{j-1}.
    """
    valid_N = complete_steps(window)
    columns = (Column(s, window.durations_NRS[valid_N, :, s]) for s in range(len(window.schema.stages)))
    return account([walk(Segment(tuple(columns), None, int(valid_N.sum()), window.durations_NRS.shape[1]))], window)


def anchored(window: Window) -> Accounting:
    """The accounting cut at the end of each sync stage, so that a delay after the last sync keeps its stage."""
    return account([walk(segment) for segment in segments(window)], window)


def account(walks: list[Walk], window: Window, n_steps: int | None = None) -> Accounting:
    """What the walks through a window's segments add up to; ``n_steps`` complete steps, counted if not given."""
    n_stages, n_ranks = len(window.schema.stages), window.durations_NRS.shape[1]
    advances_S = np.zeros(n_stages)
    led_SR = np.zeros((n_stages, n_ranks))
    exposed_s = 0.0
    for one in walks:
        for stage, advance_M, leader_M in one.boundaries:
            advances_S[stage] += advance_M.sum()
            led_SR[stage] += np.bincount(leader_M, weights=advance_M, minlength=n_ranks)
        exposed_s += float(one.end_M.sum())
    leaders_S = tuple(int(row.argmax()) if row.any() else None for row in led_SR)
    n_steps = int(complete_steps(window).sum()) if n_steps is None else n_steps
    return Accounting(exposed_s, advances_S, leaders_S, n_steps)
