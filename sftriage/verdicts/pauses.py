"""Pauses: a step or a few that all ranks have spent many times as long in as in others, and no rank alone explains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import BoolArray, medians
from sftriage.model.events import JobPaused, PauseReason
from sftriage.verdicts.regression import COMMON, QUEUED, STAGES, STEP, StepMeasures
from sftriage.verdicts.settings import Settings

PAUSE_STEPS, LEAST_PAUSE_S = 10.0, 1.0
"""A pause is a step that takes as many times the typical one's length, and this much longer."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in some steps: what they took over the typical step, the stage with most of that, and what it was."""

    first_step: int
    last_step: int
    lasted_s: float
    stage: str
    reason: PauseReason

    def event(self, time_s: float, attempt: int) -> JobPaused:
        """The pause as it goes on record."""
        return JobPaused(time_s, attempt, self.first_step, self.last_step, self.lasted_s, self.stage, self.reason)


def paused_steps(measures: StepMeasures, settings: Settings) -> BoolArray:
    """The steps of a window in which the job paused: most of what they take longer is what all ranks have in common.

    A step with a kind is as long as that kind takes.
    """
    counts_N: BoolArray = measures.counts_N & np.asarray([kind == "" for kind, _ in measures.regimes])
    if not counts_N.any():
        return counts_N
    times_NQ = measures.times_NQ
    usual_Q = medians(times_NQ[counts_N], axis=0)
    over_NQ = times_NQ - usual_Q
    least_s = max(LEAST_PAUSE_S, (PAUSE_STEPS - 1.0) * float(usual_Q[STEP]))
    paused_N = counts_N & (over_NQ[:, STEP] >= least_s)
    return np.asarray(paused_N & (over_NQ[:, COMMON] >= settings.most_fraction * over_NQ[:, STEP]))


def pauses(measures: StepMeasures, settings: Settings, new_from: int) -> tuple[Pause, ...]:
    """The pauses in a window's steps from ``new_from`` on. Of steps on end, those in one window are one."""
    paused_N, found, stages = paused_steps(measures, settings), [], measures.stages
    usual_Q = medians(measures.times_NQ[measures.counts_N], axis=0) if paused_N.any() else np.zeros(0)
    ends = np.flatnonzero(np.diff(np.concatenate(([False], paused_N, [False])).astype(np.int8))).reshape(-1, 2)
    for begin, end in np.maximum(ends, new_from - measures.first_step).tolist():
        if begin == end:
            continue
        over_Q = (measures.times_NQ[begin:end] - usual_Q).sum(axis=0)
        local_S, sync_S = over_Q[STAGES : STAGES + len(stages)], over_Q[STAGES + len(stages) : QUEUED]
        s = int(np.argmax(local_S + sync_S))
        reason: PauseReason = "in_sync" if sync_S[s] >= local_S[s] else "in_own_work"
        first = measures.first_step + begin
        found.append(Pause(first, measures.first_step + end - 1, float(over_Q[STEP]), stages[s], reason))
    return tuple(found)
