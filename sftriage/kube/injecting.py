"""From a pod to what makes it one that sftriage watches: a JSON Patch that only adds, and warnings. Pure.

Each part is added where it is missing, so that what is injected already stays as it is, and a pod that another webhook
has changed meanwhile gets what it lacks. A pod that cannot be handled is left as it is: nothing here is ever a reason
that it does not start.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftriage.errors import InputError
from sftriage.kube import sidecar
from sftriage.kube.jobs import (
    INJECTED,
    JOB_ID_ANNOTATION,
    JOB_LABEL,
    NAME_LABEL,
    OWNERS,
    STATUS_ANNOTATION,
    JobRef,
    Pod,
    System,
    annotations_of,
    items,
    job_of,
    labels_of,
    mapping,
    text,
)
from sftriage.kube.objects import GROUP
from sftriage.kube.sidecar import InjectionSettings
from sftriage.words.kube import injected_but, left_alone

CONTAINERS_ANNOTATION = f"{GROUP}/containers"
"""Which containers train, by name, with commas between them; by default all do."""
IMAGE_PATH_ANNOTATION = f"{GROUP}/image-pythonpath"
"""The PYTHONPATH of the trainer's image, which the pod's own would replace."""
SHARE_ANNOTATION = f"{GROUP}/share-process-namespace"
NSYS_ANNOTATION = f"{GROUP}/nsys"
"""An image with Nsight Systems, under which ranks start then."""
PATH = "PYTHONPATH"

Operation = dict[str, Any]
Version = tuple[int, int]
SIDECARS_SINCE: Version = (1, 29)
"""The first version that has native sidecars unless somebody switches them off."""


@dataclass(frozen=True, slots=True)
class Injection:
    """What becomes of a pod: nothing, where the patch is empty."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


def version_of(told: Mapping[str, Any]) -> Version | None:
    """The version that a server tells at ``/version``; None where that is none. Some add a plus sign."""
    found = [re.match(r"\d+", str(told.get(name, ""))) for name in ("major", "minor")]
    return None if None in found else (int(found[0][0]), int(found[1][0]))  # type: ignore[index]  # neither is None


def injection(pod: Pod, job: JobRef | None, settings: InjectionSettings, server: Version | None) -> Injection:
    """What becomes of a pod of a job (None: of none that is known) on a server of that version."""
    why = _left_alone(pod, job, server)
    if why is not None or job is None:
        return Injection(warnings=(why,) if why else ())
    trains, warnings = _trainers(pod)
    if not trains:
        return Injection(warnings=warnings)
    spec = mapping(pod, "spec")
    looks_in = annotations_of(pod).get(SHARE_ANNOTATION) == "true" and spec.get("shareProcessNamespace") is not False
    ours = sidecar.pod_parts(
        job,
        settings,
        user=mapping(spec, "securityContext").get("runAsUser"),
        guaranteed=_guaranteed(spec),
        looks_in=looks_in,
        nsys=annotations_of(pod).get(NSYS_ANNOTATION, ""),
    )
    patch = [
        *_metadata(pod, job),
        *_appended(spec, "/spec", "volumes", ours["volumes"]),
        *_appended(spec, "/spec", "initContainers", ours["initContainers"]),
        *([_add("/spec/shareProcessNamespace", True)] if looks_in and not spec.get("shareProcessNamespace") else []),
    ]
    image_path = annotations_of(pod).get(IMAGE_PATH_ANNOTATION, "")
    for index in trains:
        patch += _watched(spec["containers"][index], f"/spec/containers/{index}", ours, image_path)
    return Injection(tuple(patch), (*warnings, *_warnings(pod, trains, ours["env"])))


def applied(pod: Pod, patch: Sequence[Operation]) -> dict[str, Any]:
    """A pod with a patch of ours."""
    found: dict[str, Any] = copy.deepcopy(dict(pod))
    for operation in patch:
        *above, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"][1:].split("/")]
        inner: Any = found
        for part in above:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        if isinstance(inner, list):
            inner.append(copy.deepcopy(operation["value"]))
        else:
            inner[last] = copy.deepcopy(operation["value"])
    return found


def _left_alone(pod: Pod, job: JobRef | None, server: Version | None) -> str | None:
    spec = mapping(pod, "spec")
    if job is None:
        return left_alone("no_job")
    if server is None:
        return left_alone("no_version")
    if server < SIDECARS_SINCE:
        return left_alone("old", version=".".join(map(str, server)))
    if "windows" in (mapping(spec, "os").get("name"), mapping(spec, "nodeSelector").get("kubernetes.io/os")):
        return left_alone("windows")
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers or not all(isinstance(one, Mapping) for one in containers):
        return left_alone("no_containers")
    taken = ", ".join(sorted(set(_taken(spec))))
    return left_alone("taken", names=taken) if taken else None


def _taken(spec: Mapping[str, Any]) -> Iterator[str]:
    own = {f"/{name}" for name in (sidecar.CARRIED, sidecar.RINGS, sidecar.SPOOL, sidecar.NSYS)}
    for container in items(spec, "containers"):
        if text(container, "name") in (sidecar.CARRY, sidecar.AGENT, sidecar.NSYS):
            yield text(container, "name")
        for found in items(container, "volumeMounts"):
            place = text(found, "mountPath").rstrip("/")
            if place in own and place != f"/{text(found, 'name')}":
                yield place
    for volume in items(spec, "volumes"):
        name = text(volume, "name")
        kind = "secret" if name == sidecar.HUB else "emptyDir"
        if name in (sidecar.CARRIED, sidecar.RINGS, sidecar.SPOOL, sidecar.NSYS, sidecar.HUB) and kind not in volume:
            yield name


def _trainers(pod: Pod) -> tuple[list[int], tuple[str, ...]]:
    containers = list(items(mapping(pod, "spec"), "containers"))
    named = [name.strip() for name in annotations_of(pod).get(CONTAINERS_ANNOTATION, "").split(",") if name.strip()]
    missing = sorted(set(named) - {text(one, "name") for one in containers})
    if missing:
        return [], (left_alone("not_there", names=", ".join(missing)),)
    wanted = [index for index, one in enumerate(containers) if not named or text(one, "name") in named]
    closed = [index for index in wanted if "valueFrom" in (_variable(containers[index], PATH) or {})]
    trains = [index for index in wanted if index not in closed]
    names = ", ".join(text(containers[index], "name") for index in closed)
    if closed and trains:
        return trains, (injected_but("valueFrom", names=names),)
    return trains, (left_alone("valueFrom", names=names),) if closed else ()


def _watched(
    container: Mapping[str, Any], at: str, ours: Mapping[str, Sequence[Mapping[str, Any]]], image_path: str
) -> Iterator[Operation]:
    environment, found = ours["env"], _variable(container, PATH)
    if found is None:
        # A ConfigMap's value is filled in by the node; without one the text stays, and names a folder that is missing.
        rest = f"$({PATH})" if next(items(container, "envFrom"), None) is not None else image_path
        environment = [{"name": PATH, "value": _first(rest)}, *environment]
    elif sidecar.SITE not in (value := text(found, "value")).split(":"):
        index = next(number for number, one in enumerate(container["env"]) if one is found)
        yield _add(f"{at}/env/{index}/value", _first(value))
    yield from _appended(container, at, "env", environment)
    yield from _appended(container, at, "volumeMounts", ours["volumeMounts"])


def _first(rest: str) -> str:
    return f"{sidecar.SITE}:{rest}" if rest else sidecar.SITE


def _variable(container: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((one for one in reversed(list(items(container, "env"))) if one.get("name") == name), None)


def _warnings(pod: Pod, trains: Sequence[int], environment: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    spec, ours = mapping(pod, "spec"), {one["name"]: one.get("value") for one in environment}
    for index in trains:
        container = spec["containers"][index]
        for variable in ("SFTRIAGE_RINGS", "SFTRIAGE_SPOOL", *(["PYTHON_EXEC"] if "PYTHON_EXEC" in ours else [])):
            found = _variable(container, variable)
            if found is not None and found.get("value") != ours[variable]:
                yield injected_but("own", names=text(container, "name"), variable=variable)
    if spec.get("hostNetwork") is True and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield injected_but("dns")
    if annotations_of(pod).get(SHARE_ANNOTATION) == "true" and spec.get("shareProcessNamespace") is False:
        yield injected_but("not_shared")


def _guaranteed(spec: Mapping[str, Any]) -> bool:
    """Whether all containers ask for as much as they may take, so that the pod has its cores to itself."""
    for container in items(spec, "containers"):
        limits, requests = (mapping(container, "resources", name) for name in ("limits", "requests"))
        for resource in ("cpu", "memory"):
            # (what is not asked for is what may be taken)
            if not limits.get(resource) or requests.get(resource, limits[resource]) != limits[resource]:
                return False
    return True


def _metadata(pod: Pod, job: JobRef) -> Iterator[Operation]:
    metadata = pod.get("metadata")
    if not isinstance(metadata, Mapping):
        yield _add("/metadata", {})
        metadata = {}
    annotations = {STATUS_ANNOTATION: INJECTED, JOB_ID_ANNOTATION: job.job_id}
    for name, there, wanted in (
        ("labels", labels_of(pod), {JOB_LABEL: job.object_name}),
        ("annotations", annotations_of(pod), annotations),
    ):
        missing = {key: value for key, value in wanted.items() if key not in there}
        if missing and not isinstance(metadata.get(name), Mapping):
            yield _add(f"/metadata/{name}", missing)
        else:
            for key, value in missing.items():
                yield _add(f"/metadata/{name}/{key.replace('/', '~1')}", value)


def _appended(
    holder: Mapping[str, Any], at: str, name: str, wanted: Sequence[Mapping[str, Any]]
) -> Iterator[Operation]:
    there = {text(one, "name") for one in items(holder, name)}
    missing = [dict(one) for one in wanted if one["name"] not in there]
    if missing and not isinstance(holder.get(name), list):
        yield _add(f"{at}/{name}", missing)
    else:
        for one in missing:
            yield _add(f"{at}/{name}/-", one)


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


Path = tuple[str, ...]
EACH = "*"
"""Every item of a list, and every value of a mapping."""

_TEMPLATES: Mapping[str, tuple[Path, ...]] = {
    "Pod": ((),),
    "Job": (("spec", "template"), ("spec", "tasks", EACH, "template")),
    **dict.fromkeys(("StatefulSet", "Deployment", "ReplicaSet", "DaemonSet"), (("spec", "template"),)),
    "JobSet": (("spec", "replicatedJobs", EACH, "template", "spec", "template"),),
    "PyTorchJob": (("spec", "pytorchReplicaSpecs", EACH, "template"),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
    "RayCluster": (("spec", "headGroupSpec", "template"), ("spec", "workerGroupSpecs", EACH, "template")),
    "RayJob": (
        ("spec", "rayClusterSpec", "headGroupSpec", "template"),
        ("spec", "rayClusterSpec", "workerGroupSpecs", EACH, "template"),
    ),
}
"""Where pod templates are, by kind: `batch/v1` and Volcano call theirs Job both."""

_NAMED_LATER = {
    "TrainJob": "a TrainJob has no pod templates, its runtime has, for jobs of any name: it takes the webhook",
    "TrainingRuntime": "its jobs have names of their own, which it does not know: it takes the webhook",
    "ClusterTrainingRuntime": "its jobs have names of their own, which it does not know: it takes the webhook",
    "CronJob": "each of its Jobs is named once it is made: it takes the webhook",
}


@dataclass(frozen=True, slots=True)
class Changed:
    """An object with its pod templates injected: how many, and warnings."""

    body: dict[str, Any]
    templates: int
    warnings: tuple[str, ...]


def injected(body: Mapping[str, Any], namespace: str, settings: InjectionSettings, server: Version) -> Changed:
    """An object as the webhook would have its pods; one without pod templates as it is.

    Raises:
        InputError: the name of the job is not known before its pods are made; the message says why.
    """
    kind = text(body, "kind")
    what = f"{kind} {text(mapping(body, 'metadata'), 'name')}".strip()
    if kind in _NAMED_LATER:
        raise InputError(f"{what}: {_NAMED_LATER[kind]}")
    whole = {"": _copied(dict(body))}
    warnings: list[str] = []
    count = 0
    for path in _TEMPLATES.get(kind, ()):
        for holder, key in list(_places(whole, ("", *path))):
            job = _job(whole[""], holder[key], namespace)
            if job is None:
                continue
            one = injection(holder[key], job, settings, server)
            warnings += [f"{what}: {warning}" for warning in one.warnings]
            count += bool(one.patch)
            holder[key] = applied(holder[key], one.patch)
    return Changed(whole[""], count, tuple(dict.fromkeys(warnings)))


def _job(body: Mapping[str, Any], template: Mapping[str, Any], namespace: str) -> JobRef | None:
    metadata = mapping(body, "metadata")
    where = text(metadata, "namespace") or namespace
    if named := labels_of(template).get(NAME_LABEL):
        return JobRef("pod", named, where)
    name, kind = text(metadata, "name"), text(body, "kind")
    if kind == "Pod" and (found := job_of(template, where)) is not None:
        return found
    about = text(body, "apiVersion").partition("/")[0], kind
    owners = {(version.partition("/")[0], its): system for system, (version, its) in OWNERS.items()}
    system: System | None = "pod" if kind == "Pod" else owners.get(about)
    if system is None:
        return None
    if not name:
        raise InputError(f"{kind}: it is named once it is made; give it a name, or its pods the label {NAME_LABEL}")
    if system != "leaderworkerset":
        return JobRef(system, name, where)
    # Each of its groups is a job, and they share their templates.
    if mapping(body, "spec").get("replicas", 1) != 1:
        raise InputError(
            f"{kind} {name}: each of its replicas is a job, and all have one template: it takes the webhook"
        )
    return JobRef(system, f"{name}-0", where)


def _places(holder: Any, path: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """The holders and keys of what is at a path."""
    first, *rest = path
    keys = list(range(len(holder)) if isinstance(holder, list) else holder if isinstance(holder, dict) else ())
    for key in keys if first == EACH else [first] if first in keys else []:
        if rest:
            yield from _places(holder[key], rest)
        elif isinstance(holder[key], dict):
            yield holder, key


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
