"""A decision's reason is counted under one of a few words, whatever numbers and names are in its text."""

import pytest

from sftriage.policy.asking import decide_ask
from sftriage.policy.beside import decide_beside
from sftriage.policy.engine import decide
from sftriage.policy.loading import parse
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.reasons import RESOLVES
from sftriage.policy.state import State, finished
from sftriage.policy.triggers import trigger
from sftriage.records import Ask, CaptureRequest, CaptureResult, Suspect, Trigger, Verdict
from sftriage.sinks.reason_words import UNKNOWN, reason_word


def verdict(label="suspect", reasons=(), **suspect) -> Verdict:
    values = {"scope": "rank", "ranks": (2,), "stage": "data", "gain_s": 0.02, "share": 0.2, "persistence": 1.0}
    suspects = (Suspect(**{**values, "rank": 2, **suspect}),) if label == "suspect" else ()
    return Verdict(0, 19, label, tuple(reasons), suspects, 0.1, {"data": 0.1}, {"data": 2}, {})


def policy(rule='match: {gain: ">= 5%"}, capture: {steps: 3}', limits="", more=""):
    text = f"""
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {{name: test}}
spec:
  {limits}
  {more}
  rules: [{{name: "a-rule", {rule}}}]
"""
    return PolicySet((parse(text, "test.yaml"),))


def after(state: State, **options) -> State:
    """A state in which a capture was asked for, of rank 2."""
    return decide(verdict(), policy(**options), state, 1000.0)[1]


CASES = {
    "rule_matched": lambda: decide(verdict(), policy(), State(), 1000.0)[0],
    "healthy": lambda: decide(verdict("healthy"), policy(), State(), 1000.0)[0],
    "one_off": lambda: decide(verdict(pattern="one-off"), policy(), State(), 1000.0)[0],
    "no_rule_matched": lambda: decide(verdict(share=0.01), policy(), State(), 1000.0)[0],
    "observe_only": lambda: decide(verdict(), policy('match: {gain: ">= 5%"}'), State(), 1000.0)[0],
    "waits_for_windows": lambda: decide(
        verdict(), policy('match: {gain: ">= 5%"}, for: 3 windows, capture: {steps: 3}'), State(), 1000.0
    )[0],
    "cooldown": lambda: decide(
        verdict(), policy(), finished(after(State()), CaptureResult(_capture_id(), 2, "done"), 1001.0), 1002.0
    )[0],
    "after_failures": lambda: decide(
        verdict(), policy(), finished(after(State()), CaptureResult(_capture_id(), 2, "failed"), 1001.0), 1002.0
    )[0],
    "captures_per_run": lambda: decide(
        verdict(),
        policy(limits="limits: {captures_per_run: 1}"),
        after(State(), limits="limits: {captures_per_run: 1}"),
        9e9,
    )[0],
    "captures_per_hour": lambda: decide(
        verdict(),
        policy(limits="limits: {captures_per_hour: 1}"),
        after(State(), limits="limits: {captures_per_hour: 1}"),
        1001.0,
    )[0],
    "rank_busy": lambda: decide_ask(_ask(), policy(), after(State()), 1001.0, ranks=(0, 1, 2), step=5)[0],
    "no_such_rank": lambda: decide_ask(_ask(ranks=(9,)), policy(), State(), 1001.0, ranks=(0, 1, 2), step=5)[0],
    "rank_hangs": lambda: decide_beside(_request(), _trigger(), State(), 1001.0, step=5)[0],
    "asked": lambda: decide_ask(_ask(), policy(), State(), 1001.0, ranks=(0, 1, 2), step=5)[0],
}


def _request() -> CaptureRequest:
    return decide(verdict(), policy(), State(), 1000.0)[0].requests[0]


def _trigger() -> Trigger:
    return trigger(verdict(), policy(), "a-rule", 2)


def _capture_id() -> str:
    return _request().capture_id


def _ask(ranks=(2,)) -> Ask:
    return Ask("an-ask", ranks, "somebody", "cooldown of the room: 3 of 4")


@pytest.mark.parametrize("word", CASES)
def test_what_the_engine_says_has_a_word(word):
    decision = CASES[word]()
    assert reason_word(decision) == word, decision.reason


@pytest.mark.parametrize("reason", sorted(RESOLVES))
def test_a_hold_counts_under_the_verdicts_first_reason(reason):
    undecided = verdict("needs_evidence", (reason, "roaming"))
    decision = decide(undecided, policy(), State(), 1000.0)[0]
    assert reason_word(decision, undecided.reasons) == reason


def test_a_reason_that_nobody_knows_is_not_a_label_of_its_own():
    undecided = verdict("needs_evidence", ("phase of the moon 17",))
    decision = decide(undecided, policy(), State(), 1000.0)[0]
    assert reason_word(decision, undecided.reasons) == UNKNOWN
