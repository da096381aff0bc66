"""Pods of shell commands: what a kubelet makes of them, the pod runner has to."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.namespaces import hosts_of
from tests.integration.pod_container import missing
from tests.integration.pod_runner import Pod, running
from tests.integration.pod_spec import Image, NotYet, Objects, Place, identity

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

UID, OTHER, GROUP = 12345, 23456, 34567
"""Users and a group that this machine does not know, as in most pods."""
LISTENS = "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.02; done"

MEMORY = {"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
DISK = {"name": "v", "emptyDir": {}}


def container(name: str, script: str, **more: Any) -> dict[str, Any]:
    # (of two dollars Kubernetes leaves one)
    return {"name": name, "command": ["sh", "-c", script.replace("$$", "$$$$")], **more}


def sidecar(name: str, script: str, **more: Any) -> dict[str, Any]:
    return container(name, script, restartPolicy="Always", **more)


def pod(*containers: Mapping[str, Any], init: tuple[Mapping[str, Any], ...] = (), **spec: Any) -> dict[str, Any]:
    metadata = {"name": "pod-0", "namespace": "ml", "uid": "7d", "labels": {"app": "x", "tier": "y"}}
    wanted = {"restartPolicy": "Never", "initContainers": list(init), "containers": list(containers), **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": wanted}


def mounted(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"volumeMounts": [{"name": name, "mountPath": path, **more}]}


def ran(body: Mapping[str, Any], folder: Path, **more: Any) -> Pod:
    """A pod that has ended by itself."""
    with running(body, folder / "pod", **more) as one:
        one.wait(60)
    return one


def lines(one: Pod, name: str = "main") -> list[str]:
    return one.containers[name].said.splitlines()


AS = {"runAsUser": UID, "runAsGroup": OTHER}

IDENTITIES = {
    "nothing said: root, with what a runtime leaves to root": ({}, {}, f"0:0 {0xA80425FB:016x} 0"),
    "a user of the pod": (AS, {}, f"{UID}:{OTHER} {0:016x} 0"),
    "a container's own goes before it": (AS, {"runAsUser": OTHER}, f"{OTHER}:{OTHER} {0:016x} 0"),
    "a user alone is in root's group": ({"runAsUser": UID}, {}, f"{UID}:0 {0:016x} 0"),
    "root without any rights": ({}, {"capabilities": {"drop": ["ALL"]}}, f"0:0 {0:016x} 0"),
    "root with one": ({}, {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}, f"0:0 {1 << 19:016x} 0"),
    "no new ones": ({}, {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, f"0:0 {0:016x} 1"),
}


@pytest.mark.parametrize(("of_pod", "own", "expected"), IDENTITIES.values(), ids=IDENTITIES)
def test_whom_a_container_runs_as(tmp_path, of_pod, own, expected):
    script = "echo $(id -u):$(id -g) $(awk '/CapEff/{print $2} /NoNewPrivs/{print $2}' /proc/self/status)"
    one = ran(pod(container("main", script, securityContext=own), securityContext=of_pod), tmp_path)
    assert lines(one) == [expected]


def test_groups_are_those_of_the_pod(tmp_path):
    context = {**AS, "fsGroup": GROUP, "supplementalGroups": [7]}
    one = ran(pod(container("main", "id -G"), securityContext=context), tmp_path)
    assert set(lines(one)[0].split()) == {str(OTHER), "7", str(GROUP)}


def test_a_container_that_must_not_be_root_and_would_be_waits(tmp_path):
    body = pod(container("main", "id"), securityContext={"runAsNonRoot": True})
    with running(body, tmp_path / "pod") as one:
        one.until(lambda: "runAsNonRoot" in one.waiting["main"], 30)
    assert one.containers["main"].process is None
    # BUT one whose image says another user is fine
    assert identity(body, {"image": "i"}, Objects(images={"i": Image(user=UID)})).uid == UID
    with pytest.raises(NotYet, match="runAsNonRoot"):
        identity(body, {}, Objects())


def test_containers_have_processes_files_and_memory_of_their_own(tmp_path):
    """GIVEN two containers THEN neither sees what the other writes or runs, and this machine sees nothing of it."""
    other = container("other", "touch /there /tmp/there; touch /v/there; exec sleep 60", **mounted("v", "/v"))
    looks = (
        "until [ -e /v/there ]; do sleep 0.02; done; ls /there /tmp/there 2>/dev/null; pgrep -x sleep || echo nobody"
    )
    main = container("main", f"echo $$; touch /here /tmp/here /dev/shm/here /run/here; {looks}", **mounted("v", "/v"))
    with running(pod(main, other, volumes=[DISK]), tmp_path / "pod") as one:
        one.until(lambda: one.containers["main"].exit_code is not None, 30)
        assert one.containers["other"].running
    assert lines(one) == ["1", "nobody"]
    assert not any(Path(place, "here").exists() for place in ("/", "/tmp", "/dev/shm", "/run"))


def test_processes_are_shared_where_the_pod_says_so(tmp_path):
    """GIVEN shared process ids THEN a container sees the other's, by user, and who is PID 1 is neither."""
    main = container("main", "echo $$; until pgrep -u 23456 -x sleep; do sleep 0.05; done")
    other = container("other", "exec sleep 30", securityContext={"runAsUser": OTHER})
    body = pod(main, other, shareProcessNamespace=True)
    with running(body, tmp_path / "pod") as one:
        one.until(lambda: one.containers["main"].exit_code == 0, 30)
        assert lines(one)[0] != "1"
        assert one.containers["other"].running
    assert not one.containers["other"].running


def test_a_pod_s_name_is_its_host_s(tmp_path):
    one = ran(
        pod(container("main", "hostname; cat /etc/hostname; grep -c db.ml.svc /etc/hosts; echo $HOSTNAME")), tmp_path
    )
    assert lines(one) == ["pod-0", "pod-0", "0", "pod-0"]
    names = Objects(names={"db.ml.svc": "10.0.0.7"})
    one = ran(pod(container("main", "grep db.ml.svc /etc/hosts")), tmp_path / "2", objects=names)
    assert lines(one) == ["10.0.0.7\tdb.ml.svc"]
    # AND one that is said goes before it
    body = pod(container("main", "hostname; echo $HOSTNAME; grep -c h-0 /etc/hosts"), hostname="h-0")
    assert lines(ran(body, tmp_path / "3")) == ["h-0", "h-0", "1"]


ENDS = {
    "it ends well": ("Never", "exit 0", 0, "Succeeded"),
    "it fails": ("Never", "exit 3", 0, "Failed"),
    "it is killed": ("Never", "kill -9 $$", 0, "Failed"),
    "it fails twice and may try again": ("OnFailure", "echo x >> /v/x; [ $(wc -l < /v/x) = 3 ]", 2, "Succeeded"),
}


@pytest.mark.parametrize(("policy", "script", "restarts", "expected"), ENDS.values(), ids=ENDS)
def test_how_a_pod_ends(tmp_path, policy, script, restarts, expected):
    # (the first of a namespace cannot kill itself)
    main = container("main", f"sh -c '{script}'", **mounted("v", "/v"))
    body = pod(main, restartPolicy=policy, volumes=[DISK])
    one = ran(body, tmp_path, backoff_s=0.01)
    assert (one.phase, one.containers["main"].restarts) == (expected, restarts)


def test_what_is_to_run_always_is_begun_again_with_files_of_its_own(tmp_path):
    main = container("main", "[ -e /mark ] && echo seen; touch /mark; echo began")
    with running(pod(main, restartPolicy="Always"), tmp_path / "pod", backoff_s=0.01) as one:
        one.until(lambda: one.containers["main"].restarts >= 2, 30)
    assert set(lines(one)) == {"began"}
    assert one.phase == "Succeeded"


def test_init_containers_come_one_after_the_other(tmp_path):
    """GIVEN init containers and a sidecar between them THEN each waits for those before it, and main for all."""
    volumes = [DISK]

    def says(name: str, then: str = "") -> str:
        return f"echo {name} >> /v/x; {then}"

    init = (
        container("a", says("a", "sleep 0.2"), **mounted("v", "/v")),
        sidecar("s", says("s", LISTENS), **mounted("v", "/v")),
        container("b", "until grep -q s /v/x; do sleep 0.02; done;" + says("b"), **mounted("v", "/v")),
    )
    one = ran(
        pod(container("main", says("main", "cat /v/x"), **mounted("v", "/v")), init=init, volumes=volumes), tmp_path
    )
    assert lines(one) == ["a", "s", "b", "main"]
    assert one.phase == "Succeeded"
    assert one.containers["s"].exit_code == 0


def test_an_init_container_that_fails_is_begun_again_or_ends_the_pod(tmp_path):
    init = (sidecar("s", LISTENS), container("a", "exit 4"))
    one = ran(pod(container("main", "true"), init=init), tmp_path / "1")
    assert (one.phase, one.reason) == ("Failed", "Init:Error: a")
    assert one.containers["main"].process is None
    assert lines(one, "s") == ["up", "told"]
    again = (container("a", "echo x >> /v/x; [ $(wc -l < /v/x) = 2 ]", **mounted("v", "/v")),)
    body = pod(container("main", "true"), init=again, volumes=[DISK], restartPolicy="OnFailure")
    one = ran(body, tmp_path / "2", backoff_s=0.01)
    assert (one.phase, one.containers["a"].restarts) == ("Succeeded", 1)


def test_a_sidecar_is_started_again_and_its_end_is_nobody_s(tmp_path):
    """GIVEN a sidecar that fails WHEN the main container ends well THEN so does the pod."""
    # (whether it has started is seen only while it runs)
    init = (sidecar("s", "sleep 0.3; echo x >> /v/x; exit 1", **mounted("v", "/v")),)
    main = container("main", "until [ $(wc -l < /v/x) -ge 3 ]; do sleep 0.02; done", **mounted("v", "/v"))
    one = ran(pod(main, init=init, volumes=[DISK]), tmp_path, backoff_s=0.01)
    assert one.phase == "Succeeded"
    assert one.containers["s"].restarts >= 2


def test_what_comes_after_a_sidecar_waits_for_its_probe(tmp_path):
    probe = {"exec": {"command": ["test", "-e", "/tmp/ready"]}}
    init = (
        sidecar(
            "s",
            "sleep 0.3; echo ready >> /v/x; touch /tmp/ready; exec sleep 60",
            startupProbe=probe,
            **mounted("v", "/v"),
        ),
    )
    body = pod(
        container("main", "cat /v/x", **mounted("v", "/v")), init=init, volumes=[DISK], terminationGracePeriodSeconds=0
    )
    assert lines(ran(body, tmp_path)) == ["ready"]


def test_sidecars_end_last_and_the_last_one_first(tmp_path):
    """GIVEN a pod that is deleted THEN its main container hears SIGTERM first, then its sidecars in reverse."""
    told = "trap 'echo {0} >> /v/x; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    init = tuple(sidecar(name, told.format(name), **mounted("v", "/v")) for name in ("s1", "s2"))
    hook = {"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /v/x"]}}}}
    main = container("main", told.format("main"), **mounted("v", "/v"), **hook)
    with running(pod(main, init=init, volumes=[DISK]), tmp_path / "pod") as one:
        one.until(lambda: all("up" in each.said for each in one.containers.values()), 30)
        order = one.volume("v") / "x"
        kept = tmp_path / "pod" / "volumes" / "v" / "x"
        assert not order.exists()
        one.delete()
        assert kept.read_text().split() == ["hook", "main", "s2", "s1"]
    assert one.phase == "Succeeded"


def test_whoever_does_not_listen_is_killed_when_its_time_is_over(tmp_path):
    """GIVEN the first process of a container that says nothing of SIGTERM THEN it does not hear it, and is killed."""
    main = container("main", "exec sleep 60")
    with running(pod(main, terminationGracePeriodSeconds=1), tmp_path / "pod") as one:
        one.until(lambda: one.containers["main"].running, 30)
        one.delete()
    assert one.containers["main"].exit_code == 128 + signal.SIGKILL
    assert one.phase == "Failed"


def test_nothing_of_a_pod_is_left(tmp_path):
    """GIVEN a container that leaves others behind, in process ids that are shared or not THEN all are gone with it."""
    for shared in (True, False):
        main = container("main", "setsid sleep 60 & setsid sleep 60 & echo up; exec sleep 60")
        body = pod(main, shareProcessNamespace=shared, terminationGracePeriodSeconds=0, volumes=[MEMORY])
        with running(body, tmp_path / f"pod-{shared}") as one:
            one.until(lambda one=one: "up" in one.said, 30)
            process = one.containers["main"].process
            assert process is not None
            one.until(lambda process=process: len(process.pids) == 3, 30)
        assert process.pids == []
        assert not any(str(tmp_path) in line for line in Path("/proc/mounts").read_text().splitlines())


def test_somebody_looks_into_a_container(tmp_path):
    main = container("main", "exec sleep 60", securityContext=AS, env=[{"name": "A", "value": "1"}])
    with running(pod(main), tmp_path / "pod") as one:
        one.until(lambda: one.containers["main"].running, 30)
        looks = ("sh", "-c", "echo $A $(id -u) $(hostname) $(cat /proc/1/comm)")
        # (it becomes its command some moments after it has begun)
        one.until(lambda: one.run("main", *looks).stdout.split() == ["1", str(UID), "pod-0", "sleep"], 30)


def test_the_programs_of_the_image_are_for_any_user(tmp_path):
    """GIVEN a user that this machine does not know THEN it runs sftriage and Python as they are installed here."""
    main = container("main", "sftriage --version && python -c 'import sftriage'", securityContext=AS)
    one = ran(pod(main), tmp_path)
    assert one.phase == "Succeeded", one.said


def test_pods_have_networks_of_their_own(tmp_path):
    """GIVEN pods in networks of their own THEN one reaches the other by its address alone."""
    serves = "import socket; s = socket.create_server(('', 7422)); c, _ = s.accept(); c.sendall(b'hello'); c.close()"
    asks = "import socket; print(socket.create_connection(('hub', 7422), 10).recv(5).decode())"
    with hosts_of(2) as hosts:
        one_place, other_place = (
            Place(f"node-{name}", address) for name, address in zip("ab", hosts.addresses, strict=True)
        )
        body = pod({"name": "main", "command": ["python", "-c", serves]})
        with running(body, tmp_path / "a", place=one_place, network=hosts.names[0]) as one:
            one.until(lambda: one.containers["main"].running, 30)
            listening = ["sh", "-c", "ss -ltn | grep -q 7422"]
            one.until(lambda: one.run("main", *listening).returncode == 0, 30)
            other = pod({"name": "main", "command": ["python", "-c", asks]})
            names = Objects(names={"hub": hosts.addresses[0]})
            asked = ran(other, tmp_path / "b", objects=names, place=other_place, network=hosts.names[1])
            assert lines(asked) == ["hello"]
            assert one.wait(30) == "Succeeded"
