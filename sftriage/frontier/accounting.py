"""The frontier: an exact, additive accounting of a window's exposed time.

At a stage boundary the frontier is the cumulative time of whichever rank is furthest along; a stage's advance is the
frontier's increment over it. Advances are never negative and sum to the exposed time (StageFrontier, arXiv 2606.06751).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import FloatArray
from sftriage.frontier.segments import Segment, complete_steps, segments
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


def plain(window: Window) -> Accounting:
    """The paper's accounting: each rank measured from its own step start (design §3; arXiv 2606.06751).

    d[r,j] ≥ 0; c[r,j] = Σ_{i≤j} d[r,i]; f_j = max_r c[r,j]; a_j = f_j - f_{j-1}.
    """
    valid_N = complete_steps(window)
    whole = Segment(window.durations_NRS[valid_N], tuple(range(len(window.schema.stages))), sync=False)
    return _account([whole], window)


def anchored(window: Window) -> Accounting:
    """The accounting cut at the end of each sync stage, so that a delay after the last sync keeps its stage."""
    return _account(segments(window), window)


def _account(parts: list[Segment], window: Window) -> Accounting:
    n_stages, n_ranks = len(window.schema.stages), window.durations_NRS.shape[1]
    advances_S = np.zeros(n_stages)
    led_SR = np.zeros((n_stages, n_ranks))
    exposed_s = 0.0
    for segment in parts:
        reached_MR = np.zeros(segment.values_MRK.shape[:2])
        frontier_M = np.zeros(segment.values_MRK.shape[0])
        for k, stage in enumerate(segment.stage_K):
            reached_MR += segment.values_MRK[:, :, k]
            leader_M = reached_MR.argmax(axis=1) if n_ranks else np.zeros(0, dtype=np.intp)
            boundary_M = np.take_along_axis(reached_MR, leader_M[:, None], axis=1)[:, 0]
            advance_M = boundary_M - frontier_M
            advances_S[stage] += advance_M.sum()
            led_SR[stage] += np.bincount(leader_M, weights=advance_M, minlength=n_ranks)
            frontier_M = boundary_M
        exposed_s += float(frontier_M.sum())
    leaders_S = tuple(int(row.argmax()) if row.any() else None for row in led_SR)
    return Accounting(exposed_s, advances_S, leaders_S, int(complete_steps(window).sum()))
