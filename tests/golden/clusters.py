"""Clusters in many states: what an injected pod and a job's controller consist of, and what the doctor says."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from k8s.make_crds import definition
from sftriage.kube.controllers import ControllerSettings, wanted
from sftriage.kube.diagnosis import Certificate, Snapshot, diagnose
from sftriage.kube.injecting import InjectionSettings, applied, injection
from sftriage.kube.jobs import JobRef, job_of
from sftriage.kube.objects import KINDS
from sftriage.words.verdicts import clock
from tests.unit.kube.objects import NOW_S, made
from tests.unit.kube.pods import pod

RESNET = JobRef("jobset", "resnet", "ml")
OWNER = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "resnet", "uid": "7d"}
GIVEN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

HOUR_S = 3600.0
LONG_AGO, BEFORE, LATELY = clock(NOW_S - 100 * HOUR_S), clock(NOW_S - HOUR_S), clock(NOW_S - 5)
LABEL = {"sftriage.dev/inject": "enabled"}
JOB_LABELS = {"batch.kubernetes.io/job-name": "train", "batch.kubernetes.io/job-completion-index": "0"}


def running(name: str = "train-0", labels: Any = None, created: str = BEFORE, **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ml",
        "labels": {**JOB_LABELS, **(labels or {})},
        "creationTimestamp": created,
    }
    spec = {"containers": [{"name": "main", "image": "x"}]}
    return {"metadata": {**metadata, **more}, "spec": spec, "status": {"phase": "Running"}}


LABELLED = running(labels=LABEL)
INJECTED = {"annotations": {"sftriage.dev/status": "injected"}}
JOB: Any = job_of(running())


def namespace(labels: Any, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "ml", "labels": labels, **more}}


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
    pods=[running(labels=LABEL, **INJECTED)],
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


SNAPSHOTS: dict[str, dict[str, Any]] = {
    "rights": {"may": {"list triagereports": False}},
    "an old cluster": {"version": (1, 28)},
    "no definitions": {"definitions": []},
    "no operator": {"deployments": [deployment("sftriage-webhook")]},
    "an operator that does not run": {"deployments": [deployment("sftriage-operator", 0), WELL.deployments[1]]},
    "two of it": {"deployments": [*WELL.deployments, deployment("sftriage-operator", namespace="other")]},
    "its rights": {"operator_may": {"patch tracecaptures": False}},
    "no webhook configuration": {"webhooks": []},
    "an empty one": {"webhooks": [{**webhook(), "webhooks": []}]},
    "no caBundle": {"webhooks": [webhook("")]},
    "no webhook": {"deployments": [deployment("sftriage-operator")]},
    "nobody behind its service": {"serving": 0},
    "a certificate that is over": {"certificate": certified(not_after_s=NOW_S - 1)},
    "one that is nearly over": {"certificate": certified(not_after_s=NOW_S + HOUR_S)},
    "one that is not good yet": {"certificate": certified(not_before_s=NOW_S + 1)},
    "one of somebody else": {"certificate": certified(trusted=False)},
    "no namespace": {"about": {}, "pods": []},
    "no label": {"pods": [running()]},
    "no label on several": {"pods": [running("a"), running("b")]},
    "no label on many": {"pods": [running(f"p{number}") for number in range(9)]},
    "a label with another value": {"pods": [running(labels={"sftriage.dev/inject": "true"})]},
    "a namespace's with another value": {"about": namespace({"sftriage.dev/inject": "yes"})},
    "pods older than the label": {"pods": [running(labels=LABEL, managedFields=LABELLED_LATE)]},
    "pods older than the namespace's label": {
        "pods": [running()],
        "about": namespace(LABEL, managedFields=LABELLED_LATE),
    },
    "pods older than the webhook": {"pods": [LABELLED], "webhooks": [webhook(created=LATELY)]},
    "labelled, and the webhook was away": {"pods": [LABELLED]},
    "labelled, and left alone": {"pods": [LABELLED | {"spec": {"containers": [{"name": "sftriage-agent"}]}}]},
    "labelled, and the cluster too old": {"pods": [LABELLED], "version": (1, 27)},
    "no controller": {"controllers": [], "reports": []},
    "a controller that does not run": {"controllers": [{**WELL.controllers[0], "status": FAILED}]},
    "no report": {"reports": []},
    "a policy that is not valid": {"policies": [made("TriagePolicy", "p", {}, {"observedGeneration": 1, **NOT_VALID})]},
    "a policy that nobody looked at": {"policies": [made("TriagePolicy", "p", {})]},
    "a capture that nobody looked at": {"captures": [made("TraceCapture", "c", {})]},
    "a capture that nobody carries out": {"captures": [capture("requested")]},
    "a trace in no store": {"captures": [capture("stored")]},
    "a store that is not reached": {"stores": {"s3://traces": "no credentials"}},
    "a quota that is used up": {"quotas": [QUOTA]},
    "pods that a quota refuses": {"events": [EVENT]},
    "pods that something else refuses": {"events": [{**EVENT, "message": "denied"}]},
    "nothing is wrong": {},
    "a pod of no job, without a label": {"pods": [{"metadata": {"name": "web", "labels": {}}, "spec": {}}, *WELL.pods]},
    "a namespace's label": {"pods": [running(**INJECTED)], "about": namespace(LABEL)},
    "a pod that ended before there was a label": {"pods": [running() | {"status": {"phase": "Succeeded"}}, *WELL.pods]},
    "a job that has just begun": {
        "pods": [running(labels=LABEL, created=LATELY, **INJECTED)],
        "controllers": [],
        "reports": [],
    },
    "a job whose controller has ended": {"controllers": []},
    "a capture that was asked for just now": {"captures": [made("TraceCapture", "c", {}, creationTimestamp=LATELY)]},
    "a trace in a store": {"captures": [capture("stored", stored=STORED)], "stores": {"s3://traces": ""}},
    "a quota with room": {"quotas": [{**QUOTA, "status": {"hard": {"pods": "4"}, "used": {"pods": "3"}}}]},
    "no version": {"version": None},
    "a store that is a directory there": {"stores": {"file:///traces": "no such directory"}},
    "no training": {"pods": []},
    "no training, in a namespace that may not be read": {"pods": [], "about": {}, "unread": {"about": "no"}},
    "pods that may not be read": {"pods": [], "unread": {"pods": "forbidden"}},
    "definitions that may not be read": {"definitions": [], "unread": {"definitions": "forbidden"}},
    "deployments that may not be read": {"deployments": [], "unread": {"deployments": "no"}},
    "an operator that may be elsewhere": {"deployments": WELL.deployments[1:], "unread": {"elsewhere": "forbidden"}},
    "webhooks that may not be read": {"webhooks": [], "unread": {"webhooks": "forbidden"}},
    "a certificate that may not be read": {"certificate": None, "unread": {"certificate": "no"}},
    "controllers that may not be read": {"controllers": [], "unread": {"controllers": "no"}},
}


def texts() -> Iterator[str]:
    """All of them; of a pod and a controller what differs from the first."""
    first: list[str] = []
    for name, row in GIVEN["pods"].items():
        body, found = injected(**copy.deepcopy(row))
        added = [one for one in flat(applied(body, found.patch)) if one not in flat(body)]
        yield from (f"# A pod: {name}", *(f"! {one}" for one in found.warnings), *differences(first, added))
        first = first or added
    first = []
    for name, (settings, claim) in GIVEN["controllers"].items():
        objects = wanted(RESNET, ControllerSettings(InjectionSettings(**settings), claim), {"a.yaml": "a"}, [OWNER])
        found = [line for one in objects for line in flat({one["kind"]: one})]
        yield from (f"# A controller: {name}", *differences(first, found))
        first = first or found
    for name, changes in SNAPSHOTS.items():
        yield f"# Doctor: {name}"
        for one in diagnose(replace(WELL, **changes)):
            if one.state != "ok":
                yield f"{one.state} {one.code}: {one.says}" + (f" | {one.do}" if one.do else "")


def injected(
    *, train: Any = None, more: Any = (), settings: Any = None, job: Any = RESNET, server: Any = (1, 31), **about: Any
) -> tuple[dict[str, Any], Any]:
    body = pod(None, about.pop("env", None), **about)
    body["spec"]["containers"][0] |= train or {}
    body["spec"]["containers"] += more
    return body, injection(body, job, InjectionSettings(**(settings or {})), server and tuple(server))


def flat(value: Any, at: str = "") -> list[str]:
    """A line for each value of an object."""
    if isinstance(value, dict) and value:
        return [line for name, one in value.items() for line in flat(one, f"{at}.{name}" if at else name)]
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        named = ((one.get("name", number), one) for number, one in enumerate(value))
        return [
            line for key, one in named for line in flat({k: v for k, v in one.items() if k != "name"}, f"{at}[{key}]")
        ]
    return [f"{at} = {' '.join(map(str, value)) if isinstance(value, list) else value}"]


def differences(first: Iterable[str], lines: Iterable[str]) -> list[str]:
    first, lines = list(first), list(lines)
    if not first or not lines:
        return lines
    return [*(f"- {one}" for one in first if one not in lines), *(f"+ {one}" for one in lines if one not in first)]
