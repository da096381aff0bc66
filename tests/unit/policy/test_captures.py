"""What keeps a rule that matches from capturing, who is captured when nothing does, and manual requests."""

from dataclasses import replace
from functools import partial

import pytest

from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest
from sftriage.model.verdicts import Verdict
from sftriage.policy.captures import decide_manual_request, in_the_same_steps, trigger
from sftriage.policy.engine import decide
from sftriage.policy.state import State, charged, finished
from sftriage.words.decisions import reason_sentence, resolution

from .making import BEGUN, CAPTURING, NOW, in_a_row, job_at, make_policy, make_verdict, of, played

TELLING = {"name": "t", "match": {}, "notify": [{"webhook": {"url_from_env": "A"}}], "cooldown": "10m"}


def test_the_clock_of_the_budget_starts_with_the_first_decision():
    _, state = decide(make_verdict("healthy", ranks=None), make_policy(CAPTURING), State(), NOW)
    assert state.started_s == NOW
    assert decide(make_verdict("healthy", ranks=None), make_policy(CAPTURING), state, NOW + 60)[1] is state


def test_costs_add_up_and_negative_ones_are_ignored():
    assert charged(charged(State(spent_s=1.0), 0.5), -3.0).spent_s == 1.5
    for no_cost in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot have cost"):
            charged(State(), no_cost)


def test_rules_notify_once_per_cooldown():
    policy = make_policy(CAPTURING, TELLING, {**TELLING, "name": "costly", "match": {"gain": ">= 50%"}})
    decision, state = decide(make_verdict(), policy, BEGUN, NOW)
    # THEN it notifies beside the capture, and for the rules that only notify
    assert (decision.outcome, decision.rule, decision.notify) == ("capture", "a", ("t",))
    decision, state = decide(make_verdict(share=0.6), policy, state, NOW + 599)
    assert decision.notify == ("costly",)
    decision, state = decide(make_verdict("healthy", ranks=None), policy, state, NOW + 600)
    assert decision.notify == ()
    assert decide(make_verdict(pattern="one-off"), policy, state, NOW + 600)[0].notify == ("t",)


def test_a_notification_waits_for_the_suspect_to_last_and_ignores_limits():
    policy = make_policy({**CAPTURING, "for": "60 steps", "notify": TELLING["notify"]}, active={"cron": "* 20 * * *"})
    decisions, state = played(policy, *in_a_row({}, {}, {}))
    assert [(one.outcome, one.notify) for one in decisions] == [("hold", ()), ("throttle", ("a",)), ("throttle", ())]
    assert state.notified_s == {"a rank 2 data": NOW + 1}


def test_each_suspect_notifies_at_once_and_a_stall_once():
    policy = make_policy(TELLING, {**TELLING, "name": "s", "match": {"label": "stalled"}})
    stalls = [make_verdict("stalled", reasons=("not_arrived",), ranks=ranks) for ranks in ((1, 2), (2,))]
    decisions, _ = played(policy, *(make_verdict(ranks=(rank,)) for rank in (0, 3, 0)), *stalls)
    # THEN a message about rank 0 keeps none about rank 3; but a stall is the job's, whoever is still missing
    assert [one.notify for one in decisions] == [("t",), ("t",), (), ("s",), ()]


STACKS = {"name": "hang", "match": {"label": "stalled"}, "capture": {"profiler": "stacks", "max_seconds": 60}}


def stall(*suspects: tuple[int, ...], reasons: tuple[str, ...] = ("not_arrived",)) -> Verdict:
    """A stall for which these have not arrived."""
    verdict = make_verdict("stalled", reasons=reasons, ranks=None)
    alike = make_verdict("stalled", ranks=(0,)).suspects[0]
    return replace(verdict, suspects=tuple(replace(alike, ranks=ranks) for ranks in suspects))


def test_a_stall_is_one_capture_of_all_ranks():
    # GIVEN two ranks that have not arrived, one of them in another stage
    verdict = stall((3,), (5,))
    verdict = replace(verdict, suspects=(verdict.suspects[0], replace(verdict.suspects[1], stage="forward")))
    policy = make_policy(STACKS)
    decision, state = decide(verdict, policy, BEGUN, NOW, (4, 0))
    assert reason_sentence(decision) == "rule hang: not_arrived: rank 3 in data and 1 more"
    # THEN the first of them names it, no step is captured, and its time-box is short
    (request,) = decision.requests
    assert (request.rank, request.profiler, request.takes_steps, request.max_seconds) == (3, "stacks", False, 10.0)
    assert request.options == {"whole_job": True, "detail": [0, 3, 4, 5]}
    assert resolution(decision)
    # AND it counts once, and keeps no rank busy
    assert (state.captures, state.asked_s, state.busy_ranks) == (1, (NOW,), {})
    # AND a rule that is about one of them names it by that one
    narrow = make_policy({**STACKS, "match": {"label": "stalled", "stage": ["forward"]}})
    (request,) = decide(verdict, narrow, BEGUN, NOW, (4, 0))[0].requests
    assert (request.rank, request.options["detail"]) == (5, [0, 3, 4, 5])


def test_one_stall_is_captured_once_in_a_cooldown_and_another_one_at_once():
    policy = make_policy({**STACKS, "cooldown": "10m"})

    def decided_after(first, second, wait_s):
        decision, state = decide(first, policy, BEGUN, NOW, (0, 1))
        (request,) = decision.requests
        state = finished(State.from_json(state.to_json()), of(request.capture_id, "stored"), NOW + 2)
        return decide(second, policy, state, NOW + wait_s, (0, 1))[0].reason

    one, other, nobody = stall((2,)), stall((3,)), stall(reasons=("in_sync",))
    # THEN the same ranks wait for the cooldown, whatever their stage and reason, and so does a stall of no rank
    same = replace(one, reasons=("died",), suspects=(replace(one.suspects[0], stage="forward"),))
    assert [decided_after(one, same, wait_s) for wait_s in (30.0, 601.0)] == ["cooldown", "rule_matched"]
    assert [decided_after(nobody, nobody, wait_s) for wait_s in (30.0, 601.0)] == ["cooldown", "rule_matched"]
    # AND other ranks do not
    assert [decided_after(one, other, 30.0), decided_after(nobody, one, 30.0)] == ["rule_matched"] * 2
    # AND the start of a job, before its first step is over, does not keep a later hang from being captured
    later = replace(nobody, numbers={"typical_step_s": 0.1})
    assert [decided_after(nobody, later, 30.0), decided_after(later, later, 30.0)] == ["rule_matched", "cooldown"]


def test_a_failed_capture_of_a_stall_is_retried_like_any_other():
    policy = make_policy({**STACKS, "cooldown": "10m"})
    decision, state = decide(stall((2,)), policy, BEGUN, NOW, (0, 1))
    state = finished(state, of(decision.requests[0].capture_id), NOW + 10)
    assert decide(stall((2,)), policy, state, NOW + 60, (0, 1))[0].reason == "after_failures"
    assert decide(stall((2,)), policy, state, NOW + 71, (0, 1))[0].reason == "rule_matched"


def test_the_trigger_of_a_stall_suspects_all_ranks_if_they_look_alike():
    policy = make_policy(STACKS)
    for verdict, scope, ranks in ((stall((3,)), "rank", (3,)), (stall(reasons=("in_sync",)), "all", (0, 1, 2))):
        decision, _ = decide(verdict, policy, BEGUN, NOW, (2, 0, 1))
        why = trigger(verdict, policy, decision, decision.requests[0])
        assert (why.label, why.scope, why.ranks, why.rule) == ("stalled", scope, ranks, "hang")


LARGEST_S = 0.02
TWO_CAPTURED = replace(BEGUN, asked_s=(NOW - 1800, NOW - 60), largest_gain_s=LARGEST_S)


def test_a_stall_may_take_the_reserved_place_and_compares_with_no_step():
    """GIVEN one place that a stall takes THEN how long it lasted is no gain that a suspect has to be larger than."""
    policy = make_policy(STACKS, CAPTURING, captures_per_hour=3)
    _, state = decide(make_verdict("stalled", reasons=("not_arrived",), gain_s=90.0), policy, TWO_CAPTURED, NOW)
    assert (len(state.running), state.largest_gain_s) == (1, LARGEST_S)


def test_a_person_may_take_the_reserved_place():
    policy = make_policy(CAPTURING, captures_per_hour=3)
    decision, state = decided(by_hand(1), TWO_CAPTURED, policy)
    assert (decision.outcome, state.largest_gain_s) == ("capture", LARGEST_S)


limited = partial(make_policy, {"name": "any", "match": {}})
POLICY = limited(captures_per_hour=3, captures_per_run=4, concurrent_ranks=2)


def by_hand(*ranks, **more):
    return ManualRequest("a-1", ranks or (1,), "ann", "why not", **more)


def decided(wanted, state=None, limits=None, *, ranks=4, attempt=0, **known):
    job = job_at(120, ranks, attempt)
    return decide_manual_request(wanted, limits or POLICY, state or State(), NOW, job, **known)


def test_a_manual_request_is_captured():
    # GIVEN a request for two ranks
    decision, state = decided(by_hand(1, 3, steps=7, warmup_steps=2, max_seconds=30.0, max_bytes=2**21), attempt=2)
    # THEN just these ranks are captured, with the requested bounds
    found = decision.outcome, decision.label, reason_sentence(decision)
    assert found == ("capture", "asked", "requested by ann: why not")
    bounds = [(one.rank, one.steps, one.warmup_steps, one.max_seconds) for one in decision.requests]
    assert bounds == [(1, 7, 2, 30.0), (3, 7, 2, 30.0)]
    assert [one.capture_id for one in decision.requests] == ["asked-s120-r1-a2-1", "asked-s120-r3-a2-2"]
    # AND it counts, as every capture does, and starts no rule's cooldown
    assert (state.captures, state.asked, set(state.running)) == (2, 2, {one.capture_id for one in decision.requests})
    ended = finished(state, CaptureResult("asked-s120-r1-a2-1", 1, "stored"), NOW + 10)
    assert (ended.fired_s, ended.failures, ended.largest_gain_s) == ({}, {}, 0.0)


ANY, UNDER_NSYS = {}, {"clock": "device", "nsys": True}


@pytest.mark.parametrize(
    ("profiler", "options", "still", "case", "expected"),
    [
        # A request has no suspect: it captures both operators and lines
        ("auto", {}, (), ANY, ("torch", 5, 1, True, "whole_rank")),
        ("auto", {}, (), UNDER_NSYS, ("nsys", 5, 1, None, "device_clock")),
        # unless the rank takes no steps
        ("auto", {}, (1,), ANY, ("stacks", 1, 0, None, "stands_still")),
        ("auto", {}, (1,), UNDER_NSYS, ("stacks", 1, 0, None, "stands_still")),
        ("auto", {}, (0, 2), ANY, ("torch", 5, 1, True, "whole_rank")),
        # What is named is taken, its options with it
        ("stacks", {}, (), ANY, ("stacks", 5, 0, True, "")),
        ("stacks", {}, (1,), ANY, ("stacks", 1, 0, None, "")),
        ("stacks", {"stacks": {"native": True}}, (), ANY, ("stacks", 1, 0, None, "")),
        ("torch", {"torch": {"sample_stacks": False}}, (1,), ANY, ("torch", 5, 1, False, "")),
    ],
)
def test_the_profiler_of_a_manual_request(profiler, options, still, case, expected):
    wanted = by_hand(1, profiler=profiler, options=options)
    decision, _ = decided(wanted, still=still, **case)
    (request,) = decision.requests
    why = trigger(wanted, POLICY, decision, request)
    found = request.profiler, request.steps, request.warmup_steps, request.options.get("sample_stacks")
    assert (*found, why.chosen) == expected
    assert request.options.get("native", False) == bool(options.get("stacks"))


@pytest.mark.parametrize(
    ("wanted", "before", "limits", "reason"),
    [
        (by_hand(7), (), None, "rank 7 is not in this job: its ranks are 0 to 3"),
        (by_hand(0, 1, 2), (), None, "concurrent_ranks: 0 of at most 2"),
        (by_hand(1), (by_hand(1),), None, "rank 1 is already being captured"),
        (by_hand(2), (by_hand(0, 1),), None, "concurrent_ranks: 2 of at most 2"),
        (by_hand(1), (by_hand(0),), limited(captures_per_run=1, concurrent_ranks=1), "captures_per_run: 1 of 1"),
        (by_hand(1), (by_hand(0),), limited(captures_per_hour=1, concurrent_ranks=2), "captures_per_hour: 1 of 1"),
        (by_hand(1), (by_hand(0),), limited(captures_per_day=1, concurrent_ranks=2), "captures_per_day: 1 of 1"),
        (by_hand(1), (), limited(active={"cron": "0 3 * * *"}), "active: captures are not allowed until"),
    ],
)
def test_the_limits_hold(wanted, before, limits, reason):
    state = State()
    for one in before:
        decision, state = decided(one, state, limits)
        assert decision.outcome == "capture"
    decision, after = decided(wanted, state, limits)
    assert (decision.outcome, decision.requests) == ("throttle", ())
    assert reason_sentence(decision).startswith(reason), reason_sentence(decision)
    assert resolution(decision)
    assert after.captures == state.captures


def test_a_job_without_ranks_has_no_capture():
    assert reason_sentence(decided(by_hand(0), ranks=0)[0]) == "rank 0 is not in this job: it has no ranks yet"


def test_a_manual_trigger_names_the_person_and_reason_and_no_suspect():
    decision, _ = decided(by_hand(1))
    why = trigger(by_hand(1), POLICY, decision, decision.requests[0])
    assert (why.label, why.ranks, why.stage, why.gain_s) == ("asked", (1,), None, 0.0)
    assert (why.why, why.rule, why.policy) == ("requested by ann: why not", "", "p")


def request(rank: int, profiler: str = "torch", warmup_steps: int = 1, **more) -> CaptureRequest:
    return CaptureRequest(f"c-{rank}-{profiler}", rank, profiler, 5, warmup_steps, 60.0, 2**20, **more)


@pytest.mark.parametrize(
    ("requests", "step_s", "first"),
    [
        ([request(0)], 0.05, [0]),
        ([request(0), request(1)], 0.05, [115, 115]),
        ([request(0, warmup_steps=3), request(1)], 0.05, [117, 117]),
        ([request(0), request(1)], 0.0, [605, 605]),
        ([request(0), request(1)], 2.0, [106, 106]),
        ([request(0, "nsys"), request(1, "nsys")], 0.05, [185, 185]),
        ([request(0, "stacks"), request(1, "stacks")], 0.05, [0, 0]),
        ([request(0), request(1), request(0, "stacks")], 0.05, [115, 115, 0]),
    ],
)
def test_several_captures_begin_at_one_step_that_all_can_reach(requests, step_s, first):
    found = in_the_same_steps(requests, 100, step_s)
    assert [one.first_step for one in found] == first
    assert [one.capture_id for one in found] == [one.capture_id for one in requests]


def test_captures_of_a_recurring_fault_share_its_phase():
    # GIVEN a fault every seventh step, and two ranks that see their requests in different steps
    both = in_the_same_steps([request(rank, period_steps=7, phase=3) for rank in (0, 1)], 100, 0.05)
    # THEN both begin at the same step, with the fault among those recorded
    begins = {one.begins_at(step) for one in both for step in (101, 103, 104)}
    assert len(begins) == 1
    assert any((begins.copy().pop() + more) % 7 == 3 for more in range(5))
