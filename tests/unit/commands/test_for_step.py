"""From a step to its captures, or to why there is none."""

import json

import pytest

from sftriage.decisions import Decision, Verdict
from sftriage.runs.decisions import MAX_DECISIONS, decided_about, why_undecided
from sftriage.traces.rows import CaptureRow
from tests.journals import Recorder

ROW = CaptureRow(
    "c-1", "j", "r", 2, "data", "suspect", "rank", 90, 139, 142, 146, 0.01, 100, "0" * 64, "torch", "a", "p",
    "why", "t", "node-1", None, "/somewhere", "c-1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("step", "away"), [(142, 0), (146, 0), (90, 0), (139, 0), (140, 1), (141, 1), (147, 1), (89, 1), (0, 90), (200, 54)]
)
def test_a_capture_is_of_the_steps_that_it_recorded_and_of_the_window_that_led_to_it(step, away):
    assert ROW.distance_from(step) == away


def test_the_decisions_about_a_step_are_those_on_windows_that_hold_it_the_newest():
    decisions = [{"first_step": first, "last_step": first + 49} for first in range(0, 200, 5)]
    found = decided_about(decisions, 100)
    assert [one["first_step"] for one in found] == list(range(100, 100 - 5 * MAX_DECISIONS, -5))[::-1]
    assert decided_about(decisions, 5000) == []


def test_a_step_of_a_run_without_captures_is_answered_by_its_decisions(sftriage, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    verdict = Verdict(20, 69, "healthy", (), (), 0.05, {"data": 0.05}, {"data": 1}, {})
    journal = Recorder(run / "decisions.jsonl")
    journal.window(verdict, Decision(1.0, 20, 69, "healthy", "ignore", "healthy"))
    journal.close()
    # WHEN asked for a step of that window THEN there is no capture, and the decision says why
    status, out, _ = sftriage("traces", "for-step", "42", "--run", run, "--json")
    answer = json.loads(out)
    assert (status, answer["captures"], answer["nearest"]) == (0, [], None)
    assert [one["reason"] for one in answer["decisions"]] == ["healthy"]
    # AND of a step that no window holds, it is said
    assert "No window that holds step 500 was decided" in sftriage("traces", "for-step", "500", "--run", run)[2]


@pytest.mark.parametrize(
    ("windows", "step", "ended", "said"),
    [
        ([], 5, False, "no window was yet"),
        ([], 5, True, "no window was; the job has ended"),
        ([(20, 69), (30, 79)], 5, True, "first steps, which are warm-up; the first window begins at step 20"),
        ([(20, 69), (30, 79)], 99, True, "the last window ends at step 79, and the job has ended"),
        ([(20, 69), (30, 79)], 99, False, "the last window ends at step 79 so far"),
        ([(20, 69), (200, 249)], 99, False, "its windows are missing: nobody watched the job then"),
    ],
)
def test_it_is_said_why_no_window_holds_a_step(windows, step, ended, said):
    assert said in why_undecided(windows, step, ended=ended)
