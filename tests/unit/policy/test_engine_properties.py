"""Over random streams of verdicts: what may never happen, whatever comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.policy import State, TriagePolicy, decide, finished
from sftriage.policy.engine import GRACE_S
from sftriage.records import Decision, Verdict

MakePolicy = Callable[..., TriagePolicy]
MakeVerdict = Callable[..., Verdict]

STAGES = ("data", "forward", None)


@dataclass(frozen=True)
class Event:
    label: str
    ranks: tuple[int, ...] | None
    stage: str | None
    share: float
    wait_s: float
    finishes: bool


EVENTS = st.lists(
    st.builds(
        Event,
        # Mostly suspects: they are what could break a limit.
        label=st.sampled_from(["suspect", "suspect", "suspect", "healthy", "needs_evidence"]),
        ranks=st.sampled_from([None, (), *((rank,) for rank in range(4)), (4, 5), (5, 6), (0, 4), (0, 1, 2, 3)]),
        stage=st.sampled_from(STAGES),
        share=st.floats(0, 1) | st.just(float("nan")),
        wait_s=st.sampled_from([0.0, 1.0, 30.0, 200.0]),
        finishes=st.booleans(),
    ),
    min_size=1,
    max_size=40,
)
RULES = st.lists(
    st.fixed_dictionaries(
        {
            "match": st.fixed_dictionaries(
                {"gain": st.sampled_from([">= 0%", ">= 20%"])}, optional={"stage": st.just(["data"])}
            ),
            "cooldown": st.sampled_from(["0s", "20s", "5m"]),
        },
        optional={"capture": st.just({"max_seconds": 10})},
    ),
    min_size=1,
    max_size=3,
).map(lambda rules: [{"name": f"rule-{index}", **rule} for index, rule in enumerate(rules)])

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def played(
    events: list[Event], policy: TriagePolicy, make_verdict: MakeVerdict, *, through_json: bool = False
) -> list[tuple[Event, Decision]]:
    """Every event as a verdict, with time passing and captures ending in between."""
    state, now_s, history = State(), 1e9, []
    for number, event in enumerate(events):
        now_s += event.wait_s
        if event.finishes and state.running:
            state = finished(state, min(state.running))
        verdict = make_verdict(
            event.label,
            ranks=event.ranks,
            stage=event.stage,
            share=event.share,
            first_step=number * 10,
            reasons=("roaming",) if event.label == "needs_evidence" else (),
        )
        if through_json:
            state = State.from_json(state.to_json())
        decision, state = decide(verdict, policy, state, now_s)
        history.append((event, decision))
        assert len({one.rank for one in state.running.values()}) == len(state.running)
        assert len(state.running) <= policy.spec.limits.concurrent_ranks
    return history


@RELAXED
@given(events=EVENTS, rules=RULES, per_run=st.integers(1, 6), concurrent=st.integers(1, 3))
def test_no_limit_is_passed_and_nothing_is_captured_without_a_suspect(
    events: list[Event],
    rules: list[dict[str, object]],
    per_run: int,
    concurrent: int,
    make_policy: MakePolicy,
    make_verdict: MakeVerdict,
) -> None:
    policy = make_policy(*rules, captures_per_run=per_run, concurrent_ranks=concurrent)
    history = played(events, policy, make_verdict)
    rules_by_name = {rule.name: rule for rule in policy.spec.rules}
    captures = [(event, decision) for event, decision in history if decision.outcome == "capture"]
    requests = [request for _, decision in captures for request in decision.requests]

    assert len(history) == len(events)
    assert len(requests) <= per_run
    assert len({request.capture_id for request in requests}) == len(requests)
    fired: dict[str, float] = {}
    for event, decision in history:
        assert bool(decision.requests) == (decision.outcome == "capture")
        assert decision.reason
        if decision.outcome != "capture":
            continue
        assert event.label == "suspect"
        assert decision.rule is not None
        rule = rules_by_name[decision.rule]
        assert rule.capture is not None
        assert event.share >= rule.match.gain_condition.min_share
        assert not rule.match.stage or event.stage in rule.match.stage
        assert {request.rank for request in decision.requests} <= set(event.ranks or ())
        assert decision.time_s - fired.get(rule.name, float("-inf")) >= rule.cooldown_s
        fired[rule.name] = decision.time_s


@RELAXED
@given(events=EVENTS, rules=RULES, per_run=st.integers(1, 6), concurrent=st.integers(1, 3))
def test_a_restart_at_any_point_changes_no_decision(
    events: list[Event],
    rules: list[dict[str, object]],
    per_run: int,
    concurrent: int,
    make_policy: MakePolicy,
    make_verdict: MakeVerdict,
) -> None:
    policy = make_policy(*rules, captures_per_run=per_run, concurrent_ranks=concurrent)
    kept = played(events, policy, make_verdict)
    restarted = played(events, policy, make_verdict, through_json=True)
    assert [repr(decision) for _, decision in kept] == [repr(decision) for _, decision in restarted]


def test_the_streams_do_reach_the_limits(make_policy: MakePolicy, make_verdict: MakeVerdict) -> None:
    """GIVEN suspects without end THEN exactly as many captures as the run allows: the properties above are not idle."""
    policy = make_policy(
        {"name": "r", "match": {}, "capture": {"max_seconds": 10}, "cooldown": "0s"}, captures_per_run=5
    )
    events = [Event("suspect", (index % 8,), "data", 0.5, GRACE_S, False) for index in range(40)]
    outcomes = [decision.outcome for _, decision in played(events, policy, make_verdict)]
    assert outcomes.count("capture") == 5
    assert outcomes.count("throttle") == 35
