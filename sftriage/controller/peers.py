"""Healthy ranks that a suspect can be compared with: of its cohort, and as ordinary as they come."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sftriage.decisions import Verdict
from sftriage.records import Window


def peers_of(verdict: Verdict, window: Window | None, ranks: Iterable[int] = ()) -> tuple[int, ...]:
    """The other ranks of the first suspect's cohort, the most typical first; those that are suspected too come last.

    Whether one of those is healthy beside the first is the policy's to say (`policy.engine.HEALTHY_GAIN_FRACTION`).
    Where there is no window yet, they are of ``ranks``, in order.
    """
    if not verdict.suspects:
        return ()
    suspected = {rank for suspect in verdict.suspects for rank in suspect.ranks}
    if window is None:
        return tuple(sorted(set(ranks) - suspected))
    local_R = _local_s(window)
    roles = window.cohorts or ("",) * len(local_R)
    wanted = {roles[rank] for rank in verdict.suspects[0].ranks if rank < len(roles)}
    able = [
        rank
        for rank, local_s in enumerate(local_R)
        if rank not in verdict.suspects[0].ranks and roles[rank] in wanted and not np.isnan(local_s)
    ]
    if not able:
        return ()
    healthy = [rank for rank in able if rank not in suspected] or able
    apart = np.abs(local_R[able] - np.median(local_R[healthy]))
    order = sorted(range(len(able)), key=lambda at: (able[at] in suspected, apart[at]))
    return tuple(able[at] for at in order)


def _local_s(window: Window) -> NDArray[np.float64]:
    """What each rank (R) takes by itself in a step, in the median; NaN for one that has no step."""
    local = [at for at, stage in enumerate(window.schema.stages) if stage not in window.schema.sync]
    total_NR = window.durations_NRS[:, :, local].sum(axis=2)
    if window.ready_NR is not None:
        total_NR = total_NR + np.nan_to_num(window.ready_NR, nan=0.0)
    return median_known(total_NR.T)


def median_known(values_XY: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row's values that are not NaN; NaN where there are none.

    numpy's own takes masked arrays to it, at a millisecond a call.
    """
    ordered_XY = np.sort(values_XY, axis=1)  # NaN comes last
    known_X1 = (~np.isnan(values_XY)).sum(axis=1, keepdims=True)
    # Of no known value it is the first, which is NaN.
    places = np.maximum(known_X1 - 1, 0) // 2, np.minimum(known_X1 // 2, values_XY.shape[1] - 1)
    low_X1, high_X1 = (np.take_along_axis(ordered_XY, at_X1, axis=1) for at_X1 in places)
    return np.asarray((low_X1 + high_X1) / 2)[:, 0]
