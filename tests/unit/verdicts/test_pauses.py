"""A job that stood still for a while and went on: a step takes what it took before, and the pause is told by itself."""

from dataclasses import replace

import numpy as np
import pytest

from sftriage.verdicts import Settings, judge
from sftriage.words.keeping import pause_sentence
from sftriage.words.verdicts import verdict_sentence
from tests.scenario import OUTSIDE, Fault, Job, at, from_step

SETTINGS = Settings()
WINDOW, STRIDE, N_STEPS = 50, 10, 300


def watched(*faults, of_run=lambda run: run, **job):
    """The verdicts on a job, and the pauses that were found in it."""
    run, past, verdicts, pauses = of_run(Job(n_steps=N_STEPS, **job).run(*faults)), None, [], []
    for first in range(0, N_STEPS - WINDOW + 1, STRIDE):
        verdict, past = judge(run.steps(first, first + WINDOW - 1), past, SETTINGS)
        verdicts.append(verdict)
        pauses += past.paused
    return verdicts, pauses


KINDS = tuple("checkpoint" if n == 240 else "" for n in range(N_STEPS))


@pytest.mark.parametrize(
    ("situation", "faults", "job", "found"),
    [
        ("inside the sync stage", [Fault("backward", None, 55.0, at(240))], {}, [(240, 240, "backward")]),
        ("at their own work", [Fault("data", None, 55.0, at(240))], {}, [(240, 240, "data")]),
        ("outside the stages", [Fault(OUTSIDE, None, 55.0, at(240))], {}, [(240, 240, "other")]),
        ("in steps on end", [Fault("data", None, 9.0, at(241, 242, 243))], {}, [(241, 243, "data")]),
        ("twice", [Fault("data", None, 9.0, at(100, 240))], {}, [(100, 100, "data"), (240, 240, "data")]),
        ("two ranks", [Fault("backward", None, 55.0, at(240))], {"n_ranks": 2}, [(240, 240, "backward")]),
        # What one rank causes is a suspect's, and what some cause is no pause of the job.
        ("one rank", [Fault("data", 2, 55.0, at(240))], {}, []),
        ("one of two ranks", [Fault("data", 1, 55.0, at(240))], {"n_ranks": 2}, []),
        ("half of the ranks", [Fault("data", (2, 3), 55.0, at(240))], {}, []),
        ("a step of which it is said", [Fault("other", None, 55.0, at(240))], {"kinds": KINDS}, []),
        ("a hiccup", [Fault("data", None, 0.5, at(240))], {}, []),
        ("nothing", [], {}, []),
    ],
)
def test_a_pause_is_of_all_ranks_and_is_found_once(situation, faults, job, found):
    # GIVEN a job that goes on after that, WHEN it is judged window by window
    verdicts, pauses = watched(*faults, **job)
    # THEN the pause is found, once, with what it took
    assert [(one.first_step, one.last_step, one.stage) for one in pauses] == found
    lasted_s = sum(fault.seconds * fault.steps(N_STEPS).sum() for fault in faults)
    assert sum(one.lasted_s for one in pauses) == pytest.approx(lasted_s if found else 0.0, abs=0.2)
    # AND a step takes what it took, and nobody is blamed for it
    assert all(one.step_s == pytest.approx(0.1, abs=0.01) for one in verdicts)
    if found:
        assert {one.label for one in verdicts} == {"healthy"}


def test_thresholds_are_not_scaled_by_a_pause():
    # GIVEN a rank that is late by 15 ms, and a pause of 55 s of all ranks
    verdicts, _ = watched(Fault("data", 1, 0.015, from_step(150)), Fault("backward", None, 55.0, at(240)))
    # THEN it is named in the windows with the pause as in those without
    after = [one for one in verdicts if one.first_step >= 150]
    assert {(one.label, one.suspects[0].rank) for one in after} == {("suspect", 1)}
    assert all(one.numbers["slow_step_s"] == pytest.approx(0.115, abs=0.01) for one in after)
    assert all(one.numbers["min_gain_s"] == pytest.approx(0.0046, abs=0.0005) for one in after)
    # AND the accounting is exact nevertheless
    assert any(one.exposed_s > 1.0 for one in after)
    assert all(sum(one.advances_s.values()) == pytest.approx(one.exposed_s) for one in verdicts)


def test_a_profiler_that_holds_all_ranks_up_is_no_pause():
    def captured(run):
        return replace(run, capturing_N=np.arange(N_STEPS) == 240)

    _, pauses = watched(Fault("data", None, 9.0, at(240)), of_run=captured)
    assert pauses == []


def test_it_is_said_in_a_line():
    verdicts, (pause,) = watched(Fault("backward", None, 55.2, at(240)))
    sentence = pause_sentence(pause.event(0.0, 0))
    assert sentence == "The job paused for 55.2 s in step 240 (all ranks, in backward)."
    assert "(10" in verdict_sentence(verdicts[-1])
