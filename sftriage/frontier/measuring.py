"""The measures of a window's steps for the test of the job against its own best."""

from __future__ import annotations

import numpy as np

from sftriage.frontier.accounting import Walk
from sftriage.frontier.arrays import BoolArray
from sftriage.frontier.baseline import Profile, regimes_of
from sftriage.frontier.regression import StepMeasures
from sftriage.records import Window


def measured(window: Window, walks: list[Walk], whole: Profile, valid_N: BoolArray) -> StepMeasures:
    """The measures of a window's steps, from its walks, the profile of all steps, and which steps are complete.

    What came after a step's last sync belongs to that step. The slowest cohort counts. A step of another kind than the
    one before it does not count, for it begins with what that one left behind.
    """
    n_steps = len(window.durations_NRS)
    step_N, counts_N = np.zeros(n_steps), valid_N.copy()
    for one in walks:
        for column, (_, advance_M, _) in zip(one.segment.columns, one.boundaries, strict=False):
            step_N[: column.n_steps] += advance_M[column.offset : column.offset + column.n_steps]
    kinds_N = np.asarray(window.kinds or ("",) * n_steps)
    counts_N[1:] &= kinds_N[1:] == kinds_N[:-1]
    return StepMeasures(
        first_step=window.first_step,
        stages=window.schema.stages,
        step_N=step_N,
        level_NS=whole.common_NCS.max(axis=1),
        sync_NS=whole.sync_NS,
        counts_N=counts_N,
        regimes=regimes_of(window),
        work_N=None if window.work_NR is None else window.work_NR.mean(axis=1),
    )
