"""The evidence for a verdict: one window accounted and replayed, beside what the windows before have shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.decisions import Suspect
from sftriage.frontier.accounting import Accounting, Walk
from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.overlap import Replayed, remembered
from sftriage.frontier.profile import Profile, Typical, profile
from sftriage.frontier.roles import Roles
from sftriage.frontier.units import Unit, UnitName, host_units, last_elsewhere, places_of, rank_units
from sftriage.frontier.whatif import SegmentReplay
from sftriage.records import Window
from sftriage.verdicts.baseline import (
    Baseline,
    Excess,
    OwnTimes,
    Regime,
    excess_of,
    regimes_of,
)
from sftriage.verdicts.candidates import Candidate, WindowContext, candidates_of, group_candidates
from sftriage.verdicts.clear_events import (
    Arrivals,
    arrivals_of_hosts,
    arrivals_of_ranks,
    clear_events,
    units_to_examine,
)
from sftriage.verdicts.course import Onset, onset_of
from sftriage.verdicts.regression import OwnBest, StepMeasures, measured
from sftriage.verdicts.sequential import HISTORY_STEPS, Evidence, Recurrence, advanced, recurrence_of
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.steps import ordinary_steps, steps_of_a_kind
from sftriage.verdicts.system import waited

LISTED_FRACTION = 0.01
"""A candidate whose gain is less than this fraction of the window is not listed."""


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """The state that is carried from window to window: all that a verdict depends on besides the window itself.

    Attributes:
        baseline: the job's healthy steps.
        ranks: the sequential tests of all ranks.
        hosts: those of all hosts.
        onsets: when the fault of each named unit began.
        recurrences: the periods of recurring faults, by unit.
        own: the local times of the two ranks of each cohort of two.
        named: the suspect of the window before.
        own_best: the test of the job against its own best.
        replayed: the replay of the window before, for the steps that the next one shares with it.
        device: the state on the device's clock, where windows were judged on it; the rest is on the host's.
        counted_step: the last step whose loss was attributed to a suspect, on either clock.
    """

    baseline: Baseline = field(default_factory=Baseline)
    ranks: Evidence = field(default_factory=Evidence)
    hosts: Evidence = field(default_factory=Evidence)
    onsets: Mapping[UnitName, Onset] = field(default_factory=dict)
    recurrences: Mapping[UnitName, Recurrence] = field(default_factory=dict)
    own: OwnTimes = field(default_factory=OwnTimes)
    named: Suspect | None = None
    own_best: OwnBest = field(default_factory=OwnBest)
    replayed: Replayed | None = None
    device: Past | None = None
    counted_step: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class WindowEvidence:
    """All that the label of a window is decided by.

    Attributes:
        exposed_s: the mean exposed time of the steps that count.
        used_N: the steps that count: complete, and of the kind that most of them are.
        seen: the profile of these steps.
        like: the profile of those in the most frequent regime.
        regime: that regime.
        normal: a typical healthy step of that regime; None if none is known.
        excess: exposed time over what is normal, by where it is.
        candidates: possible suspects, the largest gain first.
        gain_R: what mending the last rank of each step would have saved, in all steps, by rank.
        single_s: the largest gain of a rank or a host, in one stage or as a whole, as a mean over the steps that count.
        roles: the cohorts.
        waited: for each named unit, by its ranks, the part of its lateness that it waited for a CPU; None if that was
            not counted.
        measures: all steps, for the test of the job against its own best.
        before: the state before this window.
        after: the state with it, except for what follows from its verdict.
    """

    exposed_s: float
    used_N: BoolArray
    seen: Profile
    like: Profile
    regime: Regime
    normal: Typical | None
    excess: Excess
    candidates: tuple[Candidate, ...]
    gain_R: FloatArray
    single_s: float
    roles: Roles
    waited: Mapping[tuple[int, ...], float | None]
    measures: StepMeasures
    before: Past
    after: Past
    settings: Settings

    def tests_of(self, suspect: Suspect) -> tuple[Evidence, UnitName]:
        """The tests that a suspect of scope rank or host is a unit of, and its name there."""
        if suspect.rank is not None:
            return self.after.ranks, suspect.rank
        assert suspect.host is not None
        return self.after.hosts, suspect.host

    def keep_fraction(self, suspect: Suspect) -> float:
        """The factor on a suspect's thresholds: below 1 if the window before named it."""
        named = self.before.named
        same = named is not None and (named.scope, named.ranks) == (suspect.scope, suspect.ranks)
        return self.settings.most_fraction if same else 1.0

    def log_odds(self, suspect: Suspect) -> float:
        """The log odds of a suspect of scope rank or host, its recurrence included."""
        evidence, name = self.tests_of(suspect)
        recurrence = self.after.recurrences.get(name)
        return max(evidence.log_odds(name), 0.0 if recurrence is None else recurrence.log_odds)

    def own_fraction(self, candidate: Candidate) -> float:
        """A candidate's share of the clear events since its onset that are its own or those of the next likeliest unit.

        Only events in its phase count, if it is recurring.
        """
        evidence, name = self.tests_of(candidate.suspect)
        assert candidate.course is not None
        began, period = candidate.course.onset.step, candidate.course.period or 1
        events = (one for one in evidence.events if one.step >= began and (one.step - began) % period == 0)
        times = Counter(one.unit for one in events)
        own = times.pop(name, 0)
        return own / max(1, own + max(times.values(), default=0))

    @property
    def best_gains_s(self) -> float:
        """What mending the last rank of each step would have saved, as a mean over the steps that count."""
        return float(self.gain_R.sum()) / float(self.used_N.sum())

    @property
    def shared_s(self) -> float:
        """The excess that all ranks, or those of a cohort, share."""
        gains = [one.suspect.gain_s for one in self.candidates if not is_single(one.suspect)]
        return max(self.excess.group_s + self.excess.sync_s, *gains, 0.0)

    def is_one_of_two(self, suspect: Suspect) -> bool:
        """Whether a suspect is one of two ranks, so that its own past decides which of them is slow."""
        return suspect.rank is not None and len(self.roles.members[self.roles.role_R[suspect.rank]]) == 2

    def pair_history(self, candidate: Candidate) -> PairHistory | None:
        """One of two ranks against the past of both, in the steps that it fills; None if that is not known."""
        rank, course = candidate.suspect.rank, candidate.course
        own_KR = self.after.own.known(self.regime, len(self.roles.role_R))
        if rank is None or course is None or not len(own_KR):
            return None
        other = next(int(one) for one in self.roles.members[self.roles.role_R[rank]] if one != rank)
        now_R, usual_R = self.seen.own_NR[course.filled_N[self.used_N]].mean(axis=0), medians(own_KR, axis=0)
        least_s = float(own_KR[:, other].min())
        rose_s, others_s = float(now_R[rank] - usual_R[rank]), float(now_R[other] - usual_R[other])
        # A shared machine may become as fast again, for both ranks, as it was before.
        quicker_s = min(0.0, max(others_s, least_s - float(usual_R[other])))
        return PairHistory(rose_s, rose_s - quicker_s - 2.0 * max(0.0, others_s), least_s - float(now_R[other]))

    @property
    def longer_s(self) -> float | None:
        """By how much a typical step is longer than a healthy one; None if none is known."""
        return None if self.normal is None else self.like.typical.total_s - self.normal.total_s


@dataclass(frozen=True, slots=True)
class PairHistory:
    """One of two ranks against the past of both, in seconds a step.

    Attributes:
        rose_s: by how much it is slower than it was.
        alone_s: the part of that which is its own: without what both became slower by, as on a shared machine, and
            with what the other became faster by, as far as that one had been so fast before.
        others_least_s: by how much the other one is faster than it ever was.
    """

    rose_s: float
    alone_s: float
    others_least_s: float


def is_single(suspect: Suspect) -> bool:
    """Whether a suspect is one rank or one host: a unit of the sequential tests."""
    return suspect.scope in ("rank", "host")


def is_named(candidate: Candidate) -> bool:
    """Whether a candidate is a rank or a host that the sequential tests have named."""
    return candidate.course is not None and is_single(candidate.suspect)


def gather_evidence(
    window: Window,
    roles: Roles,
    replays: list[SegmentReplay],
    accounting: Accounting,
    valid_N: BoolArray,
    past: Past,
    settings: Settings,
) -> WindowEvidence:
    """The evidence of a replayed window. ``valid_N`` are its complete and undisturbed steps."""
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
        normal = None  # the cohorts have changed
    exposed_s = float(exposed_N[used_N].mean()) or accounting.exposed_s / accounting.n_steps
    ranks, hosts, units = _evidence(window, replays, roles, exposed_N, used_N, past, settings)
    context = WindowContext(
        schema=window.schema,
        used_N=used_N,
        exposed_N=exposed_N,
        first_step=window.first_step,
        present_s=settings.min_event_fraction * exposed_s,
        onsets={k: v for one in (ranks, hosts) for k, v in _onsets(one, past.onsets, settings).items()},
        recurrences=_recurrences(units, ranks, hosts, past.recurrences, settings),
        settings=settings,
    )
    candidates = _single(units, context)
    if normal is not None:
        candidates += _shared(group_candidates(like, normal, roles, context, exposed_s), past.named, settings)
    return WindowEvidence(
        exposed_s=exposed_s,
        used_N=used_N,
        seen=seen,
        like=like,
        regime=regime,
        normal=normal,
        excess=excess_of(seen, like, normal, n_ranks, settings),
        candidates=_ranked(candidates, LISTED_FRACTION * exposed_s * float(used_N.sum())),
        gain_R=_gain_by_rank(replays, used_N, n_ranks),
        single_s=max((float(unit.gain_NS[used_N].mean(axis=0).max()) for unit in units), default=0.0),
        roles=roles,
        waited={one.suspect.ranks: waited(one.suspect, window) for one in candidates if is_named(one)},
        measures=measured(window, walks, whole, valid_N),
        before=past,
        after=replace(
            past,
            ranks=ranks,
            hosts=hosts,
            onsets=context.onsets,
            recurrences=context.recurrences,
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
    """The local times of two ranks, with the steps before any fault that is likely by now."""
    likely = settings.most_fraction * settings.naming_log_odds
    began = min((one.onset for one in ranks.units.values() if max(one.log_odds) >= likely), default=None)
    if began is not None:
        like_N = like_N & (first_step + np.arange(len(like_N)) < began)
    return before.after(regime, whole.of(like_N)) if like_N.sum() >= settings.min_away_steps else before


def _exposed(walks: list[Walk], n_steps: int) -> FloatArray:
    """The exposed time of each step (N); what came after the last step's last sync stage is included in it."""
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
    """The tests of ranks and of hosts after a window's steps, and the units that delayed it most."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    held_N = np.sum([one.whole_gain_M[:n_steps] for one in replays], axis=0)
    usual_s = float(medians((exposed_N - held_N)[used_N])) or float(exposed_N[used_N].mean())

    def advance(before: Evidence, arrivals: Arrivals) -> Evidence:
        """The tests with the steps that are new to them."""
        n_units = len(arrivals.names)
        if before.n_units != n_units:
            before = Evidence(n_units, before.next_step)
        new_N = used_N & (window.first_step + np.arange(n_steps) >= before.next_step)
        least = settings.min_event_fraction
        events = clear_events(arrivals, replays, new_N, window.first_step, usual_s, least)
        return advanced(before, events, max(before.next_step, window.last_step + 1), settings)

    least_s = LISTED_FRACTION * float(exposed_N[used_N].sum())
    of_ranks = arrivals_of_ranks(replays, n_ranks)
    ranks = advance(past.ranks, of_ranks)
    units = rank_units(replays, units_to_examine(of_ranks, ranks, least_s), roles, n_steps)
    places = places_of(window.hosts)
    if places is None:
        return ranks, past.hosts, units
    elsewhere = [last_elsewhere(one, places) for one in replays]
    of_hosts = arrivals_of_hosts(replays, elsewhere, places, settings)
    hosts = advance(past.hosts, of_hosts)
    examined = units_to_examine(of_hosts, hosts, least_s)
    return (
        ranks,
        hosts,
        units + host_units(replays, places, elsewhere, examined, roles, n_steps, settings.larger_part_fraction),
    )


def _onsets(evidence: Evidence, before: Mapping[UnitName, Onset], settings: Settings) -> dict[UnitName, Onset]:
    """The onset of each named unit. One that is older than the events that are kept stays as it was estimated."""
    found = {}
    for unit in filter(evidence.named, evidence.units):
        since = evidence.units[unit].onset
        events = [one.step for one in evidence.events if one.unit == unit]
        found[unit] = onset = onset_of(events, max(since, events[0]), evidence.next_step - 1, settings)
        if unit in before and since < evidence.next_step - HISTORY_STEPS:
            pause_steps = max(before[unit].pause_steps, onset.pause_steps)
            found[unit] = replace(before[unit], pause_steps=pause_steps)
    return found


def _recurrences(
    units: Sequence[Unit], ranks: Evidence, hosts: Evidence, before: Mapping[UnitName, Recurrence], settings: Settings
) -> dict[UnitName, Recurrence]:
    """The recurrence of each unit that has one; its onset is the one that was found first."""
    found = {}
    for unit in units:
        one = recurrence_of(ranks if unit.scope == "rank" else hosts, unit.name, settings)
        if one is not None:
            known = before.get(unit.name, one)
            same = (known.period, known.phase) == (one.period, one.phase)
            found[unit.name] = replace(one, onset=known.onset) if same else one
    return found


def _single(units: list[Unit], context: WindowContext) -> list[Candidate]:
    """Candidates of scope rank and host: a host instead of its ranks where these are slow alike."""
    found: list[Candidate] = []
    # ranks come first
    for unit in units:
        here = candidates_of(unit, context)
        if unit.scope == "host":
            mine = [one for one in found if one.suspect.rank in unit.ranks]
            best_s = max((one.total_s for one in here), default=0.0)
            if max((one.total_s for one in mine), default=0.0) >= context.settings.larger_part_fraction * best_s:
                continue
            found = [one for one in found if one.suspect.rank not in unit.ranks]
        found += here
    return found


def _shared(alike: list[Candidate], named: Suspect | None, settings: Settings) -> list[Candidate]:
    """Candidates of scope cohort and all from their threshold on: below it they are drift, and no rival to a rank."""
    kept = named is not None and not is_single(named)
    least = settings.min_group_fraction * (settings.most_fraction if kept else 1.0)
    return [one for one in alike if one.suspect.share >= least]


def _gain_by_rank(replays: list[SegmentReplay], used_N: BoolArray, n_ranks: int) -> FloatArray:
    """What mending the last rank of each step would have saved, by rank."""
    leader_GN = np.stack([one.walk.leader_M[: len(used_N)] for one in replays])[:, used_N]
    gain_GN = np.stack([one.whole_gain_M[: len(used_N)] for one in replays])[:, used_N]
    return np.bincount(leader_GN.ravel(), gain_GN.ravel(), n_ranks).astype(np.float64)


def _ranked(candidates: list[Candidate], min_total_s: float) -> tuple[Candidate, ...]:
    """Candidates with the largest total gain first, and without very small ones; of equals the whole before a stage.

    Recurring ones stay in any case: what recurs in few steps gains little over all of them.
    """
    kept = [one for one in candidates if one.total_s >= min_total_s or one.suspect.pattern == "recurring"]
    return tuple(sorted(kept, key=lambda one: (-one.total_s, one.suspect.stage is not None)))
