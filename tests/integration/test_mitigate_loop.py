"""A real Gloo job with a rank that is late in every step: what triage does about it where its policy allows that."""

from contextlib import ExitStack

import pytest

from tests.integration.processes import JOBS, descendants, kill, wait_until
from tests.integration.remedies import POLICY, STRAGGLAR, remedies, say, states, under_triage

JOB = JOBS / "chronic.py"
RANKS, LATE_RANK = 4, 3
SPEC = {"late_s": 0.15, "whole_s": 0.1, "steps": 1000}


@pytest.fixture
def begun(start, tmp_path):
    say(tmp_path / "whom", str(LATE_RANK))
    spec = SPEC | {"whom": str(tmp_path / "whom")}
    return under_triage(start, tmp_path, POLICY + STRAGGLAR, (RANKS, JOB), **spec)


def test_a_remedy_that_helps_is_switched_on_and_stays_until_another_rank_is_late(begun, tmp_path):
    # GIVEN a rank that is later than the break-even, and a policy that allows remedies
    _, run = begun
    # WHEN the job continues THEN gradients are reduced around that rank, first on trial and then for good
    wait_until(lambda: len(states(run)) == 2)
    assert states(run) == [("trying", "worthwhile", LATE_RANK), ("kept", "helps", LATE_RANK)]
    trying, kept = (one["numbers"] for one in remedies(run))
    # AND the measured and the predicted saving are on record
    assert trying["late_s"] > trying["break_even_s"] > 0
    assert kept["off_s"] - kept["on_s"] == pytest.approx(kept["saves_s"])
    assert kept["saves_s"] > 2 * kept["error_s"]
    assert min(kept["on_steps"], kept["off_steps"]) >= 8
    # WHEN the straggler moves THEN the remedy is undone, and tried for the other one
    say(tmp_path / "whom", "1")
    wait_until(lambda: len(states(run)) == 4)
    assert states(run)[2:] == [("undone", "moved", LATE_RANK), ("trying", "worthwhile", 1)]


def test_a_killed_controllers_trial_is_repeated_by_the_next(begun, start):
    # GIVEN a remedy on trial
    watching, run = begun
    wait_until(lambda: states(run))
    with ExitStack() as ending:
        ending.callback(kill, *descendants(watching.pid))
        # WHEN the controller is killed
        watching.kill()
        watching.wait(60)
        # THEN the next one undoes it, since steps of the trial are missing, repeats the trial, and completes it
        start("attach", "--run", run)
        wait_until(lambda: len(states(run)) == 4)
    assert [one[:2] for one in states(run)] == [
        ("trying", "worthwhile"),
        ("undone", "interrupted"),
        ("trying", "worthwhile"),
        ("kept", "helps"),
    ]
