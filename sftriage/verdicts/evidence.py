"""The evidence for a verdict: what a window shows, beside the state of the run; `gathering` puts it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.overlap import KeptReplay
from sftriage.frontier.profile import Profile, Typical
from sftriage.frontier.roles import Roles
from sftriage.frontier.units import UnitName
from sftriage.model.verdicts import Suspect
from sftriage.verdicts.alone import Alone, Known
from sftriage.verdicts.baseline import (
    Baseline,
    Excess,
    OwnTimes,
    Regime,
)
from sftriage.verdicts.candidates import Candidate, OnsetKey
from sftriage.verdicts.course import NO_TRACK, Onset, Track
from sftriage.verdicts.pauses import Pause
from sftriage.verdicts.regression import OwnBest, StepMeasures
from sftriage.verdicts.sequential import Evidence, Recurrence
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.system import SystemCounts, stage_of


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
