"""What is decided on a window, by the cases of `decided.txt`, and what a decision carries and leaves."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from sftriage.errors import InputError
from sftriage.model.captures import Decision
from sftriage.model.windows import SystemCode
from sftriage.policy.captures import trigger
from sftriage.policy.engine import decide
from sftriage.policy.state import GRACE_S, Running, State, finished
from sftriage.words.decisions import advice, reason_sentence, resolution
from sftriage.words.verdicts import RESOLVES
from tests.unit.conftest import cases

from .making import BEGUN, CAPTURING, NOW, make_policy, make_verdict, of, outcome, policy_in, verdict_in


def decided(given: str) -> tuple[Decision, State, State]:
    """The decision on a case of `decided.txt`, and the states before and after it; times are relative to now."""
    case: dict[str, Any] = yaml.safe_load(f"{{{given}}}")
    policy = policy_in(case)
    about = case.pop("state", {})
    about["fired_s"] = {key: NOW + at_s for key, at_s in about.pop("fired_s", {}).items()}
    about["asked_s"] = tuple(NOW + at_s for at_s in about.pop("asked_s", ()))
    about["running"] = {f"w1-50-r{rank}-x-1": Running(rank, NOW + 60) for rank in about.pop("running", ())}
    if "whole_job" in about:
        about["running"] = {"w1-1-r5-x-1": Running(about.pop("whole_job"), NOW + 60, of_whole_job=True)}
    peers = case.pop("peers", ())
    # (a large job is written as its number of ranks)
    peers = range(peers) if isinstance(peers, int) else peers
    verdict = verdict_in(case)
    state = replace(BEGUN, **about)
    return *decide(verdict, policy, state, NOW, peers), state


@pytest.mark.parametrize(("given", "expected"), cases(Path(__file__).parent / "decided.txt"))
def test_truth_table(given, expected):
    decision, after, before = decided(given)
    assert outcome(decision) == expected
    assert bool(decision.requests) == (decision.outcome == "capture")
    # What was not captured leaves no trace but how long the suspect has lasted
    assert decision.requests or replace(after, streak=None) == before
    held = decision.reason in ("contended", "one_off", *get_args(SystemCode))
    reasons = decision.parameters.get("reasons", ())
    assert bool(resolution(decision)) == (decision.outcome == "throttle" or held or bool(reasons))
    if decision.label == "stalled" and decision.outcome in ("hold", "ignore"):
        assert resolution(decision) == advice(reasons)
    if decision.outcome == "throttle":
        of_periods = {"captures_last_hour", "captures_per_hour", "captures_last_day", "captures_per_day"}
        assert of_periods | {"spent_s", "budget_s", "overhead_budget"} <= set(decision.numbers)
        assert ("captures_per_run" in decision.numbers) == ("captures_per_run" in given)


def test_a_stall_with_many_suspects_names_the_first_and_counts_the_others():
    verdict = make_verdict("stalled", reasons=("not_arrived",))
    others = (replace(verdict.suspects[0], ranks=(3,)), replace(verdict.suspects[0], ranks=(4, 5)))
    decision, _ = decide(replace(verdict, suspects=verdict.suspects + others), make_policy(CAPTURING), State(), NOW)
    assert reason_sentence(decision) == "not_arrived: rank 2 in data and 3 more"


def test_a_capture_has_its_rules_bounds_and_is_remembered():
    capture = {"steps": 7, "warmup_steps": 2, "max_seconds": 30, "max_bytes": "2Mi", "profiler": "torch"}
    capture["torch"] = {"record_shapes": True}
    policy = make_policy({"name": "a", "match": {"gain": ">= 5%"}, "capture": capture, "cooldown": "90s"})
    decision, state = decide(make_verdict(attempt=1), policy, replace(BEGUN, captures=1, asked=1), NOW)
    (request,) = decision.requests
    assert request.capture_id == "w100-149-r2-a-a1-2"
    assert (request.rank, request.profiler, request.steps, request.warmup_steps) == (2, "torch", 7, 2)
    assert (request.max_seconds, request.max_bytes) == (30.0, 2 * 2**20)
    assert request.options == {
        "sample_stacks": True,
        "samples_per_second": 200,
        "record_shapes": True,
        "with_stack": False,
        "profile_memory": False,
    }
    assert (decision.rule, decision.time_s, decision.attempt) == ("a", NOW, 1)
    assert decision.numbers == {
        "exposed_s": 0.07,
        "gain_s": 0.02,
        "share": 0.3,
        "persistence": 0.9,
        "min_share": 0.05,
        "min_gain_s": 0.0,
        "cooldown_s": 90.0,
        "sample": 1,
        "control_ranks": 0,
        "captures": 1,
        "captures_last_hour": 0,
        "captures_per_hour": 4,
        "captures_last_day": 0,
        "captures_per_day": 12,
        "largest_gain_s": 0.0,
        "running_ranks": 0,
        "concurrent_ranks": 2,
        "spent_s": 0.0,
        "budget_s": 5.0,
        "overhead_budget": 0.005,
    }
    assert state == State(
        captures=2,
        asked=2,
        asked_s=(NOW,),
        running={
            request.capture_id: Running(
                2, NOW + 30 + GRACE_S, "a", NOW, suspect="rank 2 data", gain_s=0.02, attempt=1, profiler="torch"
            )
        },
        largest_gain_s=0.02,
        started_s=NOW - 1000,
    )


def test_capture_ids_are_unique_file_names():
    """GIVEN the longest names and numbers there can be THEN ids are valid, and one window twice gives two."""
    rule = {"name": "r" * 63, "match": {}, "capture": {}, "cooldown": "0s"}
    policy = make_policy(rule, captures_per_run=10_000)
    verdict = make_verdict(ranks=(2**31 - 1,), first_step=2**63 - 50, attempt=2**31)
    first, state = decide(verdict, policy, State(captures=9998), NOW)
    state = finished(state, of(first.requests[0].capture_id, "stored"), NOW)
    second, _ = decide(verdict, policy, state, NOW)
    ids = {first.requests[0].capture_id, second.requests[0].capture_id}
    assert len(ids) == 2
    assert max(map(len, ids)) <= 100


def test_a_trigger_links_window_suspect_rule_and_policy():
    loaded = make_policy(CAPTURING)
    decision, _ = decide(make_verdict(), loaded, BEGUN, NOW)
    found = trigger(make_verdict(), loaded, decision, decision.requests[0])
    assert (found.first_step, found.last_step, found.label, found.scope) == (100, 149, "suspect", "rank")
    assert (found.ranks, found.stage, found.gain_s, found.share, found.persistence) == ((2,), "data", 0.02, 0.3, 0.9)
    assert (found.policy, found.policy_sha256, found.rule) == ("p", "ab" * 32, "a")


def test_an_unknown_reason_has_an_unknown_resolution():
    assert advice(("roaming", "new_reason")) == f"{RESOLVES['roaming'][0]} No advice for 'new_reason' yet."


@pytest.mark.parametrize("text", ["", '{"captures": "1"}', '{"running": {"x": {"rank": 1}}}', '{"version": 2}'])
def test_an_invalid_state_is_refused(text):
    with pytest.raises(InputError, match="not a state of the policy engine"):
        State.from_json(text)


def test_deciding_changes_neither_verdict_nor_state():
    state = State(captures=1, fired_s={"a rank 5 data": NOW - 700}, running={"w1-50-r2-x-1": Running(2, NOW + 60)})
    before = replace(state, fired_s=dict(state.fired_s), running=dict(state.running))
    decide(make_verdict(ranks=(5,)), make_policy(CAPTURING), state, NOW)
    assert state == before
