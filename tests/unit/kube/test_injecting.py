"""From a pod to what makes it one that sftriage watches."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube.injecting import Injection, applied, injection, version_of
from sftriage.kube.jobs import JobRef, job_of
from sftriage.kube.sidecar import SITE, InjectionSettings
from sftriage.words.kube import MAX_CHARS
from tests.unit.kube.pods import JOBS, pod

NEW, SETTINGS = (1, 31), InjectionSettings(image="registry.example.com/sftriage:1")
JOB = JobRef("jobset", "resnet", "ml")
PODS = {name: body for name, (body, found) in JOBS.items() if found is not None}
USERS: dict[str, dict[str, Any]] = {
    "any user": {},
    "root": {"securityContext": {"runAsUser": 0}},
    "not root": {"securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 1000}},
}


def injected(body: dict[str, Any], settings: InjectionSettings = SETTINGS, job: JobRef = JOB) -> dict[str, Any]:
    """A pod as it comes out."""
    return applied(body, injection(body, job, settings, NEW).patch)


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
@pytest.mark.parametrize("body", PODS.values(), ids=PODS)
def test_a_pod_of_any_job_is_injected_once(body, user):
    """GIVEN a pod as its controller makes it WHEN it goes through twice THEN it is as after once, and complete."""
    body = copy.deepcopy(body)
    body["spec"] |= user
    found = job_of(body, "ml")
    once = injection(body, found.job, SETTINGS, NEW)
    assert once.warnings == ()
    assert {operation["op"] for operation in once.patch} == {"add"}
    out = applied(body, once.patch)
    assert out == jsonpatch.apply_patch(body, list(once.patch))
    assert job_of(out, "ml") == found
    assert injection(out, found.job, SETTINGS, NEW) == Injection()
    assert out["metadata"]["labels"]["sftriage.dev/job"] == found.job.object_name
    assert out["metadata"]["annotations"]["sftriage.dev/status"] == "injected"
    assert out["metadata"]["annotations"]["sftriage.dev/job-id"] == found.job.job_id
    carry, agent = out["spec"]["initContainers"]
    assert (carry["name"], agent["name"]) == ("sftriage-carry", "sftriage-agent")
    assert agent["restartPolicy"] == "Always"
    assert "restartPolicy" not in carry
    (trains,) = out["spec"]["containers"]
    assert env(trains)["PYTHONPATH"] == SITE
    assert env(trains)["SFTRIAGE_HOST"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}
    mounts = {one["name"] for one in trains["volumeMounts"]}
    assert mounts == {"sftriage", "sftriage-rings", "sftriage-spool"}
    assert f"{found.job.object_name}.ml.svc:7422" in agent["command"]


@pytest.mark.parametrize(
    ("of_pod", "of_settings", "expected"),
    [(None, None, None), (0, None, 65532), (1000, None, None), (0, 7, 7), (1000, 7, 7)],
)
def test_our_containers_are_restricted_whoever_the_trainer_is(of_pod, of_settings, expected):
    """GIVEN a pod whose user is root THEN ours are not, and where it is not, ours are the same or the image's."""
    context = {} if of_pod is None else {"securityContext": {"runAsUser": of_pod}}
    out = injected(pod(**context), SETTINGS.model_copy(update={"run_as_user": of_settings}))
    for container in out["spec"]["initContainers"]:
        security = container["securityContext"]
        assert security.get("runAsUser") == expected
        assert security["runAsNonRoot"] is security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    # AND what the pod says of its own users stays
    assert out["spec"].get("securityContext") == context.get("securityContext")
    assert "securityContext" not in out["spec"]["containers"][0]
    assert env(out["spec"]["containers"][0])["SFTRIAGE_FILE_MODE"] == "0666"


PATHS = {
    "none": ({}, SITE),
    "one of its own": ({"env": [{"name": "PYTHONPATH", "value": "/app:/lib"}]}, f"{SITE}:/app:/lib"),
    "an empty one": ({"env": [{"name": "PYTHONPATH", "value": ""}]}, SITE),
    "one without a value": ({"env": [{"name": "PYTHONPATH"}]}, SITE),
    "the later of two": (
        {"env": [{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}]},
        f"{SITE}:/b",
    ),
    "ours": ({"env": [{"name": "PYTHONPATH", "value": f"/mine:{SITE}"}]}, f"/mine:{SITE}"),
    "perhaps one of a ConfigMap": ({"envFrom": [{"configMapRef": {"name": "c"}}]}, f"{SITE}:$(PYTHONPATH)"),
    "no list": ({"env": None}, SITE),
}


@pytest.mark.parametrize(("said", "expected"), PATHS.values(), ids=PATHS)
def test_our_folder_comes_first_on_the_path_and_the_others_stay(said, expected):
    body = pod()
    body["spec"]["containers"][0] |= copy.deepcopy(said)
    out = injected(body)
    assert env(out["spec"]["containers"][0])["PYTHONPATH"] == expected
    assert injection(out, JOB, SETTINGS, NEW).patch == ()


def test_the_path_of_an_image_is_kept_where_a_person_says_what_it_is():
    out = injected(pod(annotations={"sftriage.dev/image-pythonpath": "/workspace"}))
    assert env(out["spec"]["containers"][0])["PYTHONPATH"] == f"{SITE}:/workspace"


def test_containers_that_are_named_are_watched_and_the_others_left():
    body = pod(annotations={"sftriage.dev/containers": "train, second"})
    body["spec"]["containers"] += [{"name": "proxy"}, {"name": "second"}]
    before = copy.deepcopy(body["spec"]["containers"][1])
    out = injected(body)
    assert out["spec"]["containers"][1] == before
    assert all(env(out["spec"]["containers"][index])["SFTRIAGE_RINGS"] == "/sftriage-rings" for index in (0, 2))


def test_a_container_that_another_webhook_adds_later_is_watched_too():
    out = injected(pod())
    out["spec"]["containers"].append({"name": "late"})
    again = injected(out)
    assert env(again["spec"]["containers"][1])["PYTHONPATH"] == SITE
    assert [one["name"] for one in again["spec"]["initContainers"]] == ["sftriage-carry", "sftriage-agent"]


def test_what_init_containers_there_are_come_first():
    out = injected(pod(initContainers=[{"name": "fetch", "image": "x"}]))
    assert [one["name"] for one in out["spec"]["initContainers"]] == ["fetch", "sftriage-carry", "sftriage-agent"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_pod_with_cores_of_its_own_keeps_them(whole):
    """GIVEN containers that ask for all that they may take THEN so do ours; else the node may not pin its cores."""
    body = pod()
    limits = {"cpu": "8", "memory": "64Gi"}
    body["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": limits if whole else {"cpu": "1"}}
    for container in injected(body)["spec"]["initContainers"]:
        resources = container["resources"]
        assert (resources["requests"] == resources["limits"]) is whole
        assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory"}


def test_stacks_from_outside_are_for_those_who_ask_for_them():
    out = injected(pod(annotations={"sftriage.dev/share-process-namespace": "true"}))
    assert out["spec"]["shareProcessNamespace"] is True
    carry, agent = (one["securityContext"] for one in out["spec"]["initContainers"])
    assert agent["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert carry["capabilities"] == {"drop": ["ALL"]}
    assert "shareProcessNamespace" not in injected(pod())["spec"]


@pytest.mark.parametrize(("of_pod", "expected"), [(None, 65532), (0, 65532), (1000, None)])
def test_ranks_start_under_nsys_in_pods_that_ask_for_it(of_pod, expected):
    """GIVEN an image with nsys, which may be root's THEN it is copied from by somebody else, and ranks start armed."""
    context = {} if of_pod is None else {"securityContext": {"runAsUser": of_pod}}
    out = injected(pod(annotations={"sftriage.dev/nsys": "example.com/nsys:1"}, **context))
    nsys, carry, agent = out["spec"]["initContainers"]
    assert (nsys["name"], nsys["image"]) == ("sftriage-nsys", "example.com/nsys:1")
    assert nsys["securityContext"].get("runAsUser") == expected
    assert {"--nsys", "--nsys-armed", "/sftriage-spool/nsys/range"} <= set(carry["command"])
    (trains,) = out["spec"]["containers"]
    for container in (trains, agent):
        assert {"name": "sftriage-nsys", "mountPath": "/sftriage-nsys", "readOnly": True} in container["volumeMounts"]
    assert env(trains)["PYTHON_EXEC"] == env(trains)["SFTRIAGE_NSYS_RANK"] == "/sftriage/nsys-rank"
    assert injection(out, JOB, SETTINGS, NEW) == Injection()
    assert "sftriage-nsys" not in {one["name"] for one in injected(pod())["spec"]["volumes"]}


def test_a_python_of_its_own_that_torchrun_is_told_of_stays_and_is_said():
    body = pod(None, {"PYTHON_EXEC": "/opt/python"}, annotations={"sftriage.dev/nsys": "example.com/nsys:1"})
    found = injection(body, JOB, SETTINGS, NEW)
    assert found.warnings == ("sftriage: container train: PYTHON_EXEC is set already, and stays",)
    assert env(applied(body, found.patch)["spec"]["containers"][0])["PYTHON_EXEC"] == "/opt/python"


def test_a_store_and_a_hub_of_the_cluster_are_taken_by_reference():
    settings = SETTINGS.model_copy(
        update={"store": "s3://traces", "store_secret": "s3", "nats": "tls://nats:4222", "nats_secret": "keys"}
    )
    out = injected(pod(), settings)
    agent = out["spec"]["initContainers"][1]
    assert agent["envFrom"] == [{"secretRef": {"name": "s3", "optional": True}}]
    assert {"--store", "s3://traces", "--nats", "tls://nats:4222", "/sftriage-hub/agents.nk"} <= set(agent["command"])
    (hub,) = [one for one in out["spec"]["volumes"] if one["name"] == "sftriage-hub"]
    keys = [{"key": "agents.nk", "path": "agents.nk"}]
    assert hub["secret"] == {"secretName": "keys", "items": keys, "optional": True}


ALONE = {
    "a job that nobody knows": (pod(), None, NEW, "sftriage.dev/job-name"),
    "a server that has not told its version": (pod(), JOB, None, "version is not known yet"),
    "a server without sidecars": (pod(), JOB, (1, 28), "Kubernetes 1.28 has no sidecars that end with their pod"),
    "Windows, by its system": (pod(os={"name": "windows"}), JOB, NEW, "Windows"),
    "Windows, by its node": (pod(nodeSelector={"kubernetes.io/os": "windows"}), JOB, NEW, "Windows"),
    "no containers": ({"spec": {"containers": None}}, JOB, NEW, "no containers"),
    "nothing at all": ({}, JOB, NEW, "no containers"),
    "a container that is not there": (
        pod(annotations={"sftriage.dev/containers": "trainer"}),
        JOB,
        NEW,
        "names trainer, and there is no such container",
    ),
    "a path from elsewhere": (
        {
            "spec": {
                "containers": [{"name": "a", "env": [{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {}}}]}]
            }
        },
        JOB,
        NEW,
        "PYTHONPATH of a comes from elsewhere",
    ),
    "a volume of somebody else's of that name": (
        pod(volumes=[{"name": "sftriage", "hostPath": {"path": "/"}}]),
        JOB,
        NEW,
        "sftriage is there already",
    ),
    "a place that is taken": (
        {"spec": {"containers": [{"name": "a", "volumeMounts": [{"name": "v", "mountPath": "/sftriage-rings/"}]}]}},
        JOB,
        NEW,
        "/sftriage-rings is there already",
    ),
    "a container of that name": ({"spec": {"containers": [{"name": "sftriage-agent"}]}}, JOB, NEW, "sftriage-agent is"),
}


@pytest.mark.parametrize(("body", "job", "server", "said"), ALONE.values(), ids=ALONE)
def test_a_pod_that_cannot_be_handled_is_left_alone_with_a_warning(body, job, server, said):
    found = injection(body, job, SETTINGS, server)
    assert found.patch == ()
    (warning,) = found.warnings
    assert warning.startswith("sftriage: not injected: ")
    assert said in warning


def test_a_container_whose_path_comes_from_elsewhere_is_left_and_the_others_are_watched():
    body = pod()
    body["spec"]["containers"].append({"name": "b", "env": [{"name": "PYTHONPATH", "valueFrom": {"secretKeyRef": {}}}]})
    found = injection(body, JOB, SETTINGS, NEW)
    assert found.warnings == (
        "sftriage: container b: PYTHONPATH comes from elsewhere, and cannot be added to; not watched",
    )
    out = applied(body, found.patch)
    assert out["spec"]["containers"][1] == body["spec"]["containers"][1]


WARNED = {
    "rings of its own": ({"SFTRIAGE_RINGS": "/dev/shm/mine"}, {}, "SFTRIAGE_RINGS is set already"),
    "a node's network without the cluster's names": ({}, {"hostNetwork": True}, "ClusterFirstWithHostNet"),
    "a node's network with them": ({}, {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, None),
}


@pytest.mark.parametrize(("variables", "spec", "said"), WARNED.values(), ids=WARNED)
def test_what_will_not_work_is_said(variables, spec, said):
    found = injection(pod(None, variables, **spec), JOB, SETTINGS, NEW)
    assert found.patch
    assert (said is None) == (found.warnings == ())
    assert said is None or said in found.warnings[0]


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ({"major": "1", "minor": "29"}, (1, 29)),
        ({"major": "1", "minor": "27+"}, (1, 27)),
        ({"major": "", "minor": ""}, None),
        ({}, None),
    ],
)
def test_the_version_of_a_server_is_read_as_it_is_told(told, version):
    assert version_of(told) == version


_TEXT = st.sampled_from(["", "a", "b", "PYTHONPATH", "SFTRIAGE_RINGS", "/app", "sftriage", SITE])
_VARIABLE = st.fixed_dictionaries({"name": _TEXT}, optional={"value": _TEXT, "valueFrom": st.just({"fieldRef": {}})})


def _some(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(inner, max_size=3)


_CONTAINER = st.fixed_dictionaries(
    {"name": _TEXT},
    optional={
        "env": _some(_VARIABLE),
        "envFrom": _some(st.just({"configMapRef": {"name": "c"}})),
        "volumeMounts": _some(st.fixed_dictionaries({"name": _TEXT, "mountPath": _TEXT})),
        "resources": st.none() | st.just({"limits": {"cpu": "1", "memory": "1Gi"}}),
    },
)
_SPEC = st.fixed_dictionaries(
    {"containers": _some(_CONTAINER)},
    optional={
        "initContainers": _some(_CONTAINER),
        "volumes": _some(st.fixed_dictionaries({"name": _TEXT, "emptyDir": st.just({})})),
        "securityContext": st.none() | st.just({"runAsUser": 0}),
        "hostNetwork": st.booleans(),
        "shareProcessNamespace": st.none() | st.booleans(),
        "os": st.none() | st.just({"name": "linux"}),
    },
)
_TEXTS = st.none() | st.dictionaries(_TEXT, _TEXT, max_size=2)
_METADATA = st.none() | st.fixed_dictionaries({}, optional={"labels": _TEXTS, "annotations": _TEXTS})
_POD = st.fixed_dictionaries({"spec": _SPEC}, optional={"metadata": _METADATA})


def kept(before: Any, after: Any, path: str = "") -> bool:
    """Whether all that was there is there as it was; of PYTHONPATH, behind ours."""
    if isinstance(before, dict):
        if before.get("name") == "PYTHONPATH" and path.split("/")[-2:-1] == ["env"]:
            return str(after.get("value") or "").endswith(before.get("value") or "")
        return all(name in after and kept(value, after[name], f"{path}/{name}") for name, value in before.items())
    if isinstance(before, list):
        pairs = zip(before, after, strict=False)
        return len(before) <= len(after) and all(kept(*pair, f"{path}/{at}") for at, pair in enumerate(pairs))
    return before is None or before == after


@given(_POD)
def test_nothing_that_is_there_is_changed_and_twice_is_once(body):
    before = copy.deepcopy(body)
    found = injection(body, JOB, SETTINGS, NEW)
    assert body == before
    assert all(operation["op"] == "add" for operation in found.patch)
    out = applied(body, found.patch)
    assert out == jsonpatch.apply_patch(body, list(found.patch))
    assert kept(body, out)
    again = injection(out, JOB, SETTINGS, NEW)
    assert again.patch == ()
    assert all(len(warning) <= MAX_CHARS for warning in found.warnings)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(_ANY, _ANY, _ANY, _ANY)
def test_whatever_a_pod_is_nothing_is_raised(metadata, spec, one, other):
    for body in (
        {"metadata": metadata, "spec": spec},
        {"metadata": {"labels": one, "annotations": other}, "spec": {"containers": [{"name": "a", "env": one}]}},
        {"spec": {"containers": one, "initContainers": other, "volumes": metadata}},
        {"spec": {"containers": [{"name": one, "volumeMounts": other, "resources": metadata}]}},
    ):
        injection(body, JOB, SETTINGS, NEW)
