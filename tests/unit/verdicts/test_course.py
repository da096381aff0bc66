"""When a suspect was there: chronic, recurring with its period, or one-off, and since when."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from sftriage.verdicts import Settings, judge
from tests.scenario import Fault, Job, at, classify, every, from_step, gaussian

SETTINGS = Settings()


def growing(seconds):
    """A delay that grows from nothing to so many seconds over 50 steps, as ten faults that begin one after another."""
    return tuple(Fault("data", 1, seconds / 10, from_step(5 * n)) for n in range(10))


@dataclass(frozen=True)
class Case:
    """What one rank does, and its (pattern, period, onset); None where it is not named."""

    situation: str
    faults: tuple[Fault, ...]
    named: tuple[str, int | None, int] | None
    job: Job = field(default_factory=Job)


TICKS = (Fault("data", 1, 0.03, every(5)),)

TRUTH = [
    Case("always", (Fault("data", 1, 0.02),), ("chronic", None, 0)),
    Case("from step 15 on", (Fault("data", 1, 0.03, from_step(15)),), ("chronic", None, 15)),
    Case("from step 34 on", (Fault("forward", 1, 0.03, from_step(34)),), ("chronic", None, 34)),
    Case("after the sync, from step 30 on", (Fault("optimizer", 1, 0.03, from_step(30)),), ("chronic", None, 30)),
    Case("growing", growing(0.06), ("chronic", None, 0)),
    Case("from step 10 to 30", (Fault("data", 1, 0.03, from_step(10, 30)),), ("one-off", None, 10)),
    Case("from the start to step 16", (Fault("data", 1, 0.03, from_step(0, 16)),), ("one-off", None, 0)),
    Case(
        "from the start to step 38, most of the window",
        (Fault("data", 1, 0.03, from_step(0, 38)),),
        ("one-off", None, 0),
    ),
    Case("every second step", (Fault("data", 1, 0.03, every(2)),), ("recurring", 2, 0)),
    Case("every fifth step", (Fault("data", 1, 0.03, every(5, 3)),), ("recurring", 5, 3)),
    Case("every twelfth step", (Fault("data", 1, 0.05, every(12)),), ("recurring", 12, 0), Job(n_steps=80)),
    Case("every twelfth step, in few steps", (Fault("data", 1, 0.05, every(12)),), None),
    Case("every fifth step, after the sync", (Fault("other", 1, 0.03, every(5, 3)),), ("recurring", 5, 3)),
    Case("every fifth step, by little", (Fault("data", 1, 0.015, every(5)),), ("recurring", 5, 0)),
    Case("every fifth step, and now and then", (*TICKS, Fault("data", 1, 0.05, at(7, 29))), ("recurring", 5, 0)),
    Case("often, in no order", (Fault("data", 1, 0.05, at(2, 3, 11, 20, 22, 36, 37, 47)),), None),
    Case("in three steps", (Fault("data", 1, 0.05, at(2, 19, 22)),), None),
    Case("in one step", (Fault("data", 1, 0.5, at(20)),), None),
]


@pytest.mark.parametrize("case", TRUTH, ids=lambda case: case.situation)
def test_the_truth_table_of_time(case):
    for seed in range(3):
        # GIVEN what one rank does, WHEN the window is classified
        verdict = classify(case.job.run(*case.faults, seed=seed))
        # THEN the rank is named from the steps it fills, and how they lie
        assert (verdict.label == "suspect") == (case.named is not None), (verdict.label, verdict.reasons)
        if case.named is not None:
            first, (pattern, period, onset) = verdict.suspects[0], case.named
            assert (first.rank, first.pattern, first.period_steps) == (1, pattern, period)
            # AND since when is known to two steps, or it is said how unsure that is
            earliest, latest = first.onset_range
            assert earliest <= onset <= latest
            assert first.onset_step == pytest.approx(onset, abs=max(2, (latest - earliest) / 2))


def test_what_comes_back_is_not_averaged_away():
    # GIVEN 30 ms in every tenth step: 3 % of the window
    verdict = classify(Job(n_steps=100, noise=gaussian(0.01)).run(Fault("data", 1, 0.030, every(10))))
    # THEN the gain is that of the steps it fills, of which there is a tenth
    first = verdict.suspects[0]
    assert first.gain_s == pytest.approx(0.030, rel=0.1)
    assert first.share == pytest.approx(30 / 130, rel=0.1)
    assert first.persistence == pytest.approx(0.1)


def test_what_comes_back_at_longer_intervals_is_found_over_windows():
    # GIVEN a delay in every 40th step, and windows of 50
    past, found = None, []
    for first in range(0, 400, 10):
        fault = Fault("data", 1, 0.050, lambda n, first=first: (np.arange(n) + first) % 40 == 7)
        verdict, past = judge(Job().run(fault, seed=first, first_step=first), past, SETTINGS)
        if verdict.label == "suspect":
            found.append((verdict.last_step, verdict.suspects[0].rank, verdict.suspects[0].period_steps))
    # THEN it is named when it was there for the fourth time, with its period
    assert found[0][0] < 4 * 40 + 20
    assert {(rank, period) for _, rank, period in found} == {(1, 40)}
