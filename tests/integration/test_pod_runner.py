"""Pods of shell commands: what a kubelet makes of them, the pod runner has to."""

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
AS = {"runAsUser": UID, "runAsGroup": OTHER}
MEMORY = {"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
DISK = {"name": "v", "emptyDir": {}}
MOUNTED = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}


def container(name: str, script: str, **more: Any) -> dict[str, Any]:
    # (of two dollars Kubernetes leaves one)
    return {"name": name, "command": ["sh", "-c", script.replace("$$", "$$$$")], **more}


def sidecar(name: str, script: str) -> dict[str, Any]:
    return container(name, script, restartPolicy="Always", **MOUNTED)


def pod(*containers: Mapping[str, Any], init: tuple[Mapping[str, Any], ...] = (), **spec: Any) -> dict[str, Any]:
    metadata = {"name": "pod-0", "namespace": "ml", "uid": "7d", "labels": {"app": "x", "tier": "y"}}
    wanted = {"restartPolicy": "Never", "initContainers": list(init), "containers": list(containers), **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": wanted}


def ran(body: Mapping[str, Any], folder: Path, **more: Any) -> Pod:
    """A pod that has ended by itself."""
    with running(body, folder / "pod", **more) as one:
        one.wait(60)
    return one


def lines(one: Pod, name: str = "main") -> list[str]:
    return one.containers[name].said.splitlines()


IDENTITIES = {
    "nothing said: root, with what a runtime leaves to root": ({}, {}, f"0:0 {0xA80425FB:016x} 0"),
    "a user of the pod": (AS, {}, f"{UID}:{OTHER} {0:016x} 0"),
    "a container's own goes before it": (AS, {"runAsUser": OTHER}, f"{OTHER}:{OTHER} {0:016x} 0"),
    "root without any rights": ({}, {"capabilities": {"drop": ["ALL"]}}, f"0:0 {0:016x} 0"),
    "root with one": ({}, {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}, f"0:0 {1 << 19:016x} 0"),
    "no new ones": ({}, {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, f"0:0 {0:016x} 1"),
}


@pytest.mark.parametrize(("of_pod", "own", "expected"), IDENTITIES.values(), ids=IDENTITIES)
def test_whom_a_container_runs_as(tmp_path, of_pod, own, expected):
    script = "echo $(id -u):$(id -g) $(awk '/CapEff/{print $2} /NoNewPrivs/{print $2}' /proc/self/status)"
    one = ran(pod(container("main", script, securityContext=own), securityContext=of_pod), tmp_path)
    assert lines(one) == [expected]


def test_a_container_that_must_not_be_root_and_would_be_waits():
    body = pod(container("main", "id"), securityContext={"runAsNonRoot": True})
    with pytest.raises(NotYet, match="runAsNonRoot"):
        identity(body, {}, Objects())
    # BUT one whose image says another user is fine
    assert identity(body, {"image": "i"}, Objects(images={"i": Image(user=UID)})).uid == UID


def test_containers_have_processes_files_and_memory_of_their_own(tmp_path):
    """GIVEN two containers THEN neither sees what the other writes or runs, and this machine sees nothing of it."""
    other = container("other", "touch /there /tmp/there; touch /v/there; exec sleep 60", **MOUNTED)
    looks = (
        "until [ -e /v/there ]; do sleep 0.02; done; ls /there /tmp/there 2>/dev/null; pgrep -x sleep || echo nobody"
    )
    main = container("main", f"echo $$; touch /here /tmp/here /dev/shm/here /run/here; {looks}", **MOUNTED)
    with running(pod(main, other, volumes=[DISK]), tmp_path / "pod") as one:
        one.until(lambda: one.containers["main"].exit_code is not None, 30)
        assert one.containers["other"].running
    assert lines(one) == ["1", "nobody"]
    assert not any(Path(place, "here").exists() for place in ("/", "/tmp", "/dev/shm", "/run"))


ENDS = {
    "it ends well": ("Never", "exit 0", 0, "Succeeded"),
    "it fails": ("Never", "exit 3", 0, "Failed"),
    "it is killed": ("Never", "kill -9 $$", 0, "Failed"),
    "it fails twice and may try again": ("OnFailure", "echo x >> /v/x; [ $(wc -l < /v/x) = 3 ]", 2, "Succeeded"),
}


@pytest.mark.parametrize(("policy", "script", "restarts", "expected"), ENDS.values(), ids=ENDS)
def test_how_a_pod_ends(tmp_path, policy, script, restarts, expected):
    # (the first of a namespace cannot kill itself)
    body = pod(container("main", f"sh -c '{script}'", **MOUNTED), restartPolicy=policy, volumes=[DISK])
    one = ran(body, tmp_path, backoff_s=0.01)
    assert (one.phase, one.containers["main"].restarts) == (expected, restarts)


def test_init_containers_come_in_order_and_sidecars_end_last(tmp_path):
    """GIVEN init containers and sidecars THEN each waits for those before it, and a deleted pod ends in reverse."""
    listens = "echo {0} >> /v/x; trap 'echo {0} ends >> /v/x; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    waits = "until grep -q s1 /v/x; do sleep 0.02; done; echo b >> /v/x"
    init = (
        container("a", "sleep 0.2; echo a >> /v/x", **MOUNTED),
        sidecar("s1", listens.format("s1")),
        container("b", waits, **MOUNTED),
        sidecar("s2", f"until grep -q b /v/x; do sleep 0.02; done; {listens.format('s2')}"),
    )
    main = container("main", f"until grep -q s2 /v/x; do sleep 0.02; done; {listens.format('main')}", **MOUNTED)
    with running(pod(main, init=init, volumes=[DISK]), tmp_path / "pod") as one:
        one.until(lambda: "up" in one.containers["main"].said, 30)
        one.delete()
        kept = (tmp_path / "pod" / "volumes" / "v" / "x").read_text().splitlines()
    assert kept == ["a", "s1", "b", "s2", "main", "main ends", "s2 ends", "s1 ends"]
    assert one.phase == "Succeeded"


def test_nothing_of_a_pod_is_left(tmp_path):
    """GIVEN containers that leave others behind WHEN their time is over THEN all are killed.

    (The first process of a container hears SIGTERM only if it listens; with shared process ids it is not the first.)
    """
    for shared in (True, False):
        main = container("main", "setsid sleep 60 & setsid sleep 60 & echo up; exec sleep 60")
        body = pod(main, shareProcessNamespace=shared, terminationGracePeriodSeconds=1, volumes=[MEMORY])
        with running(body, tmp_path / f"pod-{shared}") as one:
            one.until(lambda one=one: "up" in one.said, 30)
            process = one.containers["main"].process
            assert process is not None
            one.until(lambda process=process: len(process.pids) == 3, 30)
            one.delete()
        number = signal.SIGTERM if shared else signal.SIGKILL
        assert (one.containers["main"].exit_code, one.phase) == (128 + number, "Failed")
        assert process.pids == []
        assert not any(str(tmp_path) in line for line in Path("/proc/mounts").read_text().splitlines())


def test_secrets_that_come_later_are_waited_for_or_appear(tmp_path):
    """GIVEN a key for a variable and an optional volume WHEN they come THEN it starts, and sees the volume change."""
    objects, context = Objects(), {**AS, "fsGroup": GROUP}
    needs = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a"}}}
    main = container("main", "echo $A; until grep -qs 2 /v/hub; do sleep 0.02; done; ls /v", env=[needs], **MOUNTED)
    volumes = [{"name": "v", "secret": {"secretName": "v", "optional": True, "defaultMode": 0o400}}]
    with running(pod(main, volumes=volumes, securityContext=context), tmp_path / "pod", objects=objects) as one:
        one.until(lambda: one.waiting["main"] == 'secret "s" not found', 30)
        objects.secrets["s"] = {"a": b"1"}
        one.until(lambda: "1" in one.said, 30)
        for value in (b"1", b"2"):
            objects.secrets["v"] = {"hub": value}
        assert one.wait(30) == "Succeeded"
    assert lines(one) == ["1", "hub"]


@pytest.mark.parametrize("volume", [MEMORY, DISK], ids=["memory", "disk"])
def test_containers_of_two_users_share_an_empty_volume(tmp_path, volume):
    """GIVEN a group of the pod THEN what one user makes there is of that group, and the other may read it."""
    script = "umask 027; echo hi > /v/x; mkdir /v/d; head -c 2M /dev/zero > /v/y; wc -c < /v/y"
    writes = container("w", script, securityContext={"runAsUser": UID}, **MOUNTED)
    reads = container("main", "cat /v/x; stat -c %g /v/d; stat -c %a /v", securityContext=AS, **MOUNTED)
    one = ran(pod(reads, init=(writes,), volumes=[volume], securityContext={"fsGroup": GROUP}), tmp_path)
    assert lines(one) == ["hi", str(GROUP), "2777"]
    # AND one in memory is no larger than it may be
    assert (int(lines(one, "w")[-1]) == 2 << 20) is (volume is DISK)


def test_a_part_of_a_volume_a_claim_and_a_root_that_is_read_only(tmp_path):
    (tmp_path / "kept").mkdir()
    mounts = [{"name": "v", "mountPath": "/v", "subPath": "a/b"}, {"name": "k", "mountPath": "/tmp"}]
    script = "touch /v/x /tmp/y; for one in / /run /etc; do touch $one/z 2>/dev/null || echo no; done"
    body = pod(
        container("main", script, volumeMounts=mounts, securityContext={"readOnlyRootFilesystem": True}),
        volumes=[DISK, {"name": "k", "persistentVolumeClaim": {"claimName": "kept"}}],
    )
    with running(body, tmp_path / "pod", objects=Objects(claims={"kept": str(tmp_path / "kept")})) as one:
        assert one.wait(30) == "Succeeded"
        assert lines(one) == ["no", "no", "no"]
    assert (tmp_path / "kept" / "y").exists()
    assert (tmp_path / "pod" / "volumes" / "v" / "a" / "b" / "x").exists()


def test_pods_have_networks_of_their_own(tmp_path):
    """GIVEN pods in networks of their own THEN one reaches the other by its address alone."""
    serves = "import socket; s = socket.create_server(('', 7422)); c, _ = s.accept(); c.sendall(b'hello'); c.close()"
    asks = "import socket; print(socket.create_connection(('hub', 7422), 10).recv(5).decode())"
    with hosts_of(2) as hosts:
        places = [Place(f"node-{name}", address) for name, address in zip("ab", hosts.addresses, strict=True)]
        body = pod({"name": "main", "command": ["python", "-c", serves]})
        with running(body, tmp_path / "a", place=places[0], network=hosts.names[0]) as one:
            one.until(lambda: one.containers["main"].running, 30)
            listening = ["sh", "-c", "ss -ltn | grep -q 7422"]
            one.until(lambda: one.run("main", *listening).returncode == 0, 30)
            other = pod({"name": "main", "command": ["python", "-c", asks]})
            names = Objects(names={"hub": hosts.addresses[0]})
            asked = ran(other, tmp_path / "b", objects=names, place=places[1], network=hosts.names[1])
            assert lines(asked) == ["hello"]
            assert one.wait(30) == "Succeeded"
