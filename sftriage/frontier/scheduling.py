"""How much of a suspect's lateness was waiting for a CPU: what the kernel counted, held against what was lost.

A rank whose thread is ready to run while another one has its core is late through no fault of its code. It holds up the
job all the same, so it stays a suspect; but what would mend it is on its host, and no profiler of the rank shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray
from sftriage.frontier.clocks import timed
from sftriage.frontier.roles import roles_of, sampled
from sftriage.frontier.segments import complete_steps, segments
from sftriage.frontier.settings import Settings
from sftriage.records import Suspect, Verdict, Window

MIN_KNOWN_FRACTION = 0.5
"""Of the steps in question, how many must have their waits known: of fewer, nothing is said of them all."""


@dataclass(frozen=True, slots=True)
class RunQueueWait:
    """What some ranks waited for a CPU in some steps.

    Attributes:
        queued_s: how long a rank stood in the run queue, as a mean over the ranks and steps.
        preempted: how often a CPU was taken from it, as a mean over the ranks and steps; None where that is not known.
        late_s: by how much a rank's time until the syncs was over its peers', as a mean over the ranks and steps.
        fraction: how much of that lateness was such waiting, over what its peers waited; None where it was not late.
    """

    queued_s: float
    preempted: float | None
    late_s: float
    fraction: float | None


def run_queue_wait(window: Window, ranks: Sequence[int], steps_N: BoolArray) -> RunQueueWait | None:
    """How much of the lateness of some ranks over their peers, in some steps (N), their run-queue wait explains.

    Peers are the other ranks of the same cohort; a rank is held against their medians. The wait is known by step, and
    not by stage: that part of it counts which the rank's time until the syncs is of its step, as if it was spread
    evenly. What was waited inside a sync stage holds up everybody alike, and makes nobody late.

    The sums over all of the steps are compared: a wait is known as exactly as readings lie apart, which may be several
    steps (see `sftriage.windows.scheduling`).

    Returns:
        None where it is not known in enough of the steps, or the ranks have no peers of whom it is.
    """
    if window.queued_NR is None or not ranks:
        return None
    roles, chosen = roles_of(window), np.asarray(ranks, dtype=np.intp)
    found = [_of_role(window, members, chosen, steps_N) for members in roles.members if np.isin(members, chosen).any()]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    late_s, waited_s, queued_s, preempted, n_vectors = np.sum(known, axis=0).tolist()
    return RunQueueWait(
        queued_s=queued_s / n_vectors,
        preempted=None if np.isnan(preempted) else preempted / n_vectors,
        late_s=late_s / n_vectors,
        fraction=min(1.0, max(0.0, waited_s / late_s)) if late_s > 0.0 else None,
    )


def _of_role(window: Window, members: RankArray, chosen: RankArray, steps_N: BoolArray) -> tuple[float, ...] | None:
    """Of the ranks in question those of one cohort: by how much they were late, and had waited for a CPU longer.

    Sums over ranks and steps, in seconds; after them the whole of their waits, how often they were preempted, and how
    many steps of single ranks these are of.
    """
    asked = np.isin(members, chosen)
    peers, n_own = sampled(members[~asked]), int(asked.sum())
    # Of a large job no more is looked at than is asked for.
    window = window.of_ranks([*members[asked].tolist(), *peers.tolist()])
    queued_NX, preempted_NX = window.queued_NR, window.preempted_NR
    assert queued_NX is not None
    valid_N = complete_steps(window)
    known_N = steps_N & valid_N & np.isfinite(queued_NX[:, :n_own]).all(axis=1)
    known_N &= np.isfinite(queued_NX[:, n_own:]).any(axis=1)
    if known_N.sum() < max(1.0, MIN_KNOWN_FRACTION * steps_N.sum()):
        return None
    local_NX, synced_NX = (times_NX[known_N] for times_NX in _times(window, valid_N))
    own_NC, step_NC = local_NX[:, :n_own], (local_NX + synced_NX)[:, :n_own]
    late_NC = own_NC - np.median(local_NX[:, n_own:], axis=1)[:, None]
    share_NC = np.divide(own_NC, step_NC, out=np.zeros_like(step_NC), where=step_NC > 0.0)
    queued_NC = queued_NX[known_N, :n_own]
    over_NC = queued_NC - np.nanmedian(queued_NX[known_N, n_own:], axis=1)[:, None]
    preempted = np.nan if preempted_NX is None else preempted_NX[known_N, :n_own].sum()
    return late_NC.sum(), (over_NC * share_NC).sum(), queued_NC.sum(), preempted, late_NC.size


def _times(window: Window, valid_N: BoolArray) -> tuple[FloatArray, FloatArray]:
    """The time of the ranks until the syncs and in them, by step (N x R each)."""
    local_NR, synced_NR = np.zeros(window.durations_NRS.shape[:2]), np.zeros(window.durations_NRS.shape[:2])
    for part in segments(window, valid_N):
        for column in part.local:
            local_NR += column.values_NR
        if part.own is not None:
            synced_NR += part.own.values_NR
    return local_NR, synced_NR


def with_scheduling(verdict: Verdict, window: Window, settings: Settings) -> Verdict:
    """The verdict, with how much of each suspect's lateness was waiting for a CPU, where that is known.

    The numbers of the first one's are in the verdict's: ``queued_s`` and ``preempted`` a step. None of it decides.
    """
    if window.queued_NR is None or not verdict.suspects:
        return verdict
    # The lateness is that on the clock of the verdict.
    seen = timed(window, settings).window if verdict.clock == "device" else window
    found = [_of(suspect, seen) for suspect in verdict.suspects]
    suspects = tuple(
        suspect if one is None else replace(suspect, descheduled_fraction=one.fraction)
        for suspect, one in zip(verdict.suspects, found, strict=True)
    )
    numbers = dict(verdict.numbers)
    if (first := found[0]) is not None:
        numbers |= {"queued_s": first.queued_s} | ({} if first.preempted is None else {"preempted": first.preempted})
    return replace(verdict, suspects=suspects, numbers=numbers)


def _of(suspect: Suspect, window: Window) -> RunQueueWait | None:
    """What is known of a suspect, from where it began; steps without its fault add next to nothing to the sums."""
    if suspect.scope not in ("rank", "host"):
        return None
    step_N = window.first_step + np.arange(len(window.durations_NRS))
    began = window.first_step if suspect.onset_step is None else suspect.onset_step
    steps_N = step_N >= min(began, window.last_step)
    if window.kinds is not None:
        # Other work is late, or waits, for its own reasons.
        usual = Counter(window.kinds).most_common(1)[0][0]
        steps_N &= np.asarray(window.kinds) == usual
    return run_queue_wait(window, suspect.ranks, steps_N)
