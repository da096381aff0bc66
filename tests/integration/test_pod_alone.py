"""Injected pods for which nothing else is there: no operator, no controller, no hub. Training is none the worse."""

import signal
from typing import Any

import pytest

from sftriage.kube.injecting import InjectionSettings, injection
from sftriage.kube.jobs import HUB_KEY, job_of
from tests.integration.pods import Image, Objects, Pod, missing, running
from tests.integration.processes import FORKED, JOBS
from tests.unit.kube.pods import pod

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")

SCRIPT = JOBS / "unedited" / "ddp.py"
OURS = InjectionSettings(image="sftriage:1")
IMAGES = {"sftriage:1": Image(("sftriage",), user=65532)}
LAUNCHERS = {"torchrun": ("torchrun", "--standalone", "--nproc-per-node"), "forked": FORKED}
KILLED = 128 + signal.SIGKILL


def injected(command: list[str], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    body = pod(name="resnet", annotations=annotations or {}, **spec)
    (container,) = body["spec"]["containers"]
    container |= {"command": command, "volumeMounts": [{"name": "out", "mountPath": "/out"}]}
    container["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    body["spec"]["volumes"] = [{"name": "out", "emptyDir": {}}]
    body["metadata"]["namespace"] = "ml"
    found = job_of(body)
    assert found is not None
    return injection(body, found, OURS, (1, 31)).pod


def name_of(body: dict[str, Any]) -> str:
    return str(body["metadata"]["labels"]["sftriage.dev/job"])


def ended_by_itself(one: Pod) -> bool:
    """Whether the agent ended when it was told to, and was not killed when its pod's time was over."""
    return one.containers["sftriage-agent"].exit_code != KILLED


ALONE = {
    "nothing is there": ("torchrun", False, False, {}),
    "a password, and no hub of that name": ("forked", True, False, {}),
    "a password and an address, at which nobody listens": ("forked", True, True, {}),
    "an agent that may look": ("forked", False, False, {"sftriage.dev/share-process-namespace": "true"}),
}


@pytest.mark.parametrize(("launcher", "password", "address", "annotations"), ALONE.values(), ids=ALONE)
def test_an_unwatched_job_trains_and_ends_as_without_sftriage(tmp_path, launcher, password, address, annotations):
    command = [*LAUNCHERS[launcher], "2", str(SCRIPT), "/out"]
    body = injected(command, annotations, securityContext={"runAsUser": 12345})
    objects = Objects(images=IMAGES)
    if password:
        objects.secrets[name_of(body)] = {HUB_KEY: b"sftriage:secret\n"}
    if address:
        objects.names[f"{name_of(body)}.ml.svc"] = "127.0.0.1"
    with running(body, tmp_path / "pod", objects=objects) as one:
        assert one.wait(200) == "Succeeded", one.said
        assert (tmp_path / "pod" / "volumes" / "out" / "trained.pt").exists()
    assert one.containers["train"].restarts == 0
    assert ended_by_itself(one), one.said


def test_the_agent_does_not_delay_a_deletion(tmp_path):
    """GIVEN an agent that waits for its hub, and trainers, WHEN the pod is deleted THEN all end before their time."""
    waits = "trap 'exit 0' TERM; while :; do sleep 0.05; done"
    body = injected(["sh", "-c", waits])
    with running(body, tmp_path / "pod", objects=Objects(images=IMAGES)) as one:
        one.until(lambda: one.containers["train"].running, 60)
        one.delete()
    assert one.phase == "Succeeded"
    assert ended_by_itself(one), one.said


def test_a_failing_job_keeps_its_exit_code(tmp_path):
    body = injected(["sh", "-c", "exit 7"])
    with running(body, tmp_path / "pod", objects=Objects(images=IMAGES)) as one:
        assert one.wait(120) == "Failed"
    assert one.containers["train"].exit_code == 7
    assert ended_by_itself(one), one.said
