"""A run's captures and report as objects of a cluster: later where it is away, and never at triage's expense."""

import logging
import time
from collections import Counter
from dataclasses import replace

import pytest

from sftriage.kube.client import STALE, AnsweredError
from sftriage.kube.jobs import JobRef
from sftriage.kube.mirror import Mirror, Mirrored
from sftriage.kube.objects import capture_of
from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest, Trigger
from sftriage.model.events import CaptureChanged, ManualRequestDecided
from sftriage.runs.decisions import request_row, row_of
from sftriage.runs.directory import RunInfo
from sftriage.runs.source import View
from sftriage.runtime.triage import requests_in
from sftriage.traces.store import Upload
from tests.integration.processes import wait_until as until
from tests.scenario import Recorder, decision, request_of, verdict
from tests.unit.conftest import manifest_of
from tests.unit.kube.objects import NOW_S, KeptObjects, made, refused

JOB = JobRef("jobset", "resnet", "ml")
INFO = RunInfo("run-1", "resnet", "2026-03-01T00:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")
STORE = "s3://traces/team"
UID = "0b9a1c2d-0000-4000-8000-000000000001"
ASKED = {"job": "resnet", "rank": 2, "reason": "why is\nthe loader slow?"}


def fired(profiler="torch", label="suspect", capture_id="c-1"):
    of = verdict(100, "suspect", onset=120)
    why = Trigger(100, 149, label, "rank", (2,), "data", 0.02, 0.3, 0.9, "default", "cd" * 32, "slow-rank", why="slow")
    asked = replace(request_of(capture_id), profiler=profiler)
    return row_of(of, decision(of, "capture", "rule_matched", requests=(asked,)), {capture_id: why})


def run(*rows, **about) -> Mirrored:
    return Mirrored(JOB, View("1", **{"info": INFO, "going": True, "rows": rows, **about}))


def served(body, status=None):
    kept = {name: body["metadata"][name] for name in ("labels", "annotations")}
    return made("TraceCapture", body["metadata"]["name"], body["spec"], status, **kept)


def by_person(status=None, **about):
    return made("TraceCapture", "look", ASKED, status, uid=UID, **about)


def answered(outcome, reason, *requests):
    manual = ManualRequest(f"k8s-{UID}", (2,), "jane", "why?")
    return request_row(ManualRequestDecided(manual, decision(verdict(100), outcome, reason, requests=requests)))


@pytest.mark.parametrize("text", ["", "ml", "ml/jobset", "ml/jobset/", "/jobset/x", "ml/nothing/x"])
def test_an_invalid_id_is_refused(text):
    with pytest.raises(ValueError, match="not NAMESPACE/SYSTEM/NAME"):
        JobRef.of_id(text)


@pytest.mark.parametrize(
    ("profiler", "label"), [("torch", "suspect"), ("nsys", "suspect"), ("stacks", "suspect"), ("stacks", "stalled")]
)
def test_a_policy_s_capture_becomes_a_valid_object(profiler, label):
    ((capture_id, body),) = run(fired(profiler, label)).new(())
    assert capture_id == "c-1"
    assert refused("TraceCapture", "spec", body["spec"]) == ""
    spec, wrong = capture_of(body)
    assert (wrong, spec.job, spec.rank, spec.profiler) == ("", "resnet", 2, profiler)
    assert (spec.trigger.policy, spec.trigger.rule, spec.trigger.stage) == ("default", "slow-rank", "data")
    assert (spec.trigger.first_step, spec.trigger.last_step, spec.trigger.gain_s) == (100, 149, 0.02)
    # AND it is its job's, and nobody owns it
    assert body["metadata"]["labels"] == {"sftriage.dev/job": JOB.object_name}
    assert "ownerReferences" not in body["metadata"]
    assert len(body["metadata"]["name"]) <= 253


def test_objects_of_two_runs_have_different_names():
    other = run(fired(), info=replace(INFO, run_id="run-2"))
    ((_, first),), ((_, second),) = run(fired()).new(()), other.new(())
    assert first["metadata"]["name"] != second["metadata"]["name"]


FAR = {
    "requested": (None, "", None),
    "running": ("running", "", None),
    "here alone": ("stored", "", None),
    "on its way": ("stored", "uploading", None),
    "in the store": ("stored", "stored", "resnet/run-1/c-1"),
    "failed": ("failed", "", None),
}


@pytest.mark.parametrize(("state", "upload", "reference"), FAR.values(), ids=FAR)
def test_the_state_of_a_mirrored_capture(state, upload, reference):
    about = {} if state is None else {"states": {"c-1": CaptureResult("c-1", 2, state, "why")}}
    about |= {"captures": (manifest_of("c-1"),)} if state == "stored" else {}
    about |= {"uploads": {"c-1": Upload(url=STORE, state=upload)}} if upload else {}
    seen = run(fired(), info=replace(INFO, store=STORE), **about)
    ((_, body),) = seen.new(())
    ((_, status),) = seen.statuses([served(body)], NOW_S)
    assert refused("TraceCapture", "status", status) == ""
    assert (status["state"], status.get("stored", {}).get("reference")) == (state or "accepted", reference)
    # AND once it is written, nothing is left to be written
    assert list(seen.statuses([served(body, status)], NOW_S + 60)) == []


@pytest.mark.parametrize(
    ("state", "now"), [(None, "failed"), ("running", "failed"), ("stored", None), ("failed", None)]
)
def test_an_unended_capture_of_another_run_has_failed(state, now):
    """GIVEN the object of a run whose record is gone with its pod THEN it does not stay as it was for ever."""
    ((_, body),) = run(fired()).new(())
    before = served(body, None if state is None else {"state": state})
    found = list(run(info=replace(INFO, run_id="run-2")).statuses([before], NOW_S))
    assert [status["state"] for _, status in found] == ([] if now is None else [now])


def test_a_person_s_capture_becomes_a_request_to_the_run():
    (request,) = run().requests([by_person()])
    assert (request.request_id, request.ranks, request.who) == (f"k8s-{UID}", (2,), "unknown")
    assert request.reason == "why is the loader slow?"
    named = {**ASKED, "requested_by": {"username": "jane"}, "profiler": "torch", "torch": {"record_shapes": True}}
    (request,) = run().requests([made("TraceCapture", "look", named, uid=UID)])
    assert (request.who, request.profiler, request.options) == ("jane", "torch", {"torch": {"record_shapes": True}})


NOT_ASKED = {
    "one that makes no sense": made("TraceCapture", "look", {"job": "resnet"}, uid=UID),
    "one that is being deleted": by_person(deletionTimestamp="2027-01-15T07:30:00Z"),
    "one that was refused": by_person({"state": "refused"}),
    "one that has ended": by_person({"state": "stored"}),
    "one of a policy": served(next(run(fired()).new(()))[1]),
}


@pytest.mark.parametrize("body", NOT_ASKED.values(), ids=NOT_ASKED)
def test_these_captures_are_not_requested(body):
    assert list(run().requests([body])) == []


def test_the_answer_to_a_request_is_in_its_object():
    request = CaptureRequest("asked-1", 2, "stacks", 5, 0, 60.0, 2**29)
    taken = run(requests=(answered("capture", "asked", request),))
    assert list(taken.requests([by_person()])) == []
    ((_, status),) = taken.statuses([by_person()], NOW_S)
    assert status["state"] == "accepted"
    # AND is no object besides
    assert list(taken.new(())) == []
    # WHEN it is refused THEN it says why
    no = run(requests=(answered("throttle", "captures_per_run"),))
    ((_, status),) = no.statuses([by_person()], NOW_S)
    assert status["state"] == "refused"
    assert status["detail"]
    # WHEN a run that has lost the record of it finds it THEN it has failed
    ((_, status),) = run().statuses([by_person({"state": "running"})], NOW_S)
    assert status["state"] == "failed"
    # AND one that nobody has taken up is left alone
    assert list(run().statuses([by_person()], NOW_S)) == []


def test_a_report_belongs_to_its_job():
    body = JOB.report([{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "resnet", "uid": "1"}])
    assert body["metadata"]["name"] == JOB.object_name
    assert body["metadata"]["annotations"] == {"sftriage.dev/job-id": "ml/jobset/resnet"}
    assert body["metadata"]["ownerReferences"][0]["kind"] == "JobSet"
    assert "ownerReferences" not in JOB.metadata()


DEADLINE_S = 20.0


class Server(KeptObjects):
    """A server that refuses some writes as too late, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.stale, self.made, self.looks = Counter(), Counter(), 0

    def answer(self, method, path, body, query):
        self.looks += method == "GET" and "limit" not in query and "triagereports" in path
        found = super().answer(method, path, body, query)
        if method == "POST":
            self.made[body["kind"]] += 1
        return found

    def put_status(self, kind, body, status):
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


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    for name, value in (("PASS_S", 0.01), ("AT_LEAST_S", 0.05), ("REPORT_S", 0.05), ("_LONGEST_PAUSE_S", 0.05)):
        monkeypatch.setattr(f"sftriage.kube.mirror.{name}", value)
    monkeypatch.setattr("sftriage.kube.client._PAUSE_S", 0.01)


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


def test_changes_during_an_outage_are_mirrored_later(server, run, mirror):
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


def test_an_unreachable_cluster_does_not_delay_the_end(server, run, mirror):
    server.away = True
    assert not mirror.finish(0.1)


def test_a_stale_write_is_repeated(server, run, mirror):
    server.stale.update({"TraceCapture": 2, "TriageReport": 2})
    fire(run)
    until(lambda: states(server) == ["accepted"])
    until(lambda: server.of("triagereports")[0].get("status", {}).get("windows") == 1)


def test_a_deleted_capture_is_not_recreated_after_a_restart(server, run, mirror):
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


def test_a_request_is_forwarded_once_and_answered(server, run, mirror):
    run.record(4, range(10), lambda rank, step: {"data": 10.0})
    about = {"name": "look", "uid": "u-1", "generation": 1, "labels": {"sftriage.dev/job": JOB.object_name}}
    spec = {"job": "resnet", "rank": 2, "reason": "why?"}
    server.create({"apiVersion": "sftriage.dev/v1alpha1", "kind": "TraceCapture", "metadata": about, "spec": spec})
    ((path, request),) = until(lambda: requests_in(run.directory))
    assert (request.request_id, request.ranks, request.reason) == ("k8s-u-1", (2,), "why?")
    # WHEN it was taken up, and its answer is not there yet THEN it is not left again
    path.unlink()
    looks = server.looks
    until(lambda: server.looks > looks + 5)
    assert not requests_in(run.directory)
    journal = Recorder(run.directory.decisions)
    manual = ManualRequest("k8s-u-1", (2,), "somebody", "why?")
    journal.append(
        ManualRequestDecided(manual, decision(verdict(100), "capture", "asked", requests=(request_of("asked-1"),)))
    )
    journal.capture(CaptureResult("asked-1", 2, "running"))
    journal.close()
    until(lambda: states(server) == ["running"])
    assert len(server.of("tracecaptures")) == 1
