"""A verdict on a job that is slower than its own best: windows of one run, judged one after the other."""

from dataclasses import replace

import numpy as np
import pytest

from sftriage.model.verdicts import Settings
from sftriage.model.windows import COUNTERS, PLACE
from sftriage.verdict.judging import judge
from sftriage.words.verdicts import verdict_sentence
from tests.scenario import Fault, Job, every, from_step, judged

SETTINGS = Settings()


def verdicts_on(job, *faults):
    return [verdict for verdict, _ in judged(job.run(*faults), stride=10)]


def labels(verdicts):
    """The distinct reports, in their order."""
    return list(dict.fromkeys((one.label, *one.reasons) for one in verdicts))


def test_a_job_that_all_ranks_make_slower_is_held_with_onset_and_stage():
    # GIVEN a job whose forward becomes slower by a third on all ranks, by less than what is a suspect
    verdicts = verdicts_on(Job(n_steps=700), Fault("forward", None, 0.010, from_step(400)))
    # THEN it is healthy until then, and held for it from soon after on
    assert labels(verdicts) == [("healthy",), ("needs_evidence", "regressed")]
    first = next(one for one in verdicts if one.label != "healthy")
    assert 427 <= first.last_step <= 439
    found = verdicts[-1].regression
    assert (found.scope, found.stages, found.kind, found.until_step) == ("all", ("forward",), "", None)
    assert found.since_step == pytest.approx(400, abs=3)
    assert found.fraction == pytest.approx(0.10, abs=0.02)
    assert found.best_step_s == pytest.approx(0.1015, abs=0.003)
    # AND what decided is in the verdict, beside its thresholds
    numbers = verdicts[-1].numbers
    assert numbers["over_best_fraction"] == pytest.approx(found.fraction)
    assert numbers["slower_evidence"] == numbers["min_slower_evidence"] == SETTINGS.naming_log_odds
    assert "slower than its best of 101" in verdict_sentence(verdicts[-1])
    assert "since about step 400 (399 to 403), in forward, on all ranks" in verdict_sentence(verdicts[-1])


def test_slow_windows_teach_neither_the_best_nor_the_baseline():
    # GIVEN a job that was slower for long
    slower = [Fault("forward", None, 0.010, from_step(300))]
    pasts = [past for _, past in judged(Job(n_steps=900).run(*slower), stride=10)]
    baselines = [past.baseline.n_windows for past in pasts]
    # THEN neither has moved since it was known
    assert baselines[35:] == [baselines[35]] * len(baselines[35:])
    assert pasts[-1].own_best.reported(850, 0).best_step_s == pytest.approx(0.1015, abs=0.003)


def test_its_end_is_reported_once_and_the_job_is_healthy_again():
    verdicts = verdicts_on(Job(n_steps=800), Fault("forward", None, 0.010, from_step(300, 500)))
    assert labels(verdicts) == [("healthy",), ("needs_evidence", "regressed")]
    ended = [one for one in verdicts if one.regression is not None and one.regression.until_step is not None]
    assert [one.label for one in ended] == ["healthy"]
    assert ended[0].regression.until_step == pytest.approx(500, abs=3)
    assert ended[0].last_step <= 530
    assert "as fast as its best again since about step 500" in verdict_sentence(ended[0])
    assert verdicts[-1].regression is None


def test_a_suspect_stays_one_and_the_step_is_longer_for_some_ranks_only():
    # GIVEN a rank that becomes late by a fifth of the step
    verdicts = verdicts_on(Job(n_steps=600), Fault("data", 2, 0.020, from_step(300)))
    # THEN it is the suspect, and beside it that the job is slower, not on all ranks
    assert {one.label for one in verdicts[-10:]} == {"suspect"}
    assert all((one.regression.scope, one.regression.stages) == ("some", ()) for one in verdicts[-10:])
    assert "because some ranks are late" in verdict_sentence(verdicts[-1])


def test_the_hosts_clock_shows_a_steps_length_on_devices_and_not_its_stages():
    # GIVEN a job on devices whose times are not recorded
    run = Job(n_steps=600).run(Fault("forward", None, 0.010, from_step(300)))
    *_, (verdict, _) = judged(replace(run, on_device=True), stride=10)
    # THEN that it is slower holds, and no stage is named
    assert "regressed" in verdict.reasons
    assert verdict.regression.stages == ()


def test_a_capture_changes_no_state():
    # GIVEN a job that is slower, and a window in which a profiler ran
    run = Job(n_steps=600).run(Fault("forward", None, 0.010, from_step(300)))
    *_, (verdict, past) = judged(run.steps(0, 449), stride=10)
    disturbed = replace(run.steps(410, 459), capturing_N=np.ones(50, dtype=bool))
    held, after = judge(disturbed, past, SETTINGS)
    # THEN that window says nothing new, and the job is no less slower for it
    assert held.reasons == ("self_inflicted",)
    assert after.own_best is past.own_best
    assert held.regression.since_step == verdict.regression.since_step


def test_steps_of_another_kind_and_their_aftermath_are_no_slowdown():
    # GIVEN a job that saves in every 25th step, and says so, and whose rank 0 is late after that
    n_steps = 1000
    saves_N = every(25)(n_steps)
    kinds = tuple("checkpoint" if saves else "" for saves in saves_N)
    faults = (Fault("other", 0, 0.3, every(25)), Fault("data", None, 0.2, every(25, 1)))
    # THEN nothing is slower than its best
    assert all(one.regression is None for one in verdicts_on(Job(n_steps=n_steps, kinds=kinds), *faults))


@pytest.mark.parametrize(
    ("counted", "waited_s", "ending"),
    [
        (True, 0.008, "; 83% of that is waiting for a CPU."),
        (True, 0.002, "on all ranks alike."),
        (False, 0.008, "on all ranks alike."),
    ],
)
def test_the_part_that_is_waiting_for_a_cpu_is_in_the_sentence(counted, waited_s, ending):
    # GIVEN a job that becomes slower by 10 ms on all ranks, each of which always waits a little for a CPU
    n_steps, n_ranks = 700, 4
    run = Job(n_steps=n_steps).run(Fault("forward", None, 0.010, from_step(400)))
    counted_NRC = np.full((n_steps, n_ranks, len(COUNTERS)), np.nan)
    counted_NRC[:, :, PLACE["queued_s"]] = 0.001
    # AND of which one waits longer from then on
    counted_NRC[400:, 2, PLACE["queued_s"]] += waited_s
    # WHEN it is judged
    *_, (verdict, _) = judged(replace(run, counted_NRC=counted_NRC if counted else None), stride=10)
    # THEN the sentence has that if it is most of it
    assert verdict.reasons == ("regressed",)
    assert verdict_sentence(verdict).endswith(ending)
    waits = verdict.regression.descheduled_fraction
    assert waits == (pytest.approx(waited_s / 0.010, rel=0.1) if counted else None)
