"""Every policy that ships, on recordings of jobs whose fault is known: what it would have done, and what never."""

import sys
from contextlib import closing
from itertools import groupby

import pytest

from sftriage.controller.controller import shape_of
from sftriage.controller.replay import replay
from sftriage.policy.in_force import load_set, shipped
from sftriage.runs.recordings import load_recording
from sftriage.testing import save
from sftriage.words.decisions import reason_sentence
from tests.integration.processes import LOOP
from tests.scenario import Fault, Job, Recorder, decision, entries, every, from_step, run_at
from tests.unit.policy.making import make_verdict

FIRST_FAULTY_STEP = 110
BEGINS = from_step(FIRST_FAULTY_STEP)

JOBS = {
    "healthy": (),
    "slow-data": (Fault("data", 2, 0.03, BEGINS),),
    "slow-forward": (Fault("forward", 1, 0.03, BEGINS),),
    "slow-backward": (Fault("backward", 1, 0.03, BEGINS),),
    "slow-rank": tuple(Fault(stage, 3, factor=1.5, steps=BEGINS) for stage in ("data", "forward", "backward")),
    "data-hiccups": (Fault("data", 2, 0.15, every(20)),),
    # Two ranks that are late together: mending one alone would save next to nothing.
    "two-slow": (Fault("data", 1, 0.03, BEGINS), Fault("forward", 2, 0.03, BEGINS)),
}

TORCH, NSYS, STACKS = "torch", "nsys", "stacks"
AWAITED = ["ignore", "hold", "capture", "hold", "throttle"]
HICCUPS = ["hold", "capture"]

EXPECTED = {
    # policy: {job: (what happens, in order; who is captured, and how)}; elsewhere, nothing is ever captured
    "default": {
        "slow-data": (AWAITED, {(2, "suspect", STACKS)}),
        "slow-forward": (AWAITED, {(1, "suspect", TORCH)}),
        "slow-backward": (AWAITED, {(1, "suspect", TORCH)}),
        "slow-rank": (AWAITED, {(3, "suspect", TORCH)}),
        "data-hiccups": (HICCUPS, {(2, "suspect", STACKS)}),
    },
    "slow-input": {
        "slow-data": (AWAITED, {(2, "suspect", STACKS), ("peer", "control", STACKS)}),
        "data-hiccups": (HICCUPS, {(2, "suspect", STACKS), ("peer", "control", STACKS)}),
    },
    "slow-compute-nsys": {
        "slow-forward": (AWAITED, {(1, "suspect", NSYS), ("peer", "control", NSYS)}),
        "slow-backward": (AWAITED, {(1, "suspect", NSYS), ("peer", "control", NSYS)}),
    },
    "stragglers-chronic": {
        "slow-data": (AWAITED, {(2, "suspect", STACKS), ("peer", "control", STACKS)}),
        "slow-forward": (AWAITED, {(1, "suspect", TORCH), ("peer", "control", TORCH)}),
        "slow-backward": (AWAITED, {(1, "suspect", TORCH), ("peer", "control", TORCH)}),
        "slow-rank": (AWAITED, {(3, "suspect", TORCH), ("peer", "control", TORCH)}),
    },
    "hang": {},
    "observe-only": {},
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Each job as an .npz: 280 steps of 4 ranks, 100 ms each."""
    directory = tmp_path_factory.mktemp("recordings")
    for name, faults in JOBS.items():
        save(Job(n_steps=280).run(*faults, split=True), directory / f"{name}.npz")
    return directory


def replayed_on(path, *names):
    policies = load_set(names)
    return list(replay(load_recording(path).windows(shape_of(policies.detection)), policies, 0.0))


def captures(replayed):
    return [request for one in replayed for request in one.decision.requests]


def test_every_shipped_policy_has_an_expectation():
    assert set(EXPECTED) == set(shipped())


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("policy", EXPECTED)
def test_a_shipped_policy_serves_its_purpose(recordings, policy, job):
    replayed = replayed_on(recordings / f"{job}.npz", policy)
    outcomes = [outcome for outcome, _ in groupby(one.decision.outcome for one in replayed)]
    if job not in EXPECTED[policy]:
        assert not captures(replayed)
        assert set(outcomes) <= ({"ignore"} if job == "healthy" else {"ignore", "hold"})
        assert job != "healthy" or not any(one.decision.notify for one in replayed)
        return
    expected, wanted = EXPECTED[policy][job]
    (suspect,) = {rank for rank, role, _ in wanted if role == "suspect"}
    made = {
        ("peer" if one.role == "control" and one.rank != suspect else one.rank, one.role, one.profiler)
        for one in captures(replayed)
    }
    if expected is HICCUPS:
        # Before the pattern of what comes back is clear, its windows are held or healthy, whichever; after that there
        # is one capture, which waits for the next time.
        at = outcomes.index("capture")
        assert outcomes[at - 1 : at + 1] == expected
        assert set(outcomes[at + 1 :]) == {"hold", "throttle"}
        for first, last in (steps for one in replayed for steps in one.captured_steps):
            assert any(step % 20 == 0 for step in range(first, last + 1))
    else:
        assert outcomes == expected
    assert made == wanted
    # AND what is captured is the fault, as it begins or while it lasts
    for one in replayed:
        if one.decision.requests and job != "data-hiccups":
            assert one.decision.last_step >= FIRST_FAULTY_STEP


def test_an_earlier_capture_hides_no_other_fault(tmp_path):
    # GIVEN a rank that is slow in the first half of a job, and another in the second
    faults = Fault("data", 0, 0.03, from_step(110, 250)), Fault("data", 3, 0.03, from_step(250))
    replayed = replayed_on(save(Job(n_steps=500).run(*faults), tmp_path / "both.npz"), "default")
    # THEN each is captured within ten minutes, and once, since then it has a trace
    assert [request.rank for request in captures(replayed)] == [0, 3]
    assert replayed[-1].time_s < 600
    assert {one.decision.reason for one in replayed if one.decision.outcome == "throttle"} == {"already_captured"}


def test_the_observing_policy_says_what_it_would_have_captured(recordings):
    observed = replayed_on(recordings / "slow-data.npz", "observe-only")
    matched = [one for one in observed if one.decision.rule is not None]
    # THEN it matches in every window in which the default policy would have had a suspect
    assert matched
    assert {reason_sentence(one.decision) for one in matched} == {"observe-only: rule slow-rank matched"}
    by_default = replayed_on(recordings / "slow-data.npz", "default")
    captured = [one.decision.first_step for one in by_default if one.decision.requests]
    assert matched[0].decision.first_step == captured[0]


def test_a_costly_chronic_straggler_notifies_once(recordings):
    replayed = replayed_on(recordings / "slow-data.npz", "stragglers-chronic")
    assert [one.decision.notify for one in replayed if one.decision.notify] == [("costly-straggler",)]


def test_several_policies_are_tried_in_order_under_the_strictest_limits(recordings):
    both = replayed_on(recordings / "slow-data.npz", "slow-input", "stragglers-chronic")
    rules = [one.decision.rule for one in both if one.decision.requests]
    # THEN the first that may captures, and the second does not capture the same fault
    assert rules == ["slow-input"]
    (limits,) = [one.decision.numbers for one in both if one.decision.requests]
    assert (limits["captures_per_hour"], limits["captures_per_day"], limits["overhead_budget"]) == (5, 17, 0.001)
    assert {one.decision.reason for one in both if one.decision.outcome == "throttle"} == {"already_captured"}


def test_the_hang_policy_captures_stacks_of_missing_ranks(sftriage, tmp_path):
    # GIVEN a run in which rank 1 stayed in data while the others waited
    run = run_at(tmp_path / "run").directory
    stall = make_verdict("stalled", ranks=(1,), reasons=("not_arrived",))
    with closing(Recorder(run.decisions)) as journal:
        journal.window(stall, decision(stall, "hold", "not_arrived"))
    # WHEN it is replayed under the hang policy
    _, out, err = sftriage("policy", "test", "hang", "--on", run.path)
    # THEN the stacks of rank 1 would have been taken, at once
    assert "capture  rule not-arrived: not_arrived: rank 1 in data" in out, err
    assert "rank 1: stacks, at once" in out


def test_a_run_replayed_under_its_own_policy_is_decided_as_it_was(start, tmp_path):
    # GIVEN a run of a real job
    # (Observed only: on a busy machine a rank may really be slow, and how a capture ends is not in the steps.)
    observed = ("run", "--policy", "observe-only", "--out", tmp_path / "run")
    run = start(*observed, "--", sys.executable, str(LOOP), "2", "200", "0")
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    recorded = [
        (entry["decision"]["first_step"], entry["decision"]["label"], entry["decision"]["outcome"])
        for entry in entries(tmp_path / "run" / "decisions.jsonl", "window")
    ]
    # WHEN it is replayed under its own policy
    replayed = replayed_on(tmp_path / "run", tmp_path / "run" / "policy.yaml")
    # THEN every window has the same decision
    assert [(one.verdict.first_step, one.verdict.label, one.decision.outcome) for one in replayed] == recorded
