"""What a verdict adds to what its suspect has cost: the gain of each step that counts, each step in one verdict."""

from dataclasses import replace

import numpy as np
import pytest

from tests.scenario import Fault, Job, at, from_step, verdicts


def per_step(found):
    """The cost of each step, by number; no step comes twice."""
    steps = [
        (verdict.lost.first_step + n, lost_s)
        for verdict in found
        if verdict.lost
        for n, lost_s in enumerate(verdict.lost.step_s)
    ]
    assert len(steps) == len(dict(steps))
    return dict(steps)


@pytest.mark.parametrize("stride", [10, 25, 50])
def test_each_step_of_a_fault_counts_once_from_its_onset_on(stride):
    # GIVEN a rank that is 30 ms slower in data from step 233 to 466
    job = Job(n_steps=620)
    healthy, window = job.run(seed=1), job.run(Fault("data", 1, 0.030, steps=from_step(233, 467)), seed=1)
    found = verdicts(window, stride=stride)
    lost = per_step(found)
    # THEN nothing was lost in other steps, and in its own what the same job takes longer with it than without
    real_s = [float(one.durations_NRS[233:467].sum(axis=2).max(axis=1).sum()) for one in (window, healthy)]
    assert sum(lost.values()) == pytest.approx(real_s[0] - real_s[1], rel=0.05)
    assert sum(lost_s for step, lost_s in lost.items() if not 233 <= step <= 466) < 0.01 * sum(lost.values())
    assert {verdict.lost.ranks for verdict in found if verdict.lost} == {4}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seconds", [0.010, 0.040])
def test_the_sum_is_the_time_that_the_job_saves_without_its_straggler(seconds, split):
    # GIVEN a job of 100 ms a step whose stages jitter by 3 %, and the same with a straggler
    job = Job(n_steps=620)
    slow, without = (job.run(*faults, seed=6, split=split) for faults in ((Fault("data", 1, seconds),), ()))
    lost = per_step(verdicts(slow))
    real_s = [float(one.durations_NRS[20:620].sum(axis=2).max(axis=1).sum()) for one in (slow, without)]
    # THEN they agree; jitter inside the sync stage shows only with the last ready gradient
    assert sum(lost.values()) == pytest.approx(real_s[0] - real_s[1], rel=0.02 if split else 0.1)


def test_a_recurring_fault_costs_in_its_own_steps():
    job = Job(n_steps=600)
    window = job.run(Fault("data", 1, 0.080, steps=at(*range(7, 600, 10))), seed=2)
    lost = per_step(verdicts(window))
    assert {step % 10 for step, lost_s in lost.items() if lost_s > 0.01} == {7}
    assert sum(lost.values()) == pytest.approx(0.08 * len([n for n in range(20, 600) if n % 10 == 7]), rel=0.2)


def test_without_a_named_rank_no_cost_is_charged():
    # GIVEN a healthy job, and one in which two ranks are late together
    job = Job(n_steps=300)
    together = job.run(Fault("data", 1, 0.030), Fault("forward", 2, 0.030), seed=3)
    for window in (job.run(seed=3), together):
        assert per_step(verdicts(window)) == {}


def test_a_capture_does_not_hide_what_the_suspect_costs_around_it():
    # GIVEN a slow rank, and a profiler that runs from step 150 to 154
    window = Job(n_steps=400).run(Fault("data", 1, 0.030), seed=4)
    capturing_N = np.zeros(400, dtype=bool)
    capturing_N[150:155] = True
    lost = per_step(verdicts(replace(window, capturing_N=capturing_N)))
    # THEN all steps count but those in which it ran
    assert {step for step in range(20, 400) if lost.get(step, 0.0) < 0.01} <= {*range(150, 156)}


def test_a_verdict_has_the_duration_of_a_slow_step_without_its_suspect():
    window = Job(n_steps=300).run(Fault("data", 1, 0.030), seed=5)
    last = verdicts(window)[-1]
    assert last.label == "suspect"
    assert last.numbers["slow_step_s"] == pytest.approx(0.13, rel=0.1)
    assert last.numbers["without_s"] == pytest.approx(last.numbers["slow_step_s"] - last.suspects[0].gain_s)
