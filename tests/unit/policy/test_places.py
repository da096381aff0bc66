"""Of an hour's and a day's places the last is kept for a suspect larger than any before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sftriage.model.captures import ManualRequest
from sftriage.policy.engine import decide
from sftriage.policy.requests import decide_manual_request
from sftriage.policy.state import finished
from sftriage.words.decisions import reason_sentence, resolution

from .making import BEGUN, CAPTURING, NOW, make_policy, make_verdict, of

LARGEST_S = 0.02
TWO_ASKED = replace(BEGUN, asked_s=(NOW - 1800, NOW - 60), largest_gain_s=LARGEST_S)
STACKS = {"name": "hang", "match": {"label": "stalled"}, "capture": {"profiler": "stacks"}}


@pytest.mark.parametrize(
    ("limits", "gain_s", "reason"),
    [
        ({"captures_per_hour": 4}, LARGEST_S, "rule_matched"),
        ({"captures_per_hour": 3}, LARGEST_S, "place_kept"),
        ({"captures_per_hour": 3}, LARGEST_S / 2, "place_kept"),
        ({"captures_per_hour": 3}, LARGEST_S + 1e-6, "rule_matched"),
        ({"captures_per_hour": 2}, 1.0, "captures_per_hour"),
        ({"captures_per_hour": 9, "captures_per_day": 3}, LARGEST_S, "place_kept"),
        ({"captures_per_hour": 9, "captures_per_day": 3}, LARGEST_S + 1e-6, "rule_matched"),
        ({"captures_per_hour": 9, "captures_per_day": 2}, 1.0, "captures_per_day"),
    ],
)
def test_who_gets_the_last_place(limits, gain_s, reason):
    """GIVEN two captures within half an hour, the larger of 20 ms WHEN somebody else is suspected."""
    decision, _ = decide(make_verdict(ranks=(7,), gain_s=gain_s), make_policy(CAPTURING, **limits), TWO_ASKED, NOW)
    assert decision.reason == reason


@pytest.mark.parametrize(
    ("limits", "place_of", "until"),
    [
        ({"captures_per_hour": 3}, "captures_per_hour", "2027-01-15T08:30:00Z"),
        ({"captures_per_hour": 3, "captures_per_day": 3}, "captures_per_day", "2027-01-16T07:30:00Z"),
    ],
)
def test_that_a_place_is_kept_is_said_with_the_gains_and_until_when(limits, place_of, until):
    decision, state = decide(make_verdict(ranks=(7,), gain_s=0.015), make_policy(CAPTURING, **limits), TWO_ASKED, NOW)
    assert (decision.outcome, decision.rule, state) == ("throttle", "a", TWO_ASKED)
    assert {name: decision.parameters[name] for name in ("place_of", "gain_s", "largest_gain_s")} == {
        "place_of": place_of,
        "gain_s": 0.015,
        "largest_gain_s": LARGEST_S,
    }
    assert reason_sentence(decision) == (
        f"the last place of {place_of} is kept for a suspect larger than any before: "
        f"this one costs 15 ms a step, and one of 20 ms was captured; until {until}"
    )
    assert resolution(decision) == f"Wait until then, or raise limits.{place_of}."
    # AND then it is captured
    until_s = decision.parameters["until_s"]
    policy = make_policy(CAPTURING, **limits)
    assert decide(make_verdict(ranks=(7,)), policy, TWO_ASKED, until_s - 1)[0].reason == "place_kept"
    assert decide(make_verdict(ranks=(7,)), policy, TWO_ASKED, until_s)[0].outcome == "capture"


def test_of_one_place_alone_none_is_kept():
    policy = make_policy(CAPTURING, captures_per_hour=1)
    state = replace(BEGUN, largest_gain_s=1.0)
    assert decide(make_verdict(), policy, state, NOW)[0].outcome == "capture"


def test_false_captures_never_keep_the_largest_fault_waiting():
    # GIVEN small suspects one after the other, all captured for nothing, until no more are
    policy, state, now_s, reasons = make_policy(CAPTURING), BEGUN, NOW, []
    for rank in range(6):
        decision, state = decide(make_verdict(ranks=(rank,), gain_s=0.005), policy, state, now_s)
        for request in decision.requests:
            state = finished(state, of(request.capture_id, "stored"), now_s + 1)
        reasons.append(decision.reason)
        now_s += 10
    assert reasons == ["rule_matched"] * 3 + ["place_kept"] * 3
    # WHEN a rank becomes slow in earnest
    decision, state = decide(make_verdict(ranks=(3,), stage="forward", gain_s=0.015), policy, state, now_s)
    # THEN it is captured
    assert (decision.outcome, decision.requests[0].rank) == ("capture", 3)
    # AND after that the hour has no place left, whatever comes
    assert decide(make_verdict(ranks=(5,), gain_s=9.0), policy, state, now_s)[0].reason == "captures_per_hour"


def test_where_a_place_is_kept_fewer_ranks_and_no_peers_are_captured():
    rule = {**CAPTURING, "capture": {"sample": 2, "control_ranks": 1}}
    policy = make_policy(rule, captures_per_hour=5, concurrent_ranks=9)
    suspected = {"ranks": (4, 5), "scope": "host"}
    for gain_s, wanted in ((LARGEST_S, [4, 5]), (2 * LARGEST_S, [4, 5, 0])):
        decision, _ = decide(make_verdict(**suspected, gain_s=gain_s), policy, TWO_ASKED, NOW, (0, 1))
        assert [request.rank for request in decision.requests] == wanted


def test_a_stall_may_have_the_place_and_compares_with_no_step():
    """GIVEN one place WHEN the job stands still THEN its stacks are taken: that costs more than any slow step."""
    policy = make_policy(STACKS, CAPTURING, captures_per_hour=3)
    decision, state = decide(make_verdict("stalled", reasons=("not_arrived",), gain_s=90.0), policy, TWO_ASKED, NOW)
    assert decision.outcome == "capture"
    # AND for how long it was waited for is no gain that a suspect would have to be larger than
    assert state.largest_gain_s == LARGEST_S


def test_a_person_may_have_the_place():
    ask = ManualRequest("a-1", (1,), "ann", "why not")
    policy = make_policy(CAPTURING, captures_per_hour=3)
    decision, state = decide_manual_request(ask, policy, TWO_ASKED, NOW, ranks=range(4), step=120)
    assert (decision.outcome, state.largest_gain_s) == ("capture", LARGEST_S)
