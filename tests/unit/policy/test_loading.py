"""Policies from files, and several of them in force together."""

import hashlib
import time
from pathlib import Path

import pytest

from sftriage.errors import InputError
from sftriage.policy.captures import trigger
from sftriage.policy.engine import decide
from sftriage.policy.in_force import PolicySet, find, load, load_set, shipped
from sftriage.policy.parsing import MAX_FILE_BYTES, LoadedPolicy, PolicyError, parse
from sftriage.policy.schema import MAX_ITEMS
from sftriage.policy.state import State
from sftriage.words.decisions import reason_sentence

from .making import BEGUN, NOW, make_verdict

HEAD = "apiVersion: sftriage.dev/v1alpha1\nkind: TriagePolicy\nmetadata: {name: p}\nspec:\n"
HERE = Path(__file__).parent
GOOD = HEAD + "  rules:\n    - name: slow-rank\n      match: {label: suspect, stage: [data, h2d]}\n      capture: {}\n"


def lines_of(text: str) -> list[str]:
    with pytest.raises(PolicyError) as refused:
        parse(text, "p.yaml")
    return str(refused.value).split("\n")


def test_a_policy_is_loaded_with_the_hash_of_its_bytes(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    loaded = load(path)
    assert loaded.policy == parse(GOOD, "p").policy
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.source == str(path)
    assert loaded.policy.spec.rules[0].match.stage == ("data", "h2d")


def test_all_mistakes_are_reported_at_once_with_their_places():
    """GIVEN mistakes of every kind in one document THEN one error has them all, in the order of the document."""
    assert lines_of((HERE / "all_wrong.yaml").read_text()) == (HERE / "all_wrong.txt").read_text().splitlines()


def test_reading_stops_after_the_maximum_of_rules():
    # GIVEN more rules than there may be, and after them what no reader of YAML takes
    rules = "".join(f"    - {{name: r{n}, match: {{}}}}\n" for n in range(MAX_ITEMS + 1))
    lines = lines_of(f"{HEAD}  rules:\n{rules}{{")
    # THEN one line says so, at the first that is too many
    assert lines == [f"p.yaml:{MAX_ITEMS + 6}:7: the list has more than {MAX_ITEMS} items"]


def test_documents_made_to_exhaust_the_reader_are_refused_quickly():
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    started = time.monotonic()
    assert lines_of(laughs) == ["p.yaml:2:10: alias *a0 is not allowed; write the value out"]
    assert lines_of("[" * 200_000) == ["p.yaml:1:21: nested more than 20 levels deep"]
    assert lines_of("x: " + "- " * 100_000)[0].startswith("p.yaml:1:")
    (digits,) = lines_of(f"{GOOD}  limits: {{captures_per_run: {'9' * 5000}}}\n")
    assert digits.startswith("p.yaml:9:30: spec.limits.captures_per_run: cannot read '9999")
    assert lines_of("a" * (MAX_FILE_BYTES + 1)) == ["p.yaml: larger than 256 KiB"]
    assert time.monotonic() - started < 5


def test_only_the_first_of_thousands_of_mistakes_are_shown():
    lines = lines_of(GOOD + "".join(f"x{n}: 1\n" for n in range(1000)))
    assert len(lines) == 51
    assert lines[-1] == "p.yaml: and 950 more"


def test_a_deleted_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml: cannot read it: No such file or directory$"):
        load(tmp_path / "gone.yaml")


def test_a_policy_is_found_by_path_or_by_name(tmp_path, monkeypatch):
    mine = tmp_path / "mine.yaml"
    mine.write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").mkdir()  # a directory is no policy, and hides none
    assert find("mine.yaml") == Path("mine.yaml")
    assert find("default") == shipped()["default"]


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_policy_loads_and_states_its_purpose(name):
    """GIVEN a file of policies/ THEN it is valid, is named as its file, and opens with five lines of comment."""
    path = shipped()[name]
    opening = path.read_text().splitlines()[:6]
    assert [line.startswith("# For") for line in opening[:1]] == [True]
    assert [line.startswith("# ") for line in opening] == [True] * 5 + [False]
    assert load(path).policy.metadata.name == name


def test_the_shipped_policies_are_those_of_the_repository():
    repository = Path(__file__).parents[3] / "policies"
    assert sorted(shipped()) == sorted(path.stem for path in repository.iterdir())


def loaded(name: str, rules: str, spec: str = "") -> LoadedPolicy:
    return parse(HEAD.replace("name: p", f"name: {name}") + f"  rules:\n    - {rules}\n{spec}", f"{name}.yaml")


INPUT = "{name: slow-input, match: {stage: [data]}, capture: {}}"
ANY = "{name: slow-rank, match: {}, capture: {sample: 2}}"


def test_rules_are_tried_in_the_order_of_the_files():
    both = loaded("one", INPUT), loaded("two", ANY)
    assert decide(make_verdict(), PolicySet(both), State(), NOW)[0].rule == "slow-input"
    assert decide(make_verdict(), PolicySet(both[::-1]), State(), NOW)[0].rule == "slow-rank"
    assert decide(make_verdict(stage="forward"), PolicySet(both), State(), NOW)[0].rule == "slow-rank"


def test_the_strictest_of_each_limit_wins():
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


def test_remedies_are_those_that_all_policies_with_mitigate_allow():
    # GIVEN a policy that says nothing of remedies beside two that do, under bounds of their own
    one = loaded("one", INPUT, "  mitigate: {remedies: [stragglar], min_saving: 5%, steps: 10}\n")
    two = loaded("two", ANY, "  mitigate: {remedies: [stragglar], steps: 40, cooldown: 2h}\n")
    silent = loaded("three", "{name: x, match: {}}")
    found = PolicySet((silent, one, two)).mitigate
    # THEN the strictest of each bound holds, and nothing is allowed if no policy mentions it
    assert found is not None
    assert (found.remedies, found.min_saving, found.steps, found.cooldown) == (("stragglar",), "5%", 40, "2h")
    assert PolicySet((silent,)).mitigate is None


def test_captures_are_allowed_when_every_policy_allows_them():
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


def test_conflicts_between_policies_have_their_place():
    first = loaded("one", INPUT, "  detection: {window_steps: 100}\n")
    second = loaded("two", INPUT, "  detection: {stride_steps: 20, min_gain: 4%}\n")
    with pytest.raises(PolicyError) as refused:
        PolicySet((first, second))
    assert str(refused.value).split("\n") == [
        "two.yaml:6:14: spec.rules[0].name: a second rule named 'slow-input'; the first is spec.rules[0] of one.yaml",
        "two.yaml:7:29: spec.detection.stride_steps: 20, but 10 in one.yaml; all policies of a job "
        "must judge the same windows",
    ]
    # A field that a policy does not set requires nothing
    assert PolicySet((first, loaded("two", ANY))).detection.window_steps == 100


def test_a_manifest_names_the_rules_policy():
    one, two = loaded("one", INPUT), loaded("two", ANY)
    both, verdict = PolicySet((one, two)), make_verdict(stage="forward")
    decision, _ = decide(verdict, both, BEGUN, NOW)
    found = trigger(verdict, both, decision, decision.requests[0])
    assert (found.rule, found.policy, found.policy_sha256) == ("slow-rank", "two", two.sha256)


def test_several_files_report_all_their_mistakes(tmp_path):
    (tmp_path / "a.yaml").write_text("kind: [\n")
    (tmp_path / "b.yaml").write_text("x: 1\n")
    with pytest.raises(PolicyError) as refused:
        load_set([tmp_path / "a.yaml", "default", tmp_path / "b.yaml"])
    lines = str(refused.value).split("\n")
    assert {line.split(":")[0] for line in lines} == {str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")}
    with pytest.raises(ValueError, match="no policy"):
        load_set([])


def test_the_shipped_policies_can_be_in_force_together():
    """GIVEN those whose rules have names of their own THEN nothing is between them."""
    names = sorted(set(shipped()) - {"observe-only"})
    assert len(load_set(names).rules) >= len(names)
