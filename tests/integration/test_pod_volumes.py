"""What pods find in their environment and their volumes: as a kubelet has it, the pod runner has to."""

from __future__ import annotations

import pytest

from tests.integration.pod_container import missing
from tests.integration.pod_runner import running
from tests.integration.pod_spec import Image, Objects, Place, expanded, quantity
from tests.integration.test_pod_runner import AS, DISK, GROUP, MEMORY, UID, container, lines, mounted, pod, ran

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

VALUES = {
    "a value": ({"value": "x"}, "x"),
    "one that names another": ({"value": "<$(FIRST)>"}, "<1>"),
    "one that names none": ({"value": "$(NONE)"}, "$(NONE)"),
    "one that is escaped": ({"value": "$$(FIRST)"}, "$(FIRST)"),
    "a name": ({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, "pod-0"),
    "a label": ({"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}}, "x"),
    "a node": ({"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, "node-b"),
    "an address": ({"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, "10.0.0.9"),
    "a secret": ({"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, "hidden"),
    "a secret that may be away": ({"valueFrom": {"secretKeyRef": {"name": "z", "key": "k", "optional": True}}}, "-"),
    "a config map": ({"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}, "shown"),
    "a limit": ({"valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}}, "64"),
}


@pytest.mark.parametrize(("source", "expected"), VALUES.values(), ids=VALUES)
def test_what_is_in_the_environment(tmp_path, source, expected):
    objects = Objects(secrets={"s": {"k": b"hidden"}}, config_maps={"c": {"k": b"shown"}})
    variables = [{"name": "FIRST", "value": "1"}, {"name": "IT", **source}]
    main = container("main", 'echo "${IT--}"', env=variables, resources={"limits": {"memory": "64Mi"}})
    one = ran(pod(main), tmp_path, objects=objects, place=Place("node-b", "10.0.0.9"))
    assert lines(one) == [expected]


def test_commands_name_variables_too_and_images_say_what_is_not_said(tmp_path):
    objects = Objects(images={"i": Image(entrypoint=("echo", "$(A)"), environment={"A": "1"})})
    env_from = [{"prefix": "P_", "configMapRef": {"name": "c"}}]
    objects.config_maps["c"] = {"B": b"2"}
    main = {"name": "main", "image": "i", "args": ["$(P_B)", "$(HOME)"], "envFrom": env_from}
    assert lines(ran(pod(main), tmp_path, objects=objects)) == ["1 2 $(HOME)"]
    assert expanded("$(A)$(A)", {"A": "$(A)"}) == "$(A)$(A)"
    assert [quantity(text) for text in ("1", "64Mi", "1.5Gi", "500m")] == [1, 64 * 2**20, 1.5 * 2**30, 0.5]


def test_what_it_needs_and_is_not_there_is_waited_for(tmp_path):
    """GIVEN a secret that is to be mounted and a key that is to be a variable WHEN they come THEN it starts."""
    objects = Objects()
    needs = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a"}}}
    main = container("main", "echo $A; cat /s/b", env=[needs], **mounted("s", "/s"))
    body = pod(main, volumes=[{"name": "s", "secret": {"secretName": "s"}}])
    with running(body, tmp_path / "pod", objects=objects) as one:
        one.until(lambda: one.waiting["main"] == 'secret "s" not found', 30)
        objects.secrets["s"] = {"b": b"2"}
        one.until(lambda: "couldn't find key a" in one.waiting["main"], 30)
        objects.secrets["s"] = {"a": b"1", "b": b"2"}
        assert one.wait(30) == "Succeeded"
    assert lines(one) == ["1", "2"]


def test_an_optional_secret_that_comes_later_appears_whole(tmp_path):
    """GIVEN an optional secret that is away THEN the pod starts, and sees it once it is there, and its changes."""
    objects = Objects()
    script = (
        "until [ -e /s/hub ]; do sleep 0.02; done; cat /s/hub; until grep -q 2 /s/hub; do sleep 0.02; done; echo; ls /s"
    )
    volumes = [{"name": "s", "secret": {"secretName": "s", "optional": True, "defaultMode": 0o400}}]
    context = {**AS, "fsGroup": GROUP}
    with running(
        pod(container("main", script, **mounted("s", "/s")), volumes=volumes, securityContext=context),
        tmp_path / "pod",
        objects=objects,
    ) as one:
        one.until(lambda: one.containers["main"].running, 30)
        objects.secrets["s"] = {"hub": b"1"}
        one.until(lambda: "1" in one.said, 30)
        objects.secrets["s"] = {"hub": b"2"}
        assert one.wait(30) == "Succeeded"
    assert lines(one) == ["1", "hub"]


@pytest.mark.parametrize(("group", "expected"), [(None, "denied"), (GROUP, "secret")])
def test_a_secret_of_root_alone_is_read_by_the_pod_s_own_group(tmp_path, group, expected):
    context = {**AS, **({"fsGroup": group} if group else {})}
    volumes = [{"name": "s", "secret": {"secretName": "s", "defaultMode": 0o400}}]
    main = container("main", "cat /s/k 2>/dev/null || echo denied", **mounted("s", "/s"))
    objects = Objects(secrets={"s": {"k": b"secret"}})
    assert lines(ran(pod(main, volumes=volumes, securityContext=context), tmp_path, objects=objects)) == [expected]


def test_projected_volumes_and_the_downward_api(tmp_path):
    sources = [
        {"configMap": {"name": "c", "items": [{"key": "k", "path": "in/side"}]}},
        {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]
    main = container(
        "main", "cat /v/in/side /v/labels; touch /v/x 2>/dev/null || echo no", **mounted("v", "/v", readOnly=True)
    )
    body = pod(main, volumes=[{"name": "v", "projected": {"sources": sources}}])
    one = ran(body, tmp_path, objects=Objects(config_maps={"c": {"k": b"shown\n"}}))
    assert lines(one) == ["shown", 'app="x"', 'tier="y"', "no"]


def test_a_service_account_is_mounted_unless_the_pod_does_not_want_it(tmp_path):
    objects, script = Objects(account={"token": b"t"}), "cat /var/run/secrets/kubernetes.io/serviceaccount/token || :"
    assert lines(ran(pod(container("main", script)), tmp_path / "1", objects=objects)) == ["t"]
    body = pod(container("main", script), automountServiceAccountToken=False)
    assert "No such file" in ran(body, tmp_path / "2", objects=objects).said


@pytest.mark.parametrize("volume", [MEMORY, DISK], ids=["memory", "disk"])
def test_containers_of_two_users_share_an_empty_volume(tmp_path, volume):
    """GIVEN a group of the pod THEN what one user makes there is of that group, and the other may read it."""
    writes = container(
        "w", "umask 027; echo hi > /v/x; mkdir /v/d", securityContext={"runAsUser": UID}, **mounted("v", "/v")
    )
    reads = container("main", "cat /w/x; stat -c %g /w/d; stat -c %a /w", securityContext=AS, **mounted("v", "/w"))
    body = pod(reads, init=(writes,), volumes=[volume], securityContext={"fsGroup": GROUP})
    assert lines(ran(body, tmp_path)) == ["hi", str(GROUP), "2777"]


def test_a_volume_in_memory_is_no_larger_than_it_may_be(tmp_path):
    fills = container("main", "head -c 2M /dev/zero > /v/x || wc -c < /v/x", **mounted("v", "/v"))
    one = ran(pod(fills, volumes=[MEMORY]), tmp_path)
    assert lines(one)[-1] == str(2**20)


def test_a_pod_that_fills_a_volume_on_disk_is_evicted(tmp_path):
    fills = container("main", "head -c 2M /dev/zero > /v/x; exec sleep 60", **mounted("v", "/v"))
    one = ran(
        pod(fills, volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}], terminationGracePeriodSeconds=0), tmp_path
    )
    assert (one.phase, one.reason) == ("Failed", 'Evicted: Usage of EmptyDir volume "v" exceeds the limit "1Mi".')


def test_a_part_of_a_volume_a_claim_and_a_root_that_is_read_only(tmp_path):
    (tmp_path / "kept").mkdir()
    mounts = [
        {"name": "v", "mountPath": "/v", "subPath": "a/b"},
        {"name": "k", "mountPath": "/tmp"},
    ]
    script = "touch /v/x /tmp/y; for one in / /run /etc; do touch $one/z 2>/dev/null || echo no; done"
    context = {"readOnlyRootFilesystem": True}
    body = pod(
        container("main", script, volumeMounts=mounts, securityContext=context),
        volumes=[DISK, {"name": "k", "persistentVolumeClaim": {"claimName": "kept"}}],
    )
    with running(body, tmp_path / "pod", objects=Objects(claims={"kept": str(tmp_path / "kept")})) as one:
        assert one.wait(30) == "Succeeded"
        assert lines(one) == ["no", "no", "no"]
    assert (tmp_path / "kept" / "y").exists()
    assert (tmp_path / "pod" / "volumes" / "v" / "a" / "b" / "x").exists()
