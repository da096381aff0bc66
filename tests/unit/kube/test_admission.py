"""What the webhook answers, whatever it is asked."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube import webhook as serving
from sftriage.kube.injecting import applied
from sftriage.kube.sidecar import InjectionSettings
from sftriage.kube.webhook import answer
from tests.unit.kube.pods import pod

NEW, SETTINGS = (1, 31), InjectionSettings()
PODS = {"group": "", "version": "v1", "resource": "pods"}
CAPTURES = {"group": "sftriage.dev", "version": "v1alpha1", "resource": "tracecaptures"}
JOB = {"batch.kubernetes.io/job-name": "resnet"}


def review(made: Any, resource: Any = PODS, operation: str = "CREATE", **more: Any) -> dict[str, Any]:
    request = {"uid": "7d", "resource": resource, "operation": operation, "namespace": "ml", "object": made, **more}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def told(asked: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The patch and the warnings of an answer."""
    found = answer(asked, SETTINGS, NEW)
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = found["response"]
    assert (response["uid"], response["allowed"]) == ("7d", True)
    patch = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    assert ("patchType" in response) == bool(patch)
    return patch, response.get("warnings", [])


def test_a_pod_that_is_made_is_injected_where_it_will_be():
    patch, warnings = told(review(pod(JOB)))
    assert warnings == []
    assert applied(pod(JOB), patch)["metadata"]["annotations"]["sftriage.dev/job-id"] == "ml/job/resnet"


def unlabelled(**labels: str) -> dict[str, Any]:
    body = pod(labels)
    del body["metadata"]["labels"]["sftriage.dev/inject"]
    return body


QUIET = {
    "a pod that is changed": review(pod(JOB), operation="UPDATE"),
    "an ephemeral container": review(pod(JOB), subResource="ephemeralcontainers"),
    "a pod that says no": review(pod({**JOB, "sftriage.dev/inject": "disabled"})),
    "a pod of no job, in a namespace that is labelled": review(unlabelled(app="web")),
    "something else": review({}, {"group": "apps", "resource": "deployments"}),
    "no object": review(None),
    "a capture without a spec": review({"spec": None}, CAPTURES),
}


@pytest.mark.parametrize("asked", QUIET.values(), ids=QUIET)
def test_what_is_none_of_its_business_is_let_through_without_a_word(asked):
    assert told(asked) == ([], [])


def test_a_pod_in_a_namespace_that_is_labelled_is_injected_if_it_is_of_a_job():
    patch, _ = told(review(unlabelled(**JOB)))
    assert patch


def test_what_goes_wrong_is_a_warning_and_nothing_more(monkeypatch):
    def boom(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(serving, "injection", boom)
    patch, (warning,) = told(review(pod(JOB)))
    assert patch == []
    assert "RuntimeError: boom" in warning


USER = {"username": "ada", "uid": "7", "groups": ["g"]}
STAMPS = {
    "nobody is said": ("CREATE", {"rank": 1}, None, {"username": "ada", "uid": "7"}),
    "somebody else is said": ("CREATE", {"requested_by": {"username": "boss"}}, None, {"username": "ada", "uid": "7"}),
    "it is changed": (
        "UPDATE",
        {"requested_by": {"username": "boss", "uid": ""}},
        {"requested_by": {"username": "ada", "uid": "7"}},
        {"username": "ada", "uid": "7"},
    ),
    "it is taken away": (
        "UPDATE",
        {"rank": 1},
        {"requested_by": {"username": "ada", "uid": "7"}},
        {"username": "ada", "uid": "7"},
    ),
}


@pytest.mark.parametrize(("operation", "spec", "before", "expected"), STAMPS.values(), ids=STAMPS)
def test_a_capture_is_asked_for_by_who_the_server_says(operation, spec, before, expected):
    patch, warnings = told(review({"spec": spec}, CAPTURES, operation, oldObject={"spec": before}, userInfo=USER))
    assert patch == [{"op": "add", "path": "/spec/requested_by", "value": expected}]
    assert warnings == []
    stamped = {"spec": {**spec, "requested_by": expected}}
    again = review(stamped, CAPTURES, operation, oldObject={"spec": before}, userInfo=USER)
    assert told(again) == ([], [])


def test_a_capture_that_nobody_was_known_to_ask_for_gets_no_name_later():
    changed = {"spec": {"requested_by": {"username": "boss", "uid": ""}}}
    patch, _ = told(review(changed, CAPTURES, "UPDATE", oldObject={"spec": {"rank": 1}}, userInfo=USER))
    assert patch == [{"op": "remove", "path": "/spec/requested_by"}]


@pytest.mark.parametrize("asked", [{}, {"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "1"}}])
def test_what_is_no_review_is_no_question(asked):
    with pytest.raises(ValueError, match="no AdmissionReview"):
        answer(asked, SETTINGS, NEW)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(_ANY, _ANY, st.sampled_from([PODS, CAPTURES]), st.sampled_from(["CREATE", "UPDATE"]))
def test_no_answer_ever_refuses(made, user, resource, operation):
    told(review(made, resource, operation, oldObject=user, userInfo=user))
    told(review({"metadata": made, "spec": user}, resource, operation, userInfo=made))
