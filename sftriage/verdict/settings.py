"""The thresholds of a verdict, in one record: each with its unit and why it has that value."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
            this much of its host's gain instead of the host; at least so many of a host's ranks must be slow (0.65: the
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
        """The smallest clear event: half of what is worth a capture."""
        return self.min_gain_fraction / 2

    @property
    def smaller_part_fraction(self) -> float:
        """What is left beside the larger part.

        More steps of a window than this are not special. And this of ``min_gain_fraction`` is enough as the gain of a
        unit that is steadily later than its peers by all of it: their jitter hides the rest, in some steps the whole.
        """
        return 1.0 - self.larger_part_fraction

    @property
    def naming_log_odds(self) -> float:
        """The log odds that name a unit."""
        return math.log(1e6 / self.false_names_per_million_steps)
