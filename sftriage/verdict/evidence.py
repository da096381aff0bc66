"""The evidence for a verdict: what a window shows, beside the state of the run.

A window's complete steps of one kind are compared, without special and disturbed ones; its replay is made, and the
tests of the run are advanced by its new steps. Of large jobs, two overlapping windows share the replay of their common
steps. A row of a replay depends on its own step and on what came after the last sync of the step before: so the rows of
shared steps are the same in both windows, except the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sftriage.model.events import JobPaused
from sftriage.model.verdicts import Settings, Suspect
from sftriage.model.windows import StageSchema, Window
from sftriage.verdict import sequential, whatif
from sftriage.verdict.accounting import (
    Accounting,
    BoolArray,
    FloatArray,
    Segment,
    medians,
    segments,
)
from sftriage.verdict.candidates import Candidate, Onset, OnsetKey, Track, candidates_of, group_candidates
from sftriage.verdict.regression import OwnBest, measured, paused_steps
from sftriage.verdict.units import (
    HeldBack,
    Unit,
    UnitName,
    charged,
    counts_of,
    host_units,
    last_elsewhere,
    places_of,
    rank_units,
)

TOLD_BY_RANKS = 8
"""Ranks whose times are compared to check that two windows agree in the steps that they share."""

Parts = tuple[StageSchema, int, whatif.Roles, tuple[tuple[object, ...], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class KeptReplay:
    """The replays of a window, kept for the next one, with the times of a few ranks (N × X × S)."""

    first_step: int
    parts: Parts
    some_NXS: FloatArray
    replays: tuple[whatif.SegmentReplay, ...]


def remembered(window: Window, roles: whatif.Roles, replays: list[whatif.SegmentReplay]) -> KeptReplay | None:
    """What is kept for the next window; None for a small job, where replaying again is faster."""
    if window.durations_NRS.shape[1] <= whatif.SAMPLE_RANKS:
        return None
    emptied = tuple(replace(one, segment=replace(one.segment, local=(), own=None)) for one in replays)
    found = [one.segment for one in replays]
    return KeptReplay(window.first_step, _parts(window, roles, found), _some(window), emptied)


def resumed(window: Window, roles: whatif.Roles, before: KeptReplay | None) -> list[whatif.SegmentReplay] | None:
    """The replays of a complete window, reusing those of the one before; None if they cannot be reused."""
    n_steps = len(window.durations_NRS)
    if before is None or window.durations_NRS.shape[1] <= whatif.SAMPLE_RANKS:
        return None
    ahead = window.first_step - before.first_step
    last_known = before.first_step + len(before.some_NXS) - 1
    n_shared = last_known - window.first_step + 1
    if ahead <= 0 or not 2 <= n_shared < n_steps:
        return None
    whole = segments(window, np.ones(n_steps, dtype=np.bool_))
    same_parts = before.parts == _parts(window, roles, whole)
    if not same_parts or not np.array_equal(before.some_NXS[ahead:], _some(window)[:n_shared]):
        return None
    found = []
    for first, last in ((window.first_step, window.first_step), (last_known, window.last_step)):
        replays, complete_N = whatif.replayed(window.steps(first, last), roles)
        if not complete_N.all():
            return None
        found.append(replays)
    one_step, new = found
    return [
        whatif.joined(
            [
                (one_step[k], slice(0, 1)),
                (before.replays[k], slice(ahead + 1, ahead + n_shared)),
                (new[k], slice(1, new[k].segment.n_rows)),
            ],
            segment,
        )
        for k, segment in enumerate(whole)
    ]


def _parts(window: Window, roles: whatif.Roles, found: list[Segment]) -> Parts:
    """What two windows must have in common for their rows to be the same: ranks and columns."""
    columns = tuple(
        (column.stage, column.offset, column.over_NR is None, column.up_to_NR is None)
        for segment in found
        for column in segment.columns
    )
    return window.schema, window.attempt, roles, columns


def _some(window: Window) -> FloatArray:
    return window.durations_NRS[:, :: window.durations_NRS.shape[1] // TOLD_BY_RANKS].copy()


def steps_of_a_kind(window: Window, valid_N: BoolArray) -> BoolArray:
    """The complete steps of the most frequent kind, without those right after a step of another kind.

    A checkpoint is not a slow training step, and the rank that wrote it arrives late in the next step.
    """
    if window.kinds is None or len(set(window.kinds)) == 1:
        return valid_N
    kinds_N = np.asarray(window.kinds)
    main = Counter(kinds_N[valid_N].tolist()).most_common(1)[0][0]
    same_N: BoolArray = np.asarray(kinds_N == main)
    used_N: BoolArray = valid_N & ~with_next(~same_N)
    return used_N if used_N.any() else valid_N & same_N


def ordinary_steps(used_N: BoolArray, whole: whatif.Profile, exposed_N: FloatArray, settings: Settings) -> BoolArray:
    """The steps without *special* ones, which do other work though no kind was given, and those right after them.

    In a special step (nearly) all ranks spend time in a stage that the other steps do not have, as in an evaluation. If
    many steps are like that, they are ordinary.
    """
    common_NS = whole.common_NCS.min(axis=1)
    usual_S = medians(common_NS[used_N], axis=0)
    over_NS = common_NS - usual_S
    # (of the step itself: in one that a late rank makes ten times as long, what all ranks spend more is a trifle)
    least_N1 = settings.min_gain_fraction * exposed_N[:, None]
    special_N = used_N & ((over_NS > usual_S) & (over_NS > least_N1)).any(axis=1)
    if not special_N.any() or special_N.sum() > settings.smaller_part_fraction * used_N.sum():
        return used_N
    ordinary_N: BoolArray = used_N & ~with_next(special_N)
    return ordinary_N if ordinary_N.any() else used_N


def with_next(steps_N: BoolArray) -> BoolArray:
    """Some steps, and those right after them."""
    return np.asarray(steps_N | np.concatenate([[False], steps_N[:-1]]))


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Everything a verdict depends on besides the window itself: the state between windows.

    Attributes:
        ranks, hosts: the sequential tests of all of them.
        track: the units' time over their peers in the last steps.
        onsets: when the fault of each named unit began, by stage.
        recurrences: the periods of recurring faults, by unit.
        alone: what ranks have done alone by their own notes.
        first_step: the first step of the job that was judged.
        own: the local times of the two ranks of each cohort of two.
        named: the suspect of the window before.
        own_best: the test of the job against its own best.
        replayed: the replay of the window before, for the steps that the next one shares with it.
        device: the state on the device's clock, where windows were judged on it; the rest is on the host's.
        counted_step: the last step whose loss was attributed to a suspect, on either clock.
        exchanged: whether the ranks have exchanged anything.
        paused: the pauses that the last window was the first to show.
        rest, rest_ranks: the state of the ranks that recorded the last window, where some did not.
    """

    baseline: whatif.Baseline = field(default_factory=whatif.Baseline)
    ranks: sequential.Evidence = field(default_factory=sequential.Evidence)
    hosts: sequential.Evidence = field(default_factory=sequential.Evidence)
    track: Track = field(default_factory=Track)
    onsets: Mapping[OnsetKey, Onset] = field(default_factory=dict)
    recurrences: Mapping[UnitName, sequential.Recurrence] = field(default_factory=dict)
    alone: sequential.Known = field(default_factory=dict)
    first_step: int | None = None
    own: whatif.OwnTimes = field(default_factory=whatif.OwnTimes)
    named: Suspect | None = None
    own_best: OwnBest = field(default_factory=OwnBest)
    replayed: KeptReplay | None = None
    device: Past | None = None
    counted_step: int = -1
    exchanged: bool = False
    paused: tuple[JobPaused, ...] = ()
    rest: Past | None = None
    rest_ranks: tuple[int, ...] = ()


class PairHistory(NamedTuple):
    """One of two ranks against the past of both, in seconds a step: by how much it is slower than it was (``rose_s``).

    ``alone_s`` of that is its own: without what both became slower by, as on a shared machine, and with what the other
    became faster by, as far as that one had been so fast before. The other one is ``others_least_s`` faster than ever.
    """

    rose_s: float
    alone_s: float
    others_least_s: float


def is_named(candidate: Candidate) -> bool:
    """Whether a candidate is a rank or a host that the sequential tests have named."""
    return candidate.course is not None and candidate.unit is not None


LISTED_FRACTION = 0.01
"""A candidate whose gain is less than this fraction of the window is not listed."""


class WindowEvidence:
    """Everything that decides the label of a replayed window.

    Args:
        valid_N: the complete and undisturbed steps.

    Attributes:
        exposed_s: what a step takes: the median exposed time of those that count. Thresholds are fractions of it.
        present_s: a candidate is present in a step if its gain there is at least this.
        used_N: the steps that count: complete, and of the kind that most of them are.
        seen, like: the profiles of these steps, and of those in the most frequent regime.
        normal: a typical healthy step of that regime; None if none is known, or if the cohorts have changed since.
        excess: exposed time over what is normal, by where it is.
        candidates: possible suspects, the largest gain first.
        gain_R: what mending the last rank of each step would have saved, in all steps, by rank.
        single_s: the largest gain of a rank or a host, in one stage or as a whole, as a mean over the steps that count.
        named_events: of each named unit, the steps of the clear events that named it.
        alone: of each rank that is named by its own notes, what it marked, and the log odds.
        counts: for each named unit, by its ranks, what the kernel counted; None if that is not known.
        measures: all steps, for the test of the job against its own best.
        before, after: the state before this window, and with it, except for what follows from its verdict.
    """

    def __init__(
        self,
        window: Window,
        roles: whatif.Roles,
        replays: list[whatif.SegmentReplay],
        accounting: Accounting,
        valid_N: BoolArray,
        past: Past,
        settings: Settings,
    ) -> None:
        self.window, self.roles, self.replays, self.valid_N = window, roles, replays, valid_N
        self.before, self.settings = past, settings
        self.n_steps, self.n_ranks, _ = window.durations_NRS.shape
        self.step_N = window.first_step + np.arange(self.n_steps)
        self.whole = whatif.profile(replays, roles)
        # What came after a step's last sync is that step's, as in a candidate's gain.
        self.exposed_N = accounting.advances_NS.sum(axis=1)
        self.measures = measured(window, self.exposed_N, self.whole, valid_N)
        used_N = ordinary_steps(steps_of_a_kind(window, valid_N), self.whole, self.exposed_N, settings)
        moved_N = used_N & ~paused_steps(self.measures, settings)
        self.used_N = used_N = moved_N if moved_N.any() else used_N
        leader_GN = np.stack([one.leader_M[: self.n_steps] for one in replays])
        gain_GN = np.stack([one.whole_gain_M[: self.n_steps] for one in replays])
        self.gain_R = np.bincount(leader_GN[:, used_N].ravel(), gain_GN[:, used_N].ravel(), self.n_ranks)
        # The length of a step that no rank delays.
        exposed_U = self.exposed_N[used_N]
        self.usual_s = float(medians(exposed_U - gain_GN.sum(axis=0)[used_N])) or float(exposed_U.mean())
        self.exposed_s = float(medians(exposed_U)) or accounting.exposed_s / accounting.n_steps
        self.present_s = settings.min_event_fraction * self.exposed_s
        regime_N = whatif.regimes_of(window)
        self.regime = Counter(one for one, used in zip(regime_N, used_N, strict=True) if used).most_common(1)[0][0]
        self.like_N = used_N & np.asarray([one == self.regime for one in regime_N])
        self.seen, self.like = self.whole.of(used_N), self.whole.of(self.like_N)
        normal = past.baseline.typical(self.regime)
        alike = normal is not None and normal.level_CS.shape == self.whole.level_NCS.shape[1:]
        self.normal = normal if alike else None
        self.excess = whatif.excess_of(self.seen, self.like, self.normal, self.n_ranks, settings)
        self._find_candidates()

    def _find_candidates(self) -> None:
        window, past, settings = self.window, self.before, self.settings
        ranks, hosts, units = self._tests()
        first_step = window.first_step if past.first_step is None else past.first_step
        known_alone, tests = self._known_alone(), (ranks, hosts)
        self.alone = sequential.named_alone(known_alone, ranks, ranks.next_step - first_step, self.usual_s, settings)
        self.named_events = {
            name: test.events_of(name, settings) for test in tests for name in test.units if test.named(name)
        }
        self.after = replace(
            past,
            ranks=ranks,
            hosts=hosts,
            track=self._track(units),
            recurrences=self._recurrences(units, ranks, hosts),
            alone=known_alone,
            first_step=first_step,
            own=self._own_times(ranks),
            replayed=remembered(window, self.roles, self.replays) if self.valid_N.all() else None,
            exchanged=True,
        )
        candidates = self._single(units)
        self.after = replace(self.after, onsets=self._onsets(candidates))
        named = {one.suspect.ranks: one.suspect for one in candidates if is_named(one)}
        if self.normal is not None:
            # Below their threshold, what all ranks or those of a cohort share is drift, and no rival to a rank.
            kept = past.named is not None and not past.named.is_single
            least = settings.min_group_fraction * (settings.most_fraction if kept else 1.0)
            alike = group_candidates(self.normal, self)
            candidates += [one for one in alike if one.suspect.share >= least]
        # Recurring ones stay in any case: what recurs in few steps gains little over all of them.
        least_s = LISTED_FRACTION * self.exposed_s * float(self.used_N.sum())
        candidates = [one for one in candidates if one.total_s >= least_s or one.suspect.pattern == "recurring"]
        # (of equals the whole before a stage)
        self.candidates = sorted(candidates, key=lambda one: (-one.total_s, one.suspect.stage is not None))
        self.single_s = max((float(unit.gain_NS[self.used_N].mean(axis=0).max()) for unit in units), default=0.0)
        self.counts = {ranks: counts_of(suspect, window) for ranks, suspect in named.items()}

    def tests_of(self, unit: UnitName) -> sequential.Evidence:
        return self.after.ranks if isinstance(unit, int) else self.after.hosts

    def keep_fraction(self, suspect: Suspect) -> float:
        """The factor on a suspect's thresholds: below 1 if the window before named it."""
        named = self.before.named
        same = named is not None and (named.scope, named.ranks) == (suspect.scope, suspect.ranks)
        return self.settings.most_fraction if same else 1.0

    def log_odds(self, unit: UnitName) -> float:
        recurrence = self.after.recurrences.get(unit)
        marked = self.alone[unit][2] if isinstance(unit, int) and unit in self.alone else 0.0
        return max(self.tests_of(unit).log_odds(unit), marked, 0.0 if recurrence is None else recurrence.log_odds)

    @property
    def usual_queued_s(self) -> float | None:
        """For how long the rank that waits longest for a CPU does so in a usual step; None if that is not known."""
        return self.before.own_best.queued_s

    def own_fraction(self, candidate: Candidate) -> float:
        """A candidate's share of the clear events since its onset that are its own or those of the next likeliest unit.

        Only events in its phase count, if it is recurring, or in the steps that it marked.
        """
        assert candidate.course is not None
        assert candidate.unit is not None
        began, period = candidate.course.onset.step, candidate.course.period or 1
        own_steps = candidate.course.own_steps
        events = (
            one
            for one in self.tests_of(candidate.unit).events
            if one.step >= began and (one.step in own_steps if own_steps else (one.step - began) % period == 0)
        )
        times = Counter(one.unit for one in events)
        own = times.pop(candidate.unit, 0)
        return own / max(1, own + max(times.values(), default=0))

    @property
    def best_gains_s(self) -> float:
        """What mending the last rank of each step would have saved, as a mean over the steps that count."""
        return float(self.gain_R.sum()) / float(self.used_N.sum())

    @property
    def shared_s(self) -> float:
        """The excess that all ranks, or those of a cohort, share."""
        gains = [one.suspect.gain_s for one in self.candidates if not one.suspect.is_single]
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

    def _events(self, arrivals: sequential.Arrivals, new_N: BoolArray) -> list[sequential.ClearEvent]:
        """The clear events in some rows, in order: at most one a step, that of the unit with the largest gain.

        An event belongs to the step in which the leader lost most of the time: a delay after a step's last sync stage
        shows in the row of the next step.
        """
        found: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for one, (number_M, gain_M) in zip(self.replays, arrivals.last, strict=True):
            for row in np.flatnonzero((gain_M[: self.n_steps] > 0.0) & new_N).tolist():
                step = row - int(one.offset_S[one.excess_MS[row].argmax()])
                found[step][int(number_M[row])] += float(gain_M[row])
        largest = ((step, *max(found[step].items(), key=lambda one: one[1])) for step in sorted(found))
        return [
            sequential.ClearEvent(self.window.first_step + step, arrivals.names[number], gain_s / self.usual_s)
            for step, number, gain_s in largest
            if gain_s > self.settings.min_event_fraction * self.usual_s
        ]

    def _tests(self) -> tuple[sequential.Evidence, sequential.Evidence, list[Unit]]:
        """The tests of ranks and of hosts after their new steps, and the units that delayed the window most."""

        def advance(before: sequential.Evidence, arrivals: sequential.Arrivals) -> sequential.Evidence:
            n_units = len(arrivals.names)
            if before.n_units != n_units:
                before = sequential.Evidence(n_units, before.next_step)
            events = self._events(arrivals, self.used_N & (self.step_N >= before.next_step))
            return sequential.advanced(before, events, max(before.next_step, self.window.last_step + 1), self.settings)

        least_s = LISTED_FRACTION * float(self.exposed_N[self.used_N].sum())
        replays, roles, places = self.replays, self.roles, places_of(self.window.hosts)
        of_ranks = sequential.arrivals_of_ranks(replays, self.n_ranks)
        ranks = advance(self.before.ranks, of_ranks)
        units = rank_units(replays, sequential.units_to_examine(of_ranks, ranks, least_s), roles)
        if places is None:
            return ranks, self.before.hosts, self._held_back(units)
        elsewhere = [last_elsewhere(one, places) for one in replays]
        of_hosts = sequential.arrivals_of_hosts(replays, elsewhere, places, self.settings)
        hosts = advance(self.before.hosts, of_hosts)
        examined, alike = sequential.units_to_examine(of_hosts, hosts, least_s), self.settings.larger_part_fraction
        units += host_units(replays, places, elsewhere, examined, roles, alike)
        return ranks, hosts, self._held_back(units)

    def _known_alone(self) -> sequential.Known:
        """What ranks do alone by their own notes, after the new steps; special steps count too."""
        noted_NR = self.window.noted_NR
        if noted_NR is None:
            return self.before.alone
        new_N = self.valid_N & (self.step_N >= self.before.ranks.next_step)
        events = self._events(sequential.arrivals_of_ranks(self.replays, self.n_ranks), new_N)
        lost_s = {(one.unit, one.step): one.share * self.usual_s for one in events}
        found = dict(self.before.alone)
        for n, rank in np.argwhere((noted_NR != "") & new_N[:, None]).tolist():
            step, key = self.window.first_step + n, (rank, str(noted_NR[n, rank]))
            found[key] = found.pop(key, sequential.Alone(step)).after(step, lost_s.get((rank, step), 0.0))
        return dict(list(found.items())[-sequential.MAX_KNOWN :])

    def _held_back(self, units: list[Unit]) -> list[Unit]:
        """The units, each with what it adds to the sync stages while the system keeps it from running.

        How long the sync stages take by themselves a baseline alone says: without one, contention is left out.
        """
        window, normal = self.window, self.normal
        held = HeldBack.of(window, limited=normal is None)
        if held is None:
            return units
        longer_NS = np.clip(self.whole.sync_NS - (0.0 if normal is None else normal.sync_S), 0.0, None)
        return [
            one
            if sequential.is_marked(window.noted_NR, one.name, one.gain_NS[:, -1] * self.used_N, self.settings)
            else charged(one, held, longer_NS, self)
            for one in units
        ]

    def _recurrences(
        self, units: Sequence[Unit], ranks: sequential.Evidence, hosts: sequential.Evidence
    ) -> dict[UnitName, sequential.Recurrence]:
        """The recurrence of each unit that has one; its onset is the one that was found first."""
        found = {}
        for unit in units:
            now = sequential.recurrence_of(ranks if unit.scope == "rank" else hosts, unit.name, self.settings)
            if now is not None:
                known = self.before.recurrences.get(unit.name, now)
                same = (known.period, known.phase) == (now.period, now.phase)
                found[unit.name] = replace(now, onset=known.onset) if same else now
        return found

    def _track(self, units: Sequence[Unit]) -> Track:
        """The track of all ranks of a small job, or of those examined, and of the hosts examined, with these steps."""
        used_N, over = self.used_N, {unit.name: unit.over_NS[self.used_N] for unit in units}
        rest = (
            [rank for rank in range(self.n_ranks) if rank not in over]
            if self.n_ranks <= sequential.MAX_EXAMINED
            else []
        )
        if rest:
            ranks = np.asarray(rest, np.intp)
            over_NXS = np.sum([one.over_NXS(ranks, self.roles) for one in self.replays], axis=0)
            over |= {rank: over_NXS[used_N, x] for x, rank in enumerate(rest)}
        return self.before.track.after(self.step_N[used_N], over)

    def _own_times(self, ranks: sequential.Evidence) -> whatif.OwnTimes:
        """The local times of two ranks, with the steps before any fault that is likely by now."""
        likely = self.settings.most_fraction * self.settings.naming_log_odds
        began = min((one.onset for one in ranks.units.values() if max(one.log_odds) >= likely), default=None)
        like_N = self.like_N if began is None else self.like_N & (self.step_N < began)
        if like_N.sum() < self.settings.min_away_steps:
            return self.before.own
        return self.before.own.after(self.regime, self.whole.of(like_N), int(self.step_N[like_N][-1]))

    def _onsets(self, candidates: Sequence[Candidate]) -> dict[OnsetKey, Onset]:
        """The onsets of what is named now, and of units that are named still but are not in the window."""
        still = self.named_events.keys() | self.after.recurrences.keys()
        found = {key: onset for key, onset in self.before.onsets.items() if key[0] in still}
        for one in candidates:
            if one.unit is not None and one.course is not None and one.course.own_steps is None:
                found[one.unit, one.suspect.stage, one.course.period] = one.course.onset
        return found

    def _single(self, units: list[Unit]) -> list[Candidate]:
        """Candidates of scope rank and host: a host instead of its ranks where these are slow alike."""
        found: list[Candidate] = []
        # ranks come first
        for unit in units:
            here = candidates_of(unit, self)
            if unit.scope == "host":
                mine = [one for one in found if one.suspect.rank in unit.ranks]
                best_s = max((one.total_s for one in here), default=0.0)
                if max((one.total_s for one in mine), default=0.0) >= self.settings.larger_part_fraction * best_s:
                    continue
                found = [one for one in found if one.suspect.rank not in unit.ranks]
            found += here
        return found
