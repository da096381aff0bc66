"""The pod templates of a job as its owner writes it, and which job its pods will be of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftriage.errors import InputError
from sftriage.kube.injecting import Injection, Version, applied, injection
from sftriage.kube.jobs import NAME_LABEL, OWNERS, JobRef, System, job_of
from sftriage.kube.pods import labels_of, mapping, text
from sftriage.kube.settings import InjectionSettings

Path = tuple[str, ...]
EACH = "*"
"""Every item of a list, and every value of a mapping."""

_TEMPLATES: Mapping[str, tuple[Path, ...]] = {
    "Pod": ((),),
    "Job": (("spec", "template"), ("spec", "tasks", EACH, "template")),
    "StatefulSet": (("spec", "template"),),
    "Deployment": (("spec", "template"),),
    "ReplicaSet": (("spec", "template"),),
    "DaemonSet": (("spec", "template"),),
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
    """An object with its pod templates injected: how many, and what there is to say of them."""

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
    found = _copied(dict(body))
    warnings: list[str] = []
    count = 0
    for path in _TEMPLATES.get(kind, ()):
        for holder, key in list(_places(found, path)):
            template = found if holder is None else holder[key]
            job = _job(found, template, namespace)
            if job is None:
                continue
            one: Injection = injection(template, job, settings, server)
            warnings += [f"{what}: {warning}" for warning in one.warnings]
            count += bool(one.patch)
            changed = applied(template, one.patch)
            if holder is None:
                found = changed
            else:
                holder[key] = changed
    return Changed(found, count, tuple(dict.fromkeys(warnings)))


def _job(body: Mapping[str, Any], template: Mapping[str, Any], namespace: str) -> JobRef | None:
    """Which job the pods of a template will be of; None where they are of none."""
    metadata = mapping(body, "metadata")
    where = text(metadata, "namespace") or namespace
    if named := labels_of(template).get(NAME_LABEL):
        return JobRef("pod", named, where)
    name, kind = text(metadata, "name"), text(body, "kind")
    if kind == "Pod" and (found := job_of(template, where)) is not None:
        return found.job
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
    """Where the things at a path are held, and under which key; None for the object itself."""
    if not path:
        yield None, None
        return
    first, *rest = path
    keys: list[Any] = []
    if first == EACH:
        keys = (
            list(range(len(holder))) if isinstance(holder, list) else list(holder) if isinstance(holder, dict) else []
        )
    elif isinstance(holder, dict) and first in holder:
        keys = [first]
    for key in keys:
        if rest:
            yield from _places(holder[key], rest)
        elif isinstance(holder[key], dict):
            yield holder, key


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
