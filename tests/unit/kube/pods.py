"""Pods of jobs of every kind, as their controllers make them: with the labels and variables that these document.

Each is as it arrives at admission, so without what the server fills in; LeaderWorkerSet's as they are before its own
webhook has seen them.
"""

from collections.abc import Mapping
from typing import Any


def pod(
    labels: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    container: str = "train",
    annotations: Mapping[str, str] | None = None,
    owner: str | None = None,
    **spec: Any,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": {"sftriage.dev/inject": "enabled", **(labels or {})}}
    metadata |= {"generateName": "train-"} if name is None else {"name": name}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if owner is not None:
        about = {"apiVersion": "v1", "kind": owner, "name": "o", "uid": "7d", "controller": True}
        metadata["ownerReferences"] = [about]
    trains: dict[str, Any] = {"name": container, "image": "example.com/train:1", "command": ["torchrun", "train.py"]}
    if env:
        trains["env"] = [{"name": name, "value": value} for name, value in env.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"restartPolicy": "Never", "containers": [trains], **spec},
    }


COMPLETION = "batch.kubernetes.io/job-completion-index"
_SETS, _STEP = "jobset.sigs.k8s.io/", "trainer.kubeflow.org/trainjob-ancestor-step"
JOBSET = {
    f"{_SETS}jobset-name": "resnet",
    f"{_SETS}replicatedjob-name": "workers",
    f"{_SETS}job-index": "0",
    f"{_SETS}replicatedjob-replicas": "1",
    f"{_SETS}job-global-index": "0",
    f"{_SETS}global-replicas": "1",
    "batch.kubernetes.io/job-name": "resnet-workers-0",
    COMPLETION: "1",
}
_KF = "training.kubeflow.org/"
PYTORCH = {
    f"{_KF}job-name": "resnet",
    f"{_KF}operator-name": "pytorchjob-controller",
    f"{_KF}replica-type": "worker",
    f"{_KF}replica-index": "0",
}
MPI = {**PYTORCH, f"{_KF}operator-name": "mpi-operator"}
OF_EIGHT = {"WORLD_SIZE": "24", "RANK": "1", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_NNODES": "3"}
_SET = "leaderworkerset.sigs.k8s.io/"
LWS, LWS_SIZE = {f"{_SET}name": "resnet"}, {f"{_SET}size": "4"}
VOLCANO = {"volcano.sh/job-name": "resnet", "volcano.sh/task-spec": "worker"}
RAY = {"ray.io/cluster": "resnet-raycluster-x8z2k", "ray.io/node-type": "worker", "ray.io/group": "gpus"}
RAY_JOB = {**RAY, "ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "resnet"}
OURS = {"sftriage.dev/job-name": "resnet"}

JOBS: dict[str, tuple[dict[str, Any], str | None]] = {
    "Kubeflow Trainer v2": (
        pod({**JOBSET, _STEP: "trainer"}, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, container="node"),
        "trainjob/resnet",
    ),
    "Kubeflow Trainer v2, a pod that fetches a dataset": (pod({**JOBSET, _STEP: "dataset-initializer"}), None),
    "JobSet": (pod(JOBSET, owner="Job"), "jobset/resnet"),
    "PyTorchJob, its master": (
        pod({**PYTORCH, f"{_KF}replica-type": "master"}, {"WORLD_SIZE": "3", "RANK": "0"}, name="resnet-master-0"),
        "pytorchjob/resnet",
    ),
    "PyTorchJob, a worker of eight ranks": (
        pod(PYTORCH, OF_EIGHT, name="resnet-worker-0", container="pytorch", owner="PyTorchJob"),
        "pytorchjob/resnet",
    ),
    "MPIJob, which starts its ranks over SSH": (pod(MPI, owner="MPIJob"), None),
    "MPIJob, its launcher": (pod({**MPI, "batch.kubernetes.io/job-name": "l"}, owner="Job"), None),
    "Indexed Job": (
        pod({"batch.kubernetes.io/job-name": "resnet", COMPLETION: "3"}, {"PET_NNODES": "4"}, owner="Job"),
        "job/resnet",
    ),
    "Indexed Job, before 1.28": (
        pod({"job-name": "resnet", "controller-uid": "7d"}, annotations={COMPLETION: "3"}, owner="Job"),
        "job/resnet",
    ),
    "LeaderWorkerSet, a leader before its own webhook": (
        pod({**LWS, f"{_SET}worker-index": "0"}, name="resnet-2", annotations=LWS_SIZE, owner="StatefulSet"),
        "leaderworkerset/resnet-2",
    ),
    "LeaderWorkerSet, a worker before its own webhook": (
        pod({**LWS, f"{_SET}group-index": "2"}, name="resnet-2-3", annotations=LWS_SIZE, owner="StatefulSet"),
        "leaderworkerset/resnet-2",
    ),
    "LeaderWorkerSet, a worker after its own webhook": (
        pod({**LWS, f"{_SET}group-index": "0", f"{_SET}worker-index": "1"}, {"LWS_GROUP_SIZE": "2"}, name="resnet-0-1"),
        "leaderworkerset/resnet-0",
    ),
    "Volcano": (pod(VOLCANO, name="resnet-worker-1", schedulerName="volcano"), "volcano/resnet"),
    "KubeRay, a RayCluster": (pod(RAY, owner="RayCluster"), "raycluster/resnet-raycluster-x8z2k"),
    "KubeRay, a RayJob": (pod(RAY_JOB, owner="RayCluster"), "rayjob/resnet"),
    "KubeRay, a pod that cleans up": (
        pod({**RAY, "ray.io/node-type": "redis-cleanup", "batch.kubernetes.io/job-name": "cleanup"}, owner="Job"),
        None,
    ),
    "pods by a label of ours": (pod(OURS), "pod/resnet"),
    "Jobs that a label of ours makes one": (pod({**JOBSET, **OURS}), "pod/resnet"),
    "a pod by itself": (pod(name="notebook"), "pod/notebook"),
    "a pod by itself, whose name is not known yet": (pod(), None),
    "a pod of a Deployment": (pod({"app": "web"}, name="web-x8z2k", owner="ReplicaSet"), None),
}
"""Pods, and the system and name of the job that each is of."""
