"""Rules on the job against itself: who is told of it, how often, and that nothing is ever captured for it."""

from dataclasses import replace

import pytest

from sftriage.decisions import Regression
from sftriage.policy.contradictions import contradictions
from sftriage.policy.engine import decide
from sftriage.policy.schema import TriagePolicy
from sftriage.policy.state import State

from .making import make_policy, make_verdict

NOW = 1_800_000_000.0
TELL = {"notify": [{"webhook": {"url_from_env": "A"}}], "cooldown": "10m"}
TELLING = {"name": "slower", "match": {"reason": "regressed"}, **TELL}
SLOWER = Regression(640, 632, 655, 0.21, "all", ("backward",), 0.05)


def regressed(found=SLOWER, label="needs_evidence", **about):
    reasons = ("regressed",) if label == "needs_evidence" else ()
    ranks = (2,) if label == "suspect" else None
    return replace(make_verdict(label, ranks=ranks, reasons=reasons, **about), regression=found)


def test_whoever_wants_it_is_told_once_in_the_cooldown_and_nothing_is_captured():
    policy = make_policy(TELLING, {"name": "any", "match": {}, "capture": {}})
    decision, state = decide(regressed(), policy, State(), NOW)
    # THEN it is held, under the rule that matched
    assert (decision.outcome, decision.reason, decision.rule) == ("hold", "undecided", "slower")
    assert (decision.notify, decision.requests) == (("slower",), ())
    # AND told again after the cooldown, while it lasts
    assert decide(regressed(), policy, state, NOW + 599)[0].notify == ()
    assert decide(regressed(), policy, state, NOW + 600)[0].notify == ("slower",)


def test_its_end_is_told_where_its_beginning_was():
    policy, over = make_policy(TELLING), replace(SLOWER, until_step=900)
    # GIVEN nobody was told of the beginning THEN nobody is of the end
    decision, state = decide(regressed(over, "healthy"), policy, State(), NOW)
    assert decision.notify == ()
    # WHEN somebody was THEN of the end too, within the cooldown, once
    _, state = decide(regressed(), policy, state, NOW)
    decision, state = decide(regressed(over, "healthy"), policy, state, NOW + 60)
    assert (decision.outcome, decision.notify) == ("ignore", ("slower",))
    assert decide(regressed(over, "healthy"), policy, state, NOW + 70)[0].notify == ()
    # AND one that came back within the cooldown, of which nobody heard, ends as quietly
    decision, state = decide(regressed(), policy, state, NOW + 80)
    assert decision.notify == ()
    assert decide(regressed(over, "healthy"), policy, state, NOW + 90)[0].notify == ()
    # AND the state comes back as it was
    assert State.from_json(state.to_json()) == state


def test_a_regression_beside_a_suspect_is_told_beside_its_capture():
    policy = make_policy(TELLING, {"name": "a", "match": {}, "capture": {}, **TELL})
    decision, _ = decide(regressed(label="suspect"), policy, State(), NOW)
    assert (decision.outcome, decision.rule) == ("capture", "a")
    assert decision.notify == ("slower", "a")


def test_it_matches_by_how_much_and_where():
    def told(**match):
        policy = make_policy({**TELLING, "match": {"reason": "regressed", **match}})
        return bool(decide(regressed(), policy, State(), NOW)[0].notify)

    # (21 % of 50 ms are 10.5 ms)
    assert told(gain=">= 20% and >= 10ms")
    assert not told(gain=">= 25%")
    assert not told(gain=">= 11ms")
    assert told(stage=["forward", "backward"])
    assert not told(stage=["data"])


def test_such_a_rule_is_about_no_suspect():
    policy = make_policy(TELLING)
    decision, _ = decide(make_verdict(), policy, State(), NOW)
    assert (decision.outcome, decision.reason, decision.notify) == ("ignore", "no_rule_matched", ())


def test_filled_with_its_defaults_it_is_still_a_policy():
    policy = make_policy(TELLING).loaded[0].policy
    again = TriagePolicy.model_validate(policy.filled())
    assert again.spec.rules[0].match.reason == "regressed"
    assert again.filled() == policy.filled()


@pytest.mark.parametrize(
    ("rule", "where", "said"),
    [
        ({"capture": {}}, "capture", "no capture on regressed, because nobody alone is why the job is slower"),
        ({"match": {"scope": ["rank"]}}, "match.scope", "no scope on regressed: it is about the job"),
        ({"match": {"pattern": ["chronic"]}}, "match.pattern", "no pattern on regressed: it is about the job"),
        ({"for": "2 windows"}, "for", "no windows on regressed: it is told once enough steps are slower"),
    ],
)
def test_what_such_a_rule_cannot_mean_is_refused(rule, where, said):
    rule = {**TELLING, **rule, "match": {"reason": "regressed", **rule.get("match", {})}}
    ((location, message),) = contradictions({"spec": {"rules": [rule]}})
    assert ".".join(map(str, location)) == f"spec.rules.0.{where}"
    assert message.startswith(said)
