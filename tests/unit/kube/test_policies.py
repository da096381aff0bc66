"""Which policies of a namespace are in force, and what their status says."""

from __future__ import annotations

import copy

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from k8s.make_crds import definition
from sftriage.kube.objects import KINDS, condition
from sftriage.kube.statuses import loaded, standings
from sftriage.policy.loading import PolicyError, find, parse, shipped
from sftriage.policy.schema import TriagePolicy

NOW_S = 1_800_000_000.0
SCHEMA = definition(KINDS[0])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
RULE = {"name": "slow", "match": {}, "capture": {}}


def body(name="p", *rules, created="2027-01-15T07:00:00Z", generation=1, status=None, **spec):
    """A policy as a server has it."""
    managed = [{"manager": "kubectl", "fieldsV1": {"f:spec": {".": {}, "f:rules": {}}}, "operation": "Update"}]
    metadata = {"name": name, "namespace": "ml", "uid": "7d", "resourceVersion": "5", "generation": generation}
    metadata |= {"creationTimestamp": created, "managedFields": managed, "labels": {"team": "ml"}, "selfLink": ""}
    made = {"apiVersion": "sftriage.dev/v1alpha1", "kind": "TriagePolicy", "metadata": metadata}
    return {**made, "spec": {"rules": list(rules or (RULE,)), **spec}, **({"status": status} if status else {})}


def told(found):
    """Each policy's conditions, as (Accepted, Conflicted)."""
    return {
        one.body["metadata"]["name"]: tuple(f"{each.status} {each.reason}" for each in one.status.conditions)
        for one in found
    }


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_policy_is_the_same_with_all_that_a_server_keeps_beside_it(name):
    """GIVEN a shipped policy as a server has it, status and all THEN it is the policy of the file."""
    file = yaml.safe_load(find(name).read_text())
    served = {**body(name), "spec": file["spec"], "status": {"conditions": [{"type": "Accepted"}]}}
    assert loaded(served).policy == parse(find(name).read_bytes(), name).policy
    # AND so is what `kubectl get -o yaml` writes
    assert parse(yaml.safe_dump(served), "x.yaml").policy == loaded(served).policy


def test_what_kubectl_writes_of_a_new_object_is_taken():
    text = "apiVersion: sftriage.dev/v1alpha1\nkind: TriagePolicy\nmetadata:\n  name: p\n  creationTimestamp: null\n"
    assert parse(f"{text}spec: {{rules: [{{name: r, match: {{}}}}]}}\nstatus: {{}}\n", "p.yaml").places
    # BUT what is nobody's is still a mistake
    with pytest.raises(PolicyError, match=r"metadata\.nmae: unknown field"):
        parse(text.replace("creationTimestamp: null", "nmae: p") + "spec: {}\n", "p.yaml")


def test_an_editor_takes_what_people_write_into_a_policy_for_a_cluster():
    policy = {**body(), "metadata": {"name": "p", "namespace": "ml", "labels": {"a": "b"}, "annotations": {"c": "d"}}}
    validator = jsonschema.Draft202012Validator(TriagePolicy.model_json_schema(by_alias=True))
    assert list(validator.iter_errors(policy)) == []
    policy["metadata"]["nmae"] = "p"
    assert [one.json_path for one in validator.iter_errors(policy)] == ["$.metadata"]


MISTAKES = {
    "an unknown field": (
        body("p", {**RULE, "capture": {"stepz": 5}}),
        "spec.rules[0].capture.stepz: unknown field; did",
    ),
    "a quantity": (body("p", {**RULE, "cooldown": "600"}), "spec.rules[0].cooldown: expected a duration with its unit"),
    "a bound": (body("p", {**RULE, "cooldown": "31d"}), "spec.rules[0].cooldown: expected 0s to 30d, got '31d'"),
    "between fields": (
        body("p", {**RULE, "match": {"label": "healthy"}}),
        "spec.rules[0].match.label: no capture on healthy, because nothing is slow; only suspect may capture",
    ),
    "a name": (body("p.q"), "metadata.name: must be lower-case letters, digits and -"),
    "null": (body("p", retention=None), "spec.retention: has no value; give it one, or leave the field out"),
    "no rules": ({**body("p"), "spec": {}}, "spec.rules: required, but not there"),
    "no spec": ({**body("p"), "spec": None}, "spec: has no value; give it one, or leave the field out"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_validate_is_not_accepted_with_the_words_of_policy_validate(mistake):
    served, said = mistake
    (found,) = standings([served], NOW_S)
    assert told([found]) == {served["metadata"]["name"]: ("False Invalid", "Unknown Invalid")}
    message = found.status.conditions[0].message
    assert said in message
    # AND `sftriage policy validate` says the same of the file, with the place besides
    file = {**served, "metadata": {"name": served["metadata"]["name"]}}
    with pytest.raises(PolicyError) as refused:
        parse(yaml.safe_dump(file, sort_keys=False), "p.yaml")
    assert message == "\n".join(f"{one.path}: {one.message}" for one in refused.value.problems)
    assert not found.in_force


OLD, NEW = "2027-01-15T07:00:00Z", "2027-01-15T08:00:00Z"
FINE, INVALID = ("True Valid", "False InForce"), ("False Invalid", "Unknown Invalid")
CONFLICT = ("True Valid", "True Conflicts")
OTHER = {**RULE, "name": "other"}
TOGETHER = {
    "one": ([body("a")], {"a": FINE}),
    "two that have nothing in common": ([body("a"), body("b", OTHER)], {"a": FINE, "b": FINE}),
    "a rule of one name": ([body("a", created=NEW), body("b", created=OLD)], {"b": FINE, "a": CONFLICT}),
    "at the same time": ([body("b"), body("a")], {"a": FINE, "b": CONFLICT}),
    "other windows": (
        [body("a", created=OLD), body("b", OTHER, created=NEW, detection={"window_steps": 100})],
        {"a": FINE, "b": CONFLICT},
    ),
    "what is not valid forbids nothing": ([body("a", RULE, RULE), body("b", created=NEW)], {"a": INVALID, "b": FINE}),
    "what is not in force forbids nothing": (
        [body("a", created=OLD), body("b", RULE, OTHER, created=NEW), body("c", OTHER, created="2027-02-01T00:00:00Z")],
        {"a": FINE, "b": CONFLICT, "c": FINE},
    ),
    "none": ([], {}),
}


@pytest.mark.parametrize("case", TOGETHER.values(), ids=TOGETHER)
def test_the_oldest_are_in_force(case):
    bodies, expected = case
    found = standings(bodies, NOW_S)
    assert told(found) == expected
    assert [one.in_force for one in found] == [conditions == FINE for conditions in expected.values()]


def test_a_conflict_says_with_whom():
    _, newer = standings([body("a", created=OLD), body("b", created=NEW)], NOW_S)
    assert newer.status.conditions[1].message == (
        "Not in force: an older policy of its namespace forbids it.\n"
        "spec.rules[0].name: a second rule named 'slow'; the first is spec.rules[0] of a"
    )


def test_a_status_is_written_once_and_says_since_when():
    # GIVEN a policy whose status is as it should be
    (first,) = standings([body()], NOW_S)
    assert first.changed
    served = body(status=first.status.plain())
    # THEN nothing is written an hour later
    (again,) = standings([served], NOW_S + 3600)
    assert not again.changed
    # AND where it is not valid any more, that is so since then, and of that generation
    broken = {**served, "spec": {"rules": []}, "metadata": {**served["metadata"], "generation": 2}}
    (later,) = standings([broken], NOW_S + 3600)
    assert later.changed
    assert [one.lastTransitionTime for one in later.status.conditions] == ["2027-01-15T09:00:00Z"] * 2
    assert later.status.observedGeneration == 2
    assert {one.observedGeneration for one in later.status.conditions} == {2}


@pytest.mark.parametrize("status", [5, [], {"conditions": 5}, {"conditions": [5, {"type": "Accepted"}]}])
def test_whatever_stands_in_a_status_is_written_over(status):
    served = {**body(), "status": status}
    (found,) = standings([served], NOW_S)
    assert found.changed
    assert condition(served, "Accepted") is None


def test_thousands_of_mistakes_fit_into_a_condition():
    rules = [{"name": f"r{number}", "match": {f"x{'y' * 900}": 1}} for number in range(999)]
    (found,) = standings([body("p", *rules)], NOW_S)
    message = found.status.conditions[0].message
    assert len(message) <= 32_768
    jsonschema.validate(found.status.plain(), SCHEMA["properties"]["status"], jsonschema.Draft4Validator)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(spec=plain, rule=plain)
def test_whatever_a_policy_says_its_status_is_one_that_the_server_takes(spec, rule):
    bodies = [{**body("a"), "spec": spec}, {**body("b"), "spec": {"rules": [rule]}}, body("c")]
    before = copy.deepcopy(bodies)
    for one in standings(bodies, NOW_S):
        jsonschema.validate(one.status.plain(), SCHEMA["properties"]["status"], jsonschema.Draft4Validator)
    assert bodies == before
