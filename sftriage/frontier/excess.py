"""What a window takes over what is normal, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import FloatArray, medians
from sftriage.frontier.baseline import Profile, Typical
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import MAD_TO_SIGMA


@dataclass(frozen=True, slots=True)
class Excess:
    """Exposed seconds a step over what is normal, by where they are.

    Attributes:
        late_s: the last arrival past the median one, over what jitter alone explains.
        group_s: local stages of the median rank over the baseline, in the cohort where they are most over it.
        sync_s: the sync stages' own work over the baseline.
        from_baseline: the last two are against a baseline; without one, against the window's own earlier steps.
    """

    late_s: float
    group_s: float
    sync_s: float
    from_baseline: bool

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.late_s + self.group_s + self.sync_s


def normal_lateness_s(
    seen: Profile, normal: Typical | None, n_ranks: int, exposed_s: float, settings: Settings
) -> float:
    """Lateness that is nobody's fault: what jitter explains, and what the job has when it is healthy.

    The largest of R normal deviations is near σ·sqrt(2 ln R).
    """
    jitter_s = min(seen.jitter_s * math.sqrt(2.0 * math.log(n_ranks)), settings.max_jitter_fraction * exposed_s)
    return jitter_s if normal is None else max(jitter_s, normal.lateness_s)


def excess_of(
    seen: Profile, like: Profile, normal: Typical | None, n_ranks: int, exposed_s: float, settings: Settings
) -> Excess:
    """The excess of a window.

    Args:
        seen: the window's profile.
        like: the profile of those of its steps that can be compared with ``normal``.
        normal: a typical healthy step of the job in the same regime, where one is known.
        n_ranks: ranks in the window.
        exposed_s: mean exposed seconds a step.
        settings: the thresholds.
    """
    late_s = max(0.0, seen.typical.lateness_s - normal_lateness_s(seen, normal, n_ranks, exposed_s, settings))
    if normal is None:
        group_s, sync_s = _shift(like, settings)
        return Excess(late_s, group_s, sync_s, from_baseline=False)
    typical = like.typical
    return Excess(
        late_s=late_s,
        group_s=float(np.clip(typical.level_CS - normal.level_CS, 0.0, None).sum(axis=1).max()),
        sync_s=float(np.clip(typical.sync_S - normal.sync_S, 0.0, None).sum()),
        from_baseline=True,
    )


def _shift(seen: Profile, settings: Settings) -> tuple[float, float]:
    """By how much the later part of a window is slower than its earlier part: (local level, sync work), seconds.

    The cut is the one with the largest step between the medians of the two sides. A step within what the window's own
    spread explains is none. A fall is no slowdown: jobs warm up.
    """
    local_N, sync_N = seen.level_NCS.sum(axis=2).max(axis=1), seen.sync_NS.sum(axis=1)
    total_N = local_N + sync_N
    n_steps = len(total_N)
    edge = max(3, n_steps // 5)
    cuts = range(edge, n_steps - edge + 1, max(1, n_steps // 32))
    if not cuts:
        return 0.0, 0.0

    def step_s(values_N: FloatArray, cut: int) -> float:
        return float(medians(values_N[cut:]) - medians(values_N[:cut]))

    cut = max(cuts, key=lambda at: step_s(total_N, at))
    rise_s = step_s(total_N, cut)
    sides = (total_N[:cut], total_N[cut:])
    spread_s = max(float(np.median(np.abs(side - np.median(side)))) * MAD_TO_SIGMA for side in sides)
    # The standard error of a median is 1.25 σ/√n; both sides add theirs.
    error_s = 1.25 * spread_s * math.sqrt(1.0 / cut + 1.0 / (n_steps - cut))
    if rise_s < settings.min_group_fraction * float(np.median(sides[0])) or rise_s < settings.shift_sigmas * error_s:
        return 0.0, 0.0
    return max(0.0, step_s(local_N, cut)), max(0.0, step_s(sync_N, cut))
