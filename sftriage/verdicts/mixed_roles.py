"""Whether ranks are late because they do different work, and no cohorts are declared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sftriage.frontier.accounting import Walk
from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.whatif import JITTER_RANKS
from sftriage.model.windows import Window
from sftriage.verdicts.evidence import WindowEvidence


def roles_differ(window: Window, walks: list[Walk], valid_N: BoolArray, evidence: WindowEvidence) -> bool:
    """Whether ranks are late because they do different work, and no cohorts are declared.

    Not if the job's healthy steps are known, for those have shown that its ranks are alike. Levels are medians over the
    steps, so that neither hiccups nor pulses count, which may lie in any stage. Of many ranks some are looked at.
    """
    min_s = evidence.settings.min_gain_fraction * evidence.exposed_s
    if window.cohorts is not None or evidence.normal is not None or evidence.excess.late_s < min_s:
        return False
    times_NX: dict[str, FloatArray] = {}
    for one in walks:
        for column, some_NX in zip(one.segment.local, one.some_KNX, strict=True):
            stage = window.schema.stages[column.stage]
            own_NX = some_NX if some_NX.size else column.values_NR
            own_NX = np.asarray(own_NX[:, :: -(-own_NX.shape[1] // JITTER_RANKS)], dtype=np.float64)[valid_N]
            times_NX[stage] = own_NX + times_NX.get(stage, 0.0)
    level_X = {stage: medians(own_NX, axis=0) for stage, own_NX in times_NX.items() if stage not in window.schema.sync}
    late = evidence.candidates[0].suspect.stage if evidence.candidates else None
    return bool(level_X) and _differ(level_X, late, min_s)


def _differ(level_X: Mapping[str, FloatArray], late: str | None, min_s: float) -> bool:
    """Whether ranks look like several roles: each is high in some local stage in which another is low.

    A straggler is high in some stage and low in none, and its peers are neither. Ranks with different roles (pipeline
    stages, a rank that also evaluates) are each high in their own work, and low in that of others. Only stages count in
    which ranks differ by at least ``min_s``, and by half. A rank that is ``late`` in a stage has the machine to itself
    while the others wait: that it is faster after it does not count, up to half of what it is late.

    Args:
        level_X: what each stage typically takes some ranks, in the order of the segment.
        late: the stage of the likeliest suspect.
        min_s: the least difference that counts, in seconds.
    """
    stages, after = list(level_X), list[str]()
    if late is not None and late in level_X:
        after = stages[stages.index(late) + 1 :]
        if sum(float(np.ptp(level_X[stage])) for stage in after) > 0.5 * float(np.ptp(level_X[late])):
            after = []
    level_SX = np.array([some_X for stage, some_X in level_X.items() if stage not in after])
    low_S, high_S = level_SX.min(axis=1, initial=np.inf), level_SX.max(axis=1, initial=0.0)
    tells_S = (high_S - low_S >= min_s) & (low_S <= 0.5 * high_S)
    if tells_S.sum() < 2:
        return False
    high_SX = (level_SX > ((low_S + high_S) / 2)[:, None])[tells_S]
    return bool(high_SX.any(axis=0).all() and not high_SX.all(axis=0).any())
