"""Ranks and hosts as units that may be slow: what fixing each alone would have saved, and what the system caused.

Only the rank that arrives last can have a gain, so only units that did are examined. The ranks of a slow host are late
together: fixing one of them alone saves nothing. A rank that waits for its CPU, is throttled or stopped delays the job
and stays a suspect, but no profiler of it would show the cause: `SystemCounts` compares the kernel's counters with the
lost time. `evidence` and `judging` call this module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sftriage.model.verdicts import Scope, Suspect, Verdict
from sftriage.model.windows import (
    COUNTERS,
    MOST_FRACTION,
    OF_INTERPRETER,
    PLACE,
    SHARED,
    InterpreterCode,
    SystemCode,
    Window,
    accounting,
)
from sftriage.verdict.accounting import (
    BoolArray,
    FloatArray,
    RankArray,
    complete_steps,
    known_medians,
    medians,
    segments,
)
from sftriage.verdict.whatif import LEAST_SAMPLE_RANKS, SAMPLE_RANKS, Roles, SegmentReplay, grouped, roles_of, sampled

if TYPE_CHECKING:
    from sftriage.verdict.evidence import WindowEvidence

UnitName: TypeAlias = "int | str"
"""A rank by its number, or a host by its name."""

Peers = Sequence[FloatArray]
"""For each local column of a segment, the medians of the ranks on other hosts, by step and cohort."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One rank, or the ranks of one host, in seconds.

    Attributes:
        gain_NS: what fixing each stage would have saved; the last column is for all local stages together.
        over_NS: its local time over its peers'.
        lateness_N: its lateness in the steps in which it arrived last, 0 in the others.
        starved: most of its lateness is waiting for a CPU, which is no single stage's fault.
    """

    name: UnitName
    ranks: tuple[int, ...]
    gain_NS: FloatArray
    over_NS: FloatArray
    lateness_N: FloatArray
    starved: bool = False

    @property
    def scope(self) -> Scope:
        return "host" if isinstance(self.name, str) else "rank"


def rank_units(replays: Sequence[SegmentReplay], ranks: Sequence[int], roles: Roles) -> list[Unit]:
    """The units of some ranks."""
    over_NXS = np.sum([replay.over_NXS(np.asarray(ranks, np.intp), roles) for replay in replays], axis=0)
    units = []
    for x, rank in enumerate(ranks):
        led = [replay.leader_M == rank for replay in replays]
        gains = [
            np.column_stack([replay.gain_MS, replay.whole_gain_M]) * led_M[:, None]
            for replay, led_M in zip(replays, led, strict=True)
        ]
        units.append(_unit(rank, (rank,), over_NXS[:, x], zip(replays, led, gains, strict=True)))
    return units


def _unit(
    name: UnitName,
    ranks: tuple[int, ...],
    over_NS: FloatArray,
    parts: Iterable[tuple[SegmentReplay, BoolArray, FloatArray]],
) -> Unit:
    """A unit from its parts by segment: the rows (M) that it led, and the gains of its stages there (M × S + 1).

    A delay after a step's last sync shows in the next step's row. The gain of all stages goes to the step with most.
    """
    n_steps, n_stages = over_NS.shape
    gain_NS, lateness_N = np.zeros((n_steps, n_stages + 1)), np.zeros(n_steps)
    for replay, led_M, gain_MS in parts:
        lateness_N += (replay.lateness_M * led_M)[:n_steps]
        offset_S = np.append(replay.offset_S, replay.offset_S[gain_MS[:, :-1].sum(axis=0).argmax()])
        step_MS = np.clip(np.arange(len(gain_MS))[:, None] - offset_S, 0, n_steps - 1)
        np.add.at(gain_NS, (step_MS, np.arange(n_stages + 1)), gain_MS)
    return Unit(name, ranks, gain_NS, over_NS, lateness_N)


def places_of(hosts: tuple[str, ...] | None) -> Roles | None:
    """The ranks by host; None if hosts are not known, or there is only one."""
    places = None if hosts is None else grouped(hosts)
    return None if places is None or len(places.names) < 2 else places


def host_units(
    replays: Sequence[SegmentReplay],
    places: Roles,
    elsewhere: Sequence[FloatArray],
    hosts: Sequence[int],
    roles: Roles,
    alike_fraction: float,
) -> list[Unit]:
    """The units of the ``hosts`` that have several ranks, of which at least ``alike_fraction`` are slow."""
    units = []
    for h in hosts:
        ranks = places.members[h]
        apart = _apart(ranks, roles)
        if len(ranks) < 2 or apart is None:
            continue
        peers = [_peers(replay, apart) for replay in replays]
        some_X = sampled(ranks, LEAST_SAMPLE_RANKS)
        over_NXS = np.sum([part.over_NXS(some_X, roles, at) for part, at in zip(replays, peers, strict=True)], axis=0)
        over_X = over_NXS.sum(axis=2).mean(axis=0)
        if not (over_X.max() > 0.0 and (over_X >= over_X.max() / 2).mean() >= alike_fraction):
            continue
        led = [places.role_R[replay.leader_M] == h for replay in replays]
        gains = [_gains(*parts, ranks, roles) for parts in zip(replays, peers, led, elsewhere, strict=True)]
        over_NS = medians(over_NXS.swapaxes(1, 2))
        units.append(_unit(places.names[h], tuple(ranks.tolist()), over_NS, zip(replays, led, gains, strict=True)))
    return units


def last_elsewhere(replay: SegmentReplay, places: Roles) -> FloatArray:
    """The last arrival of each row (M) on any host but the leader's, which alone has a gain in that row.

    Usually the second last of all ranks; if that is on the leader's host too, the host is masked.
    """
    host_M, last_M = places.role_R[replay.leader_M], replay.second_M.copy()
    for m in np.flatnonzero(places.role_R[replay.runner_up_M] == host_M):
        arrival_R, ranks = replay.arrivals_M[m], places.members[host_M[m]]
        arrival_X = arrival_R[ranks]
        arrival_R[ranks] = -np.inf
        last_M[m] = arrival_R.max()
        arrival_R[ranks] = arrival_X
    return last_M


def _apart(ranks: RankArray, roles: Roles) -> dict[int, RankArray] | None:
    """The ranks on other hosts, for each cohort of which the host has a large part; None if a cohort has none there.

    A small part of a large cohort hardly moves its median, and stays in it.
    """
    apart = {}
    elsewhere_R = np.ones(len(roles.role_R), dtype=np.bool_)
    elsewhere_R[ranks] = False
    for c in np.flatnonzero(np.bincount(roles.role_R[ranks])).tolist():
        members = roles.members[c]
        if len(members) <= SAMPLE_RANKS or len(ranks) > len(members) // 10:
            apart[c] = sampled(members[elsewhere_R[members]])
            if not len(apart[c]):
                return None
    return apart


def _peers(replay: SegmentReplay, apart: dict[int, RankArray]) -> Peers:
    peers = [median_NC.copy() for median_NC in replay.references]
    for column, median_NC in zip(replay.segment.local, peers, strict=True):
        for c, ranks in apart.items():
            times_NX = column.of(ranks)
            median_NC[:, c] = medians(times_NX if len(ranks) < SAMPLE_RANKS else times_NX.astype(np.float32))
    return peers


def _gains(
    replay: SegmentReplay, peers: Peers, led_M: BoolArray, second_M: FloatArray, ranks: RankArray, roles: Roles
) -> FloatArray:
    """What fixing each stage of a host, and last all, would have saved in the rows (L) that it led; M × (S + 1)."""
    led_L, n_stages = np.flatnonzero(led_M), replay.excess_MS.shape[1]
    arrival_LX = np.array([replay.arrivals_M[m][ranks] for m in led_L]).reshape(len(led_L), len(ranks))
    excess_LXS = np.zeros((len(led_L), len(ranks), n_stages + 1))
    for column, median_NC in zip(replay.segment.local, peers, strict=True):
        step_L = led_L - column.offset
        there_L = (step_L >= 0) & (step_L < len(median_NC))
        step_L = step_L[there_L]
        over_LX = column.at(np.ix_(step_L, ranks)) - median_NC[np.ix_(step_L, roles.role_R[ranks])]
        excess_LXS[there_L, :, column.stage] += over_LX
    excess_LXS[:, :, -1] = excess_LXS.sum(axis=2)
    left_LS = (arrival_LX[:, :, None] - np.maximum(excess_LXS, 0.0)).max(axis=1)
    saved_LS = replay.last_M[led_L, None] - np.maximum(second_M[led_L, None], left_LS)
    gain_MS = np.zeros((len(led_M), n_stages + 1))
    gain_MS[led_L] = np.maximum(saved_LS, 0.0)
    return gain_MS


MIN_KNOWN_FRACTION = 0.5
"""Fraction of the steps in which a counter must be known to stand for all of them."""

MOST_TIMES = 4.0
"""The largest factor for the peers' wait for a CPU, where a rank runs more than they do."""

SHOWN_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "garbage_collection": ("collected_s",),
    "recompilation": ("compiled_s",),
    "cgroup_throttled": ("throttled_s",),
    "stopped": ("stopped_s",),
    "page_faults": ("major_faults", "disk_s"),
    "memory_pressure": ("memory_s",),
}
"""The counters that a verdict shows, for each cause but waiting for a CPU."""


@dataclass(frozen=True, slots=True)
class SystemCounts:
    """The known counters of some ranks in some steps, as means over ranks and steps.

    Attributes:
        late_s: the rank's time before the syncs, less its peers'.
        over: its counters less its peers', in the part of the step before the syncs.
        waited_s: its wait for a CPU less its peers', without waits for its cgroup's limit, in the whole step or in
            that part, whichever is more; NaN if unknown.
        ran_s: its running time less its peers', in the whole step; NaN if unknown.
        local_S, over_S: its peers' time in each stage before the syncs, and its own less that.
    """

    late_s: float
    own: Mapping[str, float] = field(default_factory=dict)
    over: Mapping[str, float] = field(default_factory=dict)
    waited_s: float = math.nan
    ran_s: float = math.nan
    local_S: FloatArray = field(default_factory=lambda: np.zeros(0))
    over_S: FloatArray = field(default_factory=lambda: np.zeros(0))

    @property
    def descheduled_fraction(self) -> float | None:
        """The part of the lateness that was waiting for a CPU; None if the rank was not late.

        A step takes all ranks equally long: if a rank waits for a CPU longer than its peers, they wait for the rank
        meanwhile, before the syncs as far as it is late there.
        """
        if math.isnan(self.waited_s) or self.late_s <= 0.0:
            return None
        return min(1.0, max(0.0, self.waited_s / self.late_s))

    def contended_fraction(self, usual_queued_s: float | None, stage: int | None) -> float | None:
        """The part of the lateness that contention for CPUs may explain; None if that was not counted.

        If a unit was not late, as in a window in which others have become later, any contention explains all. Counters
        do not say where in a step a rank waited: of two ranks that wait equally long, the one that waits before the
        syncs is late. So all of the rank's waiting counts that is more than its peers', or than ``usual_queued_s`` if
        known. A core that is shared or clocked down runs everything more slowly, up to half as fast. So for a rank that
        is slow in everything, not in one ``stage`` alone, the time that it ran longer than its peers counts as well.
        """
        waited_s = self.waited_s
        if math.isnan(waited_s):
            return None
        if usual_queued_s is not None:
            waited_s = max(waited_s, self.own["queued_s"] - self.own.get("throttled_s", 0.0) - usual_queued_s)
        alike = stage is None or self._as_slow_elsewhere(stage)
        ran_s = min(self.ran_s, float(self.local_S.sum())) if alike and not math.isnan(self.ran_s) else 0.0
        contended_s = max(0.0, waited_s) + max(0.0, ran_s)
        return min(1.0, contended_s / self.late_s) if self.late_s > 0.0 else float(contended_s > 0.0)

    def _as_slow_elsewhere(self, stage: int) -> bool:
        """Whether it is at least half as slow, in proportion, in its other local stages or in all its running time."""
        over_s, local_s = float(self.over_S[stage]), float(self.local_S[stage])
        elsewhere = [(float(self.over_S.sum()) - over_s, float(self.local_S.sum()) - local_s)]
        if not math.isnan(self.ran_s) and (run_s := self.own["run_s"] - self.ran_s - local_s) > 0.0:
            elsewhere.append((self.ran_s - over_s, run_s))
        return any(more_s * local_s >= MOST_FRACTION * over_s * usual_s for more_s, usual_s in elsewhere)

    @property
    def system(self) -> tuple[SystemCode, float] | None:
        """What else the system did that accounts for most of the lateness, and for which part of it."""
        found = accounting(self.over, self.late_s)
        if found is None or found.alone is None or found.alone == "descheduled":
            return None
        return found.alone, min(1.0, found.took_s / self.late_s)

    @property
    def interpreter(self) -> tuple[InterpreterCode, float] | None:
        """What Python or the compiler did that accounts for most of the lateness, and for which part of it."""
        found = accounting(self.over, self.late_s)
        if found is None or not (found.code == "garbage_collection" or found.code == "recompilation"):
            return None
        return found.code, min(1.0, found.took_s / self.late_s)


@dataclass(frozen=True, slots=True, eq=False)
class HeldBack:
    """What kept ranks from running, in seconds a step (N × R each): stopped; queued for a CPU; queued or running."""

    stopped_NR: FloatArray
    waited_NR: FloatArray
    ready_NR: FloatArray

    @classmethod
    def of(cls, window: Window, *, limited: bool) -> HeldBack | None:
        """None if it was not counted. If ``limited``, only waits for the cgroup's limit count."""
        if window.counted_NRC is None:
            return None
        names = ("stopped_s", "queued_s", "run_s", "throttled_s")
        stopped_NR, queued_NR, ran_NR, limit_NR = (np.nan_to_num(window.counted_NRC[:, :, PLACE[n]]) for n in names)
        return cls(stopped_NR, np.minimum(queued_NR, limit_NR) if limited else queued_NR, queued_NR + ran_NR)

    def of_ranks(self, ranks: Sequence[int], step_N: FloatArray) -> tuple[FloatArray, FloatArray]:
        """How long some ranks were held back beyond any other (N): as counted, and in all of the step's work.

        The threads that exchange gradients wait as the training threads do: for the same part of the rest of the step
        (``step_N``) as the training threads waited of the time in which they would have run.
        """
        own_ranks = np.asarray(ranks)
        stopped_N, waited_N = (
            of_NR[:, own_ranks].mean(axis=1) - np.delete(of_NR, own_ranks, axis=1).max(axis=1, initial=0.0)
            for of_NR in (self.stopped_NR, self.waited_NR)
        )
        ready_N = self.ready_NR[:, own_ranks].mean(axis=1)
        fraction_N = np.divide(waited_N, ready_N, out=np.zeros_like(ready_N), where=ready_N > 0.0)
        return stopped_N + waited_N, stopped_N + fraction_N * np.clip(step_N - stopped_N, 0.0, None)


def charged(unit: Unit, held: HeldBack, longer_NS: FloatArray, evidence: WindowEvidence) -> Unit:
    """The unit, with what it adds to the sync stages while something keeps it from running.

    Inside the syncs all ranks wait alike for a rank that has no CPU, and no duration shows which rank that is. So the
    time for which the unit was held back beyond its lateness is charged to it: at most by how much longer the sync
    stages took than by themselves (``longer_NS``), and the step (``step_N``) than a healthy one (``usual_s``). This
    requires that the counted time is most of the unit's lateness.
    """
    step_N, used_N = evidence.exposed_N, evidence.used_N
    usual_s = 0.0 if evidence.normal is None else evidence.normal.total_s
    local_N, late_s = unit.gain_NS[:, -1], float(unit.over_NS[used_N].sum(axis=1).mean())
    own_NX = held.stopped_NR[:, unit.ranks] + held.waited_NR[:, unit.ranks]
    least_s = evidence.settings.most_fraction * late_s
    if late_s <= 0.0 or float(own_NX[used_N].mean()) < least_s:
        return unit  # (without comparing it with all other ranks, which takes longer)
    counted_N, held_N = held.of_ranks(unit.ranks, step_N)
    if float(counted_N[used_N].mean()) < least_s:
        return unit
    longer_N = longer_NS.sum(axis=1)
    added_N = np.minimum(np.clip(np.minimum(held_N, step_N - usual_s) - local_N, 0.0, None), longer_N)
    added_NS = longer_NS * np.divide(added_N, longer_N, out=np.zeros_like(added_N), where=longer_N > 0.0)[:, None]
    gain_NS = unit.gain_NS + np.column_stack([added_NS, added_N])
    return replace(unit, gain_NS=gain_NS, over_NS=unit.over_NS + added_NS, starved=True)


def system_counts(window: Window, ranks: Sequence[int], steps_N: BoolArray) -> SystemCounts | None:
    """The counters of some ranks in some steps (N), against the medians of the rest of their cohort.

    A counter is known by step and not by stage: it is assumed to be spread evenly over the step, and only the part
    before the syncs counts. (Those of the interpreter count in full: in a sync stage, too, they delay the rank, not its
    waiting.) Sums over all of the steps are compared, because two readings may be several steps apart
    (`sftriage.windows.logs`). Of many ranks, and of many peers, a sample is compared.

    Returns:
        None if no counter is known in enough of the steps, or for the peers.
    """
    if window.counted_NRC is None or not ranks:
        return None
    roles, chosen = roles_of(window), np.asarray(ranks, dtype=np.intp)
    by_role = [_of_role(window, role, chosen, steps_N) for role in roles.members if np.isin(role, chosen).any()]
    known = [sums for sums in by_role if sums is not None]
    if not known or len(known) < len(by_role):
        return None
    # (all cohorts of the ranks must be known)
    n_vectors, late_s, local_S, over_S, sums_3C = (sum(of_roles) for of_roles in zip(*known, strict=True))
    own, whole, over = (
        {name: float(value) for name, value in zip(COUNTERS, sums_C / n_vectors, strict=True) if np.isfinite(value)}
        for sums_C in sums_3C
    )
    if not over:
        return None
    over = {name: 0.0 if name in SHARED and value < 0.5 * own[name] else value for name, value in over.items()}
    return SystemCounts(
        late_s=late_s / n_vectors,
        own=own,
        over=over,
        waited_s=max(_waited_s(whole), _waited_s(over)),
        ran_s=whole.get("run_s", math.nan),
        local_S=local_S / n_vectors,
        over_S=over_S / n_vectors,
    )


def _waited_s(over: Mapping[str, float]) -> float:
    return over.get("queued_s", math.nan) - max(0.0, over.get("throttled_s", 0.0))


_Sums = tuple[int, float, FloatArray, FloatArray, FloatArray]
"""Sums over ranks of one cohort and steps: the number of vectors; their lateness; a peer's time in each stage before
the syncs (once per vector); their own time less that; their counters (3 x C): their own, their own less their peers',
and the latter in the part of the step before the syncs."""


def _of_role(window: Window, members: RankArray, chosen: RankArray, steps_N: BoolArray) -> _Sums | None:
    """The sums over the chosen ranks of one cohort; None if too little is known."""
    chosen_M = np.isin(members, chosen)
    own, peers = (sampled(some, LEAST_SAMPLE_RANKS) for some in (members[chosen_M], members[~chosen_M]))
    if not len(peers):
        return None
    n_own, window = len(own), window.of_ranks([*own.tolist(), *peers.tolist()])
    assert window.counted_NRC is not None
    valid_N = complete_steps(window)
    chosen_N = steps_N & valid_N
    if not chosen_N.any():
        return None
    known_NRC = np.isfinite(window.counted_NRC[chosen_N])
    known_NC = np.asarray(known_NRC[:, :n_own].all(axis=1) & known_NRC[:, n_own:].any(axis=1))
    least = max(1.0, MIN_KNOWN_FRACTION * steps_N.sum())
    enough_C = known_NC.sum(axis=0) >= least
    # Lateness and counters are taken over the same steps.
    counted_N = np.asarray(known_NC[:, enough_C].all(axis=1))
    if not enough_C.any() or counted_N.sum() < least:
        return None
    local_SNX, synced_NX = _times(window, valid_N)
    local_SNX, synced_NX = local_SNX[:, chosen_N][:, counted_N], synced_NX[chosen_N][counted_N]
    local_NX = local_SNX.sum(axis=0)
    own_NX, step_NX = local_NX[:, :n_own], (local_NX + synced_NX)[:, :n_own]
    late_NX = own_NX - np.median(local_NX[:, n_own:], axis=1)[:, None]
    share_NX = np.divide(own_NX, step_NX, out=np.zeros_like(step_NX), where=step_NX > 0.0)
    counted_NXC = window.counted_NRC[chosen_N][counted_N].astype(np.float64)
    usual_NC, sums_3C = known_medians(counted_NXC[:, n_own:]), np.full((3, len(COUNTERS)), np.nan)
    for place in np.flatnonzero(enough_C):
        counted_NX, usual_N = counted_NXC[:, :n_own, place], usual_NC[:, place]
        if place == PLACE["queued_s"]:
            usual_N = usual_N * max(_as_much(counted_NXC[:, :, PLACE[name]], n_own) for name in ("run_s", "woken"))
        over_NX = counted_NX - usual_N[:, None]
        before_NX = over_NX if COUNTERS[place] in OF_INTERPRETER else over_NX * share_NX
        sums_3C[:, place] = counted_NX.sum(), over_NX.sum(), before_NX.sum()
    peers_S, over_S = local_SNX[:, :, n_own:].mean(axis=(1, 2)), local_SNX[:, :, :n_own].sum(axis=(1, 2))
    peers_S *= late_NX.size
    return late_NX.size, float(late_NX.sum()), peers_S, over_S - peers_S, sums_3C


def _as_much(counted_NX: FloatArray, n_own: int) -> float:
    """A rank's counter over its peers', as a factor from 1 to `MOST_TIMES`; 1 if unknown.

    On a busy host, a rank that runs more or is woken more often waits for a CPU in proportion.
    """
    if np.isnan(counted_NX).all(axis=0).any():
        return 1.0
    own, peers = np.nanmean(counted_NX[:, :n_own]), np.median(np.nanmean(counted_NX[:, n_own:], axis=0))
    return min(max(1.0, float(own / peers)), MOST_TIMES) if peers > 0.0 else 1.0


def _times(window: Window, valid_N: BoolArray) -> tuple[FloatArray, FloatArray]:
    """The time of the ranks before the syncs, by stage (S × N × R), and inside the syncs (N × R)."""
    n_steps, n_ranks, n_stages = window.durations_NRS.shape
    local_SNR, synced_NR = np.zeros((n_stages, n_steps, n_ranks)), np.zeros((n_steps, n_ranks))
    for part in segments(window, valid_N):
        for column in part.local:
            local_SNR[column.stage] += column.values_NR
        if part.own is not None:
            synced_NR += replace(part.own, up_to_NR=None).values_NR
    return local_SNR, synced_NR


def with_system(
    verdict: Verdict, window: Window, known: Mapping[tuple[int, ...], SystemCounts | None], usual_queued_s: float | None
) -> Verdict:
    """The verdict, with the part of each suspect's lateness that the system caused or may have caused, where known.

    ``window`` has the times of the verdict's clock, ``usual_queued_s`` is a rank's wait for a CPU in a usual step, and
    ``known`` has the counts of some suspects, by their ranks. The first suspect's counters go into the verdict's
    numbers. A rank that notes that it does something alone is late, and waits for a CPU, for that reason.
    """
    if window.counted_NRC is None or not verdict.suspects:
        return verdict
    counts = dict(known)
    for suspect in verdict.suspects:
        if suspect.ranks not in counts:
            counts[suspect.ranks] = counts_of(suspect, window)
    suspects = tuple(
        suspect
        if (found := counts[suspect.ranks]) is None or not suspect.is_single
        else replace(suspect, system=found.system, interpreter=found.interpreter)
        if suspect.alone is not None
        else replace(
            suspect,
            descheduled_fraction=found.descheduled_fraction,
            contended_fraction=found.contended_fraction(usual_queued_s, stage_of(suspect, window.schema.stages)),
            system=found.system,
            interpreter=found.interpreter,
        )
        for suspect in verdict.suspects
    )
    numbers, first = dict(verdict.numbers), counts[verdict.suspects[0].ranks]
    if first is not None:
        caused = first.system or first.interpreter
        names = ("queued_s", "preempted", *(() if caused is None else SHOWN_COUNTERS[caused[0]]))
        numbers |= {name: first.own[name] for name in names if name in first.own}
    return replace(verdict, suspects=suspects, numbers=numbers)


LEAST_LIMITED = 0.25
"""The part of a step for which all ranks are throttled by CPU limits, from which on a verdict says so."""


def with_limits_of_all(verdict: Verdict, window: Window) -> Verdict:
    """Add for how long CPU limits throttle every rank in a step: no rank differs, so none becomes a suspect."""
    if window.counted_NRC is None or verdict.named is not None:
        return verdict
    throttled_NR = window.counted_NRC[:, :, PLACE["throttled_s"]]
    if np.isnan(throttled_NR).all(axis=0).any():
        return verdict
    least_s = float(np.nanmean(throttled_NR, axis=0).min())
    if not 0.0 < LEAST_LIMITED * verdict.step_s <= least_s:
        return verdict
    return replace(verdict, numbers={**verdict.numbers, "all_throttled_s": least_s})


def stage_of(suspect: Suspect, stages: Sequence[str]) -> int | None:
    """The index of a suspect's stage; None for all stages."""
    return None if suspect.stage is None else stages.index(suspect.stage)


def counts_of(suspect: Suspect, window: Window) -> SystemCounts | None:
    """A suspect's counters since its onset; None if unknown, and for suspects of scope all or cohort.

    Steps without its fault add next to nothing to the sums.
    """
    if not suspect.is_single:
        return None
    step_N = window.first_step + np.arange(len(window.durations_NRS))
    began = window.first_step if suspect.onset_step is None else suspect.onset_step
    steps_N = step_N >= min(began, window.last_step)
    if window.kinds is not None:
        # Only ordinary steps: other work waits for reasons of its own.
        usual = Counter(window.kinds).most_common(1)[0][0]
        steps_N &= np.asarray(window.kinds) == usual
    return system_counts(window, suspect.ranks, steps_N)
