"""What keeps a rule that matches from capturing, and who is captured when nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sftriage.policy.engine import decide
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.state import GRACE_S, Failures, Running, State, charged, finished
from sftriage.records import CaptureResult, Decision, Verdict
from sftriage.words import reason_sentence, resolution

from .making import make_policy, make_verdict

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z, a Friday
BEGUN = State(started_s=NOW - 1000)
CAPTURING: dict[str, Any] = {"name": "a", "match": {"gain": ">= 5%"}, "capture": {}, "cooldown": "10m"}
OTHER = {**CAPTURING, "name": "b"}
LASTING = {**CAPTURING, "for": "3 windows"}
TELLING = {"name": "t", "match": {}, "notify": [{"webhook": {"url_from_env": "A"}}], "cooldown": "10m"}


def played(policy: PolicySet, *verdicts: Verdict, state: State = BEGUN) -> tuple[list[Decision], State]:
    """Verdicts a second apart, through a restart before each."""
    decisions = []
    for number, verdict in enumerate(verdicts):
        decision, state = decide(verdict, policy, State.from_json(state.to_json()), NOW + number)
        decisions.append(decision)
    return decisions, state


def of(capture_id: str, state: str = "failed") -> CaptureResult:
    return CaptureResult(capture_id, 2, state, "why")  # type: ignore[arg-type]  # a table names the states


def test_a_rule_waits_for_as_many_windows_as_it_says():
    decisions, _ = played(make_policy(LASTING), make_verdict(), make_verdict(), make_verdict())
    assert [(one.outcome, reason_sentence(one)[:22]) for one in decisions] == [
        ("hold", "rule a: window 1 of 3"),
        ("hold", "rule a: window 2 of 3"),
        ("capture", "rule a: data of rank 2"),
    ]
    assert [one.numbers["windows"] for one in decisions] == [1, 2, 3]
    assert {one.numbers["for_windows"] for one in decisions} == {3}
    assert resolution(decisions[0]) == "Wait whether the next windows match too."


@pytest.mark.parametrize(
    ("between", "outcome"),
    [
        ({"label": "healthy", "ranks": None}, "hold"),
        ({"label": "needs_evidence", "reasons": ("roaming",)}, "hold"),
        ({"label": "needs_evidence", "reasons": ("roaming", "self_inflicted")}, "hold"),
        ({"ranks": (3,)}, "hold"),
        ({"ranks": (2, 3)}, "hold"),
        ({"stage": "forward"}, "hold"),
        ({"stage": None}, "hold"),
        ({"scope": "host"}, "hold"),
        ({"share": 0.01}, "hold"),
        ({"attempt": 1}, "hold"),
        # What says nothing of the suspect neither continues nor breaks
        ({"label": "needs_evidence", "reasons": ("self_inflicted",)}, "capture"),
        ({"label": "stalled", "reasons": ("in_sync",), "ranks": None}, "capture"),
        ({}, "capture"),
    ],
)
def test_only_windows_in_a_row_with_the_same_suspect_count(between, outcome):
    """GIVEN two windows of a suspect, something in between and another one THEN there are three only if it fits."""
    verdicts = [make_verdict(), make_verdict(), make_verdict(**between), make_verdict()]
    decisions, _ = played(make_policy({**LASTING, "cooldown": "0s"}, captures_per_run=9), *verdicts)
    last = decisions[2] if between == {} else decisions[3]
    assert last.outcome == outcome


def test_each_rule_counts_its_own_windows_of_a_suspect():
    """GIVEN a rule whose threshold only the later windows reach THEN its windows count from there."""
    policy = make_policy({**LASTING, "match": {"gain": ">= 50%"}}, {**OTHER, "for": "2 windows", "capture": None})
    decisions, state = played(policy, *(make_verdict(share=share) for share in (0.1, 0.6, 0.6, 0.6)))
    assert [one.outcome for one in decisions] == ["ignore", "hold", "hold", "capture"]
    assert state.streak is not None
    assert state.streak.windows == {"a": 3, "b": 2}


def test_an_observing_rule_waits_as_well():
    policy = make_policy({"name": "w", "match": {}, "for": "2 windows"})
    decisions, _ = played(policy, make_verdict(), make_verdict())
    assert [(one.outcome, reason_sentence(one)) for one in decisions] == [
        ("ignore", "rule w: window 1 of 2"),
        ("ignore", "observe-only: rule w matched"),
    ]


@pytest.mark.parametrize(
    ("wanted", "pattern", "outcome", "reason"),
    [
        (["chronic"], "chronic", "capture", "rule a: "),
        (["chronic"], "recurring", "ignore", "pattern recurring is not one of chronic of rule a"),
        (["chronic", "recurring"], "recurring", "capture", "rule a: "),
        (["recurring", "one-off"], "one-off", "hold", "one-off, and has passed"),
        ([], "recurring", "capture", "rule a: "),
    ],
)
def test_patterns(wanted, pattern, outcome, reason):
    policy = make_policy({**CAPTURING, "match": {"pattern": wanted}})
    decision, _ = decide(make_verdict(pattern=pattern), policy, BEGUN, NOW)
    assert (decision.outcome, reason_sentence(decision)[: len(reason)]) == (outcome, reason)


@pytest.mark.parametrize(
    ("state", "limits", "active", "reason"),
    [
        (
            {"hour_s": (NOW - 3601, NOW - 3599, NOW - 60)},
            {"captures_per_hour": 2},
            None,
            "captures_per_hour: 2 of 2 captures asked for, until 2027-01-15T08:00:01Z",
        ),
        ({"hour_s": (NOW - 3600, NOW - 60)}, {"captures_per_hour": 2}, None, None),
        (
            {"hour_s": (NOW - 50, NOW - 40, NOW - 30)},
            {"captures_per_hour": 2},  # the policy has become stricter
            None,
            "captures_per_hour: 3 of 2 captures asked for, until 2027-01-15T08:59:20Z",
        ),
        (
            {"spent_s": 20.0},
            {"overhead_budget": "1%"},
            None,
            "overhead_budget: captures have cost 20 s of the 10 s that are 1% of the run so far, "
            "until 2027-01-15T08:16:40Z",
        ),
        ({"spent_s": 10.0}, {"overhead_budget": "1%"}, None, None),
        (
            {},
            {},
            {"cron": "* 20-23 * * mon-fri", "timezone": "Europe/Berlin"},
            "active: captures are not allowed until 2027-01-15T19:00:00Z",
        ),
        ({}, {}, {"cron": "0 8 * * *"}, None),
        ({"captures": 3, "spent_s": 1e6}, {}, {"cron": "1 * * * *"}, "captures_per_run: 3 of 3 captures made"),
    ],
)
def test_limits_of_the_run(state, limits, active, reason):
    policy = make_policy(CAPTURING, OTHER, active=active, **limits)
    decision, after = decide(make_verdict(), policy, replace(BEGUN, **state), NOW)
    if reason is None:
        assert decision.outcome == "capture"
        return
    assert (decision.outcome, reason_sentence(decision), decision.rule) == ("throttle", reason, "a")
    assert resolution(decision)
    assert after == replace(BEGUN, **state)
    assert {"captures_last_hour", "captures_per_hour", "spent_s", "budget_s", "overhead_budget"} <= set(
        decision.numbers
    )


def test_what_is_not_matched_is_not_throttled():
    """GIVEN a run with nothing left THEN windows that no rule would capture are still what they are."""
    policy = make_policy(CAPTURING)
    spent = replace(BEGUN, captures=3)
    assert decide(make_verdict(share=0.01), policy, spent, NOW)[0].outcome == "ignore"
    assert decide(make_verdict("healthy", ranks=None), policy, spent, NOW)[0].outcome == "ignore"


def test_the_clock_of_the_budget_starts_with_the_first_decision():
    _, state = decide(make_verdict("healthy", ranks=None), make_policy(CAPTURING), State(), NOW)
    assert state.started_s == NOW
    assert decide(make_verdict("healthy", ranks=None), make_policy(CAPTURING), state, NOW + 60)[1] is state


def test_costs_add_up_and_noise_is_not_given_back():
    assert charged(charged(State(spent_s=1.0), 0.5), -3.0).spent_s == 1.5
    for no_cost in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot have cost"):
            charged(State(), no_cost)


@pytest.mark.parametrize(
    ("capture", "peers", "ranks", "controls"),
    [
        ({}, (0, 1), [4], []),
        ({"sample": 3}, (), [4, 5, 6], []),
        ({"sample": 9}, (), [4, 5, 6, 7], []),
        ({"ranks": [0, 8]}, (), [0, 8], []),
        ({"control_ranks": 1}, (5, 3, 1), [4], [3]),  # 5 is suspected itself
        ({"control_ranks": 2}, (3, 3, 1, 0), [4], [3, 1]),
        ({"control_ranks": 2}, (3,), [4], [3]),
        ({"control_ranks": 1}, (), [4], []),
        ({"ranks": [0, 8], "control_ranks": 1}, (8, 3), [0, 8], [3]),
    ],
)
def test_whom_a_rule_captures(capture, peers, ranks, controls):
    """GIVEN a host of ranks 4 to 7 that is suspected, and the job's ranks in order of how typical they are."""
    limits = {"captures_per_run": 20, "captures_per_hour": 20, "concurrent_ranks": 20}
    policy = make_policy({**CAPTURING, "capture": capture}, **limits)
    verdict = make_verdict(ranks=(4, 5, 6, 7), scope="host")
    decision, state = decide(verdict, policy, BEGUN, NOW, peers)
    by_role = {
        role: [request.rank for request in decision.requests if request.role == role] for role in ("suspect", "control")
    }
    assert by_role == {"suspect": ranks, "control": controls}
    assert ("to compare with" in reason_sentence(decision)) == bool(controls)
    assert ("no healthy peer" in reason_sentence(decision)) == (bool(capture.get("control_ranks")) and not controls)
    assert {one.rank: one.control for one in state.running.values()} == {
        **dict.fromkeys(ranks, False),
        **dict.fromkeys(controls, True),
    }
    assert state.captures == state.asked == len(state.hour_s) == len(ranks) + len(controls)


def test_where_little_is_left_the_suspects_come_first():
    rule = {**CAPTURING, "capture": {"sample": 2, "control_ranks": 1}}
    policy = make_policy(rule, captures_per_run=10, concurrent_ranks=3)
    for left, wanted in ((3, [4, 5, 0]), (2, [4, 5]), (1, [4])):
        state = replace(BEGUN, captures=10 - left)
        decision, _ = decide(make_verdict(ranks=(4, 5)), policy, state, NOW, (0, 1))
        assert [request.rank for request in decision.requests] == wanted


def test_a_cooldown_begins_when_a_capture_is_asked_for():
    """GIVEN a capture under way WHEN its rule matches another rank THEN the cooldown holds all the same."""
    _, state = decide(make_verdict(), make_policy(CAPTURING), BEGUN, NOW)
    decision, _ = decide(make_verdict(ranks=(5,)), make_policy(CAPTURING), state, NOW + 1)
    assert (decision.outcome, reason_sentence(decision)) == (
        "throttle",
        "cooldown of rule a until 2027-01-15T08:10:00Z",
    )


def test_a_rule_that_is_throttled_leaves_the_window_to_the_next():
    policy = make_policy(CAPTURING, {**OTHER, "for": "2 windows"}, {**CAPTURING, "name": "c"})
    cooling = replace(BEGUN, fired_s={"a": NOW - 60})
    # WHEN the first rule is in its cooldown, and the second has not seen enough
    decision, state = decide(make_verdict(), policy, cooling, NOW)
    # THEN the third captures
    assert (decision.outcome, decision.rule) == ("capture", "c")
    # WHEN all have to wait, THEN the first says why
    decision, _ = decide(make_verdict(ranks=(7,)), policy, replace(state, fired_s={"a": NOW, "c": NOW}), NOW + 1)
    assert (decision.outcome, reason_sentence(decision)) == (
        "throttle",
        "cooldown of rule a until 2027-01-15T08:10:00Z",
    )


@pytest.mark.parametrize("ended", ["failed", "refused"])
def test_what_came_to_nothing_is_given_back_but_not_tried_again_at_once(ended):
    policy = make_policy({**CAPTURING, "cooldown": "10m"}, captures_per_run=1, captures_per_hour=9)
    decision, state = decide(make_verdict(), policy, BEGUN, NOW)
    (request,) = decision.requests
    # WHEN the capture comes to nothing a minute later
    state = finished(state, of(request.capture_id, ended), NOW + 60)
    # THEN its place in the run and its cooldown are there again, and its place in the hour is not
    assert (state.captures, state.asked, state.fired_s, state.hour_s) == (0, 1, {}, (NOW,))
    assert state.failures == {"a": Failures(1, NOW, NOW + 60)}
    # THEN the rule waits a tenth of its cooldown
    throttled, _ = decide(make_verdict(), policy, state, NOW + 119)
    assert reason_sentence(throttled) == (
        "the last capture of rule a failed or was refused, next attempt from 2027-01-15T08:02:00Z on"
    )
    again, state = decide(make_verdict(), policy, state, NOW + 120)
    assert again.requests[0].capture_id != request.capture_id
    # WHEN that comes to nothing too, THEN it waits twice as long
    state = finished(state, of(again.requests[0].capture_id, ended), NOW + 120)
    assert reason_sentence(decide(make_verdict(), policy, state, NOW + 239)[0]).startswith(
        "the last 2 captures of rule a failed"
    )
    third, state = decide(make_verdict(), policy, state, NOW + 240)
    assert third.requests[0].capture_id not in (request.capture_id, again.requests[0].capture_id)
    # WHEN one is made, THEN all is as if none had failed
    state = finished(state, of(third.requests[0].capture_id, "stored"), NOW + 250)
    assert (state.captures, state.fired_s, state.failures) == (1, {"a": NOW + 240}, {})


@pytest.mark.parametrize(
    ("count", "cooldown_s", "waits_s"),
    [
        (1, 0.0, 30),
        (2, 0.0, 60),
        (9, 0.0, 3600),
        (10**9, 0.0, 3600),
        (1, 6000.0, 600),
        (4, 6000.0, 4800),
        (5, 6e3, 6e3),
    ],
)
def test_the_wait_doubles_up_to_the_cooldown_or_an_hour(count, cooldown_s, waits_s):
    assert Failures(count, 0.0, 100.0).until_s(cooldown_s) == 100.0 + waits_s


@pytest.mark.parametrize("order", [("stored", "failed"), ("failed", "stored")])
def test_of_several_ranks_one_that_is_captured_is_what_the_rule_wanted(order):
    policy = make_policy({**CAPTURING, "capture": {"sample": 2}})
    decision, state = decide(make_verdict(ranks=(2, 3)), policy, BEGUN, NOW)
    for request, ended in zip(decision.requests, order, strict=True):
        state = finished(state, of(request.capture_id, ended), NOW + 5)
    assert (state.captures, state.fired_s, state.failures, state.running) == (1, {"a": NOW}, {}, {})


def test_a_healthy_peer_alone_is_not_what_the_rule_wanted():
    policy = make_policy({**CAPTURING, "capture": {"control_ranks": 1}})
    decision, state = decide(make_verdict(), policy, BEGUN, NOW, (0,))
    suspect, control = decision.requests
    state = finished(finished(state, of(control.capture_id, "stored")), of(suspect.capture_id), NOW + 5)
    assert (state.captures, state.fired_s, state.failures) == (1, {}, {"a": Failures(1, NOW, NOW + 5)})


def test_what_is_not_running_changes_nothing_when_it_ends():
    state = replace(BEGUN, captures=2, running={"w1-50-r2-a-1": Running(2, NOW + 60, "a", NOW)})
    assert finished(state, of("w1-50-r2-a-2")) is state
    once = finished(state, of("w1-50-r2-a-1"), NOW)
    assert finished(once, of("w1-50-r2-a-1"), NOW) is once
    # A capture of which only the end is known counts as made
    assert finished(state, "w1-50-r2-a-1") == replace(state, running={}, fired_s={"a": NOW})


def test_a_capture_that_comes_late_does_not_unmake_a_later_failure():
    # GIVEN a rule that fired twice, the second time on another rank, where the capture failed
    running = {
        "w1-50-r2-a-1": Running(2, NOW + 100, "a", NOW),
        "w1-60-r3-a-2": Running(3, NOW + 110, "a", NOW + 10),
    }
    failed = finished(State(captures=2, running=running), of("w1-60-r3-a-2"), NOW + 12)
    # WHEN the first one is done after that
    state = finished(failed, of("w1-50-r2-a-1", "stored"), NOW + 20)
    # THEN the rule still waits for what failed, and has fired when the first one did
    assert state.failures == failed.failures != {}
    assert state.fired_s == {"a": NOW}


def test_a_capture_that_is_lost_counts_as_made():
    """GIVEN a capture that nobody heard of again THEN its rank is free, and the rule's cooldown holds."""
    policy = make_policy({**CAPTURING, "cooldown": "1h"})
    _, begun = decide(make_verdict(), policy, BEGUN, NOW)
    deadline = NOW + 60 + GRACE_S
    assert decide(make_verdict("healthy"), policy, begun, deadline - 1)[1] == begun
    assert decide(make_verdict("healthy"), policy, begun, deadline)[1].running == {}
    decision, state = decide(make_verdict(), policy, begun, deadline)
    assert (state.running, state.captures, state.fired_s) == ({}, 1, {"a": NOW})
    assert reason_sentence(decision) == "cooldown of rule a until 2027-01-15T09:00:00Z"


def test_a_state_of_the_first_version_is_read():
    """GIVEN what an older controller wrote THEN nothing that it did is forgotten."""
    text = (
        '{"captures": 2, "fired_s": {"a": 1800000000.0}, "running": {"w1-50-r2-a-2": {"rank": 2, '
        '"deadline_s": 1800000180.0}}, "version": 1}'
    )
    state = State.from_json(text)
    assert (state.version, state.captures, state.asked, state.fired_s) == (2, 2, 2, {"a": NOW})
    policy = make_policy(CAPTURING, OTHER)
    throttled, after = decide(make_verdict(), policy, state, NOW + 10)
    assert reason_sentence(throttled) == "cooldown of rule a until 2027-01-15T08:10:00Z"
    assert after.started_s == NOW + 10
    given, _ = decide(make_verdict(ranks=(5,)), policy, finished(after, of("w1-50-r2-a-2")), NOW + 20)
    assert given.requests[0].capture_id.endswith("-3")
    assert State.from_json(after.to_json()) == after


def test_rules_that_want_it_told_say_so_once_in_their_cooldown():
    policy = make_policy(CAPTURING, TELLING, {**TELLING, "name": "costly", "match": {"gain": ">= 50%"}})
    decision, state = decide(make_verdict(), policy, BEGUN, NOW)
    # THEN it is told beside the capture, and by the rules that match alone
    assert (decision.outcome, decision.rule, decision.notify) == ("capture", "a", ("t",))
    decision, state = decide(make_verdict(share=0.6), policy, state, NOW + 599)
    assert decision.notify == ("costly",)
    decision, state = decide(make_verdict("healthy", ranks=None), policy, state, NOW + 600)
    assert decision.notify == ()
    assert decide(make_verdict(pattern="one-off"), policy, state, NOW + 600)[0].notify == ("t",)


def test_telling_waits_for_windows_and_for_no_limit():
    policy = make_policy({**CAPTURING, "for": "2 windows", "notify": TELLING["notify"]}, active={"cron": "* 20 * * *"})
    decisions, state = played(policy, make_verdict(), make_verdict(), make_verdict())
    assert [(one.outcome, one.notify) for one in decisions] == [("hold", ()), ("throttle", ("a",)), ("throttle", ())]
    assert state.notified_s == {"a": NOW + 1}


STACKS = {
    "name": "hang",
    "match": {"label": "stalled"},
    "capture": {"profiler": "stacks", "sample": 3, "stacks": {"native": True}},
}


def test_a_stall_is_captured_by_stacks_on_the_ranks_that_have_not_arrived():
    verdict = make_verdict("stalled", reasons=("not_arrived",), ranks=(3,))
    verdict = replace(verdict, suspects=(*verdict.suspects, replace(verdict.suspects[0], ranks=(5,), stage="forward")))
    policy = make_policy(STACKS, concurrent_ranks=3)
    decision, state = decide(verdict, policy, BEGUN, NOW)
    assert (decision.outcome, reason_sentence(decision)) == (
        "capture",
        "rule hang: not_arrived: rank 3 in data and 1 more",
    )
    assert [(one.rank, one.profiler, one.steps, one.warmup_steps) for one in decision.requests] == [
        (3, "stacks", 1, 0),
        (5, "stacks", 1, 0),
    ]
    assert decision.requests[0].options == {"native": True, "flight_recorder": False}
    assert resolution(decision)
    # A rule that is about one of them takes that one
    narrow = make_policy({**STACKS, "match": {"label": "stalled", "stage": ["forward"]}}, concurrent_ranks=3)
    assert [one.rank for one in decide(verdict, narrow, BEGUN, NOW)[0].requests] == [5]
    # THEN the next report of it has to wait
    assert decide(verdict, policy, state, NOW + 1)[0].outcome == "throttle"


def test_a_stall_in_which_nobody_is_missing_is_held():
    verdict = make_verdict("stalled", reasons=("in_sync",), ranks=None)
    decision, _ = decide(verdict, make_policy(STACKS, concurrent_ranks=3), BEGUN, NOW)
    assert (decision.outcome, reason_sentence(decision), decision.requests) == ("hold", "in_sync", ())
