"""The training job of a pod, and the names of its objects. Pure.

A job is known by the labels that its controller gives its pods; one of another kind by the label
``sftriage.dev/job-name``, which goes before all others. Any part of a pod may be missing, null, or of another type, as
a client wrote it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
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
        yield from (item for item in found if isinstance(item, Mapping))


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


def _texts(found: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, str)}


INJECT_LABEL, ENABLED = f"{GROUP}/inject", "enabled"
"""The label that opts a pod or a namespace in, and its value."""
NAME_LABEL = f"{GROUP}/job-name"
"""The label by which a person names the job of a pod."""
JOB_LABEL = f"{GROUP}/job"
"""On every injected pod, report and capture of a job: its `JobRef.object_name`."""
JOB_ID_ANNOTATION, STATUS_ANNOTATION, INJECTED = f"{GROUP}/job-id", f"{GROUP}/status", "injected"
COMPONENT_LABEL, CONTROLLER = "app.kubernetes.io/component", "controller"
"""The label of the pods of controllers, and of no pod of a job itself."""
OUR_COMPONENT_LABEL = f"{GROUP}/component"
"""On all objects of a namespace's controllers."""


def is_injected(pod: Pod) -> bool:
    """Whether a pod contains sftriage."""
    return annotations_of(pod).get(STATUS_ANNOTATION) == INJECTED


HUB_KEY = "hub"
"""In the Secret of a namespace: the credentials of its hub, ``sftriage:PASSWORD``."""
HUB_NAME = "sftriage-hub"
"""The Service of a namespace's hub, and its Secret."""
HUB_ANNOTATION = f"{GROUP}/hub"
"""On an injected pod whose agent looks for the namespace's hub: `HUB_NAME`. Earlier versions had a hub for each job."""

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

_MAX_NAME = 63 - len("sftriage--") - 8


@dataclass(frozen=True, slots=True)
class JobRef:
    """A training job in a cluster. Its names follow from it alone."""

    system: System
    name: str
    namespace: str

    @classmethod
    def of_id(cls, job_id: str) -> JobRef:
        """The job of an id; raises ValueError if it is not one."""
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
        """The name of its report, and of its runs' directory. A DNS label."""
        digest = hashlib.sha256(self.job_id.encode()).hexdigest()[:8]
        kept = re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:_MAX_NAME].strip("-")
        return "-".join(part for part in ("sftriage", kept, digest) if part)

    @property
    def owner(self) -> tuple[str, str, str] | None:
        """API version, kind and name of the object that it is; None for a job of plain pods."""
        found = OWNERS.get(self.system)
        # (a group of a LeaderWorkerSet is a job, and not the set)
        name = self.name.rpartition("-")[0] if self.system == "leaderworkerset" else self.name
        return None if found is None else (*found, name)

    @property
    def fetch_command(self) -> str:
        """The command that fetches the job's most informative trace to a laptop."""
        return f"kubectl sftriage get --job {shlex.quote(self.name)} -n {self.namespace}"

    def metadata(self, **about: Any) -> dict[str, Any]:
        annotations = {JOB_ID_ANNOTATION: self.job_id, **about.pop("annotations", {})}
        labels = {JOB_LABEL: self.object_name, **about.pop("labels", {})}
        found = {"name": self.object_name, "namespace": self.namespace, "labels": labels, "annotations": annotations}
        return {**found, **about}

    def report(self, owners: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
        about = self.metadata(**({"ownerReferences": list(owners)} if owners else {}))
        return {"apiVersion": API_VERSION, "kind": REPORTS.kind, "metadata": about, "spec": {"job": self.name}}


_STEP, _PYTORCHJOB = "trainer.kubeflow.org/trainjob-ancestor-step", "pytorchjob-controller"
_KUBEFLOW, _LWS = "training.kubeflow.org/", "leaderworkerset.sigs.k8s.io/"
_JOBSET, _VOLCANO, _RAY = "jobset.sigs.k8s.io/jobset-name", "volcano.sh/job-name", "ray.io/cluster"
_STEPS = {name: name for name in ("dataset-initializer", "model-initializer")} | {"node": "trainer"}
"""The steps of a TrainJob by the names that Kubeflow Trainer requires of their containers."""
_SSH_VOLUME, _RAY_SUBMISSION = "mpi-ssh-auth", "RAY_JOB_SUBMISSION_ID"


def job_of(pod: Pod, namespace: str = "") -> JobRef | None:
    """The job of a pod, or None; ``namespace`` is where the pod will be, should its own metadata not say so.

    At admission a pod has the labels of its template and those of its controller, and not always a name.
    """
    metadata, labels = mapping(pod, "metadata"), labels_of(pod)
    pod_name, where = text(metadata, "name"), text(metadata, "namespace") or namespace or "default"
    for system, name in _candidates(pod, labels, pod_name):
        if name:
            return JobRef(system, name, where)
    # A pod that nothing has made is a job by itself; only with a label of its own, or all pods of a namespace would be.
    if labels.get(INJECT_LABEL) == ENABLED and pod_name and not metadata.get("ownerReferences"):
        return JobRef("pod", pod_name, where)
    return None


def _candidates(pod: Pod, labels: Mapping[str, str], pod_name: str) -> Iterator[tuple[System, str | None]]:
    """The name of the pod's job in each system (None: not its pod)."""
    label, annotations, step = labels.get, annotations_of(pod), _step(pod, labels)
    yield "pod", label(NAME_LABEL)
    if step not in ("", "trainer") or _trains_nothing(pod, labels):
        return
    yield "trainjob" if step else "jobset", label(_JOBSET)
    yield "pytorchjob", label(_KUBEFLOW + "job-name")
    yield "leaderworkerset", _group({**annotations, **labels}, pod_name)
    yield "volcano", label(_VOLCANO) or annotations.get(_VOLCANO)
    if label(_RAY) and label("ray.io/originated-from-crd") == "RayJob":
        yield "rayjob", label("ray.io/originated-from-cr-name")
    yield "raycluster", label(_RAY)
    # (the pods of a JobSet are those of Jobs too)
    yield "job", label("batch.kubernetes.io/job-name") or label("job-name")


def _step(pod: Pod, labels: Mapping[str, str]) -> str:
    """The step of a TrainJob that a pod does, or "". Trainer labels the Jobs of its JobSet with it, not their pods."""
    if _STEP in labels or _JOBSET not in labels:
        return labels.get(_STEP, "")
    containers = items(mapping(pod, "spec"), "containers")
    return next((_STEPS[name] for each in containers if (name := text(each, "name")) in _STEPS), "")


def _trains_nothing(pod: Pod, labels: Mapping[str, str]) -> bool:
    operator, spec = labels.get(_KUBEFLOW + "operator-name", _PYTORCHJOB), mapping(pod, "spec")
    # (MPI starts ranks over SSH, which does not carry the environment)
    if operator != _PYTORCHJOB or any(text(volume, "name") == _SSH_VOLUME for volume in items(spec, "volumes")):
        return True
    if _RAY in labels:
        return labels.get("ray.io/node-type", "worker") not in ("head", "worker")
    variables = (each for container in items(spec, "containers") for each in items(container, "env"))
    return any(text(each, "name") == _RAY_SUBMISSION for each in variables)


def _group(about: Mapping[str, str], pod_name: str) -> str | None:
    """The group of a LeaderWorkerSet: each has its own leader, and is a job."""
    name, group = about.get(_LWS + "name"), about.get(_LWS + "group-index", "")
    if not group and about.get(_LWS + "worker-index") == "0":
        # Its own webhook finds it in a leader's name, SET-GROUP, and may come after ours.
        group = pod_name.rpartition("-")[2]
    return f"{name}-{group}" if name and group.isdecimal() else None
