"""Was the fault there while it was captured? The steps inside a capture, held against what had led to it."""

from __future__ import annotations

import numpy as np

from sftriage.frontier.accounting import walked
from sftriage.frontier.clocks import HOST_STAGES, timed
from sftriage.frontier.roles import roles_of
from sftriage.frontier.segments import complete_steps
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import replay
from sftriage.records import Reproduced, Trigger, Window

THERE_FRACTION = 0.5
"""A step has the fault where its suspect is over its peers by this much of the gain that led to the capture."""


def reproduced(window: Window, trigger: Trigger, settings: Settings | None = None) -> Reproduced | None:
    """Whether the captured steps have what the window before them was suspected for.

    What comes back is expected at its phase alone. The profiler itself slows the rank that it is on: half of the gain
    is more than it costs a coarse stage, and the numbers are there to be looked at.

    Returns:
        None where it cannot be told: no step is complete, the suspect has no peers in it (a cohort, everybody), nothing
        was suspected, or only the host's clock is known of what a device does.
    """
    settings = settings or Settings()
    # On the clock that a window of these steps would be judged on.
    seen = timed(window, settings)
    if seen.limited and trigger.stage not in HOST_STAGES:
        return None
    window = seen.window
    n_ranks = window.durations_NRS.shape[1]
    ranks = np.asarray([rank for rank in trigger.ranks if rank < n_ranks], dtype=np.intp)
    valid_N = complete_steps(window)
    if (
        trigger.gain_s <= 0.0
        or trigger.scope not in ("rank", "host")
        or not len(ranks)
        or len(ranks) >= n_ranks
        or not valid_N.any()
    ):
        return None
    stages = window.schema.stages
    if trigger.stage is not None and trigger.stage not in stages:
        return None
    walks, _ = walked(window)
    roles = roles_of(window)
    replays = replay(walks, roles, len(stages))
    over_NCS = np.sum([one.over_NCS(ranks, roles, len(valid_N)) for one in replays], axis=0)
    over_NS = np.median(over_NCS, axis=1)
    over_N = over_NS.sum(axis=1) if trigger.stage is None else over_NS[:, stages.index(trigger.stage)]
    expected_N = valid_N
    if trigger.period_steps and trigger.onset_step is not None:
        step_N = window.first_step + np.arange(len(valid_N))
        expected_N = valid_N & ((step_N - trigger.onset_step) % trigger.period_steps == 0)
    there_N = expected_N & (over_N >= THERE_FRACTION * trigger.gain_s) & (over_N > 0.0)
    n_there, n_expected = int(there_N.sum()), int(expected_N.sum())
    enough = n_there >= settings.min_persistence_fraction * n_expected
    return Reproduced(
        answer="no" if not n_there else "yes" if enough else "partly",
        steps=n_expected,
        steps_with=n_there,
        over_s=float(over_N[expected_N].mean()) if n_expected else 0.0,
        expected_s=trigger.gain_s,
        fault_steps=tuple((window.first_step + np.flatnonzero(there_N)).tolist()),
    )
