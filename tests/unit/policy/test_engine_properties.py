"""Over random streams of verdicts: what may never happen, whatever comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sftriage.policy.engine import decide
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.state import GRACE_S, State, charged, finished
from sftriage.records import CaptureRequest, CaptureResult, Decision
from sftriage.words import reason_sentence

from .making import make_policy, make_verdict

START_S = 1_000_000_000.0


@dataclass(frozen=True)
class Event:
    """A window, the time before it, and what becomes of the oldest capture in that time: "" for nothing."""

    label: str
    ranks: tuple[int, ...] | None
    stage: str | None
    share: float
    wait_s: float
    ends: str
    pattern: str = "chronic"
    cost_s: float = 0.0
    restart: bool = False


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
            "for": st.sampled_from(["1 window", "1 window", "2 windows", "3 windows"]),
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
        "captures_per_run": st.integers(2, 6),
        "captures_per_hour": st.integers(2, 4),
        "concurrent_ranks": st.integers(2, 3),
        "overhead_budget": st.sampled_from(["0.5%", "100%"]),
    }
)
ACTIVE = st.sampled_from([None, {"cron": "0-29 * * * *"}])
PEERS = st.sampled_from([(), (7, 3, 1)])


@dataclass
class Played:
    """What came of a stream: each event with its decision, and of each capture what became of it, and when."""

    history: list[tuple[Event, Decision]] = field(default_factory=list)
    ended: dict[str, tuple[str, float]] = field(default_factory=dict)
    spent_s: list[float] = field(default_factory=list)

    def captures(self) -> list[tuple[Event, Decision]]:
        return [(event, decision) for event, decision in self.history if decision.outcome == "capture"]

    def came_to_nothing(self, request: CaptureRequest) -> bool:
        return self.ended.get(request.capture_id, ("",))[0] in ("failed", "refused")


def played(
    events: list[Event],
    policy: PolicySet,
    peers: tuple[int, ...] = (),
    *,
    restarts: bool = True,
) -> Played:
    """Every event as a verdict, with time passing and captures ending in between."""
    state, now_s, found = State(), START_S, Played()
    spent_s = 0.0
    for number, event in enumerate(events):
        now_s += event.wait_s
        if event.ends and state.running:
            oldest = min(state.running)
            result = CaptureResult(oldest, state.running[oldest].rank, event.ends)  # type: ignore[arg-type]
            state = finished(state, result, now_s)
            found.ended[oldest] = event.ends, now_s
        state = charged(state, event.cost_s)
        spent_s += max(0.0, event.cost_s)
        verdict = make_verdict(
            event.label,
            ranks=event.ranks,
            stage=event.stage,
            share=event.share,
            first_step=number * 10,
            reasons=("roaming",) if event.label in ("needs_evidence", "stalled") else (),
            pattern=event.pattern,
        )
        if restarts and event.restart:
            state = State.from_json(state.to_json())
        decision, state = decide(verdict, policy, state, now_s, peers)
        found.history.append((event, decision))
        found.spent_s.append(spent_s)
        assert len({one.rank for one in state.running.values()}) == len(state.running)
        assert len(state.running) <= policy.limits.concurrent_ranks
        assert {request.capture_id for request in decision.requests} <= set(state.running)
    return found


@given(events=EVENTS, rules=RULES, limits=LIMITS, active=ACTIVE, peers=PEERS)
def test_no_limit_of_the_run_is_passed(events, rules, limits, active, peers):
    """GIVEN captures that are made, fail, are refused or lost, and restarts THEN every limit holds at every moment."""
    policy = make_policy(*rules, active=active, **limits)
    found = played(events, policy, peers)
    asked = [(decision.time_s, request) for _, decision in found.captures() for request in decision.requests]
    made = [request for _, request in asked if not found.came_to_nothing(request)]
    assert len(made) <= limits["captures_per_run"]
    assert len({request.capture_id for _, request in asked}) == len(asked)
    for time_s, _ in asked:
        assert sum(time_s - 3600 < other_s <= time_s for other_s, _ in asked) <= limits["captures_per_hour"]
    for (_, decision), spent_s in zip(found.history, found.spent_s, strict=True):
        if decision.outcome == "capture":
            earned_s = policy.limits.overhead_fraction * (decision.time_s - found.history[0][1].time_s)
            assert spent_s <= earned_s + 1e-6
            minute = datetime.fromtimestamp(decision.time_s, timezone.utc).minute
            assert active is None or minute < 30


@given(events=EVENTS, rules=RULES, limits=LIMITS, peers=PEERS)
def test_nothing_is_captured_without_a_suspect_that_its_rule_is_about(events, rules, limits, peers):
    """GIVEN any windows THEN each has one decision, and no capture is on one that is not to be captured."""
    policy = make_policy(*rules, **limits)
    found = played(events, policy, peers)
    by_name = {rule.name: rule for rule in policy.rules}
    assert [decision.first_step for _, decision in found.history] == [number * 10 for number in range(len(events))]
    for number, (event, decision) in enumerate(found.history):
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
        assert suspects <= set(event.ranks or ())
        assert controls <= set(peers) - set(event.ranks or ())
        if event.label == "suspect":
            assert event.pattern != "one-off"
            assert not rule.match.pattern or event.pattern in rule.match.pattern
            windows = [one for one in events[: number + 1] if one.label != "stalled"][-rule.windows :]
            assert len(windows) == rule.windows
            assert {(one.label, one.ranks, one.stage) for one in windows} == {("suspect", event.ranks, event.stage)}


@given(events=EVENTS, rules=RULES, limits=LIMITS)
def test_a_rule_waits_after_a_capture_and_after_one_that_failed(events, rules, limits):
    policy = make_policy(*rules, **limits)
    found = played(events, policy)
    by_name = {rule.name: rule for rule in policy.rules}
    earlier: dict[str, Decision] = {}
    for _, decision in found.captures():
        rule = by_name[decision.rule or ""]
        last = earlier.get(rule.name)
        earlier[rule.name] = decision
        if last is None:
            continue
        # What was known when this one fired: a capture may have failed only after that.
        failed_s = [
            found.ended[request.capture_id][1]
            for request in last.requests
            if found.came_to_nothing(request) and found.ended[request.capture_id][1] <= decision.time_s
        ]
        if len(failed_s) == len(last.requests):
            assert decision.time_s - max(failed_s) >= max(30.0, rule.cooldown_s / 10)
        else:
            assert decision.time_s - last.time_s >= rule.cooldown_s


@given(events=EVENTS, rules=RULES)
def test_nobody_is_told_twice_within_a_cooldown(events, rules):
    policy = make_policy(*rules)
    cooldowns_s = {rule.name: rule.cooldown_s for rule in policy.rules if rule.notify}
    told_s: dict[str, float] = {}
    for _, decision in played(events, policy).history:
        assert decision.label in ("suspect", "stalled") or not decision.notify
        for name in decision.notify:
            assert decision.time_s - told_s.get(name, float("-inf")) >= cooldowns_s[name]
            told_s[name] = decision.time_s


@given(events=EVENTS, rules=RULES, limits=LIMITS, active=ACTIVE, peers=PEERS)
def test_a_restart_at_any_point_changes_no_decision(events, rules, limits, active, peers):
    policy = make_policy(*rules, active=active, **limits)
    kept = played(events, policy, peers, restarts=False)
    restarted = played(events, policy, peers)
    assert [repr(decision) for _, decision in kept.history] == [repr(decision) for _, decision in restarted.history]


def test_the_streams_do_reach_the_limits():
    """GIVEN suspects without end THEN exactly as many captures as the run allows: the properties above are not idle."""
    policy = make_policy(
        {"name": "r", "match": {}, "capture": {"max_seconds": 10}, "cooldown": "0s"},
        captures_per_run=5,
        captures_per_hour=100,
    )
    events = [Event("suspect", (index % 8,), "data", 0.5, GRACE_S, "") for index in range(40)]
    outcomes = [decision.outcome for _, decision in played(events, policy).history]
    assert outcomes.count("capture") == 5
    assert outcomes.count("throttle") == 35
