"""Faults of cluster and node beside a watched job: a user finds each where they look, and training does not notice.

Tests that leave the job as it was share one. `SLOWER` lets its steps take 100 ms, which leaves CPU to the cluster.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.node import Node, images, tag
from tests.cluster.samples import CONTROLLERS, Sample, kustomized
from tests.integration.kube import SYSTEM
from tests.integration.processes import wait_until

STEP, SLOWER = "for step in range(STEPS):", "for step in range(STEPS):\n            time.sleep(0.1)"
ENDLESS, SHORT = 100_000, 60
NO_ROOM = {"alarm": "NOSPACE", "memberID": 0}


def slower(objects: list[Any]) -> None:
    (files,) = (each["data"] for each in objects if each["kind"] == "ConfigMap")
    assert STEP in files["train.py"]
    files["train.py"] = files["train.py"].replace(STEP, SLOWER)


def of_template(objects: list[Any]) -> Any:
    (job,) = (each["spec"] for each in objects if each["kind"] == "Job")
    return job["template"]["spec"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("laptop")


@pytest.fixture(scope="module")
def job(cluster, store) -> Iterator[Sample]:
    """A watched job that goes on for as long as these tests take, and has not lost a pod at their end."""
    cluster.install(kustomized(cluster, store.settings, tag(images()[0])), lambda: store.secret(cluster, SYSTEM))
    with Sample.running(cluster, store, "faults", ENDLESS, slower) as one:
        one.until(lambda: windows(one), 600)
        yield one
        assert [restarts(pod) for pod in one.pods] == [0, 0]


def windows(job: Sample) -> int:
    return int((job.report or {}).get("status", {}).get("windows", 0))


def restarts(pod: Any) -> int:
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def why_not_watched(job: Sample) -> str:
    found = job.condition("Watched")
    return f"{found['reason']}: {found['message']}" if found.get("status") == "False" else ""


def watched(job: Sample) -> bool:
    return job.condition("Watched").get("status") == "True"


def judged_on(job: Sample) -> None:
    """Wait until the job is watched, and windows are judged that were not yet."""
    before = windows(job)
    job.until(lambda: watched(job) and windows(job) > before)


def trains_on(job: Sample) -> None:
    before = job.step()
    job.until(lambda: job.step() > before)


def doctor(job: Sample, home: Path) -> str:
    """What `kube doctor` finds wrong, each with what to do."""
    found = json.loads(job.laptop(home)("doctor", "--json", code=1).stdout)
    return "\n".join(f"{each['code']}: {each['says']} | {each['do']}" for each in found if each["state"] == "wrong")


def pid_of(cluster: Node, program: str, argument: str) -> int:
    """The process of a part of the cluster."""
    state = str(cluster.state)
    for found in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (found / "cmdline").read_text().split("\0")
            at_home = state in (str((found / "cwd").readlink()), *words)
            if words[0].rpartition("/")[2] == program and at_home and any(argument in word for word in words):
                return int(found.name)
    raise AssertionError(f"no {program} runs")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process meanwhile."""
    kill_with(signal.SIGSTOP, pid)
    try:
        yield
    finally:
        kill_with(signal.SIGCONT, pid)


def kill_with(signum: int, pid: int) -> None:
    subprocess.run(["kill", f"-{signum}", str(pid)], check=True)


@contextlib.contextmanager
def network_rule(cluster: Node, rule: str) -> Iterator[None]:
    """A rule of the node's firewall, before all others."""
    root = (cluster.state / "dest").read_text().strip() + "/root/usr/lib/x86_64-linux-gnu"
    program = f"LD_LIBRARY_PATH={root} XTABLES_LIBDIR={root}/xtables /run/sbin/iptables"
    cluster.inside("sh", "-c", f"{program} -I {rule}")
    try:
        yield
    finally:
        cluster.inside("sh", "-c", f"{program} -D {rule}")


@contextlib.contextmanager
def without_api_server(cluster: Node) -> Iterator[None]:
    """Whoever connects to the API server, or is connected, is refused."""
    with network_rule(cluster, "INPUT -p tcp --dport 6443 -j REJECT --reject-with tcp-reset"):
        yield
    wait_until(lambda: cluster.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", 60)


def hub_denied(cluster: Node) -> contextlib.AbstractContextManager[None]:
    """What a NetworkPolicy does that denies the hub's port to all pods: the network here enforces none."""
    return network_rule(cluster, "FORWARD -p tcp --dport 7422 -j DROP")


def alarm(cluster: Node, action: str) -> None:
    """Set or clear the alarm that a full etcd raises: it then takes no writes."""
    body = json.dumps({**NO_ROOM, "action": action})
    cluster.inside("curl", "-sSf", "-d", body, "http://127.0.0.1:2379/v3/maintenance/alarm")


@contextlib.contextmanager
def full_etcd(cluster: Node) -> Iterator[None]:
    alarm(cluster, "ACTIVATE")
    try:
        yield
    finally:
        alarm(cluster, "DEACTIVATE")


@contextlib.contextmanager
def without_image(cluster: Node, image: str) -> Iterator[None]:
    """The node has lost an image that no registry has."""
    kept = f"{image.rpartition(':')[0]}:kept"
    cluster.ctr("images", "tag", "--force", image, kept)
    cluster.ctr("images", "rm", "--sync", image)
    try:
        yield
    finally:
        cluster.ctr("images", "tag", "--force", kept, image)


def image_of(job: Sample) -> str:
    (deployment,) = job.controllers
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def test_the_api_server_is_away_during_a_capture(job, store):
    """GIVEN no API server WHEN a policy fires THEN the rank is captured, and shown once the server is back"""
    with without_api_server(job.cluster):
        wait_until(lambda: sorted(store.references(job.namespace)))
    traces = sorted(store.references(job.namespace))
    found = job.until(lambda: len(some := job.stored()) >= len(traces) and some)
    assert sorted(map(key_of, found)) == sorted(store.references(job.namespace))
    judged_on(job)


def test_a_kubelet_is_silent(job, home):
    """GIVEN a kubelet that is stopped THEN doctor names its node, and the job is judged meanwhile"""
    job.until(lambda: "does not answer" not in doctor(job, home))
    with stopped(pid_of(job.cluster, "kubelet", "--hostname-override")):
        found = job.until(
            lambda: "operator: the operator is not running (its node" in (text := doctor(job, home)) and text
        )
        (node,) = (line for line in found.splitlines() if line.startswith("pod: "))
        assert f"kubectl describe node {job.cluster.name}" in node
        before = windows(job)
        job.until(lambda: windows(job) > before)
    job.until(lambda: "does not answer" not in doctor(job, home))
    judged_on(job)


def test_etcd_is_full(job, home):
    """GIVEN an etcd that takes no writes THEN operator and doctor say so, and the report catches up afterwards"""
    with full_etcd(job.cluster):
        job.until(lambda: "lease: the operator has not renewed" in doctor(job, home), 180)
        operator = job.cluster.kubectl("logs", "-l", "app.kubernetes.io/name=sftriage-operator", "-n", SYSTEM).stdout
        assert "database space exceeded" in operator
        controller = job.cluster.kubectl("logs", "-l", CONTROLLERS, "-n", job.namespace, "--tail=50").stdout
        assert "cannot update all objects of the job in the cluster" in controller
    wait_until(lambda: "lease: " not in doctor(job, home))
    judged_on(job)


def test_the_hub_is_denied(job, store):
    """GIVEN a network that drops what is for the hub THEN the reports of an old and of a new job say so"""
    with contextlib.ExitStack() as held:
        with hub_denied(job.cluster):
            new = held.enter_context(Sample.running(job.cluster, store, "denied", ENDLESS, slower))
            job.until(lambda: "no data from" in why_not_watched(job))
            trains_on(job)
            assert why_not_watched(job).startswith("Unheard: ")
            new.until(lambda: "does a NetworkPolicy deny its port 7422?" in why_not_watched(new))
            agent = job.cluster.kubectl("logs", job.pods[0]["metadata"]["name"], "-c", "sftriage-agent", "-n", "faults")
            assert "cannot be reached" in agent.stdout
        judged_on(job)
        judged_on(new)


def test_an_image_is_missing(job, store, home):
    """GIVEN a node without the image WHEN parts restart and a job starts THEN reports say so until it is back"""
    with contextlib.ExitStack() as held:
        with without_image(job.cluster, image_of(job)):
            for namespace, label in (
                (SYSTEM, "app.kubernetes.io/name=sftriage-operator"),
                (job.namespace, CONTROLLERS),
            ):
                pods = job.cluster.get("pods", "-l", label, namespace=namespace)["items"]
                job.cluster.kubectl("delete", "pod", pods[0]["metadata"]["name"], "-n", namespace, "--wait=false")
            late = held.enter_context(Sample.running(job.cluster, store, "late", SHORT, slower))
            for each in (job, late):
                each.until(lambda each=each: why_not_watched(each).startswith("ControllerDown: "))
                assert "Correct the image" in why_not_watched(each)
            found = late.until(lambda: "sftriage-carry: " in (text := doctor(late, home)) and text)
            assert "container operator: " in found
            assert "container controllers: " in found
            assert "recreate the pods" in found
            trains_on(job)
        judged_on(job)
        late.until(lambda: all(each["status"]["phase"] == "Succeeded" for each in late.pods))


def test_a_controller_is_evicted(job):
    """GIVEN a drained node THEN another controller watches the job, and no trace is lost"""
    before = {each["metadata"]["name"] for each in job.stored()}
    (pod,) = job.get("pods", "-l", CONTROLLERS)
    about = {"name": pod["metadata"]["name"], "namespace": job.namespace}
    body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": about}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{about['name']}/eviction"
    job.cluster.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(body))
    run = job.report["status"]["run"]
    job.until(lambda: job.report["status"].get("run") not in (None, run))
    judged_on(job)
    assert before <= {each["metadata"]["name"] for each in job.stored()}
    # AND what the next one orders again is neither made twice nor lost
    assert not [each for each in job.get("tracecaptures") if each.get("status", {}).get("state") == "failed"]


def test_a_pod_is_evicted_for_its_spool(job, store, home):
    """GIVEN a spool over its limit THEN the pod is evicted, which doctor says, and the job ends in another pod"""

    def small(objects: list[Any]) -> None:
        slower(objects)
        of_template(objects)["volumes"].append({"name": "sftriage-spool", "emptyDir": {"sizeLimit": "32Mi"}})

    with Sample.running(job.cluster, store, "spool", 200, small) as one:
        one.until(lambda: one.step() >= 0)
        name = one.pods[0]["metadata"]["name"]
        fill = ("sh", "-c", "head -c 67108864 /dev/zero > /sftriage-spool/spool/filler")
        one.cluster.kubectl("exec", name, "-c", "train", "-n", one.namespace, "--", *fill)
        found = one.until(lambda: "Evicted: " in (text := doctor(one, home)) and text)
        assert "sftriage-spool" in found
        one.until(lambda: sum(each["status"]["phase"] == "Succeeded" for each in one.pods) == 2)


def quota(name: str, **hard: str) -> Any:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}


def test_a_quota_has_no_room(job, store, home):
    """GIVEN a quota without room for a controller, another without room for sidecars THEN doctor says so"""
    with contextlib.ExitStack() as held:
        room = ("pods-only", quota("pods-only", pods="2")), ("narrow", quota("narrow", **{"limits.memory": "9Gi"}))
        limits = {"limits": [{"type": "Container", "max": {"memory": "4Gi"}, "min": {"memory": "256Mi"}}]}
        range_ = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "ranged"}, "spec": limits}
        jobs = {}
        for name, body in (*room, ("ranged", range_)):
            job.cluster.kubectl("create", "namespace", name)
            job.cluster.create(body, name)
            if body["kind"] == "ResourceQuota":
                # (it applies once it was counted)
                wait_until(lambda name=name: "hard" in job.cluster.get("quota", name, namespace=name).get("status", {}))
            jobs[name] = held.enter_context(Sample.running(job.cluster, store, name, SHORT, slower))
        one = jobs["pods-only"]
        one.until(lambda: "exceeded quota" in why_not_watched(one))
        assert "Raise the quota or limit" in why_not_watched(one)
        one.until(lambda: one.step() >= 0)
        for name, words in (("narrow", "exceeded quota"), ("ranged", "minimum memory usage per Container")):
            jobs[name].until(lambda name=name, words=words: words in doctor(jobs[name], home))


def test_two_teams_have_a_job_of_one_name(job, store, home):
    """GIVEN jobs of one name in two namespaces THEN reports, hubs, captures and keys are apart"""
    with Sample.running(job.cluster, store, "team-b", 400, slower) as other:
        other.until(lambda: len(other.stored()) == 2)
        assert other.report["metadata"]["name"] != job.report["metadata"]["name"]
        keys = [set(map(key_of, one.stored())) for one in (job, other)]
        assert all(key.startswith("team-b%2Fsample/") for key in keys[1])
        assert not keys[0] & keys[1]
        rows = other.laptop(home, store).json("list")
        assert {row["namespace"] for row in rows["captures"]} == {"team-b"}
        passwords = {
            each["data"]["hub"] for one in (job, other) for each in one.get("secrets") if "hub" in each["data"]
        }
        assert len(passwords) == 2
        other.cluster.kubectl("delete", "tcap", "--all", "-n", "team-b", "--timeout=60s")
        assert sorted(store.references("team-b")) == []
        assert store.references(job.namespace) >= keys[0]


def test_two_clusters_share_a_store(job, store, home, tmp_path):
    """GIVEN jobs of one namespace and name in two clusters THEN neither lists, replaces or deletes the other's"""
    with contextlib.ExitStack() as held:
        second = held.enter_context(Node.start(tmp_path / "state"))
        second.load(*images())
        held.enter_context(second.as_newer())
        second.install(kustomized(second, store.settings, tag(images()[0])), lambda: store.secret(second, SYSTEM))
        other = held.enter_context(Sample.running(second, store, job.namespace, 400, slower))
        other.until(lambda: len(other.stored()) == 2)
        ours, theirs = ({each["metadata"]["name"]: key_of(each) for each in one.stored()} for one in (job, other))
        assert not {*ours.values()} & {*theirs.values()}
        assert {*ours.values(), *theirs.values()} == store.references(job.namespace)
        for one in (job, other):
            rows = one.laptop(home, store).json("list")["captures"]
            assert {row["name"] for row in rows} == {each["metadata"]["name"] for each in one.get("tracecaptures")}
        second.kubectl("delete", "tcap", "--all", "-n", other.namespace, "--timeout=60s")
        assert store.references(job.namespace) == set(ours.values())


def key_of(capture: Any) -> str:
    return str(capture["status"]["stored"]["reference"])
