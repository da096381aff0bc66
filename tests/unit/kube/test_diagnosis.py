"""Why nothing happens in a cluster: a truth table over snapshots of its objects."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from k8s.make_crds import definition
from sftriage.kube.diagnosis import Finding, diagnose
from sftriage.kube.jobs import job_of
from sftriage.kube.objects import KINDS
from sftriage.kube.snapshot import Certificate, Snapshot, certificate
from sftriage.words.amounts import clock
from tests.unit.kube.objects import NOW_S, made

HOUR_S = 3600.0
LONG_AGO, BEFORE, LATELY = clock(NOW_S - 100 * HOUR_S), clock(NOW_S - HOUR_S), clock(NOW_S - 5)
LABEL = {"sftriage.dev/inject": "enabled"}
JOB_LABELS = {"batch.kubernetes.io/job-name": "train", "batch.kubernetes.io/job-completion-index": "0"}


def pod(name: str = "train-0", labels: Any = None, created: str = BEFORE, **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ml",
        "labels": {**JOB_LABELS, **(labels or {})},
        "creationTimestamp": created,
    }
    spec = {"containers": [{"name": "main", "image": "x"}]}
    return {"metadata": {**metadata, **more}, "spec": spec, "status": {"phase": "Running"}}


INJECTED = {"annotations": {"sftriage.dev/status": "injected"}}
JOB = job_of(pod()).job  # type: ignore[union-attr]  # it is one


def deployment(name: str, available: int = 1, **more: Any) -> dict[str, Any]:
    about = {"name": name, "namespace": "sftriage-system", "labels": {"app.kubernetes.io/name": name}}
    return {"metadata": {**about, **more}, "status": {"availableReplicas": available}}


def webhook(bundle: str = "Q0E=", created: str = LONG_AGO) -> dict[str, Any]:
    hook = {
        "name": "pod.sftriage.dev",
        "clientConfig": {"caBundle": bundle, "service": {"name": "w", "namespace": "s"}},
    }
    return {"metadata": {"name": "sftriage", "creationTimestamp": created}, "webhooks": [hook]}


def capture(state: str, **status: Any) -> dict[str, Any]:
    spec = {"job": "train", "rank": 1, "reason": "why?"}
    return made("TraceCapture", "look", spec, {"state": state, "observedGeneration": 1, **status})


WELL = Snapshot(
    now_s=NOW_S,
    namespace="ml",
    version=(1, 31),
    about={"metadata": {"name": "ml"}},
    definitions=[definition(kind) for kind in KINDS],
    pods=[pod(labels=LABEL, **INJECTED)],
    reports=[made("TriageReport", "r", {"job": "train"}, labels={"sftriage.dev/job": JOB.object_name})],
    controllers=[deployment(JOB.object_name, labels={"sftriage.dev/job": JOB.object_name})],
    deployments=[deployment("sftriage-operator"), deployment("sftriage-webhook")],
    webhooks=[webhook()],
    serving=2,
    certificate=Certificate("tls", NOW_S - HOUR_S, NOW_S + 1000 * HOUR_S, trusted=True),
    may={"list triagereports": True},
    operator_may={"patch tracecaptures": True},
)
"""A cluster in which all is well."""

LABELLED_LATE = [{"fieldsV1": {"f:metadata": {"f:labels": {"f:sftriage.dev/inject": {}}}}, "time": LATELY}]
FAILED = {"conditions": [{"type": "ReplicaFailure", "message": "exceeded quota: small"}]}
NOT_VALID = {
    "conditions": [
        {"type": "Accepted", "status": "False", "reason": "Invalid", "message": "m", "lastTransitionTime": "t"}
    ]
}
QUOTA = {
    "metadata": {"name": "small"},
    "status": {"hard": {"pods": "4", "cpu": "9"}, "used": {"pods": "4", "cpu": "3"}},
}
EVENT = {
    "reason": "FailedCreate",
    "message": "exceeded quota: small",
    "involvedObject": {"kind": "Job", "name": "train"},
}
STORED = {"store": "s3://traces", "reference": "a/b/c"}


def certified(**more: Any) -> Certificate:
    return replace(WELL.certificate, **more)  # type: ignore[type-var]  # it has one


WRONG = {
    "rights": ({"may": {"list triagereports": False}}, "rights", "you may not list triagereports"),
    "an old cluster": ({"version": (1, 28)}, "version", "1.28 has no native sidecars"),
    "no definitions": ({"definitions": []}, "definitions", "does not know TriagePolicy, TraceCapture, TriageReport"),
    "no operator": ({"deployments": [deployment("sftriage-webhook")]}, "operator", "there is no operator"),
    "an operator that does not run": (
        {"deployments": [deployment("sftriage-operator", 0), deployment("sftriage-webhook")]},
        "operator",
        "the operator does not run",
    ),
    "two of it": (
        {"deployments": [*WELL.deployments, deployment("sftriage-operator", namespace="other")]},
        "operator",
        "there is more than one operator, in other, sftriage-system",
    ),
    "its rights": ({"operator_may": {"patch tracecaptures": False}}, "operator_rights", "may not patch tracecaptures"),
    "no webhook configuration": ({"webhooks": []}, "webhook_configuration", "there is no webhook configuration"),
    "an empty one": ({"webhooks": [{**webhook(), "webhooks": []}]}, "webhook_configuration", "has no webhooks"),
    "no caBundle": ({"webhooks": [webhook("")]}, "ca_bundle", "has no caBundle (pod.sftriage.dev)"),
    "no webhook": ({"deployments": [deployment("sftriage-operator")]}, "webhook", "there is no webhook: pods are"),
    "nobody behind its service": ({"serving": 0}, "webhook_service", "nobody answers"),
    "a certificate that is over": (
        {"certificate": certified(not_after_s=NOW_S - 1)},
        "certificate",
        "(Secret tls) ended at 2027",
    ),
    "one that is nearly over": (
        {"certificate": certified(not_after_s=NOW_S + HOUR_S)},
        "certificate",
        "for 60.0 min yet",
    ),
    "one that is not good yet": ({"certificate": certified(not_before_s=NOW_S + 1)}, "certificate", "a clock is wrong"),
    "one of somebody else": ({"certificate": certified(trusted=False)}, "certificate", "signed by none"),
    "no namespace": ({"about": {}, "pods": []}, "namespace", "there is no namespace ml"),
    "no label": ({"pods": [pod()]}, "label", "train-0 trains, without the label"),
    "no label on several": ({"pods": [pod("a"), pod("b")]}, "label", "a, b train, without the label"),
    "a label with another value": (
        {"pods": [pod(labels={"sftriage.dev/inject": "true"})]},
        "label_value",
        "another value",
    ),
    "a namespace's with another value": (
        {"about": {"metadata": {"name": "ml", "labels": {"sftriage.dev/inject": "yes"}}}},
        "label_value",
        "inject=yes",
    ),
    "pods older than the label": (
        {"pods": [pod(labels=LABEL, managedFields=LABELLED_LATE)]},
        "injected",
        "train-0: labelled, but not injected: older than the label",
    ),
    "pods older than the namespace's label": (
        {"pods": [pod()], "about": {"metadata": {"name": "ml", "labels": LABEL, "managedFields": LABELLED_LATE}}},
        "injected",
        "older than the label",
    ),
    "pods older than the webhook": (
        {"pods": [pod(labels=LABEL)], "webhooks": [webhook(created=LATELY)]},
        "injected",
        "older than the webhook",
    ),
    "labelled, and the webhook was away": ({"pods": [pod(labels=LABEL)]}, "injected", "the webhook was away"),
    "labelled, and left alone": (
        {"pods": [{**pod(labels=LABEL), "spec": {"containers": [{"name": "sftriage-agent"}]}}]},
        "injected",
        "sftriage-agent is there already, and not ours",
    ),
    "labelled, and the cluster too old": (
        {"pods": [pod(labels=LABEL)], "version": (1, 27)},
        "injected",
        "the cluster is too old",
    ),
    "no controller": ({"controllers": [], "reports": []}, "controller", "job ml/job/train has no controller"),
    "a controller that does not run": (
        {"controllers": [{**WELL.controllers[0], "status": FAILED}]},
        "controller",
        "does not run (exceeded quota: small)",
    ),
    "no report": ({"reports": []}, "report", "job ml/job/train has no report"),
    "a policy that is not valid": (
        {"policies": [made("TriagePolicy", "p", {}, {"observedGeneration": 1, **NOT_VALID})]},
        "policies",
        "p not valid",
    ),
    "a policy that nobody looked at": ({"policies": [made("TriagePolicy", "p", {})]}, "policies", "looked at policy p"),
    "a capture that nobody looked at": (
        {"captures": [made("TraceCapture", "c", {})]},
        "captures",
        "nobody has looked at capture c",
    ),
    "a capture that nobody carries out": (
        {"captures": [capture("requested")]},
        "captures",
        "nobody carries out look: does job train run",
    ),
    "a trace in no store": ({"captures": [capture("stored")]}, "store", "look: the trace is with the job's controller"),
    "a store that is not reached": ({"stores": {"s3://traces": "no credentials"}}, "store", "no credentials"),
    "a quota that is used up": ({"quotas": [QUOTA]}, "quota", "used up: pods (4 of 4)"),
    "pods that a quota refuses": ({"events": [EVENT]}, "quota", "Job train: exceeded quota: small"),
    "pods that something else refuses": ({"events": [{**EVENT, "message": "denied"}]}, "events", "Job train: denied"),
}

FINE = {
    "nothing is wrong": {},
    "a pod of no job, without a label": {"pods": [{"metadata": {"name": "web", "labels": {}}, "spec": {}}, *WELL.pods]},
    "a namespace's label": {
        "pods": [pod(**INJECTED)],
        "about": {"metadata": {"name": "ml", "labels": LABEL}},
    },
    "a pod that ended before there was a label": {"pods": [{**pod(), "status": {"phase": "Succeeded"}}, *WELL.pods]},
    "a job that has just begun": {
        "pods": [pod(labels=LABEL, created=LATELY, **INJECTED)],
        "controllers": [],
        "reports": [],
    },
    "a job whose controller has ended": {"controllers": []},
    "a capture that was asked for just now": {
        "captures": [{**made("TraceCapture", "c", {}, creationTimestamp=LATELY)}]
    },
    "a trace in a store": {"captures": [capture("stored", stored=STORED)], "stores": {"s3://traces": ""}},
    "a quota with room": {"quotas": [{**QUOTA, "status": {"hard": {"pods": "4"}, "used": {"pods": "3"}}}]},
}

UNKNOWN = {
    "no version": ({"version": None}, "version"),
    "a store that is a directory there": ({"stores": {"file:///traces": "no such directory"}}, "store"),
    "no training": ({"pods": []}, "label"),
    "no training, in a namespace that may not be read": ({"pods": [], "about": {}, "unread": {"about": "no"}}, "label"),
    "pods that may not be read": ({"pods": [], "unread": {"pods": "forbidden"}}, "pods"),
    "definitions that may not be read": ({"definitions": [], "unread": {"definitions": "forbidden"}}, "definitions"),
    "deployments that may not be read": ({"deployments": [], "unread": {"deployments": "no"}}, "deployments"),
    "an operator that may be elsewhere": (
        {"deployments": WELL.deployments[1:], "unread": {"elsewhere": "forbidden"}},
        "operator",
    ),
    "webhooks that may not be read": ({"webhooks": [], "unread": {"webhooks": "forbidden"}}, "webhooks"),
    "a certificate that may not be read": ({"certificate": None, "unread": {"certificate": "no"}}, "certificate"),
    "controllers that may not be read": ({"controllers": [], "unread": {"controllers": "no"}}, "controllers"),
}


def unwell(**changed: Any) -> list[Finding]:
    return [one for one in diagnose(replace(WELL, **changed)) if one.state != "ok"]


@pytest.mark.parametrize(("changed", "code", "says"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_and_what_to_do(changed, code, says):
    found = [one for one in unwell(**changed) if one.state == "wrong"]
    its = [one for one in found if one.code == code and says in one.says]
    assert its, found
    assert all(one.do and "\n" not in one.says + one.do for one in found)


@pytest.mark.parametrize("changed", FINE.values(), ids=FINE)
def test_what_is_well_is_not_complained_about(changed):
    assert unwell(**changed) == []


@pytest.mark.parametrize(("changed", "code"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_seen_is_said_to_be_so_and_is_not_wrong(changed, code):
    assert {(one.state, one.code) for one in unwell(**changed)} <= {("unknown", code), ("unknown", "deployments")}
    assert code in {one.code for one in unwell(**changed)}


def test_many_are_named_by_a_few():
    says = next(one.says for one in unwell(pods=[pod(f"p{number}") for number in range(9)]) if one.code == "label")
    assert says.startswith("p0, p1, p2 and 6 more train")


def test_a_certificate_is_read_and_held_against_those_whom_the_webhook_trusts():
    """GIVEN a certificate of a CA THEN it is trusted by whoever knows that CA, and by nobody who knows another."""
    cryptography = pytest.importorskip("cryptography")
    assert cryptography
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    begun = datetime(2027, 1, 1, tzinfo=timezone.utc)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def signed(subject: str, key: Any, issuer: str, by: Any) -> str:
        builder = x509.CertificateBuilder(name(issuer), name(subject), key.public_key(), 1, begun, begun + timedelta(9))
        return base64.b64encode(builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)).decode()

    own, ca, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    served, of_ca, of_other = signed("w", own, "ca", ca), signed("ca", ca, "ca", ca), signed("ca", other, "ca", other)
    found = certificate("tls", served, [of_other, of_ca])
    assert found == Certificate("tls", begun.timestamp(), begun.timestamp() + 9 * 86_400, trusted=True)
    assert not certificate("tls", served, [of_other]).trusted
    assert certificate("tls", served, [served]).trusted
    with pytest.raises(ValueError, match=r"."):
        certificate("tls", "nonsense", [])
