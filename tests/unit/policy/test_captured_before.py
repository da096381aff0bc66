"""What is remembered of a suspect's captures: a cooldown, failures, a trace of its fault, and what that left open."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sftriage.policy.captures import trigger
from sftriage.policy.engine import decide
from sftriage.policy.state import (
    DAY_S,
    GRACE_S,
    MEMORY_S,
    MOST_REMEMBERED,
    Failures,
    Running,
    State,
    charged,
    finished,
    key_of_ranks,
    left_open,
    remembered,
    suspect_key,
)
from sftriage.words.decisions import reason_sentence
from tests.unit.conftest import cases

from .making import BEGUN, CAPTURING, NOW, make_policy, make_verdict, of, outcome, policy_in, verdict_in

POLICY = make_policy(CAPTURING)


def taken(state: State, policy=POLICY, now_s=NOW, nsys=False, **verdict):
    """What is decided on a window of a suspect, and the state after it, through a restart."""
    decision, state = decide(make_verdict(**verdict), policy, state, now_s, nsys=nsys)
    return decision, State.from_json(state.to_json())


def captured(missing="", *, found=True, policy=POLICY, now_s=NOW, state=BEGUN, early=True, **verdict) -> State:
    """The state once a suspect was captured and its capture has ended, with its fault ``found`` or not.

    It leaves something open (``missing``), which is known before it has ended (``early``) or after it.
    """
    decision, state = taken(state, policy, now_s, **verdict)
    (request,) = decision.requests
    state = left_open(state, request.capture_id, missing) if early else state
    state = finished(state, of(request.capture_id, "stored"), now_s + 1, reproduced=found)
    state = state if early else left_open(state, request.capture_id, missing)
    return State.from_json(state.to_json())


@pytest.mark.parametrize(("given", "expected"), cases(Path(__file__).parent / "captured.txt"))
@pytest.mark.parametrize("early", [True, False])
def test_decision_about_a_captured_suspect(given, expected, early):
    case = yaml.safe_load(f"{{{given}}}")
    policy, now_s, nsys = policy_in(case), NOW + case.pop("after_s", 2), case.pop("nsys", False)
    first = {name: case.pop(name) for name in ("found", "missing") if name in case}
    state = captured(**first, policy=policy, early=early, **case.pop("first", {}))
    state = charged(state, case.pop("cost_s", 0.0))
    decision, after = decide(verdict_in(case), policy, state, now_s, nsys=nsys)
    assert outcome(decision) == expected
    assert decision.requests or after == state


def test_a_recapture_that_misses_a_worse_fault_keeps_the_earlier_capture():
    worse = {"gain_s": 0.03}
    state = captured(found=False, state=captured(), now_s=NOW + 600, **worse)
    # THEN what is as it was is known, and what is worse is tried again
    assert decide(make_verdict(), make_policy(CAPTURING), state, NOW + 1200)[0].reason == "already_captured"
    assert decide(make_verdict(**worse), make_policy(CAPTURING), state, NOW + 1200)[0].outcome == "capture"


def test_one_rank_whose_trace_contains_the_fault_is_enough():
    policy = make_policy({**CAPTURING, "capture": {"sample": 2}})
    decision, state = decide(make_verdict(ranks=(2, 3)), policy, BEGUN, NOW)
    for request, found in zip(decision.requests, (True, False), strict=True):
        state = finished(state, of(request.capture_id, "stored"), NOW + 5, reproduced=found)
    assert decide(make_verdict(ranks=(2, 3)), policy, state, NOW + 600)[0].reason == "already_captured"


def test_a_healthy_peers_trace_contains_no_fault():
    policy = make_policy({**CAPTURING, "capture": {"control_ranks": 1}})
    decision, state = decide(make_verdict(), policy, BEGUN, NOW, (0,))
    suspect, control = decision.requests
    state = finished(state, of(control.capture_id, "stored"), NOW + 5, reproduced=True)
    state = finished(state, of(suspect.capture_id, "stored"), NOW + 5)
    assert decide(make_verdict(), policy, state, NOW + 600)[0].outcome == "capture"


@pytest.mark.parametrize("ended", ["failed", "refused"])
def test_a_failed_capture_frees_its_place_but_is_not_retried_at_once(ended):
    policy = make_policy({**CAPTURING, "cooldown": "10m"}, captures_per_run=1, captures_per_hour=9)
    decision, state = decide(make_verdict(), policy, BEGUN, NOW)
    (request,) = decision.requests
    # WHEN the capture fails a minute later
    state = finished(state, of(request.capture_id, ended), NOW + 60)
    # THEN its place in the run and its cooldown are there again, and its place in the hour is not
    assert (state.captures, state.asked, state.fired_s, state.asked_s) == (0, 1, {}, (NOW,))
    assert state.failures == {"a rank 2 data": Failures(1, NOW, NOW + 60)}
    # THEN the suspect waits a tenth of the cooldown, and another for nothing
    assert decide(make_verdict(ranks=(3,)), policy, state, NOW + 61)[0].outcome == "capture"
    throttled, _ = decide(make_verdict(), policy, state, NOW + 119)
    assert reason_sentence(throttled) == (
        "the last capture of rule a failed or was refused; next attempt after 2027-01-15T08:02:00Z"
    )
    again, state = decide(make_verdict(), policy, state, NOW + 120)
    assert again.requests[0].capture_id != request.capture_id
    # WHEN that fails too, THEN it waits twice as long
    state = finished(state, of(again.requests[0].capture_id, ended), NOW + 120)
    assert reason_sentence(decide(make_verdict(), policy, state, NOW + 239)[0]).startswith(
        "the last 2 captures of rule a failed"
    )
    third, state = decide(make_verdict(), policy, state, NOW + 240)
    assert third.requests[0].capture_id not in (request.capture_id, again.requests[0].capture_id)
    # WHEN one is made, THEN all is as if none had failed
    state = finished(state, of(third.requests[0].capture_id, "stored"), NOW + 250)
    assert (state.captures, state.fired_s, state.failures) == (1, {"a rank 2 data": NOW + 240}, {})


@pytest.mark.parametrize(
    ("count", "cooldown_s", "waits_s"),
    [(1, 0.0, 30), (2, 0.0, 60), (9, 0.0, 3600), (10**9, 0.0, 3600), (1, 6e3, 600), (4, 6e3, 4800), (5, 6e3, 6e3)],
)
def test_the_wait_doubles_up_to_the_cooldown_or_an_hour(count, cooldown_s, waits_s):
    assert Failures(count, 0.0, 100.0).until_s(cooldown_s) == 100.0 + waits_s


@pytest.mark.parametrize("order", [("stored", "failed"), ("failed", "stored")])
def test_one_captured_rank_of_several_satisfies_the_rule(order):
    policy = make_policy({**CAPTURING, "capture": {"sample": 2}})
    decision, state = decide(make_verdict(ranks=(2, 3)), policy, BEGUN, NOW)
    for request, ended in zip(decision.requests, order, strict=True):
        state = finished(state, of(request.capture_id, ended), NOW + 5)
    assert (state.captures, state.fired_s, state.failures, state.running) == (1, {"a all 2-3 data": NOW}, {}, {})


def test_a_captured_peer_alone_does_not_satisfy_the_rule():
    policy = make_policy({**CAPTURING, "capture": {"control_ranks": 1}})
    decision, state = decide(make_verdict(), policy, BEGUN, NOW, (0,))
    suspect, control = decision.requests
    state = finished(finished(state, of(control.capture_id, "stored"), NOW), of(suspect.capture_id), NOW + 5)
    failures = {"a rank 2 data": Failures(1, NOW, NOW + 5)}
    assert (state.captures, state.fired_s, state.failures) == (1, {}, failures)


def test_the_end_of_an_unknown_capture_changes_nothing():
    state = replace(BEGUN, captures=2, running={"w1-50-r2-a-1": Running(2, NOW + 60, "a", NOW, suspect="rank 2 data")})
    assert finished(state, of("w1-50-r2-a-2"), NOW) is state
    once = finished(state, of("w1-50-r2-a-1"), NOW)
    assert finished(once, of("w1-50-r2-a-1"), NOW) is once
    made = finished(state, of("w1-50-r2-a-1", "stored"), NOW)
    assert made == replace(state, running={}, fired_s={"a rank 2 data": NOW})


def test_a_late_result_keeps_a_later_failure():
    # GIVEN a suspect that was captured twice on different ranks, and the second capture failed
    one = Running(2, NOW + 100, "a", NOW, suspect="rank 2 data")
    running = {"w1-50-r2-a-1": one, "w1-60-r3-a-2": replace(one, rank=3, deadline_s=NOW + 110, fired_s=NOW + 10)}
    failed = finished(State(captures=2, running=running), of("w1-60-r3-a-2"), NOW + 12)
    # WHEN the first one is done after that
    state = finished(failed, of("w1-50-r2-a-1", "stored"), NOW + 20)
    # THEN the rule still waits for what failed, and has fired when the first one did
    assert state.failures == failed.failures != {}
    assert state.fired_s == {"a rank 2 data": NOW}


def test_a_lost_capture_counts_as_made():
    """GIVEN a capture that never reports THEN its rank is free, and the rule's cooldown holds."""
    policy = make_policy({**CAPTURING, "cooldown": "1h"})
    _, begun = decide(make_verdict(), policy, BEGUN, NOW)
    deadline = NOW + 60 + GRACE_S
    assert decide(make_verdict("healthy"), policy, begun, deadline - 1)[1] == begun
    assert decide(make_verdict("healthy"), policy, begun, deadline)[1].running == {}
    decision, state = decide(make_verdict(), policy, begun, deadline)
    assert (state.running, state.captures, state.fired_s) == ({}, 1, {"a rank 2 data": NOW})
    assert reason_sentence(decision) == "cooldown of rule a until 2027-01-15T09:00:00Z"


FIRST = "w100-149-r2-a-1"


def test_a_capture_has_one_follow_up_whatever_it_shows():
    # GIVEN a follow-up that runs THEN no other is requested
    (second,) = (decided := taken(captured("operators"), now_s=NOW + 2))[0].requests
    assert second.capture_id != FIRST
    assert taken(decided[1], now_s=NOW + 3)[0].reason == "already_captured"
    # WHEN it has ended, and leaves something open too THEN there is no third
    state = left_open(decided[1], second.capture_id, "system")
    for reproduced in (True, False):
        ended = finished(state, of(second.capture_id, "stored"), NOW + 4, reproduced=reproduced)
        # (the first is looked into again once its control is there)
        ended = left_open(ended, FIRST, "operators")
        assert taken(ended, now_s=NOW + 5, nsys=True)[0].reason == "already_captured"


def test_a_failed_follow_up_is_retried_after_the_wait_for_failures():
    decision, state = taken(captured("operators"), now_s=NOW + 2)
    state = finished(state, of(decision.requests[0].capture_id, "refused"), NOW + 3)
    assert taken(state, now_s=NOW + 4)[0].reason == "after_failures"
    assert taken(state, now_s=NOW + 64)[0].reason == "follow_up"


def test_a_manifest_names_the_chosen_profiler_and_the_followed_capture():
    decision, _ = taken(captured("operators"), now_s=NOW + 2)
    both = [trigger(make_verdict(), POLICY, one, one.requests[0]) for one in (taken(BEGUN)[0], decision)]
    assert [(one.chosen, one.follows) for one in both] == [("host_stage", ""), ("left_open", FIRST)]


@pytest.mark.parametrize(
    ("scope", "ranks", "stage", "expected"),
    [
        ("rank", (3,), "data", "rank 3 data"),
        ("rank", (3,), None, "rank 3 *"),
        ("host", (8, 9, 10, 11), "forward", "host 8-11 *"),
        ("cohort", (11, 0, 8, 1, 2), None, "cohort 0-2,8,11 *"),
        ("all", tuple(range(16_384)), "data", "all 0-16383 data"),
    ],
)
def test_suspect_keys_name_scope_ranks_and_stage(scope, ranks, stage, expected):
    assert suspect_key(make_verdict(ranks=ranks, stage=stage, scope=scope).suspects[0]) == expected


@given(st.lists(st.lists(st.integers(0, 300), min_size=1).map(tuple), min_size=2, max_size=2))
def test_other_ranks_have_another_key_and_keys_are_short(both):
    one, other = (key_of_ranks("cohort", ranks, None) for ranks in both)
    assert (one == other) == (set(both[0]) == set(both[1]))
    assert max(len(one), len(other)) < 80


def test_entries_past_their_cooldown_are_forgotten():
    kept = remembered({"old": NOW - MEMORY_S - 1, "new": NOW - MEMORY_S}, {"last": NOW}, lambda at_s: at_s)
    assert kept == {"new": NOW - MEMORY_S, "last": NOW}
    many = remembered({f"s{n}": NOW + n for n in range(MOST_REMEMBERED)}, {"last": NOW + 1e5}, lambda at_s: at_s)
    assert len(many) == MOST_REMEMBERED
    assert "s0" not in many


def test_a_months_state_is_small():
    """GIVEN a month of a job in which another rank is suspected every hour THEN as much is kept as can matter."""
    policy = make_policy({**CAPTURING, "notify": [{"webhook": {"url_from_env": "A"}}]}, captures_per_day=24)
    state, captures, sizes = BEGUN, 0, []
    for hour in range(60 * 24):
        now_s = NOW + 3600 * hour
        decision, state = decide(make_verdict(ranks=(hour % 5000,), gain_s=0.02 + hour * 1e-5), policy, state, now_s)
        for number, request in enumerate(decision.requests):
            result = of(request.capture_id, "failed" if (hour + number) % 3 == 0 else "stored")
            state = finished(state, result, now_s + 60, reproduced=hour % 2 == 0)
            captures += 1
        if hour in (30 * 24, 60 * 24 - 1):
            sizes.append(len(state.to_json()))
    assert captures == 60 * 24
    assert sizes[1] < 1.05 * sizes[0] < 200_000
    assert len(state.asked_s) == 24
    assert all(now_s - DAY_S < at_s for at_s in state.asked_s)
