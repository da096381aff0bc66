"""A capture that holds its fault and does not show why is followed by one by another means: once, and at once."""

from __future__ import annotations

import pytest

from sftriage.policy.engine import decide
from sftriage.policy.requests import trigger
from sftriage.policy.state import State, finished, left_open
from sftriage.words.decisions import reason_sentence

from .making import BEGUN, CAPTURING, NOW, make_policy, make_verdict, of

POLICY = make_policy(CAPTURING)


def taken(state: State, policy=POLICY, now_s=NOW, nsys=False, **verdict):
    """What is decided on a window of a suspect, and the state after it, through a restart."""
    decision, state = decide(make_verdict(**verdict), policy, state, now_s, nsys=nsys)
    return decision, State.from_json(state.to_json())


def captured(missing="operators", *, reproduced=True, policy=POLICY, early=True, **verdict) -> tuple[str, State]:
    """The first capture of a suspect and the state once it has ended, and it is known what it leaves open."""
    decision, state = taken(BEGUN, policy, **verdict)
    (request,) = decision.requests
    state = left_open(state, request.capture_id, missing) if early else state
    state = finished(state, of(request.capture_id, "stored"), NOW + 1, reproduced=reproduced)
    state = state if early else left_open(state, request.capture_id, missing)
    return request.capture_id, State.from_json(state.to_json())


@pytest.mark.parametrize(
    ("missing", "first", "nsys", "then"),
    [
        ("operators", {"stage": "data"}, False, ("follow_up", "torch")),
        ("stacks", {"stage": "forward"}, False, ("follow_up", "stacks")),
        ("system", {"stage": "forward"}, True, ("follow_up", "nsys")),
        # There is no other means, or nothing to see with one
        ("system", {"stage": "forward"}, False, ("already_captured", None)),
        ("", {"stage": "data"}, False, ("already_captured", None)),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_what_is_left_open_is_asked_of_the_other_means_without_waiting(missing, first, nsys, then, early):
    # GIVEN a suspect whose capture holds the fault WHEN it is there a moment later THEN no cooldown is waited for
    capture_id, state = captured(missing, early=early, **first)
    decision, _ = taken(state, now_s=NOW + 2, nsys=nsys, **first)
    assert (decision.reason, next((one.profiler for one in decision.requests), None)) == then
    assert then[1] is None or decision.parameters["follows"] == capture_id


@pytest.mark.parametrize(
    ("how", "verdict", "reason"),
    [
        # A fault that was not there while it was captured is tried again, not looked into
        ({"reproduced": False}, {}, "cooldown"),
        # Another suspect, or the same one after another start of the job, has a first capture of its own
        ({}, {"ranks": (1,)}, "rule_matched"),
        ({}, {"attempt": 1}, "cooldown"),
        # A rule that names its profiler means that one
        ({"policy": make_policy({**CAPTURING, "capture": {"profiler": "stacks"}})}, {}, "already_captured"),
    ],
)
def test_what_is_not_followed_up(how, verdict, reason):
    _, state = captured(**how)
    assert taken(state, how.get("policy", POLICY), NOW + 2, **verdict)[0].reason == reason


def test_there_is_one_follow_up_whatever_it_shows():
    # GIVEN a follow-up that runs THEN no other is asked for
    capture_id, state = captured()
    (second,) = (decided := taken(state, now_s=NOW + 2))[0].requests
    assert second.capture_id != capture_id
    assert taken(decided[1], now_s=NOW + 3)[0].reason == "already_captured"
    # WHEN it has ended, and leaves something open too THEN there is no third
    state = left_open(decided[1], second.capture_id, "system")
    for reproduced in (True, False):
        ended = finished(state, of(second.capture_id, "stored"), NOW + 4, reproduced=reproduced)
        # (the first is looked into again once its control is there)
        ended = left_open(ended, capture_id, "operators")
        assert taken(ended, now_s=NOW + 5, nsys=True)[0].reason == "already_captured"


def test_a_follow_up_that_fails_is_tried_again_once_failures_are_let_be():
    _, state = captured()
    decision, state = taken(state, now_s=NOW + 2)
    state = finished(state, of(decision.requests[0].capture_id, "refused"), NOW + 3)
    assert taken(state, now_s=NOW + 4)[0].reason == "after_failures"
    assert taken(state, now_s=NOW + 64)[0].reason == "follow_up"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"captures_per_hour": 1}, "captures_per_hour"),
        ({"captures_per_hour": 2}, "place_kept"),
        ({"captures_per_run": 1}, "captures_per_run"),
        ({"captures_per_hour": 3}, "follow_up"),
    ],
)
def test_the_limits_hold(limits, reason):
    policy = make_policy({**CAPTURING, "cooldown": "0s"}, **limits)
    _, state = captured(policy=policy)
    assert taken(state, policy, NOW + 2)[0].reason == reason


def test_decision_and_manifest_say_what_was_chosen_why_and_what_it_follows():
    capture_id, state = captured()
    decision, _ = taken(state, now_s=NOW + 2)
    said = reason_sentence(decision)
    assert said.startswith(
        f"rule a follows up {capture_id} with PyTorch Profiler: its stacks do not show what the time"
    )
    why = trigger(make_verdict(), POLICY, "a", 2, decision.parameters)
    assert (why.chosen, why.follows) == ("left_open", capture_id)
    first = trigger(make_verdict(), POLICY, "a", 2, taken(BEGUN)[0].parameters)
    assert (first.chosen, first.follows) == ("host_stage", "")


@pytest.mark.parametrize("capture", [{}, {"profiler": "stacks"}, {"stacks": {"native": True}}])
def test_of_a_stall_stacks_are_taken_from_outside(capture):
    policy = make_policy({**CAPTURING, "match": {"label": "stalled"}, "capture": capture})
    decision, _ = taken(BEGUN, policy, label="stalled", reasons=("not_arrived",))
    (request,) = decision.requests
    assert (request.profiler, request.takes_steps, request.steps) == ("stacks", False, 1)
    assert decision.parameters.get("chosen", "") == ("" if "profiler" in capture else "stands_still")
