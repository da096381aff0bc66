"""The training job of a pod, and the names of its objects. Pure.

A job is known by the labels that its controller gives its pods, and by variables that it sets in their containers; one
of another kind by the label ``sftriage.dev/job-name``, which goes before all others. Any part of a pod may be missing,
null, or of another type, as a client wrote it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sftriage.kube.objects import API_VERSION, GROUP, REPORTS

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

    @classmethod
    def of_id(cls, job_id: str) -> JobRef:
        """The job of an id.

        Raises:
            ValueError: it is not an id.
        """
        namespace, _, rest = job_id.partition("/")
        system, _, name = rest.partition("/")
        if not (namespace and name) or system not in get_args(System):
            raise ValueError(f"{job_id}: not NAMESPACE/SYSTEM/NAME")
        return cls(system, name, namespace)  # type: ignore[arg-type]  # (checked above)

    @property
    def job_id(self) -> str:
        """Its name on its hub."""
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

    def metadata(self, **about: Any) -> dict[str, Any]:
        annotations = {JOB_ID_ANNOTATION: self.job_id, **about.pop("annotations", {})}
        labels = {JOB_LABEL: self.object_name, **about.pop("labels", {})}
        found = {"name": self.object_name, "namespace": self.namespace, "labels": labels, "annotations": annotations}
        return {**found, **about}

    def report(self, owners: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
        about = self.metadata(**({"ownerReferences": list(owners)} if owners else {}))
        return {"apiVersion": API_VERSION, "kind": REPORTS.kind, "metadata": about, "spec": {"job": self.name}}


@dataclass(frozen=True, slots=True)
class JobPod:
    """A pod of a job: which of its nodes it is, counted from 0, and how many there are; None where that is unknown."""

    job: JobRef
    node_index: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True)
class _Described:
    """Names to values of a pod's labels, annotations and variables."""

    label: Mapping[str, str]
    annotation: Mapping[str, str]
    variable: Mapping[str, str]
    pod_name: str

    def number(self, *names: str) -> int | None:
        for name in names:
            for described in (self.label, self.annotation, self.variable):
                if described.get(name, "").isdecimal():
                    return int(described[name])
        return None

    @property
    def ordinal(self) -> int | None:
        last = self.pod_name.rpartition("-")[2]
        return int(last) if last.isdecimal() else None


_COMPLETION = "batch.kubernetes.io/job-completion-index"
_STEP, _PYTORCHJOB = "trainer.kubeflow.org/trainjob-ancestor-step", "pytorchjob-controller"
_JOBSET, _KUBEFLOW, _LWS = "jobset.sigs.k8s.io/", "training.kubeflow.org/", "leaderworkerset.sigs.k8s.io/"
_VOLCANO, _RAY = "volcano.sh/job-name", "ray.io/cluster"


def job_of(pod: Pod, namespace: str = "") -> JobPod | None:
    """The job of a pod, or None; ``namespace`` is where the pod will be, should its own metadata not say so.

    At admission a pod has the labels of its template and those of its controller, and not always a name.
    """
    metadata = mapping(pod, "metadata")
    described = _Described(labels_of(pod), annotations_of(pod), environment_of(pod), text(metadata, "name"))
    where = text(metadata, "namespace") or namespace or "default"
    for system, name, index, nodes in _candidates(described):
        if name:
            return JobPod(JobRef(system, name, where), index, nodes)
    # A pod that nothing has made is a job by itself; only with a label of its own, or all pods of a namespace would be.
    if described.label.get(INJECT_LABEL) == ENABLED and described.pod_name and not metadata.get("ownerReferences"):
        return JobPod(JobRef("pod", described.pod_name, where), 0, 1)
    return None


def _candidates(pod: _Described) -> Iterator[tuple[System, str | None, int | None, int | None]]:
    """What each system says of a pod: the job's name (None: not its pod), the node and the number of nodes."""
    label, number = pod.label.get, pod.number
    index = number(INDEX_LABEL, "apps.kubernetes.io/pod-index", _COMPLETION)
    yield "pod", label(NAME_LABEL), index, number(NODES_LABEL, "PET_NNODES")
    if _trains_nothing(pod):
        return
    if _STEP in pod.label:
        yield "trainjob", label(_JOBSET + "jobset-name"), number("PET_NODE_RANK", _COMPLETION), number("PET_NNODES")
    nodes = number("PET_NNODES", "NNODES")
    yield "jobset", label(_JOBSET + "jobset-name"), _jobset_index(pod, nodes), nodes
    # (RANK is that of the node, until torchrun sets it anew)
    index = number("PET_NODE_RANK", "RANK", _KUBEFLOW + "replica-index")
    yield "pytorchjob", label(_KUBEFLOW + "job-name"), index, _pytorchjob_nodes(pod)
    yield "leaderworkerset", *_group(pod), number(_LWS + "size", "LWS_GROUP_SIZE")
    index = number("RANK", "volcano.sh/task-index", "VC_TASK_INDEX", "VK_TASK_INDEX")
    yield "volcano", label(_VOLCANO) or pod.annotation.get(_VOLCANO), index, number("WORLD_SIZE")
    if label(_RAY) and label("ray.io/originated-from-crd") == "RayJob":
        yield "rayjob", label("ray.io/originated-from-cr-name"), None, None
    yield "raycluster", label(_RAY), None, None
    # (the pods of a JobSet are those of Jobs too)
    yield "job", label("batch.kubernetes.io/job-name") or label("job-name"), number(_COMPLETION), nodes


def _trains_nothing(pod: _Described) -> bool:
    operator = pod.label.get(_KUBEFLOW + "operator-name", _PYTORCHJOB)
    ray = pod.label.get("ray.io/node-type", "worker") if _RAY in pod.label else "worker"
    return pod.label.get(_STEP, "trainer") != "trainer" or operator != _PYTORCHJOB or ray not in ("head", "worker")


def _jobset_index(pod: _Described, nodes: int | None) -> int | None:
    jobs, job = pod.number(_JOBSET + "replicatedjob-replicas"), pod.number(_JOBSET + "job-index")
    index, within = pod.number("PET_NODE_RANK", "NODE_RANK"), pod.number(_COMPLETION)
    if index is None and jobs == 1:
        return within
    if index is None and jobs and job is not None and nodes is not None and nodes % jobs == 0:
        return job * (nodes // jobs) + (within or 0)
    return index


def _pytorchjob_nodes(pod: _Described) -> int | None:
    nodes, ranks = pod.number("PET_NNODES"), pod.number("WORLD_SIZE")
    if nodes is None and ranks is not None:
        return ranks // max(1, pod.number("PET_NPROC_PER_NODE") or 1)
    return nodes


def _group(pod: _Described) -> tuple[str | None, int | None]:
    """The group of a LeaderWorkerSet, and which of its nodes this is: each group has its own leader, and is a job."""
    name = pod.label.get(_LWS + "name")
    index, group = pod.number(_LWS + "worker-index"), pod.number(_LWS + "group-index")
    # Its own webhook finds both in the pod's name, SET-GROUP of a leader and SET-GROUP-WORKER, and may come after ours.
    if group is None and index == 0:
        group = pod.ordinal
    elif group is not None and index is None:
        index = pod.ordinal
    return f"{name}-{group}" if name and group is not None else None, index
