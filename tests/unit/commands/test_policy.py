"""`sftriage policy`: policies checked, shown and tried out, for people and for programs."""

import json

import numpy as np
import pytest
import yaml

from sftriage.model.captures import Decision
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.policy.loading import parse, shipped
from tests.scenario import Recorder
from tests.unit.commands.test_analyze import recorded
from tests.unit.conftest import run_in

POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: mine}
spec:
  detection: {window_steps: 20, stride_steps: 10, warmup_steps: 10}
  rules: [{name: slow-input, match: {stage: [data], gain: ">= 10%"}, capture: {steps: 3}, cooldown: 10m}]
"""


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(POLICY, encoding="utf-8")
    return path


@pytest.fixture
def job(tmp_path):
    """A job of 100 ms steps; from step 60 of 120 on rank 2 is 30 ms late in data."""
    return recorded(tmp_path / "job.npz", 0.03, steps=120, first=60)


def test_the_timeline_says_what_would_have_happened_and_why(sftriage, policy, job):
    outcome = sftriage("policy", "test", policy, "--on", job)
    assert (outcome.code, outcome.err) == (0, "")
    timeline, summary = outcome.out.split("\n\n### ")
    lines = timeline.splitlines()
    # THEN windows decided alike are one line
    assert "windows" in lines[0]
    assert lines[0].endswith("ignore    healthy")
    # AND the capture stands by itself, with whom, how and when
    (at,) = [number for number, line in enumerate(lines) if "  capture  " in line]
    assert "rule slow-input: mending data of rank 2 would save" in lines[at]
    assert "rank 2: stacks, steps " in lines[at + 1]
    assert "no more than 60 s and 512.0 MiB" in lines[at + 1]
    # AND then it is held while the profiler runs, and after that there is a trace that holds it
    assert "hold      self_inflicted" in lines[at + 2]
    assert "throttle  already captured: w" in lines[at + 3]
    assert "(rank 2 in data, " in lines[at + 3]
    # AND the summary is Markdown
    assert summary.startswith("Policy mine on job.npz\n\n")
    assert "; 1 capture." in summary
    assert "| capture | 1 | rule slow-input (1) |" in summary
    assert "already captured (" in summary


def test_json_has_every_window_with_its_decision(sftriage, policy, job):
    said = sftriage("policy", "test", policy, "--on", job, "--json").json
    assert (said["policies"], said["recording"], said["captures"]) == (["mine"], "job.npz", 1)
    assert said["outcomes"]["capture"] == 1
    assert sum(said["outcomes"].values()) == len(said["windows"]) == 10
    (captured,) = [window for window in said["windows"] if window["decision"]["outcome"] == "capture"]
    assert captured["suspect"]["ranks"] == [2]
    first, last = captured["captured_steps"][0]
    assert last - first == 2


def test_a_saved_outcome_is_met_until_something_changes_and_then_the_difference_is_shown(
    sftriage, policy, job, tmp_path
):
    saved = tmp_path / "expected.txt"
    assert sftriage("policy", "test", policy, "--on", job, "--save", saved).code == 0
    assert sftriage("policy", "test", policy, "--on", job, "--expect", saved).code == 0
    # WHEN the policy changes so that it captures no more
    policy.write_text(POLICY.replace("[data]", "[forward]"), encoding="utf-8")
    outcome = sftriage("policy", "test", policy, "--on", job, "--expect", saved)
    # THEN that is a failure, with a unified diff
    assert outcome.code == 1
    assert outcome.out.startswith("--- expected\n+++ replayed\n@@")
    assert "\n-| capture | 1 | rule slow-input (1) |\n" in outcome.out
    assert "\n+| capture | 0 |  |\n" in outcome.out


def test_the_outcome_is_the_same_wherever_the_files_lie(sftriage, policy, job, tmp_path, monkeypatch):
    first = sftriage("policy", "test", policy, "--on", job).out
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (policy, job):
        path.rename(elsewhere / path.name)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert sftriage("policy", "test", "mine.yaml", "--on", "job.npz").out == first


def test_an_expected_outcome_that_is_not_there_says_how_to_make_one(sftriage, policy, job, tmp_path):
    outcome = sftriage("policy", "test", policy, "--on", job, "--expect", tmp_path / "nothing")
    assert outcome.code == 2
    assert "an outcome is saved with --save" in outcome.err


def test_comparing_and_replacing_at_once_is_refused(sftriage, policy, job, tmp_path):
    saved = tmp_path / "x"
    outcome = sftriage("policy", "test", policy, "--on", job, "--expect", saved, "--save", saved)
    assert (outcome.code, saved.exists()) == (2, False)


def test_a_recording_shorter_than_a_window_and_its_warm_up_is_judged_as_it_is(sftriage, policy, tmp_path):
    path = tmp_path / "short.npz"
    np.savez(path, durations_s=np.full((5, 2, 2), 0.01), stages=["a", "b"], sync=["b"])
    outcome = sftriage("policy", "test", policy, "--on", path)
    assert (outcome.code, "steps 0-4" in outcome.out) == (0, True)


def test_the_clock_starts_when_it_is_told_to(sftriage, policy, job):
    policy.write_text(POLICY + "  active: {cron: '* 20 * * *'}\n", encoding="utf-8")
    outcome = sftriage("policy", "test", policy, "--on", job, "--start", "2026-07-01T08:00:00")
    assert "active: captures are not allowed until 2026-07-01T20:00:00Z" in outcome.out


def test_a_run_is_called_by_its_name_and_its_stalls_are_replayed(sftriage, tmp_path):
    # GIVEN a run that stalled before its first window
    run = run_in(tmp_path / "run", POLICY)
    suspect = Suspect("rank", (1,), "data", 90.0, 1.0, 1.0, rank=1)
    verdict = Verdict(7, 7, "stalled", ("not_arrived",), (suspect,), 90.0, {}, {}, {"still_s": 90.0})
    journal = Recorder(run.decisions)
    journal.window(verdict, Decision(1.0, 7, 7, "stalled", "hold", "standstill"))
    journal.close()
    policy = tmp_path / "watching.yaml"
    policy.write_text(POLICY.replace('{stage: [data], gain: ">= 10%"}, capture: {steps: 3}', "{label: stalled}"))
    # WHEN a policy with a rule on stalls is tried on it
    outcome = sftriage("policy", "test", policy, "--on", run.path)
    # THEN the stall is decided by that rule
    assert outcome.code == 0
    assert "0:01:30.0  steps 7  stall  ignore  observe-only: rule slow-input matched" in outcome.out
    assert "### Policy mine on run-1" in outcome.out


def test_a_run_without_a_window_says_so(sftriage, policy, tmp_path):
    run = run_in(tmp_path / "run", POLICY)
    outcome = sftriage("policy", "test", policy, "--on", run.path)
    assert (outcome.code, "No window" in outcome.out) == (0, True)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_what_is_shown_is_a_policy_again_with_nothing_left_to_fill_in(sftriage, tmp_path, name):
    shown = sftriage("policy", "show", name).out
    again = parse(shown, "shown.yaml").policy
    assert again.filled() == yaml.safe_load(shown)
    assert sftriage("policy", "show", name, "--json").json == yaml.safe_load(shown)


def test_every_default_is_shown(sftriage, policy):
    shown = yaml.safe_load(sftriage("policy", "show", policy).out)
    assert shown["spec"]["limits"]["concurrent_ranks"] == 2
    assert shown["spec"]["rules"][0]["match"]["label"] == "suspect"
    assert shown["spec"]["rules"][0]["capture"]["max_bytes"] == "512Mi"


def test_the_schema_is_one_that_a_crd_can_take(sftriage):
    schema = sftriage("policy", "schema").json
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["apiVersion"]["type"] == "string"
    text = json.dumps(schema)
    assert not [word for word in ("anyOf", "oneOf", '"null"') if word in text]


def test_validate_tells_programs_where_each_mistake_is(sftriage, policy, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text(POLICY.replace("steps: 3", "stepz: 3"), encoding="utf-8")
    outcome = sftriage("policy", "validate", policy, broken, "no-such-policy", "--json")
    assert outcome.code == 2
    good, bad, absent = json.loads(outcome.out)
    assert (good["valid"], good["policy"], good["problems"]) == (True, "mine", [])
    (problem,) = bad["problems"]
    assert (problem["line"], problem["field"]) == (7, "spec.rules[0].capture.stepz")
    assert 'did you mean "steps"' in problem["message"]
    assert (absent["valid"], "no policy 'no-such-policy'" in absent["problems"][0]["message"]) == (False, True)


def test_all_files_are_checked_and_not_only_up_to_the_first_that_is_not_there(sftriage, policy, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text(POLICY.replace("steps: 3", "stepz: 3"), encoding="utf-8")
    err = sftriage("policy", "validate", "no-such-policy", broken).refusal
    assert "no policy 'no-such-policy'" in err
    assert f"{broken}:7:" in err
    assert 'stepz: unknown field; did you mean "steps"?' in err
