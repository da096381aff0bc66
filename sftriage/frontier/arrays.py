"""Array types of this room. Axes are in the names of the arrays that have them: N steps, R ranks, S stages, M rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
SingleArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
RankArray = NDArray[np.intp]


def medians(values: FloatArray, axis: int = -1) -> FloatArray:
    """The medians along an axis, as `np.median` has them, at a fraction of its cost: of numbers, never of NaN."""
    middle = values.shape[axis] // 2
    parted = np.partition(values if axis == -1 else np.moveaxis(values, axis, -1), middle, axis=-1)
    if values.shape[axis] % 2:
        return np.asarray(parted[..., middle])
    # Below the upper of the two in the middle, the largest is the lower one.
    return np.asarray((parted[..., :middle].max(axis=-1) + parted[..., middle]) / 2)


def known_medians(values_NXC: FloatArray) -> FloatArray:
    """The medians over ranks of those that are known, as `np.nanmedian` has them, at a fraction of its cost."""
    # What is not known comes last: of a row of which nothing is, at -1 and 0, too.
    ordered_NXC, known_NC = np.sort(values_NXC, axis=1), (~np.isnan(values_NXC)).sum(axis=1)
    lower_NC, upper_NC = (
        np.take_along_axis(ordered_NXC, at_NC[:, None], axis=1)[:, 0] for at_NC in ((known_NC - 1) // 2, known_NC // 2)
    )
    return np.asarray((lower_NC + upper_NC) / 2)
