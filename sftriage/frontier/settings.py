"""The thresholds of a verdict, in one record: each with its unit and why it has that value."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides a label. Fractions are of the exposed step time unless they say otherwise.

    How much is worth looking at:

    Attributes:
        min_gain_fraction: a rank or a host that adds less to a step is not worth a capture (4 %: above the jitter of a
            calm job, and low enough that a fault of 5 %, part of which jitter hides, is found).
        min_seen_fraction: of ``min_gain_fraction``, the gain that is enough for who is steadily later than its peers by
            the whole of it (0.35: the peers' own jitter hides part of what mending it would save, and their lateness
            hides it in some steps altogether).
        min_group_fraction: ``min_gain_fraction`` for what all ranks share, measured against the job's past instead of
            against peers in the same step (15 %: a machine's clock, neighbours and caches drift by several percent in
            minutes).
        min_lateness_fraction: lateness of the last rank over the median one, beyond jitter, that wants a reason where
            no single one is worth looking at (10 %: ranks that share cores, switches or a file system take turns at
            being last all day).
        keep_fraction: who was named stays named down to this fraction of the thresholds it had to pass, in evidence and
            in size (0.7: what lies at a threshold must not make the verdict flap).

    Who it is (docs/verdicts.md, "The evidence"):

    Attributes:
        false_names_per_million_steps: how often chance alone may name somebody, in a job whose every step has a clear
            event that comes by chance (0.1: once in 10⁷ steps, a month at four a second). `naming_log_odds` is its
            logarithm.
        event_fractions: from which shares of a step on that one unit alone held up an event is clear, besides half of
            ``min_gain_fraction``: larger ones tell a fault amid hiccups (10 %, 30 %, a whole step).
        guilty_fractions: of the clear events, how many the guilty one causes: nearly all, or, amid the hiccups of
            others, most (90 %, 65 %).
        min_chance: of many ranks an event says no more than of eight: a hiccup lasts for several steps, and all of them
            are its own (1/8).
        whole_factor: of the log odds that name, those that it takes to name a rank or a host without a stage, or which
            mostly waited for a CPU (2: whose core another process has for a second or two is slow in all it does, for a
            dozen steps). They stand no higher than this: a name must be possible to lose.
        rhythm_log_odds: of a unit's events, that their falling into one phase is no chance; and of the others', that
            the rhythm is theirs too (5: one time in 150).
        min_part_fraction: a stage with this much of its rank's excess, or a rank with this much of its host's gain, is
            the better name for it: a smaller place to look; and so many of a host's ranks must be slow for the host to
            be (0.65).
        most_fraction: what is most of something (half). A suspect must explain most of its lateness where it is the
            last, and of what all share; another may have less than that of its clear events, and a second named one of
            its gain. Devices are judged by their own clock where most steps have it, and take most of the host's time
            by it, or the reverse.

    When it was there:

    Attributes:
        onset_log_likelihood: onsets whose log likelihood is this little under the best one's may be the true one (2;
            95 % are 1.92, by Wilks).
        min_away_steps: a fault that has been away for fewer steps may come back (8: a hiccup lasts a few), and so may
            one that has been away for twice as long before.
        min_persistence_fraction: fraction of a window's steps in which there must be what all ranks share (0.6), or who
            may have waited for a CPU; or in which one rank is most of the lateness, or captured steps have the fault.

    What can be judged at all:

    Attributes:
        min_coverage_fraction: fraction of (step, rank) vectors that must be there (0.95).
        max_special_fraction: steps with work that the others do not have are special while they are so few (a third).
        shift_sigmas: a change inside a window that has no baseline must stand this many standard errors out of the
            steps' own spread (5: steps are correlated, so nominal significance overstates).
        clear_sigmas: what is more than this many standard deviations out is no chance (3: one time in a thousand).

    Whether the job has become slower than its own best:

    Attributes:
        best_steps: steps whose median is one sample of what the job is at its best (50: a checkpoint, an evaluation
            and the slow start of an epoch among them do not count).
        best_fraction: of these samples, those that must have been as good for it to be the job's best (a quarter, and
            two at least: the luckiest of a month is not what the job is held to).
        min_over_best_fraction: how much slower than its best a job must be to be told so, of its step (5 %).
        slower_fraction: a step is slower than the best if it, or a stage of it, takes this much of a step longer (3 %:
            under the 5 % that is told, so that these are found as well; more where blocks of ``best_steps`` differ by
            chance, ``clear_sigmas`` of their standard deviations).
        slower_steps_fraction: of a job that has become slower, the steps that are (0.85; of one that has not, half of
            them at most: whatever its times are distributed like).
    """

    min_gain_fraction: float = 0.04
    min_seen_fraction: float = 0.35
    min_group_fraction: float = 0.15
    min_lateness_fraction: float = 0.10
    keep_fraction: float = 0.7

    false_names_per_million_steps: float = 0.1
    event_fractions: tuple[float, ...] = (0.1, 0.3, 1.0)
    guilty_fractions: tuple[float, ...] = (0.9, 0.65)
    min_chance: float = 0.125
    whole_factor: float = 2.0
    rhythm_log_odds: float = 5.0
    min_part_fraction: float = 0.65
    most_fraction: float = 0.5

    onset_log_likelihood: float = 2.0
    min_away_steps: int = 8
    min_persistence_fraction: float = 0.6

    min_coverage_fraction: float = 0.95
    max_special_fraction: float = 1 / 3
    shift_sigmas: float = 5.0
    clear_sigmas: float = 3.0

    best_steps: int = 50
    best_fraction: float = 0.25
    min_over_best_fraction: float = 0.05
    slower_fraction: float = 0.03
    slower_steps_fraction: float = 0.85

    @property
    def min_event_fraction(self) -> float:
        """The smallest clear event: half of what is worth a capture."""
        return self.min_gain_fraction / 2

    @property
    def naming_log_odds(self) -> float:
        """The log odds that name a unit."""
        return math.log(1e6 / self.false_names_per_million_steps)
