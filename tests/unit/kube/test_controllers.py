"""How a job's pods stand, and what that comes to. `test_kube_jobs` has a real server."""

from __future__ import annotations

import threading

import pytest

from sftriage.kube.controllers import Controllers, ControllerSettings, Deployed, JobPods, PodState
from sftriage.kube.jobs import JobRef
from sftriage.kube.sidecar import InjectionSettings
from tests.unit.kube.objects import KeptObjects

JOB = JobRef("job", "pretraining", "ml")
INJECTED = {"sftriage.dev/job-id": JOB.job_id, "sftriage.dev/status": "injected"}
LABELS = {"batch.kubernetes.io/job-name": "pretraining", "sftriage.dev/inject": "enabled"}


def pod(name="pretraining-0", *, annotations=INJECTED, labels=LABELS, phase="Running", version="1"):
    about = {"name": name, "namespace": "ml", "labels": labels, "annotations": annotations, "resourceVersion": version}
    return {"metadata": about, "spec": {"containers": []}, "status": {"phase": phase}}


SEEN = {
    "injected": (pod(), PodState("pretraining-0", JOB, True, True)),
    "missed": (pod(annotations={}), PodState("pretraining-0", JOB, False, True)),
    "ended": (pod(phase="Succeeded"), PodState("pretraining-0", JOB, True, False)),
    "failed": (pod(phase="Failed"), PodState("pretraining-0", JOB, True, False)),
    "of no job": (pod(annotations={}, labels={}), PodState("pretraining-0", None, False, True)),
    "an id that is none": (pod(annotations={"sftriage.dev/job-id": "x"}), PodState("pretraining-0", JOB, False, True)),
}


@pytest.mark.parametrize("case", SEEN.values(), ids=SEEN)
def test_what_matters_of_a_pod(case):
    body, expected = case
    assert PodState.of(body) == expected


STANDS = {
    "all have it": ((True, True), True, "True Injected"),
    "some have it": ((True, False), True, "False PartlyInjected"),
    "none has it": ((False, False), False, "False NotInjected"),
}


@pytest.mark.parametrize("case", STANDS.values(), ids=STANDS)
def test_how_a_job_s_pods_stand(case):
    injected, watched, told = case
    pods = {("labelled", f"p-{n}"): PodState(f"p-{n}", JOB, one, True) for n, one in enumerate(injected)}
    # (two watches see the same pod; one that has ended does not count)
    pods |= {("injected", name): one for (_, name), one in pods.items()}
    found = JobPods.of({**pods, ("labelled", "p-9"): PodState("p-9", JOB, False, False)})
    now = found.condition()
    assert (found.count, found.watched, f"{now.status} {now.reason}") == (2, watched, told)


class Server(KeptObjects):
    """A server that has some pods, and a job; watches say nothing."""

    def __init__(self, pods) -> None:
        super().__init__()
        self.pods, self.ended = pods, threading.Event()

    def answer(self, method, path, body, query):
        if path == "/api/v1/pods":
            return {"items": self.pods, "metadata": {"resourceVersion": "1"}}
        if path.endswith("/jobs/pretraining"):
            return {"metadata": {"uid": "7d"}}
        return super().answer(method, path, body, query)

    def list(self, kind, namespace):
        return []

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
    found._deployment(None, Deployed.of(deployment))
    found._pod("labelled", PodState.of(pod()), None)
    found._pod("injected", PodState.of(pod()), None)
    assert found.reconcile(JOB) == 60.0
    clock[0] = 59.0
    assert found.reconcile(JOB) == 1.0
    # WHEN pods come back in time THEN it counts anew
    found._pod("injected", None, PodState.of(pod()))
    assert found.reconcile(JOB) is None
    found._pod("injected", PodState.of(pod()), None)
    clock[0] = 100.0
    assert found.reconcile(JOB) == 60.0


def test_pods_that_were_missed_get_a_report_and_no_controller(looked):
    _, server, _ = looked([pod(annotations={})])
    (report,) = server.kept.values()
    assert report["kind"] == "TriageReport"
    assert report["metadata"]["ownerReferences"][0]["uid"] == "7d"
    (one,) = report["status"]["conditions"]
    assert (one["type"], one["reason"]) == ("Injected", "NotInjected")
