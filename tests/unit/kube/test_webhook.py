"""The webhook's answers, its server, and its certificate, as far as they need no cluster."""

import base64
import json
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import sftriage.kube.webhook as serving
from sftriage.errors import InputError
from sftriage.kube.injecting import InjectionSettings
from sftriage.kube.webhook import (
    WebhookServer,
    answer,
    good_until,
    issued,
    kept_settings,
    rotating,
    service_names,
    wait_for_certificate,
    wanted,
)
from tests.integration.processes import wait_until
from tests.unit.kube.pods import pod

NEW, SETTINGS = (1, 31), InjectionSettings()
PODS = {"group": "", "version": "v1", "resource": "pods"}
CAPTURES = {"group": "sftriage.dev", "version": "v1alpha1", "resource": "tracecaptures"}
JOB = {"batch.kubernetes.io/job-name": "resnet"}


def review(made: Any, resource: Any = PODS, operation: str = "CREATE", **more: Any) -> dict[str, Any]:
    request = {"uid": "7d", "resource": resource, "operation": operation, "namespace": "ml", "object": made, **more}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def told(asked: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    found = answer(asked, SETTINGS, NEW)
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = found["response"]
    assert (response["uid"], response["allowed"]) == ("7d", True)
    patch = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    assert ("patchType" in response) == bool(patch)
    return patch, response.get("warnings", [])


def test_a_new_pod_is_injected_for_its_namespace():
    patch, warnings = told(review(pod(JOB)))
    assert warnings == []
    assert jsonpatch.apply_patch(pod(JOB), patch)["metadata"]["annotations"]["sftriage.dev/job-id"] == "ml/job/resnet"


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
def test_other_requests_pass_unchanged_and_without_warning(asked):
    assert told(asked) == ([], [])


def test_a_labelled_namespace_injects_pods_of_jobs_only():
    patch, _ = told(review(unlabelled(**JOB)))
    assert patch


def test_an_exception_becomes_a_warning(monkeypatch):
    def boom(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(serving, "injection", boom)
    patch, (warning,) = told(review(pod(JOB)))
    assert patch == []
    assert "RuntimeError: boom" in warning


USER = {"username": "ada", "uid": "7", "groups": ["g"]}
ADA, BOSS = {"username": "ada", "uid": "7"}, {"requested_by": {"username": "boss", "uid": ""}}
STAMPS = {
    "nobody is said": ("CREATE", {"rank": 1}, None),
    "somebody else is said": ("CREATE", BOSS, None),
    "it is changed": ("UPDATE", BOSS, {"requested_by": ADA}),
    "it is taken away": ("UPDATE", {"rank": 1}, {"requested_by": ADA}),
}


@pytest.mark.parametrize(("operation", "spec", "before"), STAMPS.values(), ids=STAMPS)
def test_the_server_s_user_is_stamped_on_a_capture(operation, spec, before):
    patch, warnings = told(review({"spec": spec}, CAPTURES, operation, oldObject={"spec": before}, userInfo=USER))
    assert patch == [{"op": "add", "path": "/spec/requested_by", "value": ADA}]
    assert warnings == []
    stamped = {"spec": {**spec, "requested_by": ADA}}
    again = review(stamped, CAPTURES, operation, oldObject={"spec": before}, userInfo=USER)
    assert told(again) == ([], [])


def test_a_capture_without_requester_gets_none_later():
    changed = {"spec": {"requested_by": {"username": "boss", "uid": ""}}}
    patch, _ = told(review(changed, CAPTURES, "UPDATE", oldObject={"spec": {"rank": 1}}, userInfo=USER))
    assert patch == [{"op": "remove", "path": "/spec/requested_by"}]


@pytest.mark.parametrize("asked", [{}, {"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "1"}}])
def test_only_admission_reviews_are_answered(asked):
    with pytest.raises(ValueError, match="not an AdmissionReview"):
        answer(asked, SETTINGS, NEW)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(_ANY, _ANY, st.sampled_from([PODS, CAPTURES]), st.sampled_from(["CREATE", "UPDATE"]))
def test_no_request_is_ever_refused(made, user, resource, operation):
    told(review(made, resource, operation, oldObject=user, userInfo=user))
    told(review({"metadata": made, "spec": user}, resource, operation, userInfo=made))


def webhook(version: tuple[int, int] | None = (1, 31)) -> TestClient:
    return TestClient(WebhookServer(InjectionSettings, lambda: version).app)


@pytest.mark.parametrize(("version", "ready"), [((1, 31), 200), (None, 503)])
def test_it_is_ready_and_injects_once_it_knows_the_version_of_the_cluster(version, ready):
    with webhook(version) as client:
        assert client.get("/healthz").text == "ok"
        wait_until(lambda: client.get("/readyz").status_code == ready, 30)
        found = client.post("/mutate", json=review(pod(JOB))).json()["response"]
        assert (found["allowed"], "patch" in found) == (True, version is not None)
        warnings = [] if version else ["sftriage: not injected: the cluster's version is not known yet"]
        assert found.get("warnings", []) == warnings


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ("{}", 400),
        ("[" * 100_000, 400),
        (json.dumps({"x": "y" * serving.MAX_BODY_BYTES}), 413),
    ],
    ids=["half", "a list", "nothing", "deep", "large"],
)
def test_an_invalid_review_gets_an_http_error_and_the_server_continues(body, status):
    with webhook() as client:
        assert client.post("/mutate", content=body).status_code == status
        assert client.get("/healthz").text == "ok"


def test_changed_settings_take_effect_unless_invalid(tmp_path, caplog):
    path = tmp_path / "settings.yaml"

    def write(text: str) -> None:
        # (as a node does it: another file takes its name)
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)

    write("image: one")
    kept = kept_settings(path)
    assert kept().image == "one"
    write("image: two")
    assert kept().image == "two"
    write("imag: three")
    assert kept().image == "two"
    assert "keeping the previous state" in caplog.text
    write("image: four")
    assert kept().image == "four"
    path.unlink()
    assert kept().image == "four"
    with pytest.raises(InputError, match="cannot read"):
        kept_settings(path)


def laid(folder: Path, made: dict[str, bytes]) -> None:
    for name, content in made.items():
        (folder / name).write_bytes(content)


def shaken(server: ssl.SSLContext, made: dict[str, bytes]) -> bool:
    """Whether a client that trusts an authority takes what a server has."""
    one, other, back = ssl.MemoryBIO(), ssl.MemoryBIO(), None
    context = ssl.create_default_context(cadata=made["ca.crt"].decode())
    client = context.wrap_bio(one, other, server_hostname="a.b.svc")
    serves = server.wrap_bio(other, one, server_side=True)
    for _ in range(10):
        for end in (client, serves):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
            back = end
    return back is not None


def test_each_handshake_uses_the_newest_valid_certificate(tmp_path, caplog):
    first, second = (issued(["a.b.svc"], datetime.now(timezone.utc)) for _ in range(2))
    laid(tmp_path, first)
    context = rotating(tmp_path)
    assert shaken(context, first)
    assert not shaken(context, second)
    # WHEN a key has come, and its certificate has not THEN the one before is used still
    (tmp_path / "tls.key").write_bytes(second["tls.key"])
    assert shaken(context, first)
    assert "keeping the previous state" in caplog.text
    laid(tmp_path, second)
    assert shaken(context, second)
    assert not shaken(context, first)
    # AND back again
    laid(tmp_path, first)
    assert shaken(context, first)


def test_a_missing_certificate_is_reported_after_the_wait(tmp_path):
    with pytest.raises(InputError, match=r"no tls\.crt and tls\.key in"):
        wait_for_certificate(tmp_path, 0.0)
    with pytest.raises(InputError, match="no usable certificate"):
        rotating(tmp_path)
    laid(tmp_path, issued(["a.b.svc"], datetime.now(timezone.utc)))
    wait_for_certificate(tmp_path, 0.0)


NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)
NAMES = service_names("sftriage-webhook", "sftriage-system")
GOOD = issued(NAMES, NOW)
OLD = issued(NAMES, NOW - timedelta(days=310))


def test_a_certificate_is_valid_for_its_service_and_a_year():
    assert NAMES[0] == "sftriage-webhook.sftriage-system.svc"
    assert good_until(GOOD, NAMES) == NOW + timedelta(days=365)
    assert good_until(GOOD, ("another.ns.svc",)) is None
    assert good_until(issued(["127.0.0.1"], NOW), ["127.0.0.1"]) is not None


OTHER = issued(NAMES, NOW)
BAD = {
    "nothing": {},
    "no key": {name: one for name, one in GOOD.items() if name != "tls.key"},
    "another's key": {**GOOD, "tls.key": OTHER["tls.key"]},
    "another's authority": {**GOOD, "ca.crt": OTHER["ca.crt"]},
    "half of one": {**GOOD, "tls.crt": GOOD["tls.crt"][:100]},
}


@pytest.mark.parametrize("files", BAD.values(), ids=BAD)
def test_an_unusable_certificate_is_replaced_and_distrusted(files):
    assert good_until(files, NAMES) is None
    made, trusted = wanted(files, b"whatever", NAMES, NOW)
    assert made is not None
    assert trusted == made["ca.crt"]


def test_a_valid_certificate_stays_and_is_trusted():
    assert wanted(GOOD, GOOD["ca.crt"], NAMES, NOW) == (None, GOOD["ca.crt"])
    # AND where somebody has taken the trust away, it is trusted again
    assert wanted(GOOD, b"", NAMES, NOW) == (None, GOOD["ca.crt"])


def test_an_expiring_certificate_is_replaced_and_both_are_trusted():
    made, trusted = wanted(OLD, OLD["ca.crt"], NAMES, NOW)
    assert made is not None
    assert trusted == made["ca.crt"] + OLD["ca.crt"]
    # WHEN it is looked at again THEN nothing is done
    assert wanted(made, trusted, NAMES, NOW) == (None, trusted)
