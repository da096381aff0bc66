"""What a verdict is taken from: one window accounted, replayed, and put beside what is known of the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.frontier.accounting import Accounting, Walk
from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.baseline import (
    Baseline,
    Excess,
    OwnTimes,
    Profile,
    Regime,
    Typical,
    excess_of,
    normal_lateness_s,
    profile,
    regimes_of,
)
from sftriage.frontier.candidates import Candidate, Scene, Unit, group_candidates, rank_units, suspects_of
from sftriage.frontier.clear_events import (
    Arrivals,
    arrivals_of_hosts,
    arrivals_of_ranks,
    clear_events,
    who_held_up,
)
from sftriage.frontier.course import Onset, onset_of
from sftriage.frontier.hosts import host_units, last_elsewhere, places_of
from sftriage.frontier.measuring import measured
from sftriage.frontier.overlap import Replayed, remembered
from sftriage.frontier.regression import OwnBest, StepMeasures
from sftriage.frontier.roles import Roles
from sftriage.frontier.sequential import HISTORY_STEPS, Evidence, Rhythm, UnitName, advanced, rhythm
from sftriage.frontier.settings import Settings
from sftriage.frontier.steps import ordinary_steps, steps_of_a_kind
from sftriage.frontier.system import waited
from sftriage.frontier.whatif import SegmentReplay
from sftriage.records import Suspect, Window

LISTED_FRACTION = 0.01
"""A candidate that would save less than this fraction of the window is not worth a line."""


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What the windows before have taught: all that a verdict needs to know besides the window itself.

    ``ranks`` and ``hosts`` are the evidence against them; ``onsets`` and ``rhythms``, when the faults began of those
    that it names, and what comes back; ``own`` is what each of two ranks takes by itself, ``own_best`` what the job's
    steps are held against, ``named`` the suspect of the window before, and ``replayed`` what is known of the steps that
    the next one shares with it. ``device`` is the same of the windows that were judged on the device's clock; the rest
    is on the host's. ``counted_step`` is the last one whose loss was put down to somebody, by either clock.
    """

    baseline: Baseline = field(default_factory=Baseline)
    ranks: Evidence = field(default_factory=Evidence)
    hosts: Evidence = field(default_factory=Evidence)
    onsets: Mapping[UnitName, Onset] = field(default_factory=dict)
    rhythms: Mapping[UnitName, Rhythm] = field(default_factory=dict)
    own: OwnTimes = field(default_factory=OwnTimes)
    named: Suspect | None = None
    own_best: OwnBest = field(default_factory=OwnBest)
    replayed: Replayed | None = None
    device: Past | None = None
    counted_step: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class WindowEvidence:
    """What the ladder looks at.

    ``used_N`` are the steps that count: complete, and of the kind that most of them are. ``like`` is the profile of
    those in the regime that most of them are in. ``best_gains_s`` is what mending whoever came last would have saved,
    step by step, as a mean, and ``gain_R`` that by rank, summed. ``waited`` says of those whom the evidence of the run
    has named whether they mostly waited for a CPU; None where nobody counted. ``before`` is what the windows before
    have taught, and ``after`` what is known with this one, but for what follows from its verdict; ``measures`` are all
    its steps, as the job is tested against itself.
    """

    exposed_s: float
    used_N: BoolArray
    seen: Profile
    like: Profile
    regime: Regime
    normal: Typical | None
    normal_late_s: float
    excess: Excess
    candidates: tuple[Candidate, ...]
    best_gains_s: float
    gain_R: FloatArray
    roles: Roles
    waited: Mapping[tuple[int, ...], bool | None]
    measures: StepMeasures
    before: Past
    after: Past
    settings: Settings

    def of(self, suspect: Suspect) -> tuple[Evidence, UnitName]:
        """The evidence on those that a rank or a host is one of, and its name there."""
        if suspect.rank is not None:
            return self.after.ranks, suspect.rank
        assert suspect.host is not None
        return self.after.hosts, suspect.host

    def keep_fraction(self, suspect: Suspect) -> float:
        """By how much the thresholds are lower for a suspect because the window before named it."""
        named = self.before.named
        same = named is not None and (named.scope, named.ranks) == (suspect.scope, suspect.ranks)
        return self.settings.keep_fraction if same else 1.0

    def log_odds(self, suspect: Suspect) -> float:
        """What the run says against a rank or a host."""
        evidence, name = self.of(suspect)
        rhythm = self.after.rhythms.get(name)
        return max(evidence.log_odds(name), 0.0 if rhythm is None else rhythm.log_odds)

    def own_fraction(self, candidate: Candidate) -> float:
        """Of the clear events of a named rank or host and of the next one, since it began: how many are its own.

        Of what comes back, at the steps where it does.
        """
        evidence, name = self.of(candidate.suspect)
        assert candidate.course is not None
        began, period = candidate.course.onset.step, candidate.course.period or 1
        events = (one for one in evidence.events if one.step >= began and (one.step - began) % period == 0)
        times = Counter(one.unit for one in events)
        own = times.pop(name, 0)
        return own / max(1, own + max(times.values(), default=0))

    @property
    def single_s(self) -> float:
        """What mending the one rank or host that would save most would, as a mean over all of the window's steps."""
        totals = [one.total_s for one in self.candidates if single(one.suspect)]
        return max(totals, default=0.0) / float(self.used_N.sum())

    @property
    def shared_s(self) -> float:
        """The excess that all ranks, or those of a cohort, have in common."""
        gains = [one.suspect.gain_s for one in self.candidates if not single(one.suspect)]
        return max(self.excess.group_s + self.excess.sync_s, *gains, 0.0)

    def of_two(self, suspect: Suspect) -> bool:
        """Whether a suspect is one of two ranks: slow only as much as the other is quick. Its own past decides."""
        return suspect.rank is not None and len(self.roles.members[self.roles.role_R[suspect.rank]]) == 2

    def of_pair(self, candidate: Candidate) -> OfPair | None:
        """What the past of two ranks says of one of them, in the steps that it fills; None where it is not known."""
        rank, course = candidate.suspect.rank, candidate.course
        own_KR = self.after.own.known(self.regime, len(self.roles.role_R))
        if rank is None or course is None or not len(own_KR):
            return None
        other = next(int(one) for one in self.roles.members[self.roles.role_R[rank]] if one != rank)
        now_R, usual_R = self.seen.own_NR[course.filled_N[self.used_N]].mean(axis=0), medians(own_KR, axis=0)
        least_s = float(own_KR[:, other].min())
        rose_s, others_s = float(now_R[rank] - usual_R[rank]), float(now_R[other] - usual_R[other])
        # A machine that others use too may be as quick again as it was before, for both.
        quicker_s = min(0.0, max(others_s, least_s - float(usual_R[other])))
        return OfPair(rose_s, rose_s - quicker_s - 2.0 * max(0.0, others_s), least_s - float(now_R[other]))

    @property
    def longer_s(self) -> float | None:
        """By how much a typical step is longer than a healthy one; None where none is known."""
        return None if self.normal is None else self.like.typical.total_s - self.normal.total_s


@dataclass(frozen=True, slots=True)
class OfPair:
    """Of two ranks one, held against what both were, in seconds a step.

    ``rose_s``: by how much it is slower than it was. ``alone_s``: so much of that as is its own, for what both are
    slower by, as on a machine that others use too, is neither's; and it may be slower than it was only as much as the
    other one is quicker, as far as that one has been so before. ``others_least_s``: by how much the other one is
    quicker than it ever was.
    """

    rose_s: float
    alone_s: float
    others_least_s: float


def single(suspect: Suspect) -> bool:
    """Whether a suspect is one rank or one host: a unit of the evidence."""
    return suspect.scope in ("rank", "host")


def named_one(candidate: Candidate) -> bool:
    """Whether a candidate is a rank or a host that the evidence of the run has named."""
    return candidate.course is not None and single(candidate.suspect)


def weigh(
    window: Window,
    roles: Roles,
    replays: list[SegmentReplay],
    accounting: Accounting,
    valid_N: BoolArray,
    past: Past,
    settings: Settings,
) -> WindowEvidence:
    """Put every candidate of a window that is replayed and every part of the excess beside each other."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    walks = [one.walk for one in replays]
    whole = profile(replays, n_steps, roles)
    exposed_N = _exposed(walks, n_steps)
    used_N = ordinary_steps(steps_of_a_kind(window, valid_N), whole, exposed_N, settings)
    regime_N = regimes_of(window)
    regime = Counter(one for one, used in zip(regime_N, used_N, strict=True) if used).most_common(1)[0][0]
    like_N = used_N & np.asarray([one == regime for one in regime_N])
    seen, like = whole.of(used_N), whole.of(like_N)
    normal = past.baseline.typical(regime)
    if normal is not None and normal.level_CS.shape != like.level_NCS.shape[1:]:
        normal = None  # the job has other cohorts than it had
    exposed_s = float(exposed_N[used_N].mean()) or accounting.exposed_s / accounting.n_steps
    ranks, hosts, units = _evidence(window, replays, roles, exposed_N, used_N, past, settings)
    scene = Scene(
        schema=window.schema,
        used_N=used_N,
        exposed_N=exposed_N,
        first_step=window.first_step,
        present_s=settings.min_event_fraction * exposed_s,
        onsets=_onsets((ranks, hosts), past.onsets, settings),
        rhythms=_rhythms(units, ranks, hosts, past.rhythms, settings),
        settings=settings,
    )
    candidates = _single(units, scene)
    if normal is not None:
        group = group_candidates(like, normal, roles, scene, exposed_s)
        # What all ranks share is drift below its threshold, and no rival to a rank.
        kept = past.named is not None and not single(past.named)
        least = settings.min_group_fraction * (settings.keep_fraction if kept else 1.0)
        candidates += [candidate for candidate in group if candidate.suspect.share >= least]
    leader_NG = np.stack([one.walk.leader_M[:n_steps] for one in replays])[:, used_N]
    gain_NG = np.stack([one.whole_gain_M[:n_steps] for one in replays])[:, used_N]
    return WindowEvidence(
        exposed_s=exposed_s,
        used_N=used_N,
        seen=seen,
        like=like,
        regime=regime,
        normal=normal,
        normal_late_s=normal_lateness_s(seen, normal, n_ranks),
        excess=excess_of(seen, like, normal, n_ranks, settings),
        candidates=_ranked(candidates, LISTED_FRACTION * exposed_s * float(used_N.sum())),
        best_gains_s=float(gain_NG.sum()) / float(used_N.sum()),
        gain_R=np.bincount(leader_NG.ravel(), gain_NG.ravel(), n_ranks).astype(np.float64),
        roles=roles,
        waited={one.suspect.ranks: waited(one.suspect, window) for one in candidates if named_one(one)},
        measures=measured(window, walks, whole, valid_N),
        before=past,
        after=replace(
            past,
            ranks=ranks,
            hosts=hosts,
            onsets=scene.onsets,
            rhythms=scene.rhythms,
            own=_own_times(past.own, whole, regime, like_N, ranks, window.first_step, settings),
            replayed=remembered(window, roles, replays) if valid_N.all() else None,
        ),
        settings=settings,
    )


def _own_times(
    before: OwnTimes,
    whole: Profile,
    regime: Regime,
    like_N: BoolArray,
    ranks: Evidence,
    first_step: int,
    settings: Settings,
) -> OwnTimes:
    """What each of two ranks takes by itself, with the steps before anything began that is hardly chance."""
    likely = settings.keep_fraction * settings.naming_log_odds
    began = min((one.onset for one in ranks.units.values() if max(one.log_odds) >= likely), default=None)
    if began is not None:
        like_N = like_N & (first_step + np.arange(len(like_N)) < began)
    return before.after(regime, whole.of(like_N)) if like_N.sum() >= settings.min_away_steps else before


def _exposed(walks: list[Walk], n_steps: int) -> FloatArray:
    """The exposed time of each step (N); what came after the last one's last sync stage is its own."""
    exposed_N = np.sum([one.end_M[:n_steps] for one in walks], axis=0)
    exposed_N[-1] += sum(float(one.end_M[n_steps:].sum()) for one in walks)
    return np.asarray(exposed_N)


def _evidence(
    window: Window,
    replays: list[SegmentReplay],
    roles: Roles,
    exposed_N: FloatArray,
    used_N: BoolArray,
    past: Past,
    settings: Settings,
) -> tuple[Evidence, Evidence, list[Unit]]:
    """The evidence against ranks and against hosts with the steps of a window, and those that held up most in it."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    held_N = np.sum([one.whole_gain_M[:n_steps] for one in replays], axis=0)
    usual_s = float(medians((exposed_N - held_N)[used_N])) or float(exposed_N[used_N].mean())

    def advance(before: Evidence, arrivals: Arrivals) -> Evidence:
        """With the steps that it has not seen."""
        if before.n_units != arrivals.n_units:
            before = Evidence(arrivals.n_units, before.next_step)
        new_N = used_N & (window.first_step + np.arange(n_steps) >= before.next_step)
        least = settings.min_event_fraction
        events = clear_events(arrivals, replays, new_N, window.first_step, usual_s, least)
        return advanced(before, events, max(before.next_step, window.last_step + 1), settings)

    least_s = LISTED_FRACTION * float(exposed_N[used_N].sum())
    of_ranks = arrivals_of_ranks(replays, n_ranks)
    ranks = advance(past.ranks, of_ranks)
    units = rank_units(replays, who_held_up(of_ranks, ranks, least_s), roles, n_steps)
    places = places_of(window.hosts)
    if places is None:
        return ranks, past.hosts, units
    elsewhere = [last_elsewhere(one, places) for one in replays]
    of_hosts = arrivals_of_hosts(replays, elsewhere, places, settings)
    hosts = advance(past.hosts, of_hosts)
    looked_at = who_held_up(of_hosts, hosts, least_s)
    return ranks, hosts, units + host_units(replays, places, elsewhere, looked_at, roles, n_steps, settings)


def _onsets(
    evidences: Sequence[Evidence], before: Mapping[UnitName, Onset], settings: Settings
) -> dict[UnitName, Onset]:
    """When the faults of the units began that are named. What is too long ago for the events of then is as it was."""
    found = {}
    for evidence in evidences:
        for unit, standing in evidence.units.items():
            if not standing.named:
                continue
            events = [one.step for one in evidence.events if one.unit == unit]
            onset = onset_of(events, max(standing.onset, events[0]), evidence.next_step - 1, settings)
            known = before.get(unit)
            if known is not None and standing.onset < evidence.next_step - HISTORY_STEPS:
                onset = replace(known, pause_steps=max(known.pause_steps, onset.pause_steps))
            found[unit] = onset
    return found


def _rhythms(
    units: Sequence[Unit], ranks: Evidence, hosts: Evidence, before: Mapping[UnitName, Rhythm], settings: Settings
) -> dict[UnitName, Rhythm]:
    """What comes back, by whose it is; since when is what was said first."""
    found = {}
    for unit in units:
        one = rhythm(ranks if unit.scope == "rank" else hosts, unit.name, settings)
        if one is not None:
            known = before.get(unit.name, one)
            same = (known.period, known.phase) == (one.period, one.phase)
            found[unit.name] = replace(one, onset=known.onset) if same else one
    return found


def _single(units: list[Unit], scene: Scene) -> list[Candidate]:
    """Ranks and hosts: the host where its ranks are slow alike, and otherwise the ranks."""
    found: list[Candidate] = []
    # ranks come first
    for unit in units:
        here = suspects_of(unit, scene)
        if unit.scope == "host":
            mine = [one for one in found if one.suspect.rank in unit.ranks]
            best_s = max((one.total_s for one in here), default=0.0)
            if max((one.total_s for one in mine), default=0.0) >= scene.settings.min_part_fraction * best_s:
                continue
            found = [one for one in found if one.suspect.rank not in unit.ranks]
        found += here
    return found


def _ranked(candidates: list[Candidate], min_total_s: float) -> tuple[Candidate, ...]:
    """What would have saved most first, without those that would hardly; of equals a whole scope before its stages.

    What comes back in few steps saves little over all of them.
    """
    kept = [one for one in candidates if one.total_s >= min_total_s or one.suspect.pattern == "recurring"]
    return tuple(sorted(kept, key=lambda one: (-one.total_s, one.suspect.stage is not None)))
