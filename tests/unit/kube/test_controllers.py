"""The objects of a job's controller, and when they come and go. `test_kube_jobs` has a real server."""

import threading
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml

from sftriage.kube import controllers
from sftriage.kube.client import plural_of
from sftriage.kube.controllers import Controllers, ControllerSettings, PodState, secret, wanted
from sftriage.kube.injecting import InjectionSettings, injection, pod_parts
from sftriage.kube.jobs import JobRef
from sftriage.kube.statuses import policy_states
from sftriage.kube.webhook import good_until
from sftriage.policy.parsing import parse
from tests.unit.kube.objects import KeptObjects
from tests.unit.kube.test_statuses import RULE, body

JOB = JobRef("job", "pretraining", "ml")
INJECTED = {"sftriage.dev/job-id": JOB.job_id, "sftriage.dev/status": "injected"}
LABELS = {"batch.kubernetes.io/job-name": "pretraining", "sftriage.dev/inject": "enabled"}


def pod(name="pretraining-0", *, annotations=INJECTED, labels=LABELS, phase="Running", version="1"):
    about = {"name": name, "namespace": "ml", "labels": labels, "annotations": annotations, "resourceVersion": version}
    return {"metadata": about, "spec": {"containers": []}, "status": {"phase": phase}}


POD = ("ml", "pretraining-0")
SEEN = {
    "injected": (pod(), PodState("pretraining-0", JOB, True, True)),
    "missed": (pod(annotations={}), PodState("pretraining-0", JOB, False, True)),
    "ended": (pod(phase="Succeeded"), PodState("pretraining-0", JOB, True, False)),
    "failed": (pod(phase="Failed"), PodState("pretraining-0", JOB, True, False)),
    "of no job": (pod(annotations={}, labels={}), PodState("pretraining-0", None, False, True)),
    "an id that is none": (pod(annotations={"sftriage.dev/job-id": "x"}), PodState("pretraining-0", JOB, False, True)),
}


@pytest.mark.parametrize("case", SEEN.values(), ids=SEEN)
def test_the_state_of_a_pod(case):
    body, expected = case
    assert PodState.of(body) == expected


STANDS = {
    "all have it": ((True, True), True, "True Injected"),
    "some have it": ((True, False), True, "False PartlyInjected"),
    "none has it": ((False, False), False, "False NotInjected"),
}


@pytest.mark.parametrize("case", STANDS.values(), ids=STANDS)
def test_the_injected_condition_of_a_job(case):
    injected, watched, told = case
    pods = [PodState(f"p-{n}", JOB, one, True) for n, one in enumerate(injected)]
    # (two watches have the same pod; one that has ended does not count)
    found = controllers.JobPods.of([*pods, *pods, PodState("p-9", JOB, False, False)])
    now = found.condition()
    assert (found.count, found.watched, f"{now.status} {now.reason}") == (2, watched, told)


class Server(KeptObjects):
    def __init__(self, pods) -> None:
        super().__init__()
        self.pods, self.ended = pods, threading.Event()

    def answer(self, method, path, body, query):
        if path == "/api/v1/pods":
            return {"items": self.pods, "metadata": {"resourceVersion": "1"}}
        if path.endswith("/jobs/pretraining"):
            return {"metadata": {"uid": "7d"}}
        return super().answer(method, path, body, query)

    def watch(self, path, seconds, **query):
        self.ended.wait(20.0)
        yield from ()


@pytest.fixture
def looked():
    made = []

    def look(pods):
        server, told = Server(pods), threading.Event()
        clock = [0.0]
        times = {"grace_s": 60.0, "keep_s": 9e9, "now": lambda: clock[0]}
        found = Controllers(server, ControllerSettings(InjectionSettings()), lambda job: told.set(), **times)
        found.begin()
        made.append((server, found))
        assert told.wait(20.0)
        assert all(one.listed.wait(20.0) for one in found.watches)
        assert found.reconcile(JOB) is None
        return found, server, clock

    yield look
    for server, found in made:
        # (a watch that is only let go of lists and watches anew, as fast as it can)
        for one in found.watches:
            one.end()
        server.ended.set()
        for one in found.watches:
            assert one.end(20.0)


def kinds(server):
    return sorted(body["kind"] for body in server.kept.values())


def test_a_controller_exists_while_pods_do_and_for_the_grace_period(looked):
    found, server, clock = looked([pod()])
    assert kinds(server) == [
        *("ConfigMap", "Deployment", "NetworkPolicy", "RoleBinding", "Secret", "Service", "ServiceAccount"),
        "TriageReport",
    ]
    # WHEN its Deployment is seen, and its pods are gone THEN it stays for a while
    (deployment,) = (body for body in server.kept.values() if body["kind"] == "Deployment")
    labelled, injected, deployments, _ = found.watches
    deployments._put(deployment)
    labelled._drop(POD)
    injected._drop(POD)
    assert found.reconcile(JOB) == 60.0
    clock[0] = 59.0
    assert found.reconcile(JOB) == 1.0
    # WHEN pods come back in time THEN it counts anew
    injected._put(pod())
    assert found.reconcile(JOB) is None
    injected._drop(POD)
    clock[0] = 100.0
    assert found.reconcile(JOB) == 60.0


def test_missed_pods_get_a_report_and_no_controller(looked):
    _, server, _ = looked([pod(annotations={})])
    (report,) = server.kept.values()
    assert report["kind"] == "TriageReport"
    assert report["metadata"]["ownerReferences"][0]["uid"] == "7d"
    (one,) = report["status"]["conditions"]
    assert (one["type"], one["reason"]) == ("Injected", "NotInjected")


SETTINGS = ControllerSettings(InjectionSettings(image="sftriage@sha256:12"))
OWNER = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "pretraining", "uid": "7d"}


def made(settings=SETTINGS, policies=None, owners=(OWNER,)):
    return {one["kind"]: one for one in wanted(JOB, settings, policies or {"a.yaml": "a"}, owners)}


NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)


def digest(found):
    return found["Deployment"]["metadata"]["annotations"][controllers.WANTED_ANNOTATION]


def test_the_job_owns_all_objects_and_all_are_removed():
    found = made()
    assert set(found) == {"ServiceAccount", "RoleBinding", "ConfigMap", "Service", "NetworkPolicy", "Deployment"}
    for one in found.values():
        about = one["metadata"]
        assert (about["name"], about["namespace"], about["ownerReferences"]) == (JOB.object_name, "ml", [OWNER])
        assert about["labels"]["sftriage.dev/job"] == JOB.object_name
    # AND all that is made is removed, the Deployment last: by it the others are found
    secrets = [secret(JOB, InjectionSettings(hub_tls=one), "x", NOW) for one in (False, True)]
    all_made, removed = (*wanted(JOB, SETTINGS, {}), *secrets), controllers.removed(JOB)
    assert {(one["apiVersion"], plural_of(one["kind"]), one["metadata"]["name"]) for one in all_made} == set(removed)
    assert removed[-1] == ("apps/v1", "deployments", JOB.object_name)


def test_an_encrypted_hub_has_its_certificate_in_its_secret():
    """GIVEN hub_tls THEN one Secret, made once, has what the controller serves by; agents get less of it"""
    said = InjectionSettings(hub_tls=True)
    found = secret(JOB, said, "x", NOW)
    data = found["stringData"]
    assert set(data) == {"hub", "ca.pem", "cert.pem", "key.pem"}
    names = {f"{JOB.object_name}.ml.svc", "127.0.0.1"}
    files = {"ca.crt": data["ca.pem"], "tls.crt": data["cert.pem"], "tls.key": data["key.pem"]}
    until = good_until({name: text.encode() for name, text in files.items()}, tuple(names))
    assert until is not None
    assert until.year >= 2036
    spec = made(ControllerSettings(said))["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"][-2:] == ["--tls", "/hub"]
    (hub,) = (one for one in pod_parts(JOB, said)["volumes"] if one["name"] == "sftriage-hub")
    assert {one["key"] for one in hub["secret"]["items"]} == {"hub", "ca.pem"}
    (served,) = (one for one in spec["volumes"] if one["name"] == "hub")
    assert served["secret"]["secretName"] == hub["secret"]["secretName"] == found["metadata"]["name"]
    # AND a job whose Secret was made without is not left with that
    assert found["metadata"]["name"] != secret(JOB, InjectionSettings(), "x", NOW)["metadata"]["name"]


def test_the_digest_follows_all_objects_and_policies_restart_no_pod():
    first, again, other = made(), made(), made(policies={"a.yaml": "b"})
    assert digest(first) == digest(again) != digest(other)
    assert first["Deployment"]["spec"] == other["Deployment"]["spec"]
    assert digest(made(owners=())) != digest(first)


def test_policies_in_force_become_ordered_files_or_the_default():
    old = body("z-old", {**RULE, "name": "one"}, created="2027-01-15T07:00:00Z")
    new = body("a-new", {**RULE, "name": "two"}, created="2027-01-15T08:00:00Z")
    conflicting = body("b", {**RULE, "name": "one"}, created="2027-01-15T09:00:00Z")
    found = controllers.policy_files(policy_states([conflicting, new, old], 0.0))
    assert list(found) == ["000-z-old.yaml", "001-a-new.yaml"]
    assert [parse(text, name).policy.metadata.name for name, text in found.items()] == ["z-old", "a-new"]
    default = controllers.policy_files(policy_states([], 0.0))
    assert [parse(text, name).policy.metadata.name for name, text in default.items()] == ["default"]


NEXT = InjectionSettings(image="registry.example.com/sftriage:next", store="s3://traces", store_secret="s3")
RELEASED = sorted(Path(__file__).parent.glob("injected-*.yaml"))
"""One of each release; the next one adds its own."""


@pytest.fixture(params=RELEASED, ids=lambda path: path.stem)
def released(request):
    return yaml.safe_load(request.param.read_text())


def test_agents_of_an_old_pod_find_the_new_hub(released):
    """GIVEN a pod of before WHEN the controller is one of now THEN address, Secret and key are those its agent has"""
    observed = PodState.of(released)
    assert (observed.job, observed.injected) == (JOB, True)
    made = {one["kind"]: one for one in wanted(JOB, ControllerSettings(NEXT), {})}
    held = secret(JOB, NEXT, "x", datetime(2027, 1, 15, tzinfo=timezone.utc))
    (agent,) = (one for one in released["spec"]["initContainers"] if one["name"] == "sftriage-agent")
    command = agent["command"]
    name, _, port = command[command.index("--hub") + 1].partition(":")
    about = made["Service"]["metadata"]
    assert (name, int(port)) == (f"{about['name']}.ml.svc", made["Service"]["spec"]["ports"][0]["port"])
    (volume,) = (one for one in released["spec"]["volumes"] if one["name"] == "sftriage-hub")
    assert volume["secret"]["secretName"] == held["metadata"]["name"]
    assert command[command.index("--creds") + 1].rpartition("/")[2] in held["stringData"]
    assert command[command.index("--job-id") + 1] == JOB.job_id

    (rule,) = made["NetworkPolicy"]["spec"]["ingress"]
    labels = rule["from"][0]["podSelector"]["matchLabels"]
    assert labels.items() <= released["metadata"]["labels"].items()


def test_the_webhook_leaves_a_pod_of_an_older_release_unchanged(released):
    """GIVEN a job that `sftriage kube inject` of before has changed THEN the webhook of now adds nothing to its pods"""
    assert injection(released, JOB, NEXT, (1, 31)).patch == ()
