"""Clusters in many states: what an injected pod and a job's controller consist of, and what the doctor says."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from k8s.make_crds import definition
from sftriage.kube.controllers import ControllerSettings, wanted
from sftriage.kube.diagnosis import Certificate, Snapshot, diagnose
from sftriage.kube.injecting import InjectionSettings, injection
from sftriage.kube.jobs import JobRef, job_of
from sftriage.kube.objects import KINDS
from sftriage.words.verdicts import clock
from tests.unit.kube.objects import NOW_S, made
from tests.unit.kube.pods import pod

RESNET = JobRef("jobset", "resnet", "ml")
GIVEN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

HOUR_S = 3600.0
TIMES = {"long_ago": clock(NOW_S - 100 * HOUR_S), "before": clock(NOW_S - HOUR_S), "lately": clock(NOW_S - 5)}
LABELS = {"batch.kubernetes.io/job-name": "train", "batch.kubernetes.io/job-completion-index": "0"}


def running(
    *,
    name: str = "train-0",
    labels: Any = None,
    created: str = "before",
    container: str = "main",
    phase: str = "Running",
    plain: bool = False,
    **more: Any,
) -> dict[str, Any]:
    if plain:
        return {"metadata": {"name": "web", "labels": {}}, "spec": {}}
    about = {"name": name, "namespace": "ml", "labels": {**LABELS, **(labels or {})}, **more}
    spec = {"containers": [{"name": container, "image": "x"}]}
    return {"metadata": {**about, "creationTimestamp": TIMES[created]}, "spec": spec, "status": {"phase": phase}}


JOB: Any = job_of(running())
OF_JOB = {"sftriage.dev/job": JOB.object_name}


def deployment(*, name: str, available: int = 1, status: Any = None, **more: Any) -> dict[str, Any]:
    about = {"name": name, "namespace": "sftriage-system", "labels": {"app.kubernetes.io/name": name}}
    return {"metadata": {**about, **more}, "status": status or {"availableReplicas": available}}


def webhook(*, bundle: str = "Q0E=", created: str = "long_ago", hooks: int = 1) -> dict[str, Any]:
    config = {"caBundle": bundle, "service": {"name": "w", "namespace": "s"}}
    about = {"name": "sftriage", "creationTimestamp": TIMES[created]}
    return {"metadata": about, "webhooks": [{"name": "pod.sftriage.dev", "clientConfig": config}] * hooks}


def capture(*, created: str = "", **status: Any) -> dict[str, Any]:
    if not status:
        return made("TraceCapture", "c", {}, **({"creationTimestamp": TIMES[created]} if created else {}))
    spec = {"job": "train", "rank": 1, "reason": "why?"}
    return made("TraceCapture", "look", spec, {"observedGeneration": 1, **status})


WELL = Snapshot(
    now_s=NOW_S,
    namespace="ml",
    version=(1, 31),
    about={"metadata": {"name": "ml"}},
    definitions=[definition(kind) for kind in KINDS],
    pods=[running(labels={"sftriage.dev/inject": "enabled"}, annotations={"sftriage.dev/status": "injected"})],
    reports=[made("TriageReport", "r", {"job": "train"}, labels=OF_JOB)],
    controllers=[deployment(name="sftriage")],
    deployments=[deployment(name="sftriage-operator"), deployment(name="sftriage-webhook")],
    webhooks=[webhook()],
    serving=2,
    certificate=Certificate("tls", NOW_S - HOUR_S, NOW_S + 1000 * HOUR_S, trusted=True),
    may={"list triagereports": True},
    operator_may={"patch tracecaptures": True},
)
"""A cluster in which all is well."""


def certified(**changes: Any) -> Any:
    changes = {name: one if name == "trusted" else NOW_S + one for name, one in changes.items()}
    return replace(WELL.certificate, **changes)  # type: ignore[type-var]  # it has one


PARTS: dict[str, Callable[[Any], Any]] = {
    "version": lambda found: found and tuple(found),
    "pods": lambda found: [running(**one) for one in found],
    "deployments": lambda found: [deployment(**one) for one in found],
    "controllers": lambda found: [deployment(name="sftriage", **one) for one in found],
    "webhooks": lambda found: [webhook(**one) for one in found],
    "policies": lambda found: [made("TriagePolicy", "p", {}, status) for status in found],
    "captures": lambda found: [capture(**one) for one in found],
    "certificate": lambda found: found and certified(**found),
}


def seen(changes: dict[str, Any]) -> Snapshot:
    dated = json.loads(json.dumps(changes).replace('"time": "lately"', f'"time": "{TIMES["lately"]}"'))
    return replace(WELL, **{part: PARTS.get(part, lambda found: found)(one) for part, one in dated.items()})


def texts() -> Iterator[str]:
    """All of them; of a pod and a controller what differs from the first."""
    first: list[str] = []
    for name, row in GIVEN["pods"].items():
        body, found = injected(**copy.deepcopy(row))
        added = [one for one in flat(found.pod or body) if one not in flat(body)]
        yield from (f"# A pod: {name}", *(f"! {one}" for one in found.warnings), *differences(first, added))
        first = first or added
    first = []
    for name, (settings, claim) in GIVEN["controllers"].items():
        objects = wanted("ml", ControllerSettings(InjectionSettings(**settings), claim), {"a.yaml": "a"})
        found = [line for one in objects for line in flat({one["kind"]: one})]
        yield from (f"# A controller: {name}", *differences(first, found))
        first = first or found
    for name, changes in GIVEN["doctor"].items():
        yield f"# Doctor: {name}"
        for one in diagnose(seen(changes)):
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
