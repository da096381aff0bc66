"""The evidence for a verdict: what a window shows, beside the state of the run. `judging` calls it.

`WindowEvidence` compares a window's complete steps of one kind, without special and disturbed ones, uses its replay,
and advances the tests of the run by its new steps. In large jobs, two overlapping windows share the replay of their
common steps: a row depends on its own step and on what came after the last sync of the step before, so the rows of
shared steps are the same in both windows, except the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sftriage.model.events import JobPaused
from sftriage.model.verdicts import Settings, SlowLink, Suspect
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
from sftriage.verdict.links import Rates
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

COMPARED_RANKS = 8
"""Ranks whose times must be equal in the shared steps of two windows for the replay to be reused."""

Parts = tuple[StageSchema, int, whatif.Roles, tuple[tuple[object, ...], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class KeptReplay:
    """The replays of a window, kept for the next one, with the times of a few ranks (N × X × S)."""

    first_step: int
    parts: Parts
    some_NXS: FloatArray
    replays: tuple[whatif.SegmentReplay, ...]


def remembered(window: Window, roles: whatif.Roles, replays: list[whatif.SegmentReplay]) -> KeptReplay | None:
    """The replays for the next window; None for a small job, where replaying again is faster."""
    if window.durations_NRS.shape[1] <= whatif.SAMPLE_RANKS:
        return None
    emptied = tuple(replace(replay, segment=replace(replay.segment, local=(), own=None)) for replay in replays)
    kept_segments = [replay.segment for replay in replays]
    return KeptReplay(window.first_step, _parts(window, roles, kept_segments), _some(window), emptied)


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
    replayed_parts = []
    for first, last in ((window.first_step, window.first_step), (last_known, window.last_step)):
        replays, complete_N = whatif.replayed(window.steps(first, last), roles)
        if not complete_N.all():
            return None
        replayed_parts.append(replays)
    one_step, new = replayed_parts
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


def _parts(window: Window, roles: whatif.Roles, parts: list[Segment]) -> Parts:
    """What two windows must have in common so that their rows are the same: ranks and columns."""
    columns = tuple(
        (column.stage, column.offset, column.over_NR is None, column.up_to_NR is None)
        for segment in parts
        for column in segment.columns
    )
    return window.schema, window.attempt, roles, columns


def _some(window: Window) -> FloatArray:
    return window.durations_NRS[:, :: window.durations_NRS.shape[1] // COMPARED_RANKS].copy()


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
    """The steps without *special* ones, which do other work though they note no kind, and those right after them.

    In a special step (nearly) all ranks spend time in a stage that the other steps do not have, as in an evaluation. If
    many steps are special, they are ordinary.
    """
    common_NS = whole.common_NCS.min(axis=1)
    usual_S = medians(common_NS[used_N], axis=0)
    over_NS = common_NS - usual_S
    # (of this step's own length: if a late rank makes it ten times as long, what all ranks spend more is little)
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
        ranks, hosts: their sequential tests.
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
        best_rates: the highest rates of the links between hosts.
        link: the slow link that the last window showed.
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
    best_rates: Rates = field(default_factory=dict)
    link: SlowLink | None = None


class PairHistory(NamedTuple):
    """One of two ranks against the past of both, in seconds a step: it is slower than it was by ``rose_s``.

    ``alone_s`` of that is its own: less what both became slower by, as on a shared machine, plus what the other became
    faster by, down to that one's fastest past. The other is ``others_least_s`` faster than ever.
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
        exposed_s: the length of a step: the median exposed time of ``used_N``. Thresholds are fractions of it.
        present_s: a candidate is present in a step if its gain there is at least this.
        used_N: the steps that count: complete, and of the most frequent kind.
        profile, like: the profiles of these steps, and of those in the most frequent regime.
        normal: a typical healthy step of that regime; None if none is known, or if the cohorts have changed since.
        excess: exposed time over what is normal, by its place.
        candidates: possible suspects, the largest gain first.
        gain_R: what fixing the last rank of each step would have saved, in all steps, by rank.
        single_s: the largest gain of a rank or a host, in one stage or as a whole, as a mean over ``used_N``.
        named_events: for each named unit, the steps of the clear events that named it.
        alone: for each rank named by its own notes, what it marked, and the log odds.
        counts: for each named unit, by its ranks, the kernel's counters; None if unknown.
        measures: all steps, for the test of the job against its own best.
        before, after: the state before and after this window; the verdict's own consequences are not in it yet.
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
        # Time after a step's last sync belongs to that step, as in a candidate's gain.
        self.exposed_N = accounting.advances_NS.sum(axis=1)
        self.measures = measured(window, self.exposed_N, self.whole, valid_N)
        used_N = ordinary_steps(steps_of_a_kind(window, valid_N), self.whole, self.exposed_N, settings)
        moved_N = used_N & ~paused_steps(self.measures, settings)
        self.used_N = used_N = moved_N if moved_N.any() else used_N
        leader_GN = np.stack([replay.leader_M[: self.n_steps] for replay in replays])
        gain_GN = np.stack([replay.whole_gain_M[: self.n_steps] for replay in replays])
        self.gain_R = np.bincount(leader_GN[:, used_N].ravel(), gain_GN[:, used_N].ravel(), self.n_ranks)
        # The length of a step that no rank delays.
        exposed_U = self.exposed_N[used_N]
        self.usual_s = float(medians(exposed_U - gain_GN.sum(axis=0)[used_N])) or float(exposed_U.mean())
        self.exposed_s = float(medians(exposed_U)) or accounting.exposed_s / accounting.n_steps
        self.present_s = settings.min_event_fraction * self.exposed_s
        regime_N = whatif.regimes_of(window)
        used_regimes = [regime for regime, used in zip(regime_N, used_N, strict=True) if used]
        self.regime = Counter(used_regimes).most_common(1)[0][0]
        self.like_N = used_N & np.asarray([regime == self.regime for regime in regime_N])
        self.profile, self.like = self.whole.of(used_N), self.whole.of(self.like_N)
        normal = past.baseline.typical(self.regime)
        alike = normal is not None and normal.level_CS.shape == self.whole.level_NCS.shape[1:]
        self.normal = normal if alike else None
        self.excess = whatif.excess_of(self.profile, self.like, self.normal, self.n_ranks, settings)
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
        named = {candidate.suspect.ranks: candidate.suspect for candidate in candidates if is_named(candidate)}
        if self.normal is not None:
            # Below its threshold, what all ranks or those of a cohort share is drift, and no rival to a rank.
            kept = past.named is not None and not past.named.is_single
            least = settings.min_group_fraction * (settings.most_fraction if kept else 1.0)
            alike = group_candidates(self.normal, self)
            candidates += [candidate for candidate in alike if candidate.suspect.share >= least]
        # Recurring ones always stay: a fault in few steps gains little over all of them.
        least_s = LISTED_FRACTION * self.exposed_s * float(self.used_N.sum())
        listed = [each for each in candidates if each.total_s >= least_s or each.suspect.pattern == "recurring"]
        # (if equal, all stages before one)
        self.candidates = sorted(listed, key=lambda each: (-each.total_s, each.suspect.stage is not None))
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
        """How long the rank that waits longest for a CPU waits in a usual step; None if unknown."""
        return self.before.own_best.queued_s

    def own_fraction(self, candidate: Candidate) -> float:
        """A candidate's share of the clear events since its onset, of its own and those of the next likeliest unit.

        If it is recurring, only events in its phase count; if it marks its steps, only events in these.
        """
        assert candidate.course is not None
        assert candidate.unit is not None
        began, period = candidate.course.onset.step, candidate.course.period or 1
        own_steps = candidate.course.own_steps
        events = (
            event
            for event in self.tests_of(candidate.unit).events
            if event.step >= began and (event.step in own_steps if own_steps else (event.step - began) % period == 0)
        )
        times = Counter(event.unit for event in events)
        own = times.pop(candidate.unit, 0)
        return own / max(1, own + max(times.values(), default=0))

    @property
    def best_gains_s(self) -> float:
        """What fixing the last rank of each step would have saved, as a mean over the steps that count."""
        return float(self.gain_R.sum()) / float(self.used_N.sum())

    @property
    def shared_s(self) -> float:
        """The excess that all ranks, or those of a cohort, share."""
        gains = [candidate.suspect.gain_s for candidate in self.candidates if not candidate.suspect.is_single]
        return max(self.excess.group_s + self.excess.sync_s, *gains, 0.0)

    def is_one_of_two(self, suspect: Suspect) -> bool:
        """Whether a suspect is one of two ranks, so that their past decides which of them is slow."""
        return suspect.rank is not None and len(self.roles.members[self.roles.role_R[suspect.rank]]) == 2

    def pair_history(self, candidate: Candidate) -> PairHistory | None:
        """One of two ranks against the past of both, in the steps that its fault fills; None if unknown."""
        rank, course = candidate.suspect.rank, candidate.course
        if rank is None or course is None:
            return None
        own_KR = self.after.own.known(self.regime, len(self.roles.role_R), course.onset.earliest)
        if not len(own_KR):
            return None
        other = next(int(member) for member in self.roles.members[self.roles.role_R[rank]] if member != rank)
        now_R, usual_R = self.profile.own_NR[course.filled_N[self.used_N]].mean(axis=0), medians(own_KR, axis=0)
        least_s = float(own_KR[:, other].min())
        rose_s, others_s = float(now_R[rank] - usual_R[rank]), float(now_R[other] - usual_R[other])
        # A shared machine may become as fast again, for both ranks, as it was before.
        quicker_s = min(0.0, max(others_s, least_s - float(usual_R[other])))
        return PairHistory(rose_s, rose_s - quicker_s - 2.0 * max(0.0, others_s), least_s - float(now_R[other]))

    @property
    def longer_s(self) -> float | None:
        """By how much a typical step is longer than a healthy one; None if no healthy one is known."""
        return None if self.normal is None else self.like.typical.total_s - self.normal.total_s

    def _events(self, arrivals: sequential.Arrivals, new_N: BoolArray) -> list[sequential.ClearEvent]:
        """The clear events in some rows, in order: at most one a step, of the unit with the largest gain.

        An event belongs to the step in which the leader lost most of the time: a delay after a step's last sync stage
        shows in the row of the next step.
        """
        gains_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for replay, (number_M, gain_M) in zip(self.replays, arrivals.last, strict=True):
            for row in np.flatnonzero((gain_M[: self.n_steps] > 0.0) & new_N).tolist():
                step = row - int(replay.offset_S[replay.excess_MS[row].argmax()])
                gains_s[step][int(number_M[row])] += float(gain_M[row])
        largest = ((step, *max(gains_s[step].items(), key=lambda gain: gain[1])) for step in sorted(gains_s))
        return [
            sequential.ClearEvent(self.window.first_step + step, arrivals.names[number], gain_s / self.usual_s)
            for step, number, gain_s in largest
            if gain_s > self.settings.min_event_fraction * self.usual_s
        ]

    def _tests(self) -> tuple[sequential.Evidence, sequential.Evidence, list[Unit]]:
        """The tests of ranks and of hosts with the new steps, and the units that delayed the window most."""

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
        elsewhere = [last_elsewhere(replay, places) for replay in replays]
        of_hosts = sequential.arrivals_of_hosts(replays, elsewhere, places, self.settings)
        hosts = advance(self.before.hosts, of_hosts)
        examined, alike = sequential.units_to_examine(of_hosts, hosts, least_s), self.settings.larger_part_fraction
        units += host_units(replays, places, elsewhere, examined, roles, alike)
        return ranks, hosts, self._held_back(units)

    def _known_alone(self) -> sequential.Known:
        """What ranks do alone by their own notes, with the new steps; special steps count too."""
        noted_NR = self.window.noted_NR
        if noted_NR is None:
            return self.before.alone
        new_N = self.valid_N & (self.step_N >= self.before.ranks.next_step)
        events = self._events(sequential.arrivals_of_ranks(self.replays, self.n_ranks), new_N)
        lost_s = {(event.unit, event.step): event.share * self.usual_s for event in events}
        known = dict(self.before.alone)
        for n, rank in np.argwhere((noted_NR != "") & new_N[:, None]).tolist():
            step, key = self.window.first_step + n, (rank, str(noted_NR[n, rank]))
            known[key] = known.pop(key, sequential.Alone(step)).after(step, lost_s.get((rank, step), 0.0))
        return dict(list(known.items())[-sequential.MAX_KNOWN :])

    def _held_back(self, units: list[Unit]) -> list[Unit]:
        """The units, each with what it adds to the sync stages while the system keeps it from running.

        Only a baseline shows how long the sync stages take by themselves: without it, contention is left out.
        """
        window, normal = self.window, self.normal
        held_back = HeldBack.of(window, limited=normal is None)
        if held_back is None:
            return units
        longer_NS = np.clip(self.whole.sync_NS - (0.0 if normal is None else normal.sync_S), 0.0, None)
        return [
            unit
            if sequential.is_marked(window.noted_NR, unit.name, unit.gain_NS[:, -1] * self.used_N, self.settings)
            else charged(unit, held_back, longer_NS, self)
            for unit in units
        ]

    def _recurrences(
        self, units: Sequence[Unit], ranks: sequential.Evidence, hosts: sequential.Evidence
    ) -> dict[UnitName, sequential.Recurrence]:
        """The recurrence of each unit that has one, with the onset that was found first."""
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
            over_NXS = np.sum([replay.over_NXS(ranks, self.roles) for replay in self.replays], axis=0)
            over |= {rank: over_NXS[used_N, x] for x, rank in enumerate(rest)}
        return self.before.track.after(self.step_N[used_N], over)

    def _own_times(self, ranks: sequential.Evidence) -> whatif.OwnTimes:
        """The local times of two ranks, with the steps before any fault that is likely by now."""
        likely = self.settings.most_fraction * self.settings.naming_log_odds
        began = min((unit.onset for unit in ranks.units.values() if max(unit.log_odds) >= likely), default=None)
        like_N = self.like_N if began is None else self.like_N & (self.step_N < began)
        if like_N.sum() < self.settings.min_away_steps:
            return self.before.own
        return self.before.own.after(self.regime, self.whole.of(like_N), int(self.step_N[like_N][-1]))

    def _onsets(self, candidates: Sequence[Candidate]) -> dict[OnsetKey, Onset]:
        """The onsets of the units named in this window, and of those still named but not in it."""
        still = self.named_events.keys() | self.after.recurrences.keys()
        onsets = {key: onset for key, onset in self.before.onsets.items() if key[0] in still}
        for candidate in candidates:
            if candidate.unit is not None and candidate.course is not None and candidate.course.own_steps is None:
                onsets[candidate.unit, candidate.suspect.stage, candidate.course.period] = candidate.course.onset
        return onsets

    def _single(self, units: list[Unit]) -> list[Candidate]:
        """Candidates of scope rank and host: a host instead of its ranks if these are slow alike."""
        candidates: list[Candidate] = []
        # ranks come first
        for unit in units:
            of_unit = candidates_of(unit, self)
            if unit.scope == "host":
                of_its_ranks = [candidate for candidate in candidates if candidate.suspect.rank in unit.ranks]
                host_s, rank_s = (max((each.total_s for each in some), default=0.0) for some in (of_unit, of_its_ranks))
                if rank_s >= self.settings.larger_part_fraction * host_s:
                    continue
                candidates = [candidate for candidate in candidates if candidate.suspect.rank not in unit.ranks]
            candidates += of_unit
        return candidates
