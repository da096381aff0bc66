"""Pods of jobs of every kind, as their controllers make them: with the labels and variables that these document.

Each is as it arrives at admission, so without what the server fills in; LeaderWorkerSet's as they are before its own
webhook has seen them.
"""

from __future__ import annotations

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
    """A pod with one container that trains."""
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


JOBSET = {
    "jobset.sigs.k8s.io/jobset-name": "resnet",
    "jobset.sigs.k8s.io/replicatedjob-name": "workers",
    "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
    "jobset.sigs.k8s.io/job-index": "0",
    "jobset.sigs.k8s.io/job-global-index": "0",
    "jobset.sigs.k8s.io/global-replicas": "1",
    "batch.kubernetes.io/job-name": "resnet-workers-0",
    "batch.kubernetes.io/job-completion-index": "1",
}
TRAINER_ENV = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "resnet-node-0-0.resnet"}
PYTORCH = {
    "training.kubeflow.org/job-name": "resnet",
    "training.kubeflow.org/operator-name": "pytorchjob-controller",
    "training.kubeflow.org/replica-type": "worker",
    "training.kubeflow.org/replica-index": "0",
}
LWS = {"leaderworkerset.sigs.k8s.io/name": "resnet"}
LWS_SIZE = {"leaderworkerset.sigs.k8s.io/size": "4"}
RAY = {
    "ray.io/is-ray-node": "yes",
    "ray.io/cluster": "resnet-raycluster-x8z2k",
    "ray.io/node-type": "worker",
    "ray.io/group": "gpus",
}

JOBS: dict[str, tuple[dict[str, Any], tuple[str, str, int | None, int | None] | None]] = {
    "Kubeflow Trainer v2": (
        pod(
            {
                **JOBSET,
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
                "trainer.kubeflow.org/trainjob-ancestor-step": "trainer",
            },
            TRAINER_ENV,
            container="node",
            owner="Job",
        ),
        ("trainjob", "resnet", 1, 2),
    ),
    "Kubeflow Trainer v2, a pod that fetches a dataset": (
        pod({**JOBSET, "trainer.kubeflow.org/trainjob-ancestor-step": "dataset-initializer"}, owner="Job"),
        None,
    ),
    "JobSet, one job of two": (pod(JOBSET, owner="Job"), ("jobset", "resnet", 1, None)),
    "JobSet, two jobs of one": (
        pod(
            {
                **JOBSET,
                "jobset.sigs.k8s.io/replicatedjob-replicas": "2",
                "jobset.sigs.k8s.io/job-index": "1",
                "batch.kubernetes.io/job-completion-index": "0",
            },
            {"NNODES": "2"},
        ),
        ("jobset", "resnet", 1, 2),
    ),
    "JobSet, two jobs of two": (
        pod(
            {
                **JOBSET,
                "jobset.sigs.k8s.io/replicatedjob-replicas": "2",
                "jobset.sigs.k8s.io/job-index": "1",
            },
            {"PET_NNODES": "4"},
        ),
        ("jobset", "resnet", 3, 4),
    ),
    "JobSet, two jobs of nobody knows how many": (
        pod({**JOBSET, "jobset.sigs.k8s.io/replicatedjob-replicas": "2"}),
        ("jobset", "resnet", None, None),
    ),
    "PyTorchJob, its master": (
        pod(
            {**PYTORCH, "training.kubeflow.org/replica-type": "master", "training.kubeflow.org/job-role": "master"},
            {"MASTER_ADDR": "localhost", "WORLD_SIZE": "3", "RANK": "0"},
            name="resnet-master-0",
            container="pytorch",
            owner="PyTorchJob",
        ),
        ("pytorchjob", "resnet", 0, 3),
    ),
    "PyTorchJob, a worker of eight ranks": (
        pod(
            PYTORCH,
            {
                "WORLD_SIZE": "24",
                "RANK": "1",
                "PET_NPROC_PER_NODE": "8",
                "PET_NODE_RANK": "1",
                "PET_NNODES": "3",
            },
            name="resnet-worker-0",
            container="pytorch",
            owner="PyTorchJob",
        ),
        ("pytorchjob", "resnet", 1, 3),
    ),
    "PyTorchJob, elastic": (
        pod(PYTORCH, {"PET_NNODES": "1:4", "PET_RDZV_ID": "resnet"}, name="resnet-worker-0", owner="PyTorchJob"),
        ("pytorchjob", "resnet", 0, None),
    ),
    "MPIJob, which starts its ranks over SSH": (
        pod({**PYTORCH, "training.kubeflow.org/operator-name": "mpi-operator"}, owner="MPIJob"),
        None,
    ),
    "MPIJob, its launcher": (
        pod(
            {**PYTORCH, "training.kubeflow.org/operator-name": "mpi-operator", "batch.kubernetes.io/job-name": "l"},
            owner="Job",
        ),
        None,
    ),
    "Indexed Job": (
        pod(
            {"batch.kubernetes.io/job-name": "resnet", "batch.kubernetes.io/job-completion-index": "3"},
            {"PET_NNODES": "4"},
            owner="Job",
        ),
        ("job", "resnet", 3, 4),
    ),
    "Indexed Job, before 1.28": (
        pod(
            {"job-name": "resnet", "controller-uid": "7d"},
            annotations={"batch.kubernetes.io/job-completion-index": "3"},
            owner="Job",
        ),
        ("job", "resnet", 3, None),
    ),
    "Job of one pod": (
        pod({"batch.kubernetes.io/job-name": "resnet"}, owner="Job"),
        ("job", "resnet", None, None),
    ),
    "LeaderWorkerSet, a leader before its own webhook": (
        pod(
            {**LWS, "leaderworkerset.sigs.k8s.io/worker-index": "0"},
            name="resnet-2",
            annotations=LWS_SIZE,
            owner="StatefulSet",
        ),
        ("leaderworkerset", "resnet-2", 0, 4),
    ),
    "LeaderWorkerSet, a worker before its own webhook": (
        pod(
            {**LWS, "leaderworkerset.sigs.k8s.io/group-index": "2"},
            name="resnet-2-3",
            annotations=LWS_SIZE,
            owner="StatefulSet",
        ),
        ("leaderworkerset", "resnet-2", 3, 4),
    ),
    "LeaderWorkerSet, a worker after its own webhook": (
        pod(
            {**LWS, "leaderworkerset.sigs.k8s.io/group-index": "0", "leaderworkerset.sigs.k8s.io/worker-index": "1"},
            {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"},
            name="resnet-0-1",
            owner="StatefulSet",
        ),
        ("leaderworkerset", "resnet-0", 1, 2),
    ),
    "Volcano": (
        pod(
            {"volcano.sh/job-name": "resnet", "volcano.sh/task-spec": "worker", "volcano.sh/queue-name": "default"},
            {"VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1"},
            name="resnet-worker-1",
            schedulerName="volcano",
            owner="Job",
        ),
        ("volcano", "resnet", 1, None),
    ),
    "Volcano with its plugin for PyTorch": (
        pod(
            {"volcano.sh/job-name": "resnet", "volcano.sh/task-spec": "worker", "volcano.sh/task-index": "0"},
            {"MASTER_ADDR": "resnet-master-0.resnet", "WORLD_SIZE": "3", "RANK": "1", "VC_TASK_INDEX": "0"},
            name="resnet-worker-0",
            owner="Job",
        ),
        ("volcano", "resnet", 1, 3),
    ),
    "KubeRay, a RayCluster": (
        pod(RAY, container="ray-worker", owner="RayCluster"),
        ("raycluster", "resnet-raycluster-x8z2k", None, None),
    ),
    "KubeRay, a RayJob": (
        pod(
            {**RAY, "ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "resnet"},
            container="ray-worker",
            owner="RayCluster",
        ),
        ("rayjob", "resnet", None, None),
    ),
    "KubeRay, a pod that cleans up": (
        pod({**RAY, "ray.io/node-type": "redis-cleanup", "batch.kubernetes.io/job-name": "cleanup"}, owner="Job"),
        None,
    ),
    "pods by labels of ours": (
        pod({"sftriage.dev/job-name": "resnet", "sftriage.dev/node-index": "1", "sftriage.dev/nodes": "2"}),
        ("pod", "resnet", 1, 2),
    ),
    "a StatefulSet by a label of ours": (
        pod({"sftriage.dev/job-name": "resnet", "apps.kubernetes.io/pod-index": "3"}, owner="StatefulSet"),
        ("pod", "resnet", 3, None),
    ),
    "Jobs that a label of ours makes one": (
        pod({**JOBSET, "sftriage.dev/job-name": "all"}),
        ("pod", "all", 1, None),
    ),
    "a pod by itself": (pod(name="notebook"), ("pod", "notebook", 0, 1)),
    "a pod by itself, whose name nobody knows yet": (pod(), None),
    "a pod of a Deployment": (pod({"app": "web"}, name="web-x8z2k", owner="ReplicaSet"), None),
}
"""Pods, and what job each is of: system, name, node and number of nodes."""
