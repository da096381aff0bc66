"""The thresholds of a verdict, in one record: each with its unit and why it has that value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides a label. Fractions are of the exposed step time unless they say otherwise.

    Attributes:
        min_gain_fraction: excess or gain below this is not worth a capture (5 %: above the jitter of a calm job, below
            what anybody would shrug off over weeks of training).
        min_seen_fraction: of ``min_gain_fraction``, the gain that is enough for who is steadily later than its peers by
            the whole of it (0.35: the peers' own jitter hides part of what mending it would save, and their lateness
            hides it in some steps altogether).
        known_fraction: how exactly a gain is known (0.9: of one at its threshold, half of all windows see less).
        min_group_fraction: ``min_gain_fraction`` for what all ranks share, measured against the job's past instead of
            against peers in the same step (15 %: a machine's clock, neighbours and caches drift by several percent in
            minutes).
        min_roaming_fraction: lateness without one who causes it. 10 %: ranks that share cores, switches or a file
            system take turns at being last all day, and nobody can act on less.
        max_jitter_fraction: lateness that jitter explains is forgiven up to here. 15 %: two ranks that take turns at
            being late look like two that jitter, and a job that loses more to either is not healthy.
        min_persistence_fraction: fraction of a window's steps a suspect must be present in (0.6: most, with room for
            the steps another rank's jitter happens to hide it).
        min_coverage_fraction: fraction of (step, rank) vectors that must be there (0.95).
        min_device_fraction: fraction of the steps whose device times must be known, of all ranks, to judge by them
            (half: a step without is not late, its host was only too far ahead of its device).
        min_clock_agreement: how nearly a step must take as long on the host's clock as on the device's, the shorter by
            the longer (half: a host may be many steps ahead of its device at one end of a window and not at the other,
            but a device time that lacks half of the step is not that of the step).
        min_explained_fraction: fraction of the excess that one suspect must explain (half: more than all others).
        min_lead_fraction: how far the first suspect's gain must be ahead of the runner-up's, as a fraction of the
            first's (0.25: neither of two within that would be a fair choice).
        min_sparse_lead_fraction: the same for a suspect that fills only some of the steps (0.5: twice the runner-up's;
            there are fewer steps to tell it by).
        min_lead_sigmas: how far the steps with the first suspect must outnumber those with the runner-up, in standard
            deviations of a fair coin (2: of two ranks that take turns, one leads 12 of 20 steps one time in four).
        present_fraction: a suspect is present in a step where its gain is over this fraction of ``min_gain_fraction``
            (0.5: a step's jitter may hide half of a gain that is just at the threshold).
        clear_sigmas: a late arrival stands out of jitter from this many of its standard deviations on (3: of a thousand
            arrivals that only jitter, one).
        shift_sigmas: a change inside a window that has no baseline must stand this many standard errors out of the
            steps' own spread (5: steps are correlated, so nominal significance overstates).
        min_run_steps: a fault that fills a run of steps, and not most of the window, is named from so many steps on
            (8: a hiccup of the machine lasts a few).
        keep_fraction: a suspect that was named in the window before stays named down to this fraction of the
            thresholds it had to pass (0.7: a gain that lies at its threshold must not make the verdict flap).
        best_steps: steps whose median is one sample of what the job is at its best (50: a checkpoint, an evaluation
            and the slow start of an epoch among them do not count).
        best_fraction: of these samples, those that must have been as good for it to be the job's best (a quarter, and
            two at least: the luckiest of a month is not what the job is held to).
        slower_fraction: a step is slower than the best if it, or a stage of it, takes this much of a step longer (3 %:
            under the 5 % that is told, so that these are found as well; more where blocks of ``best_steps`` differ by
            chance, ``clear_sigmas`` of their standard deviations).
        slower_steps_fraction: of a job that has become slower, the steps that are (0.85; of one that has not, half of
            them at most: whatever its times are distributed like).
        min_evidence: the evidence from which on the job is told to have become slower, as the natural logarithm of the
            odds (16: 31 steps of which every one is slower; by chance once in e^16 steps, or more seldom).
    """

    min_gain_fraction: float = 0.05
    min_seen_fraction: float = 0.35
    known_fraction: float = 0.9
    min_group_fraction: float = 0.15
    min_roaming_fraction: float = 0.10
    max_jitter_fraction: float = 0.15
    min_persistence_fraction: float = 0.6
    min_coverage_fraction: float = 0.95
    min_device_fraction: float = 0.5
    min_clock_agreement: float = 0.5
    min_explained_fraction: float = 0.5
    min_lead_fraction: float = 0.25
    min_sparse_lead_fraction: float = 0.5
    min_lead_sigmas: float = 2.0
    present_fraction: float = 0.5
    clear_sigmas: float = 3.0
    shift_sigmas: float = 5.0
    min_run_steps: int = 8
    keep_fraction: float = 0.7
    best_steps: int = 50
    best_fraction: float = 0.25
    slower_fraction: float = 0.03
    slower_steps_fraction: float = 0.85
    min_evidence: float = 16.0
