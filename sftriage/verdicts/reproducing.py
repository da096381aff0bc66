"""Whether the fault was present while it was captured: the captured steps against the trigger of the capture."""

from __future__ import annotations

import numpy as np

from sftriage.frontier.accounting import walked
from sftriage.frontier.arrays import FloatArray, medians
from sftriage.frontier.roles import roles_of
from sftriage.frontier.segments import complete_steps
from sftriage.frontier.whatif import replay
from sftriage.model.captures import Reproduced, Trigger
from sftriage.model.windows import Window
from sftriage.verdicts.clocks import HOST_STAGES, timed
from sftriage.verdicts.settings import Settings


def reproduced(window: Window, trigger: Trigger, settings: Settings | None = None) -> Reproduced | None:
    """Whether the captured steps have the fault that the capture was triggered by.

    Each captured step is looked at: it has the fault if the suspect is over its peers by most of the gain that led to
    the capture. A recurring fault is expected as often as whole periods fit into the captured steps, once at least, in
    any of them: its phase may have drifted.

    The profiler slows the rank itself, but a coarse stage by less than half of the gain; the numbers are returned.

    Returns:
        None if it cannot be told: no step is complete, or all steps in which a recurring fault was due may be missing;
        the suspect has no peers (a cohort, all ranks); nothing was suspected; or a device's time is not known.
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
    there_N = valid_N & (over_N >= settings.most_fraction * trigger.gain_s) & (over_N > 0.0)
    n_steps, n_valid, n_there = len(valid_N), int(valid_N.sum()), int(there_N.sum())
    recurring = trigger.pattern == "recurring" or bool(trigger.period_steps)

    def due(n_steps: int) -> int:
        """In how many captured steps the fault is expected at least."""
        return max(1, n_steps // (trigger.period_steps or n_steps)) if recurring else n_steps

    if not n_there and recurring and n_steps - n_valid >= due(n_steps):
        return None
    n_expected = max(due(n_valid), n_there)
    enough = n_there >= settings.min_persistence_fraction * n_expected
    # Those with the fault, and after them the likeliest others.
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
    """By how much the suspect was over its peers in its stage, by step (N); the median one of several ranks.

    None if it has no peers.
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
