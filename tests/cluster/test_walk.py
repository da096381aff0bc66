"""A platform team's way with sftriage on a real cluster; `make test-cluster STEP=` runs one of the steps."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import node
from tests.cluster.node import Node
from tests.cluster.samples import SECRET, Sample, Store, install, kustomized, load
from tests.integration.kube import SYSTEM
from tests.integration.processes import ROOT, wait_until

SLOW, TEAM = 3, "sftriage-walk"
NAMED = re.compile(rf"rank {SLOW} on sample-\w+ in data")
"""The suspect: all pods are on one node, so that each counts as a host."""
LONG = 100_000
"""More steps than any of these tests takes."""
BEFORE = "SFTRIAGE_TEST_CLUSTER_BEFORE"
"""The variable that names the git revision from which the product is upgraded."""


@pytest.fixture(scope="module")
def sample(cluster, store) -> Iterator[Sample]:
    """The job of `k8s/samples`, once a trace of its slow rank is stored."""
    install(cluster, store)
    with Sample.running(cluster, store, TEAM, LONG) as found:
        yield captured(found)


def captured(found: Sample) -> Sample:
    found.until(lambda: any(each["spec"]["rank"] == SLOW for each in found.stored()), 600)
    return found


def test_install(installed):
    """GIVEN `kubectl apply -k k8s/` THEN all parts run, their objects explain themselves, and the doctor agrees."""
    for part in node.PARTS:
        (deployed,) = (each for each in deployments(installed) if each["metadata"]["name"] == part)
        assert deployed["status"]["readyReplicas"] == deployed["spec"]["replicas"]
    pods = installed.get("pods", namespace=SYSTEM)["items"]
    assert [each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]] == [0] * len(pods)
    for kind in ("triagepolicy", "tracecapture", "triagereport"):
        assert "FIELDS" in installed.kubectl("explain", f"{kind}.spec").stdout
    checks = json.loads(run(installed, "sftriage", "kube", "doctor", "--json"))
    # (nothing is labelled yet, and the server is 1.20)
    assert {each["code"] for each in checks if each["state"] != "ok"} <= {"version", "label"}


def test_job(sample):
    """GIVEN an unedited job in a labelled namespace THEN its slow rank is named, captured once, and trains on."""
    sample.until(lambda: NAMED.fullmatch(sample.report["status"].get("suspect", "")))
    sample.until(lambda: "Batches.__iter__ (train.py" in json.dumps(sample.report))
    for kind, wanted in {"Watched": "True", "Injected": "True", "Healthy": "False"}.items():
        assert sample.condition(kind)["status"] == wanted, sample.condition(kind)
    (found,) = (each for each in sample.stored() if each["spec"]["rank"] == SLOW)
    assert found["spec"]["trigger"]["stage"] == "data"
    # (a trace is read after it was stored)
    name = ("tracecapture", found["metadata"]["name"])
    read = sample.until(lambda: sample.cluster.get(*name, namespace=TEAM)["status"].get("reproduced"))
    assert read == "yes"
    sample.until(
        lambda: any(
            each["reason"] == "CaptureStored" and "kubectl sftriage get" in each["message"]
            for each in sample.get("events")
        )
    )
    trains_on(sample)


def test_laptop(sample, store, tmp_path):
    """GIVEN a kubeconfig and the store's credentials THEN the laptop's commands find the job and its trace."""
    laptop = sample.laptop(tmp_path, store)
    (report,) = laptop.json("status", "sample")
    assert NAMED.fullmatch(report["suspect"])
    listed = laptop.json("list", "--job", "sample")["captures"]
    assert SLOW in {each["rank"] for each in listed}
    fetched = laptop.json("get", "--job", "sample", "--rank", SLOW)
    assert (tmp_path / fetched["path"]).stat().st_size == fetched["size_bytes"] > 0
    with laptop.running("open", fetched["capture"]["name"], "--no-browser", "--json") as process:
        shown = json.loads(process.stdout.readline())
        with urllib.request.urlopen(shown["file_url"], timeout=30) as answer:
            assert answer.read(1)
    table = run(sample.cluster, "sftriage", "kube", "status", "-n", TEAM)
    assert NAMED.search(table)
    assert run(sample.cluster, "kubectl", "sftriage", "status", "-n", TEAM) == table


def test_capture(sample, store, tmp_path):
    """GIVEN a person who asks for a rank that is not slow THEN the trace comes, with the person's name."""
    laptop = sample.laptop(tmp_path, store)
    name = laptop.json("capture", "sample", "--rank", 0, "--profiler", "stacks", "--reason", "what is normal?")["name"]
    found = sample.cluster.get("tracecapture", name, namespace=TEAM)
    assert found["spec"]["requested_by"]["username"] == "admin"
    assert laptop.json("get", name)["size_bytes"] > 0
    # AND deleting the object deletes the trace
    kept = found["status"]["stored"]["reference"]
    assert kept in store.references(TEAM)
    sample.cluster.kubectl("delete", "tracecapture", name, "-n", TEAM)
    assert kept not in store.references(TEAM)


IN_IMAGE = """
set -e
test $(command -v sftriage) = /opt/sftriage/bin/sftriage
kubectl-sftriage --help > /dev/null
python -c 'import kopf, kubernetes, nats, obstore, cryptography, prometheus_client, sftriage.trainer._moments'
python -c 'from sftriage.kube.injecting import manifest; manifest("pod.yaml"), manifest("controller.yaml")'
if touch /opt/sftriage/x 2>/dev/null; then exit 1; fi
if python -c 'import torch' 2>/dev/null; then exit 1; fi
id -u
"""


def test_image(installed):
    """GIVEN the image in an operator's pod THEN it has what all parts import, no torch, and runs unprivileged."""
    done = installed.kubectl("exec", "deployment/sftriage-operator", "-n", SYSTEM, "--", "sh", "-c", IN_IMAGE)
    assert done.stdout.split() == ["65532"]


@contextlib.contextmanager
def before() -> Iterator[Path]:
    """A checkout of the previous version: the newest tag, or a commit that stays the same for twenty."""
    revision = os.environ.get(BEFORE) or git("describe", "--tags", "--abbrev=0", check=False)
    if not revision:
        count = int(git("rev-list", "--count", "HEAD"))
        revision = git("rev-parse", f"HEAD~{min(count - 1, 20 + count % 20)}")
    with tempfile.TemporaryDirectory() as folder:
        git("worktree", "add", "--detach", f"{folder}/before", revision)
        try:
            yield Path(folder) / "before"
        finally:
            git("worktree", "remove", "--force", f"{folder}/before")


def git(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=check)
    return done.stdout.strip()


def test_upgrade(cluster, store, tmp_path):
    """GIVEN a job that began under the previous version WHEN sftriage is upgraded THEN the job trains on, watched."""
    with before() as checkout:
        install(cluster, store, checkout)
        with Sample.running(cluster, store, f"{TEAM}-before", LONG) as sample:
            sample.until(lambda: requested(sample, store, tmp_path))
            stays(sample, store, tmp_path, lambda: upgrade(sample, store))
            # AND back again
            stays(sample, store, tmp_path, lambda: install(cluster, store, checkout))


def upgrade(sample: Sample, store: Store) -> None:
    """Upgrade, and wait for the job's new controllers: the old ones may not finish a capture."""
    cluster = sample.cluster
    install(cluster, store)
    (operator,) = (each for each in deployments(cluster) if each["metadata"]["name"] == "sftriage-operator")
    sample.until(lambda: all(is_ready(each, image_of(operator)) for each in sample.controllers))


def is_ready(deployed: Any, image: str) -> bool:
    """Whether all pods of a deployment have this image, and are ready."""
    status, known = deployed["status"], deployed["metadata"]["generation"]
    current = status.get("observedGeneration") == known and status.get("updatedReplicas") == status.get("readyReplicas")
    return image_of(deployed) == image and current and status.get("replicas") == deployed["spec"]["replicas"]


def image_of(deployed: Any) -> str:
    return str(deployed["spec"]["template"]["spec"]["containers"][0]["image"])


def stays(sample: Sample, store: Store, home: Path, change: Callable[[], None]) -> None:
    """Assert that a job trains on after a change, is watched or says why not, and keeps its captures."""
    stored, pods = {each["metadata"]["name"] for each in sample.stored()}, sample.pods
    change()
    trains_on(sample, pods)
    # A controller captures, once it has been replaced, or the report says why none does.
    sample.until(lambda: requested(sample, store, home) or sample.condition("Watched")["reason"] == "OldPods")
    assert stored <= {each["metadata"]["name"] for each in sample.stored()}
    sample.until(lambda: sorted(references(sample)) == sorted(store.references(sample.namespace)), 60)


def requested(sample: Sample, store: Store, home: Path) -> str:
    """The name of a capture that a person's command has waited for, or "" if that failed."""
    with contextlib.suppress(AssertionError):
        return asked(sample, store, home)
    return ""


def asked(sample: Sample, store: Store, home: Path) -> str:
    """The name of a capture that a person's command has waited for; fails with the command's message."""
    why = ("--profiler", "stacks", "--reason", "a look")
    return str(sample.laptop(home, store).json("capture", sample.job, "--rank", 1, *why)["name"])


def references(sample: Sample) -> list[str]:
    """Where the traces of a namespace's captures are, each once."""
    return [each["status"]["stored"]["reference"] for each in sample.stored()]


BROKEN = {
    "settings": ({"store": "nowhere", "rings": "many"}, None, "rings"),
    "image": ({}, "sftriage:not-there", "ImagePull"),
}


@pytest.mark.parametrize(("settings", "image", "why"), BROKEN.values(), ids=BROKEN)
def test_broken(sample, store, tmp_path, settings, image, why):
    """GIVEN an upgrade that cannot work WHEN it is applied THEN what ran works on, and `undo` ends it."""
    cluster = sample.cluster
    install(cluster, store)
    sample.until(lambda: requested(sample, store, tmp_path))
    working = {each["metadata"]["name"] for each in ready(cluster)}
    broken = kustomized(cluster, {**store.settings, **settings}, image or load(cluster, ROOT))
    cluster.kubectl("apply", "-f", "-", text=broken)
    sample.until(lambda: why in shown(cluster), 120)
    serving = [part for part in node.PARTS if part != "sftriage-certificates"]
    assert {each for each in working if each.startswith((*serving,))} <= {
        each["metadata"]["name"] for each in ready(cluster)
    }
    # AND jobs are injected with the image that works, and captures are answered
    made = cluster.kubectl(
        "run",
        "x",
        "--image=x",
        "-l",
        "job-name=x,batch.kubernetes.io/job-name=x",
        "-n",
        TEAM,
        "--dry-run=server",
        "-o",
        "json",
    ).stdout
    assert "sftriage-agent" in made
    assert "not-there" not in made
    asked(sample, store, tmp_path)
    trains_on(sample)
    # WHEN the rollouts are undone THEN all is as before
    for part in serving:
        cluster.kubectl("rollout", "undo", f"deployment/{part}", "-n", SYSTEM)
    cluster.available(*serving)


def test_uninstall(sample, store, empty):
    """GIVEN a watched job WHEN the documented commands are run THEN nothing is left, and the job trains on."""
    cluster, pods = sample.cluster, sample.pods
    install(cluster, store)
    uninstall(cluster)
    trains_on(sample, pods)
    # (a namespace's own Secret and its pods' addresses are not ours)
    left = {each for each in cluster.snapshot() - empty if SECRET not in each and not each.startswith("Pod/")}
    assert not {each for each in left if "sftriage" in each.replace(sample.namespace, "")}
    assert {each.split("/")[1] or each for each in left} == {sample.namespace, f"Namespace//{sample.namespace}"}
    sample.end()
    wait_until(lambda: cluster.snapshot() <= empty, 120)


def test_helm(cluster, store, tmp_path):
    """GIVEN the chart WHEN it is installed, changed and taken back THEN jobs are watched, and it leaves nothing."""
    empty = emptied(cluster)
    chart = adapted(tmp_path / "chart")
    values = {"image": load(cluster, ROOT), "settings": store.settings}

    def helm(*arguments: str, **more: Any) -> None:
        command = [f"{sys.prefix}/bin/helm", *arguments, "--kubeconfig", str(cluster.kubeconfig), "-n", SYSTEM]
        given = ["--wait", "--timeout", "4m", *(["-f", "-"] if more else [])]
        done = subprocess.run([*command, *given], input=json.dumps(more), text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr

    cluster.kubectl("create", "namespace", SYSTEM)
    store.secret(cluster, SYSTEM)
    helm("install", "sftriage", str(chart), **values)
    with Sample.running(cluster, store, f"{TEAM}-helm", LONG) as sample:
        sample.until(lambda: requested(sample, store, tmp_path))
        changed = {**values, "settings": {**store.settings, "rings": "64Mi"}}
        stays(sample, store, tmp_path, lambda: helm("upgrade", "sftriage", str(chart), **changed))
        stays(sample, store, tmp_path, lambda: helm("rollback", "sftriage"))
    uninstall(cluster, f"{sys.prefix}/bin/helm uninstall sftriage -n {SYSTEM}", "kubectl delete -k k8s/crds", GONE)
    wait_until(lambda: cluster.snapshot() <= empty, 120)


GONE = f"kubectl delete namespace {SYSTEM}"


def adapted(chart: Path) -> Path:
    """The chart for 1.20."""
    shutil.copytree(ROOT / "k8s" / "helm" / "sftriage", chart)
    for path in (chart / "Chart.yaml", *(chart / "templates").iterdir()):
        text = path.read_text().replace("policy/v1\n", "policy/v1beta1\n").replace("kubeVersion: '>=1.29.0-0'\n", "")
        path.write_text(text.replace('--port, "8443"', '--port, "8443", --server-version, "1.29"'))
    return chart


def emptied(cluster: Node) -> frozenset[str]:
    """What a cluster has without sftriage, which is uninstalled."""
    if cluster.kubectl("get", "namespace", SYSTEM, check=False).returncode == 0:
        uninstall(cluster)
    return cluster.snapshot()


def uninstall(cluster: Node, *last: str) -> None:
    """Run the documented commands, the last of them for `kubectl apply -k` by default."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (block,) = re.findall(r"### Uninstall\n.*?```\n(.*?)```", page, re.DOTALL)
    commands = block.splitlines()
    script = "\n".join([*(commands[:-1] if last else commands), *last])
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False)
    if not last:
        # (1.20 knows the disruption budgets by another version; they go with their namespace)
        cluster.kubectl("wait", "--for=delete", f"namespace/{SYSTEM}", "--timeout=120s")


def trains_on(sample: Sample, pods: list[Any] | None = None) -> None:
    """Assert that a job's pods are those that it had, and take steps."""
    step = sample.step()
    sample.until(lambda: sample.step() > step)
    now = sample.pods
    assert all(each["status"]["phase"] == "Running" for each in now)
    trainers = [each for pod in now for each in pod["status"]["containerStatuses"] if each["name"] == "train"]
    assert [each["restartCount"] for each in trainers] == [0, 0]
    assert pods is None or [each["metadata"]["uid"] for each in pods] == [each["metadata"]["uid"] for each in now]


def deployments(cluster: Node) -> list[Any]:
    found: list[Any] = cluster.get("deployments", namespace=SYSTEM)["items"]
    return found


def ready(cluster: Node) -> list[Any]:
    """The pods of sftriage that serve, and are not being replaced."""
    return [
        each
        for each in cluster.get("pods", namespace=SYSTEM)["items"]
        if "deletionTimestamp" not in each["metadata"]
        and all(one["ready"] for one in each["status"].get("containerStatuses", [{"ready": False}]))
    ]


def shown(cluster: Node) -> str:
    """What `kubectl` shows of sftriage's own pods."""
    pods = cluster.get("pods", namespace=SYSTEM)["items"]
    logs = (cluster.kubectl("logs", each["metadata"]["name"], "-n", SYSTEM, check=False).stdout for each in pods)
    return json.dumps(pods) + "".join(logs)


def run(cluster: Node, *command: str) -> str:
    """What a person's command prints."""
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "COLUMNS": "200", "PATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    return done.stdout
