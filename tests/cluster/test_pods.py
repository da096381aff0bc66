"""Limits and security of a job's pods: what they do is named where a user looks, and captures and training go on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nvtx
import pytest

from tests.cluster.node import CACHE, TRAINER, Node, alone, images, tag
from tests.cluster.samples import Sample, Store, kustomized
from tests.cluster.test_faults import STEP, doctor, restarts, slower, trains_on
from tests.integration.kube import SYSTEM, made
from tests.integration.processes import ended, wait_until

ENDLESS, CGROUPS, AGENT = 100_000, Path("/sys/fs/cgroup"), "sftriage-agent"
HUNGRY = """for step in range(STEPS):
            if self.rank == 3 and step == 60 and not os.path.exists("/tmp/eaten"):
                open("/tmp/eaten", "w").close()
                eaten = [torch.ones(8 << 20) for _ in range(1000)]"""
EAT = """
import os, sys
open(f"{sys.argv[1]}/cgroup.procs", "w").write("0")
eaten = []
while True:
    eaten.append(bytearray(8 << 20))
"""
"""Fills the memory of a container."""


NSYS, WITH_NSYS = shutil.which("nsys"), "docker.io/library/trainer-nsys:1"
BESIDE = r"=> (/\S*lib(?:pfm|gssapi|krb5|k5crypto|com_err|keyutils|crypto)\S*)"
DOCKERFILE = f"""
FROM {TRAINER}
COPY nvtx /opt/train/lib/python3.11/site-packages/nvtx
COPY nsight-systems /opt/nvidia/nsight-systems
RUN ln -s /opt/nvidia/nsight-systems/target-linux-x64/nsys /usr/bin/nsys
"""


def of_kind(objects: list[Any], kind: str) -> Any:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def hardened(objects: list[Any]) -> None:
    """Any user and group without a name, nothing to write to but a small /tmp, and limits that let people capture."""
    spec = of_kind(objects, "Job")["spec"]["template"]["spec"]
    spec["restartPolicy"] = "OnFailure"
    spec["securityContext"] |= {"runAsUser": 1000730000, "runAsGroup": 0, "fsGroup": 1000730000}
    (train,) = spec["containers"]
    train["securityContext"]["readOnlyRootFilesystem"] = True
    # (a capture under way would hold up the end of its namespace: none but people ask)
    train["env"] += [{"name": "HOME", "value": "/nonexistent"}, {"name": "SLOW_S", "value": "0"}]
    train["resources"]["limits"]["ephemeral-storage"] = "200Mi"
    train["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
    spec["volumes"].append({"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}})
    of_kind(objects, "TriagePolicy")["spec"]["limits"] = {"captures_per_hour": 60, "overhead_budget": "50%"}


def apart(objects: list[Any], change: Callable[[dict[str, Any], int], None]) -> None:
    """Two pods in place of the Job, which may differ."""
    job = of_kind(objects, "Job")
    for number in range(2):
        spec = json.loads(json.dumps(job["spec"]["template"]["spec"]))
        spec |= {"hostname": f"sample-{number}", "restartPolicy": "OnFailure"}
        spec["containers"][0]["env"].insert(0, {"name": "JOB_COMPLETION_INDEX", "value": str(number)})
        change(spec, number)
        labels = {"job-name": "sample", "batch.kubernetes.io/job-name": "sample", "sftriage.dev/job-name": "sample"}
        about = {"name": f"sample-{number}", "namespace": job["metadata"]["namespace"], "labels": labels}
        objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})
    objects.remove(job)


@pytest.fixture(scope="module")
def platform(cluster, store):
    cluster.install(kustomized(cluster, store.settings, tag(images()[0])), lambda: store.secret(cluster, SYSTEM))
    return cluster


def with_nsys(cluster: Node, folder: Path) -> str:
    """An image of trainers with NVTX and this machine's Nsight Systems, laid out as NVIDIA's packages have it."""
    images_folder, context = CACHE / "images", folder / "nsight-systems"
    archive = images_folder / "trainer-nsys.tar"
    with alone("images"):
        if not archive.exists():
            target = Path(NSYS or "").resolve().parent
            hosts = (*target.parent.glob("host-*"), *Path("/usr/lib/nsight-systems").glob("host-*"))
            for each in (target, hosts[0]):
                shutil.copytree(each, context / each.name)
            # (libraries that NVIDIA's packages have beside the importer, and Debian's among the system's)
            linked = subprocess.run(["ldd", hosts[0] / "QdstrmImporter"], capture_output=True, text=True, check=True)
            for library in re.findall(BESIDE, linked.stdout):
                shutil.copy(library, context / hosts[0].name)
            shutil.copytree(Path(nvtx.__file__).parent, folder / "nvtx")
            (folder / "Dockerfile").write_text(DOCKERFILE)
            _buildah(images_folder, "build", "--isolation", "chroot", "--pull-never", "-t", WITH_NSYS, str(folder))
            _buildah(images_folder, "push", WITH_NSYS, f"docker-archive:{archive}.part:{WITH_NSYS}")
            archive.with_name(f"{archive.name}.part").rename(archive)
    cluster.load(archive)
    return WITH_NSYS


def _buildah(folder: Path, command: str, *arguments: str) -> None:
    its = {"CONTAINERS_REGISTRIES_CONF": "registries.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    environment = os.environ | {name: str(folder / "tools" / file) for name, file in its.items()}
    whole = [folder / "tools/usr/bin/buildah", command, "--signature-policy", "tools/policy.json", *arguments]
    subprocess.run(whole, cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def job(platform, store) -> Iterator[Sample]:
    def edit(objects: list[Any]) -> None:
        slower(objects)
        hardened(objects)

    with Sample.running(platform, store, "hardened", ENDLESS, edit) as one:
        one.until(lambda: one.condition("Healthy").get("reason") not in (None, "NoRun", "WarmingUp"))
        yield one
        assert all(container(pod, "train")["restartCount"] == 0 for pod in one.pods), one.said()


def container(pod: Any, name: str) -> Any:
    return next(each for each in pod["status"]["containerStatuses"] if each["name"] == name)


def cgroup(job: Sample, pod: Any, name: str, controller: str) -> Path:
    """The folder of a container's cgroup on this machine."""
    its_id = container(pod, name)["containerID"].rpartition("/")[2]
    (found,) = (CGROUPS / controller / job.cluster.name / "kubepods").rglob(its_id)
    return found


def ask(job: Sample, name: str, **spec: Any) -> None:
    wanted = {"job": "sample", "steps": 5, "max_seconds": 60, "reason": "a look", **spec}
    job.cluster.create(made("TraceCapture", name, wanted), job.namespace)


def answer(job: Sample, name: str) -> Any:
    """How a capture has ended, once its trace, if there is one, is in the store."""

    def found() -> Any:
        status = job.cluster.get("tracecapture", name, namespace=job.namespace).get("status", {})
        # (a trace is in the store before its capture has ended)
        over = {"failed", "refused", "expired"} | ({"stored"} if "stored" in status else set())
        return status if status.get("state") in over else None

    return job.until(found)


def is_once(store: Store, status: Any) -> bool:
    """Whether a capture's trace is in the store, and in one place."""
    reference = status["stored"]["reference"]
    found = store.references(reference.partition("%2F")[0])
    return [each for each in found if each.rpartition("/")[2] == reference.rpartition("/")[2]] == [reference]


@pytest.mark.parametrize("profiler", ["torch", "stacks"])
def test_a_hardened_pod_can_be_captured(job, store, profiler):
    """GIVEN pods of a random user with read-only roots WHEN a person asks THEN there is a trace, once"""
    ask(job, profiler, rank=0, profiler=profiler)
    status = answer(job, profiler)
    assert status["state"] == "stored", status
    assert is_once(store, status)


def test_what_is_injected_meets_the_restricted_standard(job):
    for pod in job.pods:
        ours = [each for kind in ("initContainers", "containers") for each in pod["spec"].get(kind, [])]
        for each in (each for each in ours if each["name"].startswith("sftriage-")):
            secure = each["securityContext"]
            assert (secure["runAsNonRoot"], secure["allowPrivilegeEscalation"], secure["readOnlyRootFilesystem"]) == (
                True,
                False,
                True,
            )
            assert secure["capabilities"] == {"drop": ["ALL"]}
            assert secure["seccompProfile"] == {"type": "RuntimeDefault"}


def test_an_agent_killed_for_memory_loses_no_capture(job, store, tmp_path):
    """GIVEN a capture WHEN the kernel kills its agent THEN it ends once, the next one works, and doctor says why"""
    pod = job.pods[0]
    rank = 2 * int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
    ask(job, "killed", rank=rank, profiler="torch", steps=40)
    folder = cgroup(job, pod, AGENT, "memory")
    pids = (folder / "cgroup.procs").read_text().split()
    for pid in pids:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    with ended(subprocess.Popen([sys.executable, "-c", EAT, str(folder)])):
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)

    def back() -> bool:
        found = next(each for each in job.pods if each["metadata"]["name"] == pod["metadata"]["name"])
        return bool(container(found, AGENT)["restartCount"] == 1 and container(found, AGENT)["ready"])

    job.until(back)
    first = answer(job, "killed")
    assert first["state"] == "stored" or first["detail"], first
    assert first["state"] != "stored" or is_once(store, first)
    ask(job, "after", rank=rank, profiler="torch")
    status = answer(job, "after")
    assert status["state"] == "stored", status
    assert is_once(store, status)
    assert f"{pod['metadata']['name']}, container {AGENT}: killed for its memory" in doctor(job, tmp_path)


def test_a_limit_on_processes_fails_a_capture_in_words(job, store):
    """GIVEN a pod that may start no more threads WHEN it is captured THEN that fails in words, and later ones work"""
    pod = job.pods[1]
    rank = 2 * int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
    folder = cgroup(job, pod, "train", "pids")
    with limited(folder / "pids.max", (folder / "pids.current").read_text().strip()):
        ask(job, "no-threads", rank=rank, profiler="torch")
        status = answer(job, "no-threads")
        assert status["state"] == "failed", status
        assert "raise the limit on processes" in status["detail"]
        trains_on(job)
    ask(job, "threads", rank=rank, profiler="torch")
    status = answer(job, "threads")
    assert status["state"] == "stored", status
    assert is_once(store, status)


@contextlib.contextmanager
def limited(file: Path, value: str) -> Iterator[None]:
    before = file.read_text().strip()
    file.write_text(value)
    try:
        yield
    finally:
        file.write_text(before)


def test_a_pod_s_cpu_limit_is_named(platform, store):
    """GIVEN two restricted pods of one node, one with a CPU limit THEN the report says that it throttles its ranks"""

    def limit(spec: dict[str, Any], number: int) -> None:
        (train,) = spec["containers"]
        train["resources"] = {"requests": {"cpu": "100m"}, "limits": {"cpu": "100m"} if number else {}}
        train["env"].append({"name": "SLOW_S", "value": "0"})

    with Sample.running(platform, store, "throttled", ENDLESS, lambda objects: apart(objects, limit)) as one:

        def named() -> Any:
            status = (one.report or {}).get("status", {})
            return status if status.get("suspect", "").endswith(", throttled by its CPU limit") else None

        status = one.until(named)
        assert status["suspect"].startswith("host sample-1 (2 ranks)")
        assert "throttling by its cgroup's CPU limit" in status["summary"]


def test_a_rank_killed_for_memory_is_named(platform, store):
    """GIVEN a rank that takes more memory than its pod may WHEN its containers restart THEN the report says why"""

    def hungry(objects: list[Any]) -> None:
        hardened(objects)
        files = of_kind(objects, "ConfigMap")["data"]
        assert STEP in files["train.py"]
        files["train.py"] = files["train.py"].replace(STEP, HUNGRY)
        (train,) = of_kind(objects, "Job")["spec"]["template"]["spec"]["containers"]
        train["resources"]["limits"]["memory"] = "1500Mi"

    with Sample.running(platform, store, "hungry", ENDLESS, hungry) as one:
        message = one.until(lambda: one.condition("Restarted").get("message"))
        assert message.startswith("Attempt 0: Rank 3 went first: killed by SIGKILL (out of memory, by its cgroup; ")
        assert "1.5 GiB" in message
        trains_on(one)
        assert all(restarts(pod) for pod in one.pods)


@pytest.mark.skipif(NSYS is None, reason="no nsys here")
def test_nsys_captures_a_rank_of_a_hardened_pod(platform, store, tmp_path):
    """GIVEN hardened pods whose ranks start under nsys WHEN a person asks THEN the report has the steps"""
    image = with_nsys(platform, tmp_path / "image")

    def under_nsys(objects: list[Any]) -> None:
        slower(objects)
        hardened(objects)
        template = of_kind(objects, "Job")["spec"]["template"]
        template["metadata"]["annotations"]["sftriage.dev/nsys"] = image
        template["spec"]["containers"][0]["image"] = image

    with Sample.running(platform, store, "nsys", ENDLESS, under_nsys) as one:
        one.until(lambda: one.condition("Healthy").get("reason") not in (None, "NoRun", "WarmingUp"))
        ask(one, "nsys", rank=0, profiler="nsys", nsys={"trace": ["nvtx", "osrt"]})
        status = answer(one, "nsys")
        assert status["state"] == "stored", status
        assert status["last_step"] - status["first_step"] == 4
        assert is_once(store, status)
        trains_on(one)
