"""The evidence for a verdict: what a window shows, beside the state of the run.

A window's complete steps of one kind are compared, without special and disturbed ones; its replay is made, and the
tests of the run are advanced by its new steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.frontier.accounting import Accounting, advances_by_step
from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.roles import Roles
from sftriage.frontier.units import Unit, UnitName, host_units, last_elsewhere, places_of, rank_units
from sftriage.frontier.whatif import KeptReplay, Profile, SegmentReplay, Typical, profile, remembered
from sftriage.model.verdicts import Suspect
from sftriage.model.windows import Window
from sftriage.verdicts.baseline import (
    Baseline,
    Excess,
    OwnTimes,
    Regime,
    excess_of,
    regimes_of,
)
from sftriage.verdicts.candidates import (
    Alone,
    Candidate,
    Known,
    OnsetKey,
    WindowContext,
    candidates_of,
    group_candidates,
    is_marked,
    known_after,
    named_alone,
)
from sftriage.verdicts.course import NO_TRACK, Onset, Track
from sftriage.verdicts.regression import OwnBest, Pause, StepMeasures, measured, paused_steps
from sftriage.verdicts.sequential import (
    MAX_EXAMINED,
    Arrivals,
    Evidence,
    Recurrence,
    advanced,
    arrivals_of_hosts,
    arrivals_of_ranks,
    clear_events,
    recurrence_of,
    units_to_examine,
)
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.system import HeldBack, SystemCounts, charged, counts_of, stage_of


def undisturbed_steps(window: Window, valid_N: BoolArray) -> BoolArray:
    """The complete steps in which no profiler ran, nor in the step before."""
    return valid_N if window.capturing_N is None else valid_N & ~_with_next(window.capturing_N)


def steps_of_a_kind(window: Window, valid_N: BoolArray) -> BoolArray:
    """The complete steps of the most frequent kind, without those right after a step of another kind.

    A checkpoint is not a slow training step, and the rank that wrote it arrives late in the next step.
    """
    if window.kinds is None or len(set(window.kinds)) == 1:
        return valid_N
    kinds_N = np.asarray(window.kinds)
    main = Counter(kinds_N[valid_N].tolist()).most_common(1)[0][0]
    same_N: BoolArray = np.asarray(kinds_N == main)
    used_N: BoolArray = valid_N & ~_with_next(~same_N)
    return used_N if used_N.any() else valid_N & same_N


def ordinary_steps(used_N: BoolArray, whole: Profile, exposed_N: FloatArray, settings: Settings) -> BoolArray:
    """The steps without *special* ones, which do other work though no kind was given, and those right after them.

    In a special step (nearly) all ranks spend time in a stage that the other steps do not have: an evaluation, a
    checkpoint, garbage collection. If many steps are like that, they are ordinary.
    """
    common_NS = whole.common_NCS.min(axis=1)
    usual_S = medians(common_NS[used_N], axis=0)
    over_NS = common_NS - usual_S
    # (of the step itself: in one that a late rank makes ten times as long, what all ranks spend more is a trifle)
    least_N1 = settings.min_gain_fraction * exposed_N[:, None]
    special_N = used_N & ((over_NS > usual_S) & (over_NS > least_N1)).any(axis=1)
    if not special_N.any() or special_N.sum() > settings.smaller_part_fraction * used_N.sum():
        return used_N
    ordinary_N: BoolArray = used_N & ~_with_next(special_N)
    return ordinary_N if ordinary_N.any() else used_N


def _with_next(steps_N: BoolArray) -> BoolArray:
    return np.asarray(steps_N | np.concatenate([[False], steps_N[:-1]]))


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """The state that is carried from window to window: all that a verdict depends on besides the window itself.

    Attributes:
        baseline: the job's healthy steps.
        ranks: the sequential tests of all ranks.
        hosts: those of all hosts.
        track: the units' time over their peers in the last steps.
        onsets: when the fault of each named unit began, by stage.
        recurrences: the periods of recurring faults, by unit.
        alone: what ranks have done alone by their own notes.
        first_step: the first step of the job that was looked at.
        own: the local times of the two ranks of each cohort of two.
        named: the suspect of the window before.
        own_best: the test of the job against its own best.
        replayed: the replay of the window before, for the steps that the next one shares with it.
        device: the state on the device's clock, where windows were judged on it; the rest is on the host's.
        counted_step: the last step whose loss was attributed to a suspect, on either clock.
        exchanged: an exchange between the ranks has been seen.
        paused: the pauses that the last window has shown first.
        rest, rest_ranks: the state of the ranks that recorded the last window, where some did not.
    """

    baseline: Baseline = field(default_factory=Baseline)
    ranks: Evidence = field(default_factory=Evidence)
    hosts: Evidence = field(default_factory=Evidence)
    track: Track = NO_TRACK
    onsets: Mapping[OnsetKey, Onset] = field(default_factory=dict)
    recurrences: Mapping[UnitName, Recurrence] = field(default_factory=dict)
    alone: Known = field(default_factory=dict)
    first_step: int | None = None
    own: OwnTimes = field(default_factory=OwnTimes)
    named: Suspect | None = None
    own_best: OwnBest = field(default_factory=OwnBest)
    replayed: KeptReplay | None = None
    device: Past | None = None
    counted_step: int = -1
    exchanged: bool = False
    paused: tuple[Pause, ...] = ()
    rest: Past | None = None
    rest_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class WindowEvidence:
    """All that the label of a window is decided by.

    Attributes:
        exposed_s: what a step takes: the median exposed time of those that count. Thresholds are fractions of it.
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
        alone: of each rank that is named by its own notes, what it marked, and the log odds.
        counts: for each named unit, by its ranks, what the kernel counted; None if that is not known.
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
    alone: Mapping[int, tuple[str, Alone, float]]
    counts: Mapping[tuple[int, ...], SystemCounts | None]
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
        marked = 0.0 if suspect.rank is None or suspect.rank not in self.alone else self.alone[suspect.rank][2]
        return max(evidence.log_odds(name), marked, 0.0 if recurrence is None else recurrence.log_odds)

    @property
    def usual_queued_s(self) -> float | None:
        """For how long the rank that waits longest for a CPU does so in a usual step; None if that is not known."""
        return self.before.own_best.queued_s

    def contended_fraction(self, suspect: Suspect) -> float | None:
        """The part of a named unit's lateness that contention for CPUs may explain; None if that is not known."""
        counts = self.counts.get(suspect.ranks)
        stage = stage_of(suspect, self.measures.stages)
        return None if counts is None else counts.contended_fraction(self.usual_queued_s, stage)

    def is_held_back(self, suspect: Suspect) -> bool:
        """Whether it was counted that something else than contention for CPUs made a named unit late."""
        counts = self.counts.get(suspect.ranks)
        return counts is not None and counts.system is not None

    def own_fraction(self, candidate: Candidate) -> float:
        """A candidate's share of the clear events since its onset that are its own or those of the next likeliest unit.

        Only events in its phase count, if it is recurring, or in the steps that it marked.
        """
        evidence, name = self.tests_of(candidate.suspect)
        assert candidate.course is not None
        began, period = candidate.course.onset.step, candidate.course.period or 1
        own_steps = candidate.course.own_steps
        events = (
            one
            for one in evidence.events
            if one.step >= began and (one.step in own_steps if own_steps else (one.step - began) % period == 0)
        )
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
        if rank is None or course is None:
            return None
        own_KR = self.after.own.known(self.regime, len(self.roles.role_R), course.onset.earliest)
        if not len(own_KR):
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


LISTED_FRACTION = 0.01
"""A candidate whose gain is less than this fraction of the window is not listed."""


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
    # What came after a step's last sync is that step's, as in a candidate's gain.
    exposed_N = advances_by_step(walks, window).sum(axis=1)
    measures = measured(window, walks, whole, valid_N)
    used_N = ordinary_steps(steps_of_a_kind(window, valid_N), whole, exposed_N, settings)
    moved_N = used_N & ~paused_steps(measures, settings)
    used_N = moved_N if moved_N.any() else used_N
    regime, like_N = _main_regime(window, used_N)
    seen, like = whole.of(used_N), whole.of(like_N)
    normal = _normal(past.baseline, regime, like)
    exposed_s = float(medians(exposed_N[used_N])) or accounting.exposed_s / accounting.n_steps
    ranks, hosts, units, usual_s = _evidence(window, replays, roles, exposed_N, used_N, past, settings)
    known_alone = _known_alone(window, replays, valid_N, usual_s, past, settings)
    first_step = window.first_step if past.first_step is None else past.first_step
    units = _held_back(units, window, whole, normal, exposed_N, used_N, settings)
    context = WindowContext(
        schema=window.schema,
        used_N=used_N,
        exposed_N=exposed_N,
        first_step=window.first_step,
        present_s=settings.min_event_fraction * exposed_s,
        track=_track(past.track, replays, units, roles, used_N, window.first_step),
        events={unit: one.events_of(unit, settings) for one in (ranks, hosts) for unit in one.units if one.named(unit)},
        recurrences=_recurrences(units, ranks, hosts, past.recurrences, settings),
        onsets=past.onsets,
        known_alone=known_alone,
        noted_NR=window.noted_NR,
        alone=named_alone(known_alone, ranks, ranks.next_step - first_step, usual_s, settings),
        settings=settings,
    )
    candidates = _single(units, context)
    onsets = _onsets(candidates, context)
    if normal is not None:
        candidates += _shared(group_candidates(like, normal, roles, context, exposed_s), past.named, settings)
    named = {one.suspect.ranks: one.suspect for one in candidates if is_named(one)}
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
        alone=context.alone,
        counts={ranks: counts_of(suspect, window) for ranks, suspect in named.items()},
        measures=measures,
        before=past,
        after=replace(
            past,
            ranks=ranks,
            hosts=hosts,
            track=context.track,
            onsets=onsets,
            recurrences=context.recurrences,
            alone=known_alone,
            first_step=first_step,
            own=_own_times(past.own, whole, regime, like_N, ranks, window.first_step, settings),
            replayed=remembered(window, roles, replays) if valid_N.all() else None,
            exchanged=True,
        ),
        settings=settings,
    )


def _known_alone(
    window: Window,
    replays: Sequence[SegmentReplay],
    valid_N: BoolArray,
    usual_s: float,
    past: Past,
    settings: Settings,
) -> Known:
    """What ranks do alone by their own notes, after the window's new steps.

    What a rank marks costs what it does, also where others make the step a special one.
    """
    if window.noted_NR is None:
        return past.alone
    n_steps, n_ranks, _ = window.durations_NRS.shape
    new_N = valid_N & (window.first_step + np.arange(n_steps) >= past.ranks.next_step)
    arrivals = arrivals_of_ranks(replays, n_ranks)
    events = clear_events(arrivals, replays, new_N, window.first_step, usual_s, settings.min_event_fraction)
    lost_s = {(one.unit, one.step): one.share * usual_s for one in events}
    return known_after(past.alone, window.noted_NR, new_N, window.first_step, lost_s)


def _held_back(
    units: Sequence[Unit],
    window: Window,
    whole: Profile,
    normal: Typical | None,
    exposed_N: FloatArray,
    used_N: BoolArray,
    settings: Settings,
) -> list[Unit]:
    """The units, each with what it adds to the sync stages while the system keeps it from running.

    How long the sync stages take by themselves is known from a baseline alone: without one, contention is left out.
    """
    held = HeldBack.of(window, limited=normal is None)
    if held is None:
        return list(units)
    longer_NS = np.clip(whole.sync_NS - (0.0 if normal is None else normal.sync_S), 0.0, None)
    healthy_s = 0.0 if normal is None else normal.total_s
    return [
        one
        if is_marked(window.noted_NR, one.name, one.gain_NS[:, -1] * used_N, settings)
        else charged(one, held, exposed_N, longer_NS, healthy_s, used_N, settings)
        for one in units
    ]


def _main_regime(window: Window, used_N: BoolArray) -> tuple[Regime, BoolArray]:
    """The most frequent regime of the steps that count, and its steps."""
    regime_N = regimes_of(window)
    regime = Counter(one for one, used in zip(regime_N, used_N, strict=True) if used).most_common(1)[0][0]
    return regime, used_N & np.asarray([one == regime for one in regime_N])


def _normal(baseline: Baseline, regime: Regime, like: Profile) -> Typical | None:
    """A typical healthy step of a regime; None if none is known, or if the cohorts have changed since."""
    normal = baseline.typical(regime)
    return None if normal is None or normal.level_CS.shape != like.level_NCS.shape[1:] else normal


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
    step_N = first_step + np.arange(len(like_N))
    if began is not None:
        like_N = like_N & (step_N < began)
    if like_N.sum() < settings.min_away_steps:
        return before
    return before.after(regime, whole.of(like_N), int(step_N[like_N][-1]))


def _evidence(
    window: Window,
    replays: list[SegmentReplay],
    roles: Roles,
    exposed_N: FloatArray,
    used_N: BoolArray,
    past: Past,
    settings: Settings,
) -> tuple[Evidence, Evidence, list[Unit], float]:
    """The tests of ranks and of hosts after a window's steps, the units that delayed it most, and the usual step."""
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
        return ranks, past.hosts, units, usual_s
    elsewhere = [last_elsewhere(one, places) for one in replays]
    of_hosts = arrivals_of_hosts(replays, elsewhere, places, settings)
    hosts = advance(past.hosts, of_hosts)
    examined = units_to_examine(of_hosts, hosts, least_s)
    alike = settings.larger_part_fraction
    units += host_units(replays, places, elsewhere, examined, roles, n_steps, alike)
    return ranks, hosts, units, usual_s


def _track(
    before: Track, replays: Sequence[SegmentReplay], units: Sequence[Unit], roles: Roles, used_N: BoolArray, first: int
) -> Track:
    """The track of all ranks of a small job, or of those examined, and of the hosts examined, with a window's steps."""
    over = {unit.name: unit.over_NS[used_N] for unit in units}
    n_ranks = len(roles.role_R)
    rest = [rank for rank in range(n_ranks) if rank not in over] if n_ranks <= MAX_EXAMINED else []
    if rest:
        over_NXS = np.sum([one.over_NXS(np.asarray(rest, np.intp), roles, len(used_N)) for one in replays], axis=0)
        over |= {rank: over_NXS[used_N, x] for x, rank in enumerate(rest)}
    return before.after(first + np.flatnonzero(used_N), over)


def _onsets(candidates: Sequence[Candidate], context: WindowContext) -> dict[OnsetKey, Onset]:
    """The onsets of what is named now, and of units that are named still but are not in the window."""
    still = context.events.keys() | context.recurrences.keys()
    found = {key: onset for key, onset in context.onsets.items() if key[0] in still}
    for one in filter(is_named, candidates):
        assert one.course is not None
        if one.course.own_steps is not None:
            continue
        name = one.suspect.host if one.suspect.rank is None else one.suspect.rank
        assert name is not None
        found[name, one.suspect.stage, one.course.period] = one.course.onset
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
