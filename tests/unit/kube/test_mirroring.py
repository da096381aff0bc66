"""What a cluster is shown of a run: later, where it is away, and never at triage's expense."""

from __future__ import annotations

import logging
import time
from collections import Counter

import pytest

from sftriage.errors import ClusterError
from sftriage.kube import client
from sftriage.kube import mirror as mirroring
from sftriage.kube.client import STALE, AnsweredError
from sftriage.kube.jobs import JobRef
from sftriage.kube.mirror import Mirror
from sftriage.model.captures import CaptureResult, ManualRequest
from sftriage.model.events import CaptureChanged, ManualRequestDecided
from sftriage.runs.requests import left
from tests.scenario import Recorder, decision, request_of, verdict
from tests.unit.kube.objects import KeptObjects

JOB = JobRef("jobset", "resnet", "ml")
DEADLINE_S = 20.0


class Server(KeptObjects):
    """A server that is away when it is told to, and refuses some writes as too late."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.refused, self.stale = False, 0, Counter()
        self.made, self.looks = Counter(), 0

    def answer(self, method, path, body, query):
        self._check()
        self.looks += method == "GET" and "limit" not in query and "triagereports" in path
        found = super().answer(method, path, body, query)
        if method == "POST":
            self.made[body["kind"]] += 1
        return found

    def apply(self, body, manager):
        self._check()
        return super().apply(body, manager)

    def put_status(self, kind, body, status):
        self._check()
        if self.stale[kind.kind]:
            self.stale[kind.kind] -= 1
            raise AnsweredError(STALE, "modified")
        super().put_status(kind, body, status)

    def watch(self, path, seconds, **query):
        time.sleep(0.01)
        # (all is listed again)
        raise AnsweredError(410, "too old")
        yield

    def create(self, body):
        with self.lock:
            about = {**body["metadata"], "namespace": "ml"}
            where = f"/apis/sftriage.dev/v1alpha1/namespaces/ml/tracecaptures/{about['name']}"
            self.keep(where, {**body, "metadata": about})

    def drop(self, name):
        with self.lock:
            del self.kept[f"/apis/sftriage.dev/v1alpha1/namespaces/ml/tracecaptures/{name}"]

    def of(self, plural):
        with self.lock:
            return [one for where, one in self.kept.items() if f"/{plural}/" in where]

    def _check(self):
        if self.away:
            self.refused += 1
            raise ClusterError("away")


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    for name, value in (("LOOK_S", 0.01), ("AT_LEAST_S", 0.05), ("REPORT_S", 0.05), ("_LONGEST_PAUSE_S", 0.05)):
        monkeypatch.setattr(mirroring, name, value)
    monkeypatch.setattr(client, "_PAUSE_S", 0.01)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def mirror(server, run):
    made = Mirror(server, JOB)
    made.follow(run.directory)
    made.begin()
    yield made
    made.finish(0.0)


def until(what):
    end_s = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < end_s, what
        time.sleep(0.01)
    return found


def fire(run, capture_id="c-1"):
    run.record(4, range(10), lambda rank, step: {"data": 10.0})
    run.decide(verdict(100, "suspect", onset=120), "capture", "rule_matched", requests=(request_of(capture_id),))


def states(server):
    return [one.get("status", {}).get("state") for one in server.of("tracecaptures")]


def test_a_capture_and_a_report_follow_the_run(server, run, mirror):
    until(lambda: [one for one in server.of("triagereports") if "status" in one])
    fire(run)
    until(lambda: states(server) == ["accepted"])
    run.ended(CaptureResult("c-1", 2, "failed", "no kernels"))
    until(lambda: states(server) == ["failed"])
    until(lambda: server.of("triagereports")[0]["status"]["captures_total"] == 1)
    assert until(lambda: {one["reason"] for one in server.of("events")}) <= {"Suspect", "Captured", "CaptureFailed"}
    assert server.made == {"TraceCapture": 1, "TriageReport": 1}


def test_what_happened_while_the_cluster_was_away_is_shown_later(server, run, mirror):
    until(lambda: server.of("triagereports"))
    server.away = True
    # WHEN the run goes on THEN whoever tells of it waits for nothing
    fire(run)
    mirror.take(CaptureChanged(1.0, CaptureResult("c-1", 2, "running")))
    refused = server.refused
    until(lambda: server.refused > refused + 3)
    assert states(server) == []
    # WHEN the cluster is back THEN it is shown
    server.away = False
    until(lambda: states(server) == ["accepted"])


def test_a_cluster_that_stays_away_keeps_nobody_from_ending(server, run, mirror):
    server.away = True
    assert not mirror.finish(0.1)


def test_who_comes_too_late_writes_again(server, run, mirror):
    server.stale.update({"TraceCapture": 2, "TriageReport": 2})
    fire(run)
    until(lambda: states(server) == ["accepted"])
    until(lambda: server.of("triagereports")[0].get("status", {}).get("windows") == 1)


def test_what_somebody_deleted_is_not_made_again_by_whoever_goes_on(server, run, mirror):
    fire(run)
    (one,) = until(lambda: server.of("tracecaptures"))
    until((run.directory.path / "cluster.json").exists)
    server.drop(one["metadata"]["name"])
    assert mirror.finish(DEADLINE_S)
    # WHEN another process goes on with the run
    other = Mirror(server, JOB)
    other.follow(run.directory)
    other.begin()
    fire(run, "c-2")
    until(lambda: len(server.of("tracecaptures")) == 1)
    assert other.finish(DEADLINE_S)
    annotations = [one["metadata"]["annotations"] for one in server.of("tracecaptures")]
    assert [one["sftriage.dev/capture-id"] for one in annotations] == ["c-2"]


def test_a_person_s_request_is_left_once_and_answered(server, run, mirror):
    run.record(4, range(10), lambda rank, step: {"data": 10.0})
    about = {"name": "look", "uid": "u-1", "generation": 1, "labels": {"sftriage.dev/job": JOB.object_name}}
    spec = {"job": "resnet", "rank": 2, "reason": "why?"}
    server.create({"apiVersion": "sftriage.dev/v1alpha1", "kind": "TraceCapture", "metadata": about, "spec": spec})
    ((path, request),) = until(lambda: left(run.directory))
    assert (request.request_id, request.ranks, request.reason) == ("k8s-u-1", (2,), "why?")
    # WHEN it was taken up, and its answer is not there yet THEN it is not left again
    path.unlink()
    looks = server.looks
    until(lambda: server.looks > looks + 5)
    assert not left(run.directory)
    journal = Recorder(run.directory.decisions)
    manual = ManualRequest("k8s-u-1", (2,), "somebody", "why?")
    journal.append(
        ManualRequestDecided(manual, decision(verdict(100), "capture", "asked", requests=(request_of("asked-1"),)))
    )
    journal.capture(CaptureResult("asked-1", 2, "running"))
    journal.close()
    until(lambda: states(server) == ["running"])
    assert len(server.of("tracecaptures")) == 1
