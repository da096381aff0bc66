"""Verdicts on windows, the suspects they name, and the thresholds: frozen records, standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sftriage.model.windows import MOST_FRACTION, InterpreterCode, SystemCode

Label = Literal["healthy", "suspect", "stalled", "needs_evidence"]
NAMING: frozenset[Label] = frozenset({"suspect", "stalled"})
"""The labels that name a suspect. Other verdicts may list candidates that are not certain enough."""
UNDECIDED = frozenset({"low_coverage", "self_inflicted", "mixed_roles", "no_sync"})
"""Reasons that hold on any clock, and for which a window shows nothing, not even the job's own speed."""
Scope = Literal["rank", "host", "cohort", "all"]
Clock = Literal["host", "device"]
Pattern = Literal["chronic", "recurring", "one-off"]
Direction = Literal["send", "receive", "both"]
Against = Literal["peers", "reverse", "before", "interface"]
"""What a slow link is compared with: the other hosts' links, the other direction, itself before, its interface."""


@dataclass(frozen=True, slots=True)
class Regression:
    """The job is slower than its own best.

    Attributes:
        since_step: the approximate step at which it began, between ``since_first_step`` and ``since_last_step``.
        fraction: by how much a typical step is longer than ``best_step_s``, as a fraction of that.
        scope: ``all`` if the ranks have become slower alike, ``some`` if late ranks make the step longer.
        stages: the slower stages, in the order of the step; empty if all are slower alike, or only some ranks are.
        best_step_s: the duration of a typical step at the job's best, with the same work.
        kind: the kind of step that has become slower, "" for ordinary ones.
        until_step: the approximate step from which the job is at its best again; None while it is not.
        descheduled_fraction: the part of the slowdown that the longest wait of a rank for a CPU explains; None if no
            rank waits longer than at the job's best, or if unknown. It decides nothing.
    """

    since_step: int
    since_first_step: int
    since_last_step: int
    fraction: float
    scope: Literal["all", "some"]
    stages: tuple[str, ...]
    best_step_s: float
    kind: str = ""
    until_step: int | None = None
    descheduled_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class OwnWork:
    """Work that a rank does alone, by its own note (``kind``), while the others wait, such as an evaluation.

    ``fraction`` of the steps that its fault fills have the note. In the run so far it delayed the others in ``times``
    steps, which cost ``lost_s`` seconds.
    """

    kind: str
    fraction: float
    times: int
    lost_s: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible cause of exposed time: a scope, a stage, and what fixing it would save.

    Attributes:
        scope: one rank, the ranks of one host, those of one cohort, or all; the field of that name identifies it.
        ranks: the ranks of the scope.
        host: its name; also that of a rank which is alone on its host.
        stage: the stage, or None if all local stages of the scope are slow alike.
        gain_s: exposed seconds a step that fixing the suspect would save (if it were as its reference): the mean over
            the steps that its fault fills (the whole window for a ``chronic`` fault that was there from its start).
        share: what it adds to those steps, as a fraction of their exposed time: ``gain_s``, or a little more if that is
            hardly worth a capture and the jitter of others hides part of a steady delay.
        persistence: fraction of the window's steps in which the suspect's gain was there.
        pattern: ``chronic``: it lasts; ``recurring``: it comes back; ``one-off``: it has passed.
        period_steps: the period of a ``recurring`` fault.
        onset_step: the most likely first step of the fault; for a ``recurring`` one, one of its own steps.
        onset_range: the earliest and the latest likely first step.
        descheduled_fraction: the part of its lateness that was waiting for a CPU; None if unknown.
        contended_fraction: the part of its lateness that contention for CPUs may explain: its wait for a CPU beyond its
            peers', or beyond the job's usual wait, and, unless one stage alone is slow, its longer running time; None
            if unknown.
        system: what else the system did that explains most of its lateness, and which part; None if nothing, or if
            unknown.
        alone: what it does alone, by its own note, in most of the steps that its fault fills; None if it notes nothing.
        on_host: the host of a ``rank``, if the job has several.
    """

    scope: Scope
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    rank: int | None = None
    host: str | None = None
    cohort: str | None = None
    pattern: Pattern = "chronic"
    period_steps: int | None = None
    onset_step: int | None = None
    onset_range: tuple[int, int] | None = None
    descheduled_fraction: float | None = None
    contended_fraction: float | None = None
    system: tuple[SystemCode, float] | None = None
    interpreter: tuple[InterpreterCode, float] | None = None
    alone: OwnWork | None = None
    on_host: str | None = None

    @property
    def is_single(self) -> bool:
        """Whether it is one rank or one host, which have peers in the same step."""
        return self.scope in ("rank", "host")

    @property
    def identity(self) -> tuple[Scope, tuple[int, ...], str | None]:
        """Scope, ranks and stage. A slow host is slow in changing stages, so its stage does not count."""
        return self.scope, self.ranks, None if self.scope == "host" else self.stage

    @property
    def by_system(self) -> tuple[SystemCode, float] | None:
        """What the system did that explains most of its lateness, waiting for a CPU included, and which part."""
        if self.system is not None:
            return self.system
        waited = self.descheduled_fraction
        return None if waited is None or waited < MOST_FRACTION else ("descheduled", waited)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link between hosts that slows the exchange of all ranks; no rank is slow for it.

    Attributes:
        host, peer: the host whose link is slow, to or from all others; with a ``peer``, the link between them, where
            nothing shows whose end is slow.
        direction: whether it is slow to ``send``, to ``receive``, or ``both``; with a peer, ``send`` is from the host
            to it.
        bits_per_s: its rate while it is busy.
        usual_bits_per_s: what that is compared with, which is ``against``.
        cost_s: exposed seconds a step that it would save if it were as fast as that.
        again_per_s: segments sent again a second.
    """

    host: str
    peer: str
    direction: Direction
    bits_per_s: float
    usual_bits_per_s: float
    against: Against
    cost_s: float = 0.0
    again_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lost:
    """What one suspect, or a slow link, cost a job of ``ranks`` ranks, in steps that no earlier window has counted.

    ``step_s`` has the exposed seconds that fixing it would have saved in each step, from ``first_step`` on. ``of`` is
    the suspect if the verdict does not name it: the one named before a capture that disturbs the window.
    """

    first_step: int
    step_s: tuple[float, ...]
    ranks: int
    of: Suspect | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One window's label, its reasons, its ranked suspects, and every number that decided.

    ``exposed_s`` is the mean exposed time of a step; ``advances_s`` sums to it to floating-point precision. ``step_s``
    is the typical step: the median, which pauses and occasional long steps do not change. ``leaders`` has for each
    stage the rank that led the frontier at its boundary, weighted by the advance; None if the frontier never moved. At
    the end of the ``sync`` stages all ranks are together, and the leader is a matter of microseconds. All times are on
    ``clock``.

    A ``stalled`` verdict is about the step in progress: it is both the first and the last step, ``exposed_s`` is its
    duration so far, a suspect's ``gain_s`` is how long the others have been waiting, and there is no frontier yet.

    ``regression`` is set while the job is slower than its own best, and once when that ends. ``lost`` is what the
    window adds to the cost of stragglers. ``link`` is a slow link between hosts.
    """

    first_step: int
    last_step: int
    label: Label
    reasons: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    exposed_s: float
    advances_s: Mapping[str, float]
    leaders: Mapping[str, int | None]
    numbers: Mapping[str, float]
    sync: tuple[str, ...] = ()
    clock: Clock = "host"
    attempt: int = 0
    regression: Regression | None = None
    lost: Lost | None = None
    link: SlowLink | None = None

    @property
    def step_s(self) -> float:
        """The duration of a typical step; the mean if unknown."""
        return self.numbers.get("typical_step_s", self.exposed_s)

    @property
    def named(self) -> Suspect | None:
        """The named suspect; None if there is none: the suspects of a held window are only candidates."""
        return self.suspects[0] if self.suspects and self.label in NAMING else None


def is_informative(label: Label, reasons: Iterable[str]) -> bool:
    """Whether a verdict can show which rank is slow: not if ranks are missing or captured, or all wait."""
    return label != "stalled" and UNDECIDED.isdisjoint(reasons)


@dataclass(frozen=True, slots=True)
class Settings:
    """Thresholds of the label. Fractions are of the exposed step time unless stated otherwise.

    What is worth a capture:

    Attributes:
        min_gain_fraction: the least that a rank or a host adds to a step to be a suspect (4 %: above the jitter of a
            calm job, and low enough to find a fault of 5 %, part of which jitter hides).
        min_group_fraction: ``min_gain_fraction`` for what all ranks share, against the job's past instead of peers in
            the same step (15 %: a machine's clock, neighbours and caches drift by several percent within minutes).
        min_lateness_fraction: lateness of the last rank over the median one, beyond jitter, that needs a reason where
            no single rank or host is worth a capture (10 %: ranks that share cores take turns at being last).

    Who it is (docs/verdicts.md, "The evidence"):

    Attributes:
        false_names_per_million_steps: how often chance alone may name a unit, in a job with a clear event in every step
            (0.1: once in 10⁷ steps, a month at four a second). `naming_log_odds` is its logarithm.
        event_fractions: the shares of a step from which a delay is a clear event of a larger size, besides
            ``min_gain_fraction`` / 2 (10 %, 30 %, a whole step: a large fault stands out from small hiccups).
        guilty_fractions: the fraction of clear events that a unit at fault causes, one test each (90 %; 65 % amid the
            hiccups of others). The first is also the fraction of slower steps in a job that has become slower (in one
            that has not, at most half, whatever the distribution of its times).
        min_chance: the probability that chance makes a given unit last, at least: 1 / R, but not below this (1/8: a
            hiccup lasts for several steps, whose events are not independent). After an event of its own it is more
            where the runs of other units' events go on more often.
        whole_factor: multiple of ``naming_log_odds`` to name a unit in all its stages, or one most of whose lateness
            contention for CPUs may explain, and the most that any log odds can be (2: a process that has the unit's
            core for a second or two makes it slow for dozens of steps; and a bounded sum can fall again).
        recurrence_log_odds: log odds against chance from which events fall into one phase of a period: a unit's, or all
            others' too, so that the period is the job's (5: one time in 150).
        larger_part_fraction: a stage with this much of its rank's excess is named instead of the rank, and a rank with
            this much of its host's gain instead of the host; and this much of a host's ranks must be slow (0.65: the
            smallest scope that explains most of it). `smaller_part_fraction` is the rest.
        most_fraction: "most of it" (half). What a suspect's gain must be of its lateness where it is last, and of what
            all ranks share; a rival has less than this of its clear events, and of its gain. Who was named stays so
            down to this of the thresholds. This of the gain shows a fault in a captured step. The device's clock is
            used if this many steps have it, and it and the host's differ by less than this factor.

    When it was present:

    Attributes:
        onset_log_likelihood: onsets whose log likelihood is at most this much below the best one's are given as its
            range, and steps at which the evidence that the job is slower was at most this (2; 95 % are 1.92, by Wilks).
        min_away_steps: steps without it after which a fault may be over (8: a hiccup lasts a few), if it was never
            absent for half as long before.
        min_persistence_fraction: fraction of a window's steps in which something must be present (0.6): what all ranks
            share; a unit that contention may have slowed; one rank's share of the lateness (else it is roaming); the
            fault in the captured steps.

    What can be judged:

    Attributes:
        min_coverage_fraction: fraction of (step, rank) vectors that must be there (0.95).
        shift_sigmas: standard errors by which a change within a window stands out, where there is no baseline (5: steps
            are correlated, so that nominal significance overstates).
        clear_sigmas: standard deviations beyond which a difference is not chance (3: one time in a thousand).

    Whether the job has become slower than its own best:

    Attributes:
        best_steps: steps whose median is one sample of the job's speed (50: a checkpoint, an evaluation and the slow
            start of an epoch among them do not count).
        best_fraction: fraction of these samples, two at least, that must be as good for a level to be the job's best (a
            quarter: not the luckiest sample of a month).
        min_over_best_fraction: how much slower than its best a job must be to be called regressed (5 %).
        slower_fraction: a step counts as slower if it, or one stage of it, takes this much of a step longer than the
            best (3 %: below the 5 % that are reported; more where blocks of ``best_steps`` differ by chance).
    """

    min_gain_fraction: float = 0.04
    min_group_fraction: float = 0.15
    min_lateness_fraction: float = 0.10

    false_names_per_million_steps: float = 0.1
    event_fractions: tuple[float, ...] = (0.1, 0.3, 1.0)
    guilty_fractions: tuple[float, ...] = (0.9, 0.65)
    min_chance: float = 0.125
    whole_factor: float = 2.0
    recurrence_log_odds: float = 5.0
    larger_part_fraction: float = 0.65
    most_fraction: float = 0.5

    onset_log_likelihood: float = 2.0
    min_away_steps: int = 8
    min_persistence_fraction: float = 0.6

    min_coverage_fraction: float = 0.95
    shift_sigmas: float = 5.0
    clear_sigmas: float = 3.0

    best_steps: int = 50
    best_fraction: float = 0.25
    min_over_best_fraction: float = 0.05
    slower_fraction: float = 0.03

    @property
    def min_event_fraction(self) -> float:
        return self.min_gain_fraction / 2

    @property
    def event_sizes(self) -> tuple[float, ...]:
        """The shares of a step from which events count, with as many tests each as there are ``guilty_fractions``."""
        return (self.min_event_fraction, *self.event_fractions)

    @property
    def smaller_part_fraction(self) -> float:
        """The rest beside the larger part.

        If more of a window's steps are special, they are ordinary. And this part of ``min_gain_fraction`` is enough as
        the gain of a unit that is steadily later than its peers by all of it: their jitter hides the rest.
        """
        return 1.0 - self.larger_part_fraction

    @property
    def naming_log_odds(self) -> float:
        return math.log(1e6 / self.false_names_per_million_steps)
