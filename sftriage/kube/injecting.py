"""Injects sftriage into a pod: a JSON Patch that only adds, and warnings. Pure.

The injected parts come from ``pod.yaml`` and `InjectionSettings`. Only missing parts are added, so that an injected pod
stays as it is, and a pod that another webhook has changed meanwhile gets what it lacks. A pod that cannot be handled is
left unchanged: injection never keeps a pod from starting.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from sftriage.errors import InputError
from sftriage.fleet.hub import AGENTS_FILE, CA_FILE, PORT
from sftriage.kube import jobs
from sftriage.kube.jobs import JobRef, Pod, System, annotations_of, items, job_of, labels_of, mapping, text
from sftriage.kube.objects import GROUP, ObjectModel
from sftriage.policy.parsing import path_text
from sftriage.words.kube import injected_but, left_alone

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]


class Resources(ObjectModel):
    """Requests and limits of an injected container, or of the controllers of a namespace."""

    cpu: Quantity = "50m"
    memory: Quantity = "192Mi"
    cpu_limit: Quantity = "500m"
    memory_limit: Quantity = "1Gi"


class InjectionSettings(ObjectModel):
    """Settings of what is injected into pods; docs/kubernetes.md describes them."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] = "sftriage:latest"
    agent_image: Annotated[str, Field(max_length=1024)] = ""
    pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] = "IfNotPresent"
    store: Annotated[str, Field(max_length=4096)] = ""
    store_secret: Annotated[str, Field(max_length=253)] = ""
    nats: Annotated[str, Field(max_length=4096)] = ""
    nats_secret: Annotated[str, Field(min_length=1, max_length=253)] = "sftriage-nats"
    nats_ca: bool = False
    hub_tls: bool = False
    metrics_secret: Annotated[str, Field(max_length=253)] = ""
    rings: Quantity = "128Mi"
    spool: Quantity = "20Gi"
    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    resources: Resources = Resources()
    controllers: Resources = Resources(cpu="100m", memory="256Mi", cpu_limit="4", memory_limit="8Gi")
    runs: Quantity = "100Gi"


def read_settings(path: Path) -> InjectionSettings:
    """The settings in a file; raises InputError if it cannot be read, or is not valid."""
    try:
        return InjectionSettings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ValidationError):
            problem = error.errors(include_input=False)[0]
            raise InputError(f"{path}: {path_text(problem['loc'])}: {problem['msg']}") from None
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from error


Made = dict[str, Any]
"""A part of a manifest."""

CARRY, AGENT = "sftriage-carry", "sftriage-agent"
CARRIED, RINGS, SPOOL, HUB = "sftriage", "sftriage-rings", "sftriage-spool", "sftriage-hub"
"""Volumes; each is mounted at its own name below the root."""
SITE = f"/{CARRIED}/sftriage/trainer/seams/site"
"""A folder that `sftriage kube carry` makes in its volume, for a PYTHONPATH."""
POD_UID = 65532
"""Our containers' user where the pod's own is root."""
NSYS = "sftriage-nsys"
"""A volume, and the init container that brings Nsight Systems into it."""
NSYS_TRACES, NSYS_SESSION = "cuda,nvtx,osrt", "sft-pod"


@functools.cache
def manifest(name: str) -> Any:
    """A manifest of this package, for `filled`."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """A manifest with a value for each ``<name>``, which may be any part of one; a list extends the list it stands in.

    A part whose value is None, or that has an ``if`` without a value, is left out.
    """
    if isinstance(template, dict):
        if not filled(template.get("if", True), values):
            return None
        parts = {name: filled(part, values) for name, part in template.items() if name != "if"}
        return {name: part for name, part in parts.items() if part is not None}
    if isinstance(template, list):
        found: list[Any] = []
        for part in template:
            value = filled(part, values)
            found += value if isinstance(value, list) else [] if value is None else [value]
        return found
    name = re.fullmatch(r"<(\w+)>", template) if isinstance(template, str) else None
    return template if name is None else copy.deepcopy(values[name[1]])


def secret_of(settings: InjectionSettings) -> str:
    """The Secret of a namespace with the credentials of its agents and controllers."""
    # (a Secret that was made without certificates is never written again)
    return settings.nats_secret if settings.nats else jobs.HUB_NAME + ("-tls" if settings.hub_tls else "")


def encrypted(settings: InjectionSettings) -> bool:
    """Whether that Secret has the certificate of the authority that signs the hub's."""
    return settings.nats_ca if settings.nats else settings.hub_tls


def pod_parts(
    job: JobRef,
    settings: InjectionSettings,
    *,
    user: object = None,
    guaranteed: bool = False,
    looks_in: bool = False,
    nsys: str = "",
    bounded: bool = False,
) -> dict[str, list[Made]]:
    """The parts injected into a pod of a job, see ``pod.yaml``.

    ``user`` is the pod's own. Containers of a ``guaranteed`` pod have exclusive cores, which requires limits equal to
    requests. An agent that ``looks_in`` may read the memory of the pod's other processes, for stacks from outside.
    ``nsys`` is an image with Nsight Systems, if ranks start under it. A pod whose disk use is ``bounded`` may use the
    sum of its containers' limits, and our volumes count: without a limit for them, a trace could evict it.
    """
    template, sizes = manifest("pod.yaml"), settings.resources
    limits = {"cpu": sizes.cpu_limit, "memory": sizes.memory_limit}
    requests = dict(limits) if guaranteed else {"cpu": sizes.cpu, "memory": sizes.memory}
    disk = ({"ephemeral-storage": "0"}, {"ephemeral-storage": settings.spool}) if bounded else ({}, {})
    keys = [AGENTS_FILE if settings.nats else jobs.HUB_KEY, *([CA_FILE] if encrypted(settings) else [])]
    hub = ["--nats", settings.nats] if settings.nats else ["--hub", f"{jobs.HUB_NAME}.{job.namespace}.svc:{PORT}"]
    hub += ["--creds", f"/{HUB}/{keys[0]}", *(["--tls", f"/{HUB}"] if encrypted(settings) else [])]

    def restricted(*, root: bool) -> Made:
        return dict(filled(template["restricted"], {"user": settings.run_as_user or (POD_UID if root else None)}))

    # (nsys looks for its importer beside the directory that it is in)
    armed = ["--nsys", f"/{NSYS}/run/nsys", "--nsys-armed", f"/{SPOOL}/nsys/range"]
    values = {
        **dict(settings),
        "image": settings.agent_image or settings.image,
        "job_id": job.job_id,
        "secret": secret_of(settings),
        "keys": [{"key": key, "path": key} for key in keys],
        "resources": {"requests": requests, "limits": limits},
        "agent_resources": {"requests": requests | disk[0], "limits": limits | disk[1]},
        "security": restricted(root=user == 0),
        "agent_security": filled(template["tracing"], {}) if looks_in else restricted(root=user == 0),
        # (most images with Nsight Systems are root's)
        "nsys_security": restricted(root=not user),
        "hub": hub,
        "store_options": ["--store", settings.store, "--drop-local"] if settings.store else None,
        "store_environment": store_environment(settings),
        "armed": armed if nsys else None,
        "nsys": nsys,
        "nsys_session": NSYS_SESSION,
        "nsys_traces": NSYS_TRACES,
    }
    return {name: filled(template[name], values) for name in ("volumes", "initContainers", "env", "volumeMounts")}


def store_environment(settings: InjectionSettings) -> list[Made] | None:
    """The source of the store's credentials in a container; None if there are none."""
    return [{"secretRef": {"name": settings.store_secret, "optional": True}}] if settings.store_secret else None


CONTAINERS_ANNOTATION = f"{GROUP}/containers"
"""Names of the containers that train, separated by commas; by default all do."""
IMAGE_PATH_ANNOTATION = f"{GROUP}/image-pythonpath"
"""The PYTHONPATH of the trainer's image, which the pod's own would replace."""
SHARE_ANNOTATION = f"{GROUP}/share-process-namespace"
NSYS_ANNOTATION = f"{GROUP}/nsys"
"""An image with Nsight Systems; ranks then start under it."""
PATH = "PYTHONPATH"

Operation = dict[str, Any]
Version = tuple[int, int]
SIDECARS_SINCE: Version = (1, 29)
"""The first version with native sidecars on by default."""


@dataclass(frozen=True, slots=True)
class Injection:
    """The change of a pod (an empty patch: none), warnings, and the changed pod."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    pod: Mapping[str, Any] = field(default_factory=dict, compare=False)


def version_of(answer: Mapping[str, Any]) -> Version | None:
    """The version in a server's answer at ``/version``; None if it has none. Some servers add a plus sign."""
    found = [re.match(r"\d+", str(answer.get(name, ""))) for name in ("major", "minor")]
    return None if None in found else (int(found[0][0]), int(found[1][0]))  # type: ignore[index]  # neither is None


def injection(pod: Pod, job: JobRef | None, settings: InjectionSettings, server: Version | None) -> Injection:
    """How to inject a pod of a job (None: of no known job) on a server of that version."""
    why = _left_alone(pod, job, server)
    if why is not None or job is None:
        return Injection(warnings=(why,) if why else ())
    trains, warnings = _trainers(pod)
    if not trains:
        return Injection(warnings=warnings)
    changed = _copied(pod)
    spec = changed["spec"]
    looks_in = annotations_of(pod).get(SHARE_ANNOTATION) == "true" and spec.get("shareProcessNamespace") is not False
    ours = pod_parts(
        job,
        settings,
        user=mapping(spec, "securityContext").get("runAsUser"),
        guaranteed=_guaranteed(spec),
        looks_in=looks_in,
        nsys=annotations_of(pod).get(NSYS_ANNOTATION, ""),
        bounded=any("ephemeral-storage" in mapping(each, "resources", "limits") for each in items(spec, "containers")),
    )
    warnings = (*warnings, *_warnings(pod, trains, ours["env"]))
    annotations = {jobs.STATUS_ANNOTATION: jobs.INJECTED, jobs.JOB_ID_ANNOTATION: job.job_id}
    # (an agent of an earlier version looks elsewhere)
    annotations |= {} if jobs.is_injected(pod) else {jobs.HUB_ANNOTATION: jobs.HUB_NAME}
    for name, wanted in (("labels", {jobs.JOB_LABEL: job.object_name}), ("annotations", annotations)):
        there = _within(_within(changed, "metadata", dict), name, dict)
        there |= {key: value for key, value in wanted.items() if not isinstance(there.get(key), str)}
    for name in ("volumes", "initContainers"):
        _append(spec, name, ours[name])
    if looks_in:
        spec["shareProcessNamespace"] = True
    for index in trains:
        _watch(spec["containers"][index], ours, annotations_of(pod).get(IMAGE_PATH_ANNOTATION, ""))
    return Injection(tuple(_added(pod, changed)), warnings, changed)


def _added(before: Any, after: Any, at: str = "") -> Iterator[Operation]:
    """What is new in one part of a pod, by its path."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in after.items():
            path = f"{at}/{str(name).replace('~', '~0').replace('/', '~1')}"
            yield from _added(before[name], value, path) if name in before else (_add(path, value),)
    elif isinstance(before, list) and isinstance(after, list):
        for index, value in enumerate(after):
            new = index >= len(before)
            yield from (_add(f"{at}/-", value),) if new else _added(before[index], value, f"{at}/{index}")
    elif before != after:
        yield _add(at, after)


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _within(holder: dict[str, Any], name: str, of: type[Any]) -> Any:
    """The dict or list of a name, made if it is missing."""
    if not isinstance(holder.get(name), of):
        holder[name] = of()
    return holder[name]


def _append(holder: dict[str, Any], name: str, wanted: Sequence[Mapping[str, Any]]) -> None:
    there = {text(item, "name") for item in items(holder, name)}
    if missing := [copy.deepcopy(dict(item)) for item in wanted if item["name"] not in there]:
        _within(holder, name, list).extend(missing)


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
    if not isinstance(containers, list) or not containers or not all(isinstance(each, Mapping) for each in containers):
        return left_alone("no_containers")
    taken = ", ".join(sorted(set(_taken(spec))))
    return left_alone("taken", names=taken) if taken else None


def _taken(spec: Mapping[str, Any]) -> Iterator[str]:
    own = {f"/{name}" for name in (CARRIED, RINGS, SPOOL, NSYS)}
    for container in items(spec, "containers"):
        if text(container, "name") in (CARRY, AGENT, NSYS):
            yield text(container, "name")
        for found in items(container, "volumeMounts"):
            place = text(found, "mountPath").rstrip("/")
            if place in own and place != f"/{text(found, 'name')}":
                yield place
    for volume in items(spec, "volumes"):
        name = text(volume, "name")
        kind = "secret" if name == HUB else "emptyDir"
        if name in (CARRIED, RINGS, SPOOL, NSYS, HUB) and kind not in volume:
            yield name


def _trainers(pod: Pod) -> tuple[list[int], tuple[str, ...]]:
    containers = list(items(mapping(pod, "spec"), "containers"))
    named = [name.strip() for name in annotations_of(pod).get(CONTAINERS_ANNOTATION, "").split(",") if name.strip()]
    missing = sorted(set(named) - {text(container, "name") for container in containers})
    if missing:
        return [], (left_alone("not_there", names=", ".join(missing)),)
    wanted = [index for index, container in enumerate(containers) if not named or text(container, "name") in named]
    closed = [index for index in wanted if "valueFrom" in (_variable(containers[index], PATH) or {})]
    trains = [index for index in wanted if index not in closed]
    names = ", ".join(text(containers[index], "name") for index in closed)
    if closed and trains:
        return trains, (injected_but("valueFrom", names=names),)
    return trains, (left_alone("valueFrom", names=names),) if closed else ()


def _watch(container: dict[str, Any], ours: Mapping[str, Sequence[Mapping[str, Any]]], image_path: str) -> None:
    environment, found = ours["env"], _variable(container, PATH)
    if found is None:
        # A ConfigMap's value is filled in by the node; without one the text stays, and names a folder that is missing.
        rest = f"$({PATH})" if next(items(container, "envFrom"), None) is not None else image_path
        environment = [{"name": PATH, "value": _first(rest)}, *environment]
    elif SITE not in (value := text(found, "value")).split(":"):
        found["value"] = _first(value)
    _append(container, "env", environment)
    _append(container, "volumeMounts", ours["volumeMounts"])


def _first(rest: str) -> str:
    return f"{SITE}:{rest}" if rest else SITE


def _variable(container: Mapping[str, Any], name: str) -> Any:
    return next((each for each in reversed(list(items(container, "env"))) if each.get("name") == name), None)


def _warnings(pod: Pod, trains: Sequence[int], environment: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    spec, ours = mapping(pod, "spec"), {variable["name"]: variable.get("value") for variable in environment}
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
    """Whether requests equal limits in all containers, so that the pod has exclusive cores."""
    for container in (*items(spec, "containers"), *items(spec, "initContainers")):
        limits, requests = (mapping(container, "resources", name) for name in ("limits", "requests"))
        for resource in ("cpu", "memory"):
            # (a missing request equals the limit)
            if not limits.get(resource) or requests.get(resource, limits[resource]) != limits[resource]:
                return False
    return True


_RAY = "headGroupSpec.template", "workerGroupSpecs.*.template"
_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "Pod": ("body",),
    "Job": ("body.spec.template", "body.spec.tasks.*.template"),
    **dict.fromkeys(("StatefulSet", "Deployment", "ReplicaSet", "DaemonSet"), ("body.spec.template",)),
    "JobSet": ("body.spec.replicatedJobs.*.template.spec.template",),
    "PyTorchJob": ("body.spec.pytorchReplicaSpecs.*.template",),
    "LeaderWorkerSet": tuple(f"body.spec.leaderWorkerTemplate.{role}Template" for role in ("leader", "worker")),
    "RayCluster": tuple(f"body.spec.{group}" for group in _RAY),
    "RayJob": tuple(f"body.spec.rayClusterSpec.{group}" for group in _RAY),
}
"""Where pod templates are, by kind (`batch/v1` and Volcano both have a Job); * stands for every item or value."""

_NAMED_LATER = {
    "TrainJob": "its pod templates are in its runtime, which serves jobs of any name; use the webhook",
    "TrainingRuntime": "it does not know the names of its jobs; use the webhook",
    "ClusterTrainingRuntime": "it does not know the names of its jobs; use the webhook",
    "CronJob": "its Jobs get their names when they are created; use the webhook",
}


@dataclass(frozen=True, slots=True)
class Changed:
    """An object with its pod templates injected: how many, and warnings."""

    body: dict[str, Any]
    templates: int
    warnings: tuple[str, ...]


def injected(body: Mapping[str, Any], namespace: str, settings: InjectionSettings, server: Version) -> Changed:
    """An object with its pod templates injected as the webhook would inject its pods.

    Raises InputError, which says why, if the job has no name before its pods are created.
    """
    kind = text(body, "kind")
    name = f"{kind} {text(mapping(body, 'metadata'), 'name')}".strip()
    if kind in _NAMED_LATER:
        raise InputError(f"{name}: {_NAMED_LATER[kind]}")
    whole = {"body": _copied(dict(body))}
    warnings: list[str] = []
    count = 0
    for path in _TEMPLATES.get(kind, ()):
        for holder, key in list(_places(whole, path.split("."))):
            job = _job(whole["body"], holder[key], namespace)
            if job is None:
                continue
            change = injection(holder[key], job, settings, server)
            warnings += [f"{name}: {warning}" for warning in change.warnings]
            if change.patch:
                count += 1
                holder[key] = change.pod
    return Changed(whole["body"], count, tuple(dict.fromkeys(warnings)))


def _job(body: Mapping[str, Any], template: Mapping[str, Any], namespace: str) -> JobRef | None:
    metadata = mapping(body, "metadata")
    where = text(metadata, "namespace") or namespace
    if named := labels_of(template).get(jobs.NAME_LABEL):
        return JobRef("pod", named, where)
    name, kind = text(metadata, "name"), text(body, "kind")
    if kind == "Pod" and (found := job_of(template, where)) is not None:
        return found
    about = text(body, "apiVersion").partition("/")[0], kind
    owners = {(version.partition("/")[0], its): system for system, (version, its) in jobs.OWNERS.items()}
    lone = kind == "Pod" and not metadata.get("ownerReferences")
    system: System | None = "pod" if lone else owners.get(about)
    if system is None:
        return None
    if not name:
        raise InputError(
            f"{kind}: it is named only when created; set a name, or the label {jobs.NAME_LABEL} on its pods"
        )
    if system != "leaderworkerset":
        return JobRef(system, name, where)
    # Each of its groups is a job, and they share their templates.
    if mapping(body, "spec").get("replicas", 1) != 1:
        raise InputError(f"{kind} {name}: its replicas are jobs that share one template; use the webhook")
    return JobRef(system, f"{name}-0", where)


def _places(holder: Any, path: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """The holders and keys of what is at a path."""
    first, *rest = path
    keys = list(range(len(holder)) if isinstance(holder, list) else holder if isinstance(holder, dict) else ())
    for key in keys if first == "*" else [first] if first in keys else []:
        if rest:
            yield from _places(holder[key], rest)
        elif isinstance(holder[key], dict):
            yield holder, key


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value
