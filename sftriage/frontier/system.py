"""How much of a suspect's lateness was the system's doing: what the kernel counted, held against what was lost.

A rank whose thread is ready to run while another one has its core, whose cgroup keeps it from running, or that somebody
stops, is late through no fault of its code. It holds up the job all the same, so it stays a suspect; but what would
mend it is on its host, and no profiler of the rank shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.counters import COUNTERS, MOST_FRACTION, PLACE, SHARED, SystemCode, accounting
from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray
from sftriage.frontier.clocks import timed
from sftriage.frontier.roles import roles_of, sampled
from sftriage.frontier.segments import complete_steps, segments
from sftriage.frontier.settings import Settings
from sftriage.records import Suspect, Verdict, Window

MIN_KNOWN_FRACTION = 0.5
"""Of the steps in question, how many must have a counter known: of fewer, nothing is said of them all."""

MOST_TIMES = 4.0
"""How much more than its peers a rank may have had to run for as much more waiting for a CPU to be its own work's."""

SAID: Mapping[str, tuple[str, ...]] = {
    "cgroup_throttled": ("throttled_s",),
    "stopped": ("stopped_s",),
    "page_faults": ("major_faults", "disk_s"),
    "memory_pressure": ("memory_s",),
}
"""The numbers that go into a verdict with what the system did, beside those of waiting for a CPU."""


@dataclass(frozen=True, slots=True)
class SystemCounts:
    """What the kernel counted of some ranks in some steps, as means over the ranks and steps. Of what is known alone.

    Attributes:
        late_s: by how much a rank's time until the syncs was over its peers'.
        own: each counter.
        over: by how much it was over its peers', in the part of the step before the syncs.
    """

    late_s: float
    own: Mapping[str, float] = field(default_factory=dict)
    over: Mapping[str, float] = field(default_factory=dict)

    @property
    def descheduled_fraction(self) -> float | None:
        """How much of the lateness was waiting for a CPU that the cgroup did not forbid; None where it was not late."""
        queued_s = self.over.get("queued_s")
        if queued_s is None or self.late_s <= 0.0:
            return None
        return min(1.0, max(0.0, (queued_s - max(0.0, self.over.get("throttled_s", 0.0))) / self.late_s))

    @property
    def system(self) -> tuple[SystemCode, float] | None:
        """What else the system did that accounts for most of the lateness, where no line of the program has to."""
        found = accounting(self.over, self.late_s)
        if found is None or found.alone is None or found.alone == "descheduled":
            return None
        return found.alone, min(1.0, found.took_s / self.late_s)


def system_counts(window: Window, ranks: Sequence[int], steps_N: BoolArray) -> SystemCounts | None:
    """What the kernel counted of some ranks in some steps (N), beside their peers.

    Peers are the other ranks of the same cohort; a rank is held against their medians. A counter is known by step, and
    not by stage: that part of it counts which the rank's time until the syncs is of its step, as if it was spread
    evenly. What happens inside a sync stage holds up everybody alike, and makes nobody late.

    The sums over all of the steps are compared: a counter is known as exactly as readings lie apart, which may be
    several steps (see `sftriage.windows.counting`).

    Returns:
        None where no counter is known in enough of the steps, or the ranks have no peers of whom it is.
    """
    if window.counted_NRC is None or not ranks:
        return None
    roles, chosen = roles_of(window), np.asarray(ranks, dtype=np.intp)
    found = [_of_role(window, members, chosen, steps_N) for members in roles.members if np.isin(members, chosen).any()]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    # (what is not known of the ranks of one cohort is not known of all)
    late_s, n_vectors = sum(one[0] for one in known), sum(one[1] for one in known)
    sums_2C = np.sum([one[2] for one in known], axis=0)
    own, over = (
        {name: float(one) for name, one in zip(COUNTERS, sums_C / n_vectors, strict=True) if np.isfinite(one)}
        for sums_C in sums_2C
    )
    over = {name: 0.0 if name in SHARED and one < 0.5 * own[name] else one for name, one in over.items()}
    return SystemCounts(late_s / n_vectors, own, over) if over else None


def _of_role(
    window: Window, members: RankArray, chosen: RankArray, steps_N: BoolArray
) -> tuple[float, int, FloatArray] | None:
    """Of the ranks in question those of one cohort: by how much they were late (seconds), in how many steps of ranks.

    And their counters (2 x C), whole and over their peers'. All are sums; those of a counter that is known in fewer
    steps are made up to all of them.
    """
    asked = np.isin(members, chosen)
    peers, n_own = sampled(members[~asked]), int(asked.sum())
    if not len(peers):
        return None
    # Of a large job no more is looked at than is asked for.
    window = window.of_ranks([*members[asked].tolist(), *peers.tolist()])
    assert window.counted_NRC is not None
    valid_N = complete_steps(window)
    chosen_N = steps_N & valid_N
    if not chosen_N.any():
        return None
    known_NRC = np.isfinite(window.counted_NRC[chosen_N])
    known_NC = np.asarray(known_NRC[:, :n_own].all(axis=1) & known_NRC[:, n_own:].any(axis=1))
    least = max(1.0, MIN_KNOWN_FRACTION * steps_N.sum())
    enough_C = known_NC.sum(axis=0) >= least
    # Lateness and counters are of the same steps.
    seen_N = np.asarray(known_NC[:, enough_C].all(axis=1))
    if not enough_C.any() or seen_N.sum() < least:
        return None
    local_NX, synced_NX = (times_NX[chosen_N][seen_N] for times_NX in _times(window, valid_N))
    own_NX, step_NX = local_NX[:, :n_own], (local_NX + synced_NX)[:, :n_own]
    late_NX = own_NX - np.median(local_NX[:, n_own:], axis=1)[:, None]
    share_NX = np.divide(own_NX, step_NX, out=np.zeros_like(step_NX), where=step_NX > 0.0)
    counted_NXC = window.counted_NRC[chosen_N][seen_N].astype(np.float64)
    sums_2C = np.full((2, len(COUNTERS)), np.nan)
    for place in np.flatnonzero(enough_C):
        counted_NX = counted_NXC[:, :n_own, place]
        usual_N = np.nanmedian(counted_NXC[:, n_own:, place], axis=1)
        if place == PLACE["queued_s"]:
            usual_N = usual_N * max(_as_much(counted_NXC[:, :, PLACE[name]], n_own) for name in ("run_s", "woken"))
        sums_2C[:, place] = counted_NX.sum(), ((counted_NX - usual_N[:, None]) * share_NX).sum()
    return float(late_NX.sum()), late_NX.size, sums_2C


def _as_much(counted_NX: FloatArray, n_own: int) -> float:
    """How many times as much as its peers a rank has of a counter, from 1 on; 1 where that is not known.

    Who has more to run on a busy host, or is woken more often, waits for as much longer. Of peers that hardly run,
    nothing follows: what they wait is what being woken takes.
    """
    if np.isnan(counted_NX).all(axis=0).any():
        return 1.0
    own, peers = np.nanmean(counted_NX[:, :n_own]), np.median(np.nanmean(counted_NX[:, n_own:], axis=0))
    return min(max(1.0, float(own / peers)), MOST_TIMES) if peers > 0.0 else 1.0


def _times(window: Window, valid_N: BoolArray) -> tuple[FloatArray, FloatArray]:
    """The time of the ranks until the syncs and in them, by step (N x R each)."""
    local_NR, synced_NR = np.zeros(window.durations_NRS.shape[:2]), np.zeros(window.durations_NRS.shape[:2])
    for part in segments(window, valid_N):
        for column in part.local:
            local_NR += column.values_NR
        if part.own is not None:
            synced_NR += part.own.values_NR
    return local_NR, synced_NR


def with_system(verdict: Verdict, window: Window, settings: Settings) -> Verdict:
    """The verdict, with how much of each suspect's lateness the system accounts for, where that is known.

    The numbers of the first one's are in the verdict's: ``queued_s`` and ``preempted`` a step, and those of what else
    the system did.
    """
    if window.counted_NRC is None or not verdict.suspects:
        return verdict
    # The lateness is that on the clock of the verdict.
    seen = timed(window, settings).window if verdict.clock == "device" else window
    found = [_of(suspect, seen) for suspect in verdict.suspects]
    suspects = tuple(
        suspect if one is None else replace(suspect, descheduled_fraction=one.descheduled_fraction, system=one.system)
        for suspect, one in zip(verdict.suspects, found, strict=True)
    )
    numbers = dict(verdict.numbers)
    if (first := found[0]) is not None:
        system = first.system
        names = ("queued_s", "preempted", *(() if system is None else SAID[system[0]]))
        numbers |= {name: first.own[name] for name in names if name in first.own}
    return replace(verdict, suspects=suspects, numbers=numbers)


def waited(suspect: Suspect, window: Window) -> bool | None:
    """Whether most of a suspect's lateness was waiting for a CPU; None where that is not known."""
    counts = _of(suspect, window)
    if counts is None or counts.descheduled_fraction is None:
        return None
    return counts.descheduled_fraction >= MOST_FRACTION


def _of(suspect: Suspect, window: Window) -> SystemCounts | None:
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
    return system_counts(window, suspect.ranks, steps_N)
