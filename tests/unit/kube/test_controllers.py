"""How a job's pods stand, and what that comes to. `test_kube_jobs` has a real server."""

from __future__ import annotations

import threading

import pytest

from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError, plural_of
from sftriage.kube.controllers import Controllers, JobPods, PodSeen, _deployed, pod_seen
from sftriage.kube.deploying import ControllerSettings
from sftriage.kube.jobs import JobRef
from sftriage.kube.settings import InjectionSettings

JOB = JobRef("job", "pretraining", "ml")
INJECTED = {"sftriage.dev/job-id": JOB.job_id, "sftriage.dev/status": "injected"}
LABELS = {"batch.kubernetes.io/job-name": "pretraining", "sftriage.dev/inject": "enabled"}


def pod(name="pretraining-0", *, annotations=INJECTED, labels=LABELS, phase="Running", version="1"):
    about = {"name": name, "namespace": "ml", "labels": labels, "annotations": annotations, "resourceVersion": version}
    return {"metadata": about, "spec": {"containers": []}, "status": {"phase": phase}}


SEEN = {
    "injected": (pod(), PodSeen("pretraining-0", JOB, True, True)),
    "missed": (pod(annotations={}), PodSeen("pretraining-0", JOB, False, True)),
    "ended": (pod(phase="Succeeded"), PodSeen("pretraining-0", JOB, True, False)),
    "failed": (pod(phase="Failed"), PodSeen("pretraining-0", JOB, True, False)),
    "of no job": (pod(annotations={}, labels={}), PodSeen("pretraining-0", None, False, True)),
    "an id that is none": (pod(annotations={"sftriage.dev/job-id": "x"}), PodSeen("pretraining-0", JOB, False, True)),
}


@pytest.mark.parametrize("case", SEEN.values(), ids=SEEN)
def test_what_matters_of_a_pod(case):
    body, expected = case
    assert pod_seen(body) == expected


STANDS = {
    "all have it": ((True, True), True, "True Injected"),
    "some have it": ((True, False), True, "False PartlyInjected"),
    "none has it": ((False, False), False, "False NotInjected"),
}


@pytest.mark.parametrize("case", STANDS.values(), ids=STANDS)
def test_how_a_job_s_pods_stand(case):
    injected, watched, told = case
    pods = {("labelled", f"p-{n}"): PodSeen(f"p-{n}", JOB, one, True) for n, one in enumerate(injected)}
    # (two watches see the same pod; one that has ended does not count)
    pods |= {("injected", name): one for (_, name), one in pods.items()}
    found = JobPods.of({**pods, ("labelled", "p-9"): PodSeen("p-9", JOB, False, False)})
    now = found.condition()
    assert (found.count, found.watched, f"{now.status} {now.reason}") == (2, watched, told)


class Server:
    """A server that has some pods; what is made is kept, and watches say nothing."""

    def __init__(self, pods) -> None:
        self.pods, self.kept, self.ended = pods, {}, threading.Event()

    def ask(self, method, path, body=None, *, as_="", **query):
        if method == "GET" and "limit" in query:
            items = self.pods if path == "/api/v1/pods" else []
            return {"items": items, "metadata": {"resourceVersion": "1"}}
        if method == "GET":
            if path.endswith("/jobs/pretraining"):
                return {"metadata": {"uid": "7d"}}
            if path not in self.kept:
                raise AnsweredError(NOT_FOUND, "none")
            return self.kept[path]
        if method == "DELETE":
            if self.kept.pop(path, None) is None:
                raise AnsweredError(NOT_FOUND, "none")
            return {}
        where = f"{path}/{body['metadata']['name']}"
        if where in self.kept:
            raise AnsweredError(STALE, "there already")
        self.kept[where] = body
        return body

    def apply(self, body, manager):
        self.kept[f"{plural_of(body['kind'])}/{body['metadata']['name']}"] = body

    def list(self, kind, namespace):
        return []

    def put_status(self, kind, body, status):
        body["status"] = status

    def watch(self, path, seconds, **query):
        self.ended.wait(20.0)
        yield from ()


@pytest.fixture
def looked():
    made = []

    def look(pods):
        server, told = Server(pods), threading.Event()
        clock = [0.0]
        found = Controllers(
            server, ControllerSettings(InjectionSettings()), lambda job: told.set(), grace_s=60.0, now=lambda: clock[0]
        )
        found.begin()
        made.append((server, found))
        assert told.wait(20.0)
        assert all(one.listed.wait(20.0) for one in found._watches)
        assert found.reconcile(JOB) is None
        return found, server, clock

    yield look
    for server, found in made:
        # (a watch that is only let go of lists and watches anew, as fast as it can)
        for one in found._watches:
            one.end()
        server.ended.set()
        for one in found._watches:
            assert one.end(20.0)


def kinds(server):
    return sorted(body["kind"] for body in server.kept.values())


def test_a_controller_is_made_for_injected_pods_and_goes_after_a_while_without(looked):
    found, server, clock = looked([pod()])
    assert kinds(server) == [
        *("ConfigMap", "Deployment", "NetworkPolicy", "RoleBinding", "Secret", "Service", "ServiceAccount"),
        "TriageReport",
    ]
    # WHEN its Deployment is seen, and its pods are gone THEN it stays for a while
    (deployment,) = (body for body in server.kept.values() if body["kind"] == "Deployment")
    found._deployment(None, _deployed(deployment))
    found._pod("labelled", pod_seen(pod()), None)
    found._pod("injected", pod_seen(pod()), None)
    assert found.reconcile(JOB) == 60.0
    clock[0] = 59.0
    assert found.reconcile(JOB) == 1.0
    # WHEN pods come back in time THEN it counts anew
    found._pod("injected", None, pod_seen(pod()))
    assert found.reconcile(JOB) is None
    found._pod("injected", pod_seen(pod()), None)
    clock[0] = 100.0
    assert found.reconcile(JOB) == 60.0


def test_pods_that_were_missed_get_a_report_and_no_controller(looked):
    _, server, _ = looked([pod(annotations={})])
    (report,) = server.kept.values()
    assert report["kind"] == "TriageReport"
    assert report["metadata"]["ownerReferences"][0]["uid"] == "7d"
    (one,) = report["status"]["conditions"]
    assert (one["type"], one["reason"]) == ("Injected", "NotInjected")
