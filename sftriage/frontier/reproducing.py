"""Was the fault there while it was captured? The steps inside a capture, held against what had led to it."""

from __future__ import annotations

import numpy as np

from sftriage.frontier.accounting import walked
from sftriage.frontier.arrays import FloatArray, medians
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

    Which of them have it is read off the steps themselves. Of what comes back, so many are expected to as there are
    whole periods among the captured steps, and one at least, for the capture was laid over one; in which steps they
    lie is not asked: its phase may have drifted, and an onset says when a suspicion began and is no phase.

    The profiler itself slows the rank that it is on: half of the gain is more than it costs a coarse stage, and the
    numbers are there to be looked at.

    Returns:
        None where it cannot be told: no step is complete, or of what comes back all that it was due in may be missing;
        the suspect has no peers (a cohort, everybody), nothing was suspected, or only the host's clock is known of
        what a device does.
    """
    settings = settings or Settings()
    # On the clock that a window of these steps would be judged on.
    seen = timed(window, settings)
    if seen.limited and trigger.stage not in HOST_STAGES:
        return None
    window = seen.window
    valid_N = complete_steps(window)
    over_N = _over(window, trigger)
    if over_N is None or trigger.gain_s <= 0.0 or not valid_N.any():
        return None
    there_N = valid_N & (over_N >= THERE_FRACTION * trigger.gain_s) & (over_N > 0.0)
    n_steps, n_valid, n_there = len(valid_N), int(valid_N.sum()), int(there_N.sum())
    if not n_there and _comes_back(trigger) and n_steps - n_valid >= _due(n_steps, trigger):
        return None
    n_expected = max(_due(n_valid, trigger), n_there)
    enough = n_there >= settings.min_persistence_fraction * n_expected
    # The steps that are furthest over are those that it was there in, and after them those that it may have been in.
    furthest_X = np.sort(over_N[valid_N])[-n_expected:]
    return Reproduced(
        answer="no" if not n_there else "yes" if enough else "partly",
        steps=n_expected,
        steps_with=n_there,
        over_s=float(furthest_X.mean()),
        expected_s=trigger.gain_s,
        fault_steps=tuple((window.first_step + np.flatnonzero(there_N)).tolist()),
    )


def _over(window: Window, trigger: Trigger) -> FloatArray | None:
    """How far the suspect was over its peers in what it was suspected for, by step (N); None where it has no peers.

    Of several ranks, the median one.
    """
    stages, n_ranks = window.schema.stages, window.durations_NRS.shape[1]
    ranks = np.asarray([rank for rank in trigger.ranks if rank < n_ranks], dtype=np.intp)
    if trigger.scope not in ("rank", "host") or not 0 < len(ranks) < n_ranks:
        return None
    if trigger.stage is not None and trigger.stage not in stages:
        return None
    roles = roles_of(window)
    if not set(roles.role_R[ranks]) & set(np.delete(roles.role_R, ranks)):
        return None
    walks, complete_N = walked(window, roles.some_X)
    replays = replay(walks, roles, len(stages))
    over_NXS = np.sum([one.over_NXS(ranks, roles, len(complete_N)) for one in replays], axis=0)
    over_NS = medians(over_NXS, axis=1)
    return np.asarray(over_NS.sum(axis=1) if trigger.stage is None else over_NS[:, stages.index(trigger.stage)])


def _comes_back(trigger: Trigger) -> bool:
    return trigger.pattern == "recurring" or bool(trigger.period_steps)


def _due(n_steps: int, trigger: Trigger) -> int:
    """In how many of so many captured steps the fault is expected at least."""
    if not _comes_back(trigger):
        return n_steps
    return max(1, n_steps // trigger.period_steps) if trigger.period_steps else 1
