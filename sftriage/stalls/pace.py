"""What is normal for a running job: the length of its steps, and how long it may stand still.

Learned from the ranks' status, which stalls are judged by, and from windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sftriage.model.windows import JobStatus, Window


@dataclass(frozen=True, slots=True, eq=False)
class JobSince:
    """A `JobStatus` with ages converted to times on the observer's clock, in nanoseconds."""

    status: JobStatus
    since_ns_R: NDArray[np.int64]
    step_since_ns_R: NDArray[np.int64]

    def begun(self, at: int) -> tuple[int, int]:
        """How many steps a rank has begun, and when it began the last of them."""
        in_step = bool(self.status.stage_R[at] >= 0)
        return int(self.status.published_R[at]) + in_step, int(self.step_since_ns_R[at])


SAME_NS = 50_000_000
"""Ages take time to travel: two times within this of each other are the same event."""


def on_clock(job: JobStatus, before: JobSince | None, now_ns: int) -> JobSince:
    """What the ranks are doing, on the observer's clock; times that were known ``before`` are kept."""
    since = JobSince(job, now_ns - job.stage_age_ns_R, now_ns - job.step_age_ns_R)
    if before is None or (before.status.attempt, before.status.schema) != (job.attempt, job.schema):
        return since
    was = before.status
    _, here_K, there_K = np.intersect1d(job.rank_R, was.rank_R, assume_unique=True, return_indices=True)
    same_K = job.stage_R[here_K] == was.stage_R[there_K]
    same_K &= job.step_R[here_K] == was.step_R[there_K]
    same_K &= job.published_R[here_K] == was.published_R[there_K]
    here_K, there_K = here_K[same_K], there_K[same_K]
    for now_R, then_R in ((since.since_ns_R, before.since_ns_R), (since.step_since_ns_R, before.step_since_ns_R)):
        then_K = then_R[there_K]
        now_R[here_K] = np.where(np.abs(now_R[here_K] - then_K) < SAME_NS, then_K, now_R[here_K])
    return since


NS = 1e-9
PERIODS_KEPT = 63
"""The last steps, whose median is the typical one: enough for a checkpoint among them not to count."""
PAUSES_KEPT = 256
KINDS_KEPT = 32
"""Bounds the memory of a job that keeps inventing kinds of steps."""

Wait = Literal["step", "outside", "start", "idle"]
"""Kinds of waits: for a rank in an ordinary stage or a sync stage; for one outside of them, as in an evaluation or a
checkpoint; for the job's first steps; or idle, with no rank in a step."""


@dataclass(frozen=True, slots=True)
class StepPause:
    """A time in which no rank moved, which ended by itself."""

    wait: Wait
    seconds: float
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Pace:
    """The normal times of a job.

    Attributes:
        periods_s: from the start of a step to that of the next; the latest ones, without the first step.
        pauses: those long enough to matter.
        kinds_s: the longest step of each kind but the ordinary one.
        unused: stages that most steps do not enter, such as one for checkpoints.
    """

    periods_s: tuple[float, ...] = ()
    pauses: tuple[StepPause, ...] = ()
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()

    @property
    def typical_s(self) -> float:
        """The typical step; 0 if none is known."""
        return median_low(self.periods_s) if self.periods_s else 0.0

    def longest_s(self, wait: Wait, since_ns: int) -> float:
        """The longest pause of a kind since ``since_ns``, or the longest step with a kind if that is more."""
        pauses = (pause.seconds for pause in self.pauses if pause.wait == wait and pause.ended_ns >= since_ns)
        return max((*pauses, *self.kinds_s.values()), default=0.0)

    def with_steps(self, before: tuple[int, int], after: tuple[int, int]) -> Pace:
        """The pace with the steps between two looks at a rank (`JobSince.begun`), but for its first, which compiles."""
        starts, period_s = after[0] - before[0], (after[1] - before[1]) * NS
        if before[0] <= 1 or starts < 1 or period_s <= 0:
            return self
        return replace(self, periods_s=(*self.periods_s, period_s / starts)[-PERIODS_KEPT:])

    def with_pause(self, pause: StepPause, min_s: float, memory_s: float) -> Pace:
        """The pace with a pause, unless it is under ``min_s``; pauses older than ``memory_s`` are dropped."""
        if pause.seconds < min_s:
            return self
        fresh = [one for one in self.pauses if (pause.ended_ns - one.ended_ns) * NS <= memory_s]
        return replace(self, pauses=(*fresh, pause)[-PAUSES_KEPT:])

    def with_window(self, window: Window) -> Pace:
        """The pace with a window: the longest step of each kind, and the stages that steps enter."""
        durations_NRS = window.durations_NRS
        if not durations_NRS.size:
            return self
        unused_S = (durations_NRS == 0.0).mean(axis=(0, 1)) > 0.5
        unused = frozenset(stage for stage, idle in zip(window.schema.stages, unused_S, strict=True) if idle)
        kinds_s = dict(self.kinds_s)
        some_noted = window.kinds is not None or window.noted_NR is not None
        for row, kind in ((n, kind) for n in range(len(durations_NRS) * some_noted) for kind in window.noted(n)):
            if kind in kinds_s or len(kinds_s) < KINDS_KEPT:
                # fmax ignores missing ranks; a step that no rank has takes no time.
                lengths_R = durations_NRS[row].sum(axis=1)
                kinds_s[kind] = float(np.fmax.reduce(lengths_R, initial=kinds_s.get(kind, 0.0)))
        return replace(self, unused=unused, kinds_s=kinds_s)
