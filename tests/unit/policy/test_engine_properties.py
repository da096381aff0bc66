"""Over random streams of verdicts: what may never happen, whatever comes."""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.captures import CaptureRequest, CaptureResult, Decision
from sftriage.policy.captures import WORSE_TIMES
from sftriage.policy.engine import decide
from sftriage.policy.in_force import PolicySet
from sftriage.policy.state import GRACE_S, State, charged, finished, key_of_ranks
from sftriage.words.decisions import reason_sentence

from .making import make_policy, make_verdict

START_S = 1_000_000_000.0


@dataclass(frozen=True)
class Event:
    """A window, the time before it, and what becomes of the oldest capture in that time: "" for nothing.

    A capture that is stored has ``found`` its fault, or not.
    """

    label: str
    ranks: tuple[int, ...] | None
    stage: str | None
    share: float
    wait_s: float
    ends: str
    pattern: str = "chronic"
    cost_s: float = 0.0
    restart: bool = False
    gain_s: float = 0.02
    found: bool = False


def numbered(number: int) -> Event:
    """One of all the events there are: a draw for each of its fields would take ten times as long."""
    # Small numbers are drawn more often than large ones; as many as there are follow one another in any order.
    number, values = number * SPREAD % N_EVENTS, {}
    for name, among in EVENT.items():
        number, index = divmod(number, len(among))
        values[name] = among[index]
    return Event(**values)


EVENT: dict[str, list[Any]] = {
    # Mostly suspects: they are what could break a limit.
    "label": ["suspect"] * 6 + ["healthy", "needs_evidence", "stalled"],
    "ranks": [*((rank,) for rank in range(4)), (0,), (4, 5), (5, 6), (0, 1, 2, 3), (), None],
    "stage": ["data", "data", "data", "forward", None],
    "share": [0.5, 0.5, 0.3, 0.2, 0.1, 0.0, float("nan")],
    "wait_s": [1.0, 30.0, 10.0, 0.0, 200.0, 1800.0],
    "ends": ["", "stored", "failed", "stored", "refused"],
    "pattern": ["chronic"] * 4 + ["recurring", "one-off"],
    "cost_s": [0.0] * 8 + [-1.0, 0.05, 2.0],
    "restart": [False, True],
    "gain_s": [0.02, 0.02, 0.02, 0.029, 0.03, 0.05, 0.01],
    "found": [True, False],
}
N_EVENTS = math.prod(len(among) for among in EVENT.values())
SPREAD = 7_709_321
assert math.gcd(SPREAD, N_EVENTS) == 1
EVENTS = st.lists(
    st.integers(0, N_EVENTS - 1).map(numbered),
    min_size=20,  # a short stream meets no limit
    max_size=40,
)
CAPTURES = st.fixed_dictionaries({"max_seconds": st.just(10)}, optional={"control_ranks": st.integers(0, 1)})
RULES = st.lists(
    st.fixed_dictionaries(
        {
            "match": st.fixed_dictionaries(
                {"gain": st.sampled_from([">= 0%", ">= 20%"])},
                optional={"stage": st.just(["data"]), "pattern": st.just(["chronic"])},
            ),
            "cooldown": st.sampled_from(["0s", "20s", "5m"]),
            "for": st.sampled_from(["1 step", "1 step", "60 steps", "3 windows", "5s"]),
        },
        optional={"capture": CAPTURES, "notify": st.just([{"webhook": {"url_from_env": "A"}}])},
    ),
    min_size=1,
    max_size=3,
).map(
    lambda rules: [
        *({"name": f"rule-{index}", **rule} for index, rule in enumerate(rules)),
        {"name": "any", "match": {}, "capture": {"max_seconds": 10}, "cooldown": ("20s", "5m")[len(rules) % 2]},
        {"name": "stacks", "match": {"label": "stalled"}, "capture": {"profiler": "stacks", "max_seconds": 10}},
    ]
)
LIMITS = st.fixed_dictionaries(
    {
        "captures_per_hour": st.integers(2, 4),
        "captures_per_day": st.integers(2, 7),
        "concurrent_ranks": st.integers(2, 3),
        "overhead_budget": st.sampled_from(["0.5%", "100%"]),
    },
    optional={"captures_per_run": st.integers(2, 6)},
)
ACTIVE = st.sampled_from([None, None, {"cron": "0-29 * * * *"}])
PEERS = st.sampled_from([(), (7, 3, 1)])


@dataclass
class Played:
    """What came of a stream: each event with its decision, and of each capture what became of it, and when."""

    history: list[tuple[Event, Decision]] = field(default_factory=list)
    ended: dict[str, tuple[str, float]] = field(default_factory=dict)
    spent_s: list[float] = field(default_factory=list)
    holds_fault: set[str] = field(default_factory=set)
    state: State = field(default_factory=State)

    def captures(self) -> list[tuple[Event, Decision]]:
        return [(event, decision) for event, decision in self.history if decision.outcome == "capture"]

    def has_failed(self, request: CaptureRequest) -> bool:
        return self.ended.get(request.capture_id, ("",))[0] in ("failed", "refused")


def played(events: list[Event], policy: PolicySet, peers: tuple[int, ...] = (), *, restarts: bool = True) -> Played:
    """Every event as a verdict, with time passing and captures ending in between."""
    state, now_s, found = State(), START_S, Played()
    spent_s = 0.0
    for number, event in enumerate(events):
        now_s += event.wait_s
        if event.ends and state.running:
            oldest = min(state.running)
            result = CaptureResult(oldest, state.running[oldest].rank, event.ends)  # type: ignore[arg-type]
            state = finished(state, result, now_s, reproduced=event.found)
            found.ended[oldest] = event.ends, now_s
            if event.ends == "stored" and event.found:
                found.holds_fault.add(oldest)
        state = charged(state, event.cost_s)
        spent_s += max(0.0, event.cost_s)
        verdict = make_verdict(
            event.label,
            ranks=event.ranks,
            stage=event.stage,
            share=event.share,
            gain_s=event.gain_s,
            first_step=number * 10,
            reasons=("roaming",) if event.label in ("needs_evidence", "stalled") else (),
            pattern=event.pattern,
        )
        if restarts and event.restart:
            state = State.from_json(state.to_json())
        decision, state = decide(verdict, policy, state, now_s, peers)
        found.history.append((event, decision))
        found.spent_s.append(spent_s)
        profiled = [one.rank for one in state.running.values() if not one.of_whole_job]
        assert len(set(profiled)) == len(profiled) <= policy.limits.concurrent_ranks
        assert len(state.running) <= len(profiled) + 1
        assert {request.capture_id for request in decision.requests} <= set(state.running)
        found.state = state
    return found


@given(events=EVENTS, rules=RULES, limits=LIMITS, active=ACTIVE, peers=PEERS)
def test_any_stream_keeps_limits_and_waits_and_a_restart_changes_nothing(events, rules, limits, active, peers):
    """GIVEN captures that are made, fail, are refused or lost, and restarts THEN each invariant holds throughout."""
    policy = make_policy(*rules, active=active, **limits)
    found = played(events, policy, peers)
    no_limit_of_the_run_is_passed(found, policy, limits, active)
    nothing_is_captured_without_a_suspect_that_its_rule_is_about(found, policy, peers)
    the_last_place_goes_to_a_suspect_larger_than_any_before(found, limits)
    a_rule_waits_with_a_suspect_after_a_capture_and_after_a_failure(found, policy)
    a_message_about_a_suspect_is_sent_once_in_a_cooldown(found, policy)
    kept = played(events, policy, peers, restarts=False)
    assert [repr(decision) for _, decision in kept.history] == [repr(decision) for _, decision in found.history]


def no_limit_of_the_run_is_passed(found, policy, limits, active):
    asked = [(decision.time_s, request) for _, decision in found.captures() for request in decision.requests]
    made = [request for _, request in asked if not found.has_failed(request)]
    assert len(made) <= limits.get("captures_per_run", math.inf)
    assert len({request.capture_id for _, request in asked}) == len(asked)
    for time_s, _ in asked:
        assert sum(time_s - 3600 < other_s <= time_s for other_s, _ in asked) <= limits["captures_per_hour"]
        assert sum(time_s - 86400 < other_s <= time_s for other_s, _ in asked) <= limits["captures_per_day"]
    for (_, decision), spent_s in zip(found.history, found.spent_s, strict=True):
        if decision.outcome == "capture":
            earned_s = policy.limits.overhead_fraction * (decision.time_s - found.history[0][1].time_s)
            assert spent_s <= earned_s + 1e-6
            minute = datetime.fromtimestamp(decision.time_s, timezone.utc).minute
            assert active is None or minute < 30


def nothing_is_captured_without_a_suspect_that_its_rule_is_about(found, policy, peers):
    by_name = {rule.name: rule for rule in policy.rules}
    for number, (event, decision) in enumerate(found.history):
        assert decision.first_step == number * 10
        assert decision.label == event.label
        assert reason_sentence(decision)
        assert bool(decision.requests) == (decision.outcome == "capture")
        if decision.outcome != "capture":
            continue
        rule = by_name[decision.rule or ""]
        assert event.label == rule.match.label
        assert event.label in ("suspect", "stalled")
        assert rule.capture is not None
        assert event.share >= rule.min_share
        assert not rule.match.stage or event.stage in rule.match.stage
        suspects = {request.rank for request in decision.requests if request.role == "suspect"}
        controls = {request.rank for request in decision.requests if request.role == "control"}
        assert suspects
        assert [request.of_whole_job for request in decision.requests].count(True) == (event.label == "stalled")
        assert suspects <= set(event.ranks or (peers if event.label == "stalled" else ()))
        assert controls <= set(peers) - set(event.ranks or ())
        if event.label == "suspect":
            assert event.pattern != "one-off"
            assert not rule.match.pattern or event.pattern in rule.match.pattern


def the_last_place_goes_to_a_suspect_larger_than_any_before(found, limits):
    asked_s: list[float] = []
    largest_s = 0.0
    for event, decision in found.history:
        asked_s += [decision.time_s] * len(decision.requests)
        if decision.outcome == "capture" and event.label == "suspect":
            for name, period_s in (("captures_per_hour", 3600), ("captures_per_day", 86400)):
                taken = sum(decision.time_s - period_s < one_s for one_s in asked_s)
                assert event.gain_s > largest_s or taken <= limits[name] - 1
            largest_s = max(largest_s, event.gain_s)
        # AND a suspect refused by the reserved place was not the largest, and one place was left
        if decision.reason == "place_kept":
            assert event.gain_s <= largest_s
            name = str(decision.parameters["place_of"])
            period_s = 3600 if name == "captures_per_hour" else 86400
            assert sum(decision.time_s - period_s < one_s for one_s in asked_s) == limits[name] - 1


@given(events=EVENTS, rules=RULES, rank=st.integers(8, 10), stage=st.sampled_from(["data", "forward", None]))
def test_no_suspect_waits_for_captures_of_another(events, rules, rank, stage):
    """GIVEN any captures of others, and places enough WHEN another rank is suspected THEN it is captured at once."""
    policy = make_policy(*rules, captures_per_hour=1000, concurrent_ranks=1000, overhead_budget="100%")
    found = played([replace(event, cost_s=0.0) for event in events], policy)
    now_s = found.history[-1][1].time_s
    verdict = make_verdict(ranks=(rank,), stage=stage, gain_s=0.001, first_step=10_000)
    decision, _ = decide(verdict, policy, found.state, now_s)
    assert (decision.outcome, decision.requests[0].rank) == ("capture", rank)


def a_rule_waits_with_a_suspect_after_a_capture_and_after_a_failure(found, policy):
    by_name = {rule.name: rule for rule in policy.rules}
    earlier: dict[tuple[str, str], Decision] = {}
    held_s: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for event, decision in found.captures():
        rule = by_name[decision.rule or ""]
        subject = rule.name, key_of_ranks(event.label, event.ranks or (), event.stage)
        last = earlier.get(subject)
        earlier[subject] = decision
        if event.label == "suspect":
            # It is worse by half than at the request of a capture that contains the fault.
            known = [
                (found.ended[capture_id][1], gain_s)
                for capture_id, gain_s in held_s[subject[1]]
                if capture_id in found.holds_fault and found.ended[capture_id][1] <= decision.time_s
            ]
            assert not known or event.gain_s >= WORSE_TIMES * known[-1][1] - 1e-12
            held_s[subject[1]] += [(one.capture_id, event.gain_s) for one in decision.requests if one.role == "suspect"]
        if last is None:
            continue
        # What was known when this one fired: a capture may have failed only after that.
        failed_s = [
            found.ended[request.capture_id][1]
            for request in last.requests
            if found.has_failed(request) and found.ended[request.capture_id][1] <= decision.time_s
        ]
        if len(failed_s) == len(last.requests):
            assert decision.time_s - max(failed_s) >= max(30.0, rule.cooldown_s / 10)
        else:
            assert decision.time_s - last.time_s >= rule.cooldown_s


def a_message_about_a_suspect_is_sent_once_in_a_cooldown(found, policy):
    cooldowns_s = {rule.name: rule.cooldown_s for rule in policy.rules if rule.notify}
    notified_s: dict[object, float] = {}
    for event, decision in found.history:
        assert decision.label in ("suspect", "stalled") or not decision.notify
        for name in decision.notify:
            subject = (name, event.ranks, event.stage) if event.label == "suspect" else name
            assert decision.time_s - notified_s.get(subject, float("-inf")) >= cooldowns_s[name]
            notified_s[subject] = decision.time_s


@pytest.mark.parametrize(
    ("limits", "captures", "kept_by"),
    [
        ({"captures_per_run": 5, "captures_per_hour": 100}, 5, "captures_per_run"),
        # (of 4 the last is kept, and so is the last of 100; 40 events are 80 minutes)
        ({"captures_per_hour": 4, "captures_per_day": 100}, 6, "place_kept"),
        ({"captures_per_hour": 100, "captures_per_day": 9}, 8, "place_kept"),
        ({"captures_per_hour": 1, "captures_per_day": 100}, 2, "captures_per_hour"),
    ],
)
def test_streams_reach_the_limits(limits, captures, kept_by):
    """GIVEN suspects without end THEN exactly as many captures as allowed: the properties above are not idle."""
    rule = {"name": "r", "match": {}, "capture": {"max_seconds": 10}, "cooldown": "0s"}
    policy = make_policy(rule, **limits)
    events = [Event("suspect", (index % 8,), "data", 0.5, GRACE_S, "") for index in range(40)]
    reasons = [decision.reason for _, decision in played(events, policy).history]
    assert reasons.count("rule_matched") == captures
    assert reasons.count(kept_by) == 40 - captures


def test_streams_reach_the_reasons_to_wait():
    """GIVEN one suspect without end THEN it is captured once, waits, and again when it is worse."""
    policy = make_policy({"name": "r", "match": {}, "capture": {"max_seconds": 10}, "cooldown": "0s"})
    events = [Event("suspect", (1,), "data", 0.5, 200.0, "stored", gain_s=gain_s, found=True) for gain_s in GROWING]
    reasons = [decision.reason for _, decision in played(events, policy).history]
    assert reasons == ["rule_matched", "already_captured", "already_captured", "rule_matched", "already_captured"]


GROWING = (0.02, 0.02, 0.029, 0.03, 0.044)
