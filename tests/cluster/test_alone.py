"""Injected pods without operator, controller or hub: they train and end as without sftriage."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sftriage.kube.injecting import InjectionSettings, injection
from sftriage.kube.jobs import HUB_KEY, job_of
from tests.cluster.node import IMAGE, TRAINER, Node
from tests.integration.processes import wait_until
from tests.unit.kube.pods import pod

NAMESPACE, GRACE_S, KILLED = "sftriage-alone", 20, 128 + signal.SIGKILL
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "/train/train.py"]


@pytest.fixture(scope="module")
def namespace(cluster) -> Iterator[str]:
    labels = {"as-newer": "yes"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    cluster.kubectl("apply", "-f", "-", text=json.dumps(body))
    cluster.kubectl("create", "configmap", "train", "-n", NAMESPACE, f"--from-literal=train.py={TRAIN}")
    yield NAMESPACE
    cluster.kubectl("delete", "namespace", NAMESPACE)


def injected(name: str, command: list[str], annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """A pod as the webhook leaves it."""
    body = pod(name=name, annotations=annotations or {}, securityContext={"runAsUser": 12345})
    body["metadata"]["namespace"] = NAMESPACE
    body["spec"] |= {"terminationGracePeriodSeconds": GRACE_S}
    body["spec"]["volumes"] = [{"name": "train", "configMap": {"name": "train"}}]
    (container,) = body["spec"]["containers"]
    mounts = [{"name": "train", "mountPath": "/train"}]
    container |= {"image": TRAINER, "command": command, "volumeMounts": mounts}
    found = job_of(body)
    assert found is not None
    made: dict[str, Any] = injection(body, found, InjectionSettings(image=IMAGE), (1, 31)).pod
    return made


def start(cluster: Node, body: dict[str, Any]) -> None:
    # (the server's 1.20 does not know the sidecar's restart policy)
    cluster.kubectl("create", "--validate=false", "-f", "-", text=json.dumps(body))


def ended(cluster: Node, name: str) -> dict[str, int]:
    """The exit codes of a pod's containers, once all have ended."""

    def codes() -> dict[str, int] | None:
        pod = cluster.get("pod", name, namespace=NAMESPACE)
        states = {each["name"]: each["state"] for each in pod["status"].get("containerStatuses", [])}
        over = states and all("terminated" in each for each in states.values())
        return {name: each["terminated"]["exitCode"] for name, each in states.items()} if over else None

    return wait_until(codes)  # type: ignore[return-value]


ALONE: dict[str, tuple[bool, bool, dict[str, str]]] = {
    "nothing": (False, False, {}),
    "a password": (True, False, {}),
    "a password, and a hub that does not answer": (True, True, {}),
    "an agent that may look": (False, False, {"sftriage.dev/share-process-namespace": "true"}),
}


@pytest.mark.parametrize(("password", "hub", "annotations"), ALONE.values(), ids=ALONE)
def test_an_unwatched_job_trains_and_ends_as_without_sftriage(cluster, namespace, password, hub, annotations):
    name = f"alone-{len(annotations)}{password:d}{hub:d}"
    body = injected(name, TORCHRUN, annotations)
    ours = body["metadata"]["labels"]["sftriage.dev/job"]
    if password:
        cluster.kubectl("create", "secret", "generic", ours, "-n", namespace, f"--from-literal={HUB_KEY}=sftriage:x")
    if hub:
        # (an address without anybody behind it)
        cluster.kubectl("create", "service", "clusterip", ours, "-n", namespace, "--tcp=7422")
    start(cluster, body)
    codes = ended(cluster, name)
    assert codes["train"] == 0
    assert codes["sftriage-agent"] != KILLED
    assert "trained" in cluster.kubectl("logs", name, "-c", "train", "-n", namespace).stdout


def test_the_agent_does_not_delay_a_deletion(cluster, namespace):
    """GIVEN an agent that waits for its hub WHEN the pod is deleted THEN it ends well before the pod's time is over."""
    waits = "trap 'exit 0' TERM; while :; do sleep 0.05; done"
    start(cluster, injected("deleted", ["sh", "-c", waits]))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/deleted", "-n", namespace, "--timeout=120s")
    cluster.kubectl("delete", "pod", "deleted", "-n", namespace, f"--timeout={GRACE_S}s")


def test_a_failing_job_keeps_its_exit_code(cluster, namespace):
    start(cluster, injected("failing", ["sh", "-c", "exit 7"]))
    codes = ended(cluster, "failing")
    assert codes["train"] == 7
    assert codes["sftriage-agent"] != KILLED
