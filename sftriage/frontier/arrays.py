"""Array types of this room. Axes are in the names of the arrays that have them: N steps, R ranks, S stages, M rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
RankArray = NDArray[np.intp]
