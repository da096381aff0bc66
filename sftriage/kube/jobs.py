"""The training job of a pod, and the names of its objects. Pure.

A job is known by the labels that its controller gives its pods, and by variables that it sets in their containers; one
of another kind by the label ``sftriage.dev/job-name``, which goes before all others. Any part of a pod may be missing,
null, or of another type, as a client wrote it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sftriage.kube.objects import GROUP

Pod = Mapping[str, Any]
"""A pod, or a pod template: ``metadata`` and ``spec``."""


def mapping(holder: Any, *path: str) -> Mapping[str, Any]:
    """The mapping at a path; an empty one where there is none."""
    for name in path:
        holder = holder.get(name) if isinstance(holder, Mapping) else None
    return holder if isinstance(holder, Mapping) else {}


def items(holder: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """The mappings in a list of that name."""
    found = holder.get(name) if isinstance(holder, Mapping) else None
    if isinstance(found, Sequence) and not isinstance(found, str):
        yield from (one for one in found if isinstance(one, Mapping))


def text(holder: Any, name: str) -> str:
    """The text of that name; "" where there is none."""
    found = holder.get(name) if isinstance(holder, Mapping) else None
    return found if isinstance(found, str) else ""


def labels_of(pod: Pod) -> Mapping[str, str]:
    """The labels of a pod."""
    return _texts(mapping(pod, "metadata", "labels"))


def annotations_of(pod: Pod) -> Mapping[str, str]:
    """The annotations of a pod."""
    return _texts(mapping(pod, "metadata", "annotations"))


def environment_of(pod: Pod) -> Mapping[str, str]:
    """The variables whose values its containers' lists name; of one that several name, the first container's."""
    found: dict[str, str] = {}
    for container in items(mapping(pod, "spec"), "containers"):
        for variable in items(container, "env"):
            name, value = variable.get("name"), variable.get("value")
            if isinstance(name, str) and isinstance(value, str):
                found.setdefault(name, value)
    return found


def _texts(found: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, str)}


INJECT_LABEL, ENABLED = f"{GROUP}/inject", "enabled"
"""The label of a pod or a namespace that asks for sftriage, and its value."""
NAME_LABEL, INDEX_LABEL, NODES_LABEL = f"{GROUP}/job-name", f"{GROUP}/node-index", f"{GROUP}/nodes"
"""The labels by which a person says of which job a pod is, which of its nodes (from 0), and how many there are."""
JOB_LABEL = f"{GROUP}/job"
"""On every injected pod and every object of a job: its `JobRef.object_name`."""
JOB_ID_ANNOTATION, STATUS_ANNOTATION, INJECTED = f"{GROUP}/job-id", f"{GROUP}/status", "injected"

HUB_KEY = "hub"
"""In the Secret of a job: the credentials of its hub, ``sftriage:PASSWORD``."""

System = Literal["trainjob", "jobset", "pytorchjob", "leaderworkerset", "volcano", "rayjob", "raycluster", "job", "pod"]

OWNERS: Mapping[System, tuple[str, str]] = {
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob"),
    "leaderworkerset": ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    "volcano": ("batch.volcano.sh/v1alpha1", "Job"),
    "rayjob": ("ray.io/v1", "RayJob"),
    "raycluster": ("ray.io/v1", "RayCluster"),
    "job": ("batch/v1", "Job"),
}
"""The API version and kind of the object that a job is; a job of plain pods is none."""

_NAME_ROOM = 63 - len("sftriage--") - 8


@dataclass(frozen=True, slots=True)
class JobRef:
    """A training job in a cluster. Its names follow from it alone."""

    system: System
    name: str
    namespace: str

    @property
    def job_id(self) -> str:
        """What it is called on its hub."""
        return f"{self.namespace}/{self.system}/{self.name}"

    @property
    def object_name(self) -> str:
        """The name of each of its objects in its namespace: controller, service, secret, policies. A DNS label."""
        digest = hashlib.sha256(self.job_id.encode()).hexdigest()[:8]
        kept = re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:_NAME_ROOM].strip("-")
        return "-".join(part for part in ("sftriage", kept, digest) if part)

    @property
    def owner(self) -> tuple[str, str, str] | None:
        """API version, kind and name of the object that it is; None for a job of plain pods."""
        found = OWNERS.get(self.system)
        # (a group of a LeaderWorkerSet is a job, and not the set)
        name = self.name.rpartition("-")[0] if self.system == "leaderworkerset" else self.name
        return None if found is None else (*found, name)


@dataclass(frozen=True, slots=True)
class JobPod:
    """A pod of a job: which of its nodes it is, counted from 0, and how many there are; None where nothing tells."""

    job: JobRef
    node_index: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True)
class _Told:
    """What a pod tells: names to values, of labels and of variables."""

    label: Mapping[str, str]
    annotation: Mapping[str, str]
    variable: Mapping[str, str]
    pod_name: str

    def number(self, *names: str) -> int | None:
        for name in names:
            for told in (self.label, self.annotation, self.variable):
                if told.get(name, "").isdecimal():
                    return int(told[name])
        return None

    @property
    def ordinal(self) -> int | None:
        last = self.pod_name.rpartition("-")[2]
        return int(last) if last.isdecimal() else None


_Found = tuple[System, str, int | None, int | None] | None
_COMPLETION = "batch.kubernetes.io/job-completion-index"


def job_of(pod: Pod, namespace: str = "") -> JobPod | None:
    """The job that a pod is of, or None; ``namespace`` is where it will be, should its own metadata not say so.

    At admission a pod has the labels of its template and those of its controller, and not always a name.
    """
    metadata = mapping(pod, "metadata")
    told = _Told(labels_of(pod), annotations_of(pod), environment_of(pod), text(metadata, "name"))
    where = text(metadata, "namespace") or namespace or "default"
    for recognised in (_named,) if _trains_nothing(told) else _SYSTEMS:
        found = recognised(told)
        if found is not None:
            system, name, index, nodes = found
            return JobPod(JobRef(system, name, where), index, nodes)
    # A pod that nothing has made is a job by itself; one that says so, so that not all pods of a namespace are.
    if told.label.get(INJECT_LABEL) == ENABLED and told.pod_name and not metadata.get("ownerReferences"):
        return JobPod(JobRef("pod", told.pod_name, where), 0, 1)
    return None


def _trains_nothing(told: _Told) -> bool:
    """Whether labels say that a pod of a training job does not train."""
    step = told.label.get("trainer.kubeflow.org/trainjob-ancestor-step", "trainer")
    operator = told.label.get(_KUBEFLOW + "operator-name", _PYTORCHJOB)
    ray = told.label.get("ray.io/node-type", "worker") if "ray.io/cluster" in told.label else "worker"
    return step != "trainer" or operator != _PYTORCHJOB or ray not in ("head", "worker")


def _named(told: _Told) -> _Found:
    name = told.label.get(NAME_LABEL)
    index = told.number(INDEX_LABEL, "apps.kubernetes.io/pod-index", _COMPLETION)
    return ("pod", name, index, told.number(NODES_LABEL, "PET_NNODES")) if name else None


def _trainjob(told: _Told) -> _Found:
    name = told.label.get(_JOBSET + "jobset-name")
    if not name or "trainer.kubeflow.org/trainjob-ancestor-step" not in told.label:
        return None
    return "trainjob", name, told.number("PET_NODE_RANK", _COMPLETION), told.number("PET_NNODES")


def _jobset(told: _Told) -> _Found:
    name = told.label.get(_JOBSET + "jobset-name")
    if not name:
        return None
    nodes = told.number("PET_NNODES", "NNODES")
    jobs, job = told.number(_JOBSET + "replicatedjob-replicas"), told.number(_JOBSET + "job-index")
    within = told.number(_COMPLETION)
    index = told.number("PET_NODE_RANK", "NODE_RANK")
    if index is None and jobs == 1:
        index = within
    elif index is None and jobs and job is not None and nodes is not None and nodes % jobs == 0:
        index = job * (nodes // jobs) + (within or 0)
    return "jobset", name, index, nodes


def _pytorchjob(told: _Told) -> _Found:
    name = told.label.get(_KUBEFLOW + "job-name")
    if not name:
        return None
    nodes, ranks = told.number("PET_NNODES"), told.number("WORLD_SIZE")
    if nodes is None and ranks is not None:
        nodes = ranks // max(1, told.number("PET_NPROC_PER_NODE") or 1)
    # (RANK is that of the node, until torchrun sets it anew)
    index = told.number("PET_NODE_RANK", "RANK", _KUBEFLOW + "replica-index")
    return "pytorchjob", name, index, nodes


def _leaderworkerset(told: _Told) -> _Found:
    name = told.label.get(_LWS + "name")
    if not name:
        return None
    index, group = told.number(_LWS + "worker-index"), told.number(_LWS + "group-index")
    # Its own webhook tells both by the pod's name, SET-GROUP of a leader and SET-GROUP-WORKER, and may come after ours.
    if group is None and index == 0:
        group = told.ordinal
    elif group is not None and index is None:
        index = told.ordinal
    nodes = told.number(_LWS + "size", "LWS_GROUP_SIZE")
    # Each group is a job: it has its own leader, and its ranks know of no others.
    return None if group is None else ("leaderworkerset", f"{name}-{group}", index, nodes)


def _volcano(told: _Told) -> _Found:
    name = told.label.get("volcano.sh/job-name") or told.annotation.get("volcano.sh/job-name")
    index = told.number("RANK", "volcano.sh/task-index", "VC_TASK_INDEX", "VK_TASK_INDEX")
    return ("volcano", name, index, told.number("WORLD_SIZE")) if name else None


def _ray(told: _Told) -> _Found:
    cluster = told.label.get("ray.io/cluster")
    if not cluster:
        return None
    name = told.label.get("ray.io/originated-from-cr-name")
    of_job = told.label.get("ray.io/originated-from-crd") == "RayJob"
    return ("rayjob", name, None, None) if name and of_job else ("raycluster", cluster, None, None)


def _job(told: _Told) -> _Found:
    name = told.label.get("batch.kubernetes.io/job-name") or told.label.get("job-name")
    return ("job", name, told.number(_COMPLETION), told.number("PET_NNODES", "NNODES")) if name else None


_PYTORCHJOB = "pytorchjob-controller"
_JOBSET, _KUBEFLOW, _LWS = "jobset.sigs.k8s.io/", "training.kubeflow.org/", "leaderworkerset.sigs.k8s.io/"
_SYSTEMS: tuple[Callable[[_Told], _Found], ...] = (
    _named,
    _trainjob,
    _jobset,
    _pytorchjob,
    _leaderworkerset,
    _volcano,
    _ray,
    # (the pods of a JobSet are those of Jobs too)
    _job,
)
