"""The objects of a namespace's controllers, and when they come and go. `test_kube_jobs` has a real server."""

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
from tests.integration.processes import wait_until
from tests.unit.kube.objects import KeptObjects
from tests.unit.kube.test_statuses import RULE, body

JOB = JobRef("job", "pretraining", "ml")
OLD = {"sftriage.dev/job-id": JOB.job_id, "sftriage.dev/status": "injected"}
INJECTED = {**OLD, "sftriage.dev/hub": "sftriage-hub"}
LABELS = {"batch.kubernetes.io/job-name": "pretraining", "sftriage.dev/inject": "enabled"}
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "pretraining", "uid": "7d"}


def pod(name="pretraining-0", *, annotations=INJECTED, labels=LABELS, owner=OWNER, version="1"):
    about = {"name": name, "namespace": "ml", "labels": labels, "annotations": annotations, "resourceVersion": version}
    return {"metadata": {**about, "ownerReferences": [owner]}}


def state(name="pretraining-0", job=JOB, uid="7d", *, injected=True, hub=True):
    return PodState(name, job, uid, injected, hub)


POD = ("ml", "pretraining-0")
SEEN = {
    "injected": (pod(), state()),
    "of an earlier version": (pod(annotations=OLD), state(hub=False)),
    "missed": (pod(annotations={}), state(injected=False, hub=False)),
    "of no job": (pod(annotations={}, labels={}), state(job=None, uid="", injected=False, hub=False)),
    "an id that is none": (pod(annotations={"sftriage.dev/job-id": "x"}), state(injected=False, hub=False)),
    "owned by another": (pod(owner={**OWNER, "kind": "ReplicaSet"}), state(uid="")),
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
    pods = [state(f"p-{n}", injected=one) for n, one in enumerate(injected)]
    # (two watches have the same pod)
    found = controllers.JobPods.of([*pods, *pods])
    now = found.condition()
    assert (found.count, found.watched, f"{now.status} {now.reason}") == (2, watched, told)


class Server(KeptObjects):
    def __init__(self, pods) -> None:
        super().__init__()
        self.pods, self.ended = pods, threading.Event()

    def answer(self, method, path, body, query):
        if path == "/api/v1/pods":
            return {"items": self.pods, "metadata": {"resourceVersion": "1"}}
        return super().answer(method, path, body, query)

    def watch(self, path, seconds, **query):
        self.ended.wait(20.0)
        yield from ()


@pytest.fixture
def looked():
    made = []

    def look(pods):
        server, told = Server(pods), set()
        clock = [0.0]
        times = {"grace_s": 60.0, "keep_s": 9e9, "now": lambda: clock[0]}
        settings = ControllerSettings(InjectionSettings())
        found = Controllers(server, settings, lambda kind, name: told.add((kind, name)), **times)
        found.begin()
        made.append((server, found))
        wait_until(lambda: {("Job", JOB.job_id), ("Namespace", "ml")} <= told)
        assert found.reconcile(JOB) is None
        # (the secret is there before the pods mount it; controllers take no quota that pods need)
        clock[0] = found.reconcile_namespace("ml")
        assert ("Secret" in kinds(server), "Deployment" in kinds(server)) == (clock[0] > 0, False)
        assert found.reconcile_namespace("ml") == 0.0
        clock[0] = 0.0
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


def one(server, kind):
    (found,) = (body for body in server.kept.values() if body["kind"] == kind)
    return found


def test_controllers_exist_while_pods_do_and_for_the_grace_period(looked):
    found, server, clock = looked([pod()])
    assert kinds(server) == [
        *("ConfigMap", "Deployment", "NetworkPolicy", "RoleBinding", "Secret", "Service", "ServiceAccount"),
        "TriageReport",
    ]
    # WHEN the pods are gone THEN the job has its controller for a while
    reports, deployments, _, labelled, injected, _ = found.watches

    def observe():
        reports._put(one(server, "TriageReport"))
        deployments._put(one(server, "Deployment"))

    observe()
    labelled._drop(POD)
    assert found.reconcile(JOB) is None
    injected._drop(POD)
    assert found.reconcile(JOB) == 60.0
    clock[0] = 59.0
    assert found.reconcile(JOB) == 1.0
    # WHEN pods come back in time THEN it counts anew
    labelled._put(pod())
    assert found.reconcile(JOB) is None
    labelled._drop(POD)
    clock[0] = 100.0
    assert found.reconcile(JOB) == 60.0
    # WHEN it is over THEN only the report stays, and all objects of the namespace go
    clock[0] = 160.0
    assert found.reconcile(JOB) is None
    observe()
    found.reconcile_namespace("ml")
    assert kinds(server) == ["TriageReport"]
    assert not one(server, "TriageReport")["metadata"]["labels"].get("sftriage.dev/watch")


def test_missed_pods_get_a_report_and_no_controller(looked):
    _, server, _ = looked([pod(annotations={})])
    (report,) = server.kept.values()
    assert report["kind"] == "TriageReport"
    assert report["metadata"]["ownerReferences"][0]["uid"] == "7d"
    assert "sftriage.dev/watch" not in report["metadata"]["labels"]
    (condition,) = report["status"]["conditions"]
    assert (condition["type"], condition["reason"]) == ("Injected", "NotInjected")


def test_nothing_is_written_where_all_is_in_place(looked):
    found, server, _ = looked([pod()])
    reports, deployments, *_ = found.watches
    reports._put(one(server, "TriageReport"))
    deployments._put(one(server, "Deployment"))
    version = server.version
    assert found.reconcile(JOB) is None
    found.reconcile_namespace("ml")
    assert server.version == version


SETTINGS = ControllerSettings(InjectionSettings(image="sftriage@sha256:12"))


def made(settings=SETTINGS, policies=None):
    return {one["kind"]: one for one in wanted("ml", settings, policies or {"a.yaml": "a"})}


NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)


def digest(found):
    return found["Deployment"]["metadata"]["annotations"][controllers.WANTED_ANNOTATION]


def test_all_that_is_made_is_labelled_and_removed():
    """THEN its Deployment goes last: by it the others are found"""
    secrets = [secret("ml", InjectionSettings(hub_tls=one), "x", NOW) for one in (False, True)]
    all_made, removed = (*wanted("ml", SETTINGS, {}), *secrets), controllers.removed()
    assert {each["metadata"]["labels"]["sftriage.dev/component"] for each in all_made} == {"controller"}
    names = {(each["apiVersion"], plural_of(each["kind"]), each["metadata"]["name"]) for each in all_made}
    assert names == set(removed)
    assert removed[-1] == ("apps/v1", "deployments", "sftriage")
    # AND of the controller of one job, as earlier versions had it, all is found by the job's name
    assert {name.removesuffix("-tls") for _, _, name in controllers.removed(JOB)} == {JOB.object_name}


def test_an_encrypted_hub_has_its_certificate_in_its_secret():
    """GIVEN hub_tls THEN one Secret, made once, has what the controllers serve by; agents get less of it"""
    said = InjectionSettings(hub_tls=True)
    found = secret("ml", said, "x", NOW)
    data = found["stringData"]
    assert set(data) == {"hub", "ca.pem", "cert.pem", "key.pem"}
    names = {"sftriage-hub.ml.svc", "127.0.0.1"}
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
    # AND a namespace whose Secret was made without is not left with that
    assert found["metadata"]["name"] != secret("ml", InjectionSettings(), "x", NOW)["metadata"]["name"]


def test_agents_find_the_hub():
    """THEN address, Secret and key of an agent are those of the namespace's hub, which admits injected pods"""
    (agent,) = (each for each in pod_parts(JOB, NEXT)["initContainers"] if each["name"] == "sftriage-agent")
    name, _, port = agent["command"][agent["command"].index("--hub") + 1].partition(":")
    about, spec = made()["Service"]["metadata"], made()["Service"]["spec"]
    assert (name, int(port)) == (f"{about['name']}.ml.svc", spec["ports"][0]["port"])
    (rule,) = made()["NetworkPolicy"]["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchExpressions"] == [{"key": "sftriage.dev/job", "operator": "Exists"}]


def test_the_digest_follows_all_objects_and_policies_restart_no_pod():
    first, again, other = made(), made(), made(policies={"a.yaml": "b"})
    assert digest(first) == digest(again) != digest(other)
    assert first["Deployment"]["spec"] == other["Deployment"]["spec"]


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


def test_a_pod_of_an_older_release_looks_for_the_hub_of_its_job(released):
    """GIVEN a pod of an older version THEN the controller of its job stays until the pod is gone"""
    observed = PodState.of(released)
    assert (observed.job, observed.injected, observed.hub) == (JOB, True, False)
    assert controllers.JobPods.of([observed]).old


def test_the_webhook_leaves_a_pod_of_an_older_release_unchanged(released):
    """GIVEN a job that `sftriage kube inject` of before has changed THEN the webhook of now adds nothing to its pods"""
    assert injection(released, JOB, NEXT, (1, 31)).patch == ()
