"""Several policies in force together."""

from __future__ import annotations

import pytest

from sftriage.errors import UsageError
from sftriage.policy.engine import decide
from sftriage.policy.loading import LoadedPolicy, PolicyError, PolicySet, load_set, parse, shipped
from sftriage.policy.requests import trigger
from sftriage.policy.state import State
from sftriage.words.decisions import reason_sentence

from .making import make_verdict

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


def loaded(name: str, rules: str, spec: str = "") -> LoadedPolicy:
    return parse(
        f"apiVersion: sftriage.dev/v1alpha1\nkind: TriagePolicy\nmetadata: {{name: {name}}}\nspec:\n"
        f"  rules:\n    - {rules}\n{spec}",
        f"{name}.yaml",
    )


INPUT = "{name: slow-input, match: {stage: [data]}, capture: {}}"
ANY = "{name: slow-rank, match: {}, capture: {sample: 2}}"


def test_rules_are_tried_in_the_order_of_the_files():
    both = loaded("one", INPUT), loaded("two", ANY)
    assert decide(make_verdict(), PolicySet(both), State(), NOW)[0].rule == "slow-input"
    assert decide(make_verdict(), PolicySet(both[::-1]), State(), NOW)[0].rule == "slow-rank"
    assert decide(make_verdict(stage="forward"), PolicySet(both), State(), NOW)[0].rule == "slow-rank"


def test_of_each_limit_the_strictest_wins():
    one = "  limits: {captures_per_hour: 9, captures_per_day: 10, captures_per_run: 2, overhead_budget: 2%}\n"
    two = "  limits: {captures_per_hour: 3, captures_per_run: 5, concurrent_ranks: 4, overhead_budget: 0.1%}\n"
    first = loaded("one", INPUT, one + "  retention: {age: 5d}\n")
    third = loaded("three", "{name: x, match: {}}", "  retention: {age: 3d, bytes: 1Gi}\n")
    found = PolicySet((first, loaded("two", ANY, two), third))
    bounds = found.limits
    assert (bounds.captures_per_hour, bounds.day_limit, bounds.captures_per_run) == (3, 10, 2)
    assert bounds.concurrent_ranks == 2
    assert bounds.overhead_fraction == 0.001
    assert (found.retention_s, found.retention_bytes) == (3 * 86400, 2**30)
    alone = PolicySet((loaded("one", INPUT),))
    assert (alone.limits.day_limit, alone.limits.captures_per_run) == (12, None)
    assert (alone.retention_s, alone.retention_bytes) == (None, None)


def test_what_may_be_done_about_a_straggler_is_what_all_allow_that_speak_of_it():
    # GIVEN a policy that says nothing of remedies beside two that do, under bounds of their own
    one = loaded("one", INPUT, "  mitigate: {remedies: [stragglar], min_saving: 5%, steps: 10}\n")
    two = loaded("two", ANY, "  mitigate: {remedies: [stragglar], steps: 40, cooldown: 2h}\n")
    silent = loaded("three", "{name: x, match: {}}")
    found = PolicySet((silent, one, two)).mitigate
    # THEN the strictest of each bound holds, and nothing is allowed where nobody speaks of it
    assert found is not None
    assert (found.remedies, found.min_saving, found.steps, found.cooldown) == (("stragglar",), "5%", 40, "2h")
    assert PolicySet((silent,)).mitigate is None


def test_captures_are_allowed_where_every_policy_allows_them():
    evening = loaded("one", INPUT, '  active: {cron: "* 18-21 * * *"}\n')
    night = loaded("two", ANY, '  active: {cron: "* 20-23 * * *"}\n')
    decision, _ = decide(make_verdict(), PolicySet((evening, night)), State(), NOW)
    assert reason_sentence(decision) == "active: captures are not allowed until 2027-01-15T20:00:00Z"
    morning = loaded("two", ANY, '  active: {cron: "* 6-9 * * *"}\n')
    decision, _ = decide(make_verdict(), PolicySet((evening, morning)), State(), NOW)
    assert reason_sentence(decision) == "active: captures are never allowed again"


def test_a_rule_samples_as_many_ranks_as_a_stricter_policy_allows():
    strict = loaded("one", INPUT, "  limits: {concurrent_ranks: 1}\n")
    decision, _ = decide(make_verdict(ranks=(4, 5), stage=None), PolicySet((strict, loaded("two", ANY))), State(), NOW)
    assert [request.rank for request in decision.requests] == [4]


def test_what_cannot_be_in_force_together_is_said_with_its_place():
    first = loaded("one", INPUT, "  detection: {window_steps: 100}\n")
    second = loaded("two", INPUT, "  detection: {stride_steps: 20, min_gain: 4%}\n")
    with pytest.raises(PolicyError) as refused:
        PolicySet((first, second))
    assert str(refused.value).split("\n") == [
        "two.yaml:6:14: spec.rules[0].name: a second rule named 'slow-input'; the first is spec.rules[0] of one.yaml",
        "two.yaml:7:29: spec.detection.stride_steps: 20, but 10 in one.yaml; all policies of a job "
        "judge the same windows",
    ]
    # What a policy does not say, it does not ask for
    assert PolicySet((first, loaded("two", ANY))).detection.window_steps == 100


def test_a_manifest_names_the_policy_that_the_rule_is_of():
    one, two = loaded("one", INPUT), loaded("two", ANY)
    found = trigger(make_verdict(), PolicySet((one, two)), "slow-rank")
    assert (found.policy, found.policy_sha256) == ("two", two.sha256)
    with pytest.raises(ValueError, match="policy one, two has no rule 'x'"):
        trigger(make_verdict(), PolicySet((one, two)), "x")


def test_files_are_read_together_and_all_their_mistakes_are_said(tmp_path):
    (tmp_path / "a.yaml").write_text("kind: [\n")
    (tmp_path / "b.yaml").write_text("x: 1\n")
    with pytest.raises(PolicyError) as refused:
        load_set([tmp_path / "a.yaml", "default", tmp_path / "b.yaml"])
    lines = str(refused.value).split("\n")
    assert {line.split(":")[0] for line in lines} == {str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")}
    with pytest.raises(UsageError, match="no policy 'nope'"):
        load_set(["default", "nope"])
    with pytest.raises(ValueError, match="no policy"):
        load_set([])


def test_the_shipped_policies_can_be_in_force_together():
    """GIVEN those whose rules have names of their own THEN nothing is between them."""
    names = sorted(set(shipped()) - {"observe-only"})
    assert len(load_set(names).rules) >= len(names)
