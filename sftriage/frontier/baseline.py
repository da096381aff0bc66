"""The job's own healthy profile, against which a slowdown of every rank alike is seen.

Peers in the same step are no reference for what all of them share; the job's past is. It is learned
from windows that were not slow, and slowly, so that a creeping slowdown does not become the norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray
from sftriage.frontier.segments import by_step
from sftriage.frontier.whatif import SegmentReplay
from sftriage.records import Verdict

NEW_WINDOW_WEIGHT = 0.1
"""Weight of one more healthy window against what is known: about ten windows to move most of the way."""


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What a window's steps are like, in seconds. N complete steps, S stages.

    Attributes:
        level_NS: local time by stage of the median rank but for the one that arrived last, step by step.
        common_NS: local time by stage that three quarters of the ranks take at least.
        sync_NS: the sync stages' own work, past the last arrival.
        lateness_N: the last arrival past the median one, summed over the step's segments.
        jitter_s: scale of a rank's ordinary jitter in arrival, summed over the step's segments as lateness is.
    """

    level_NS: FloatArray
    common_NS: FloatArray
    sync_NS: FloatArray
    lateness_N: FloatArray
    jitter_s: float

    @property
    def typical(self) -> Typical:
        """The window in a few numbers: medians over its steps, but a mean of lateness, where rare delays count."""
        return Typical(
            level_S=np.median(self.level_NS, axis=0),
            common_S=np.median(self.common_NS, axis=0),
            sync_S=np.median(self.sync_NS, axis=0),
            lateness_s=float(self.lateness_N.mean()),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Typical:
    """A typical step, in seconds: by stage the local level, what is common of it, and the sync work; the lateness."""

    level_S: FloatArray
    common_S: FloatArray
    sync_S: FloatArray
    lateness_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """A typical healthy step of the job, and how many windows taught it."""

    typical: Typical
    n_windows: int


def profile(replays: list[SegmentReplay], valid_N: BoolArray) -> Profile:
    """The profile of a window's complete steps from its replay."""
    n_steps, n_stages = len(valid_N), replays[0].level_MS.shape[1]
    level_NS, common_NS, sync_NS = (np.zeros((n_steps, n_stages)) for _ in range(3))
    lateness_N = np.zeros(n_steps)
    for segment in replays:
        level_NS += by_step(segment.level_MS, n_steps)
        common_NS += by_step(segment.common_MS, n_steps)
        lateness_N += by_step(segment.lateness_M, n_steps)
        if segment.sync_stage is not None:
            sync_NS[:, segment.sync_stage] += by_step(segment.end_M - segment.last_M, n_steps)
    jitter_s = sum(segment.jitter_s for segment in replays)
    return Profile(level_NS[valid_N], common_NS[valid_N], sync_NS[valid_N], lateness_N[valid_N], jitter_s)


def learned(baseline: Baseline | None, verdict: Verdict, seen: Typical) -> Baseline | None:
    """The baseline after one more window of the job.

    A healthy window teaches all there is. One whose only fault is that the last rank to arrive keeps changing still
    teaches what the ranks have in common, so that a job that jitters from its first step gets a baseline at all; its
    lateness is not taken for normal. No other window teaches anything.
    """
    if verdict.label != "healthy" and verdict.reasons != ("roaming",):
        return baseline
    known = baseline.typical if baseline is not None else replace(seen, lateness_s=0.0)
    n_windows = baseline.n_windows if baseline is not None else 0
    weight = max(NEW_WINDOW_WEIGHT, 1.0 / (n_windows + 1))
    lateness_s = seen.lateness_s if verdict.label == "healthy" else known.lateness_s
    return Baseline(
        Typical(
            level_S=known.level_S + weight * (seen.level_S - known.level_S),
            common_S=known.common_S + weight * (seen.common_S - known.common_S),
            sync_S=known.sync_S + weight * (seen.sync_S - known.sync_S),
            lateness_s=known.lateness_s + weight * (lateness_s - known.lateness_s),
        ),
        n_windows + 1,
    )
