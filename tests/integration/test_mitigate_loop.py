"""A real Gloo job with a rank that is late in every step: what triage does about it where its policy allows that."""

import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.integration.processes import FORKED, descendants, wait_until
from tests.integration.remedies import POLICY, remedies, say, states

JOB = Path(__file__).parent / "jobs" / "chronic.py"
RANKS, LATE_RANK = 8, 5
SPEC = {"late_s": 0.15, "whole_s": 0.1, "steps": 1000}
MITIGATE = "  mitigate: {remedies: [stragglar], min_saving: 1%, steps: 8}\n"


@pytest.fixture
def begin(start, tmp_path):
    with ExitStack() as ending:

        def begin(policy, **spec):
            (tmp_path / "policy.yaml").write_text(policy)
            say(tmp_path / "whom", str(LATE_RANK))
            command = ["run", "--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run", "--"]
            process = start(*command, *FORKED, RANKS, JOB, json.dumps(SPEC | spec | {"whom": str(tmp_path / "whom")}))
            ending.callback(lambda: [kill(pid) for pid in orphans])
            return process, tmp_path / "run"

        yield begin


orphans: list[int] = []


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_remedy_that_helps_is_switched_on_and_stays_until_another_rank_is_late(begin, tmp_path):
    # GIVEN a rank that is later than the break-even, and a policy that allows to do something about it
    _, run = begin(POLICY + MITIGATE)
    # WHEN the job goes on THEN gradients are reduced around that rank, in turns at first, and then for good
    wait_until(lambda: len(states(run)) == 2)
    assert states(run) == [("trying", "worthwhile", LATE_RANK), ("kept", "helps", LATE_RANK)]
    trying, kept = (one["numbers"] for one in remedies(run))
    # AND what it saves is on record, beside what it was expected to
    assert trying["late_s"] > trying["break_even_s"] > 0
    assert kept["off_s"] - kept["on_s"] == pytest.approx(kept["saves_s"])
    assert kept["saves_s"] > 2 * kept["error_s"]
    assert min(kept["on_steps"], kept["off_steps"]) >= 8
    # WHEN the straggler moves THEN the remedy is undone, and tried for the other one
    say(tmp_path / "whom", "2")
    wait_until(lambda: len(states(run)) == 4)
    assert states(run)[2:] == [("undone", "moved", LATE_RANK), ("trying", "worthwhile", 2)]


def test_who_watches_is_killed_in_a_trial_and_the_next_one_tries_anew(begin, start):
    # GIVEN a remedy that is being tried
    watching, run = begin(POLICY + MITIGATE)
    wait_until(lambda: states(run))
    orphans.extend(descendants(watching.pid))
    # WHEN whoever watches is killed
    watching.kill()
    watching.wait(60)
    # THEN the next one undoes it, for steps of the trial are missing, begins anew, and comes to an end with it
    start("attach", "--run", run)
    wait_until(lambda: len(states(run)) == 4)
    assert [one[:2] for one in states(run)] == [
        ("trying", "worthwhile"),
        ("undone", "interrupted"),
        ("trying", "worthwhile"),
        ("kept", "helps"),
    ]
