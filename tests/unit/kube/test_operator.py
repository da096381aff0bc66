"""The operator writes statuses and deletes traces, whatever a namespace contains. `test_kube_operator` has a server."""

import asyncio
import logging
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from sftriage.errors import ClusterError, StoreError
from sftriage.kube import operator
from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError
from sftriage.kube.objects import POLICIES
from sftriage.kube.operator import RETRY_S, Reconciler, remove_trace
from sftriage.traces.remote import RemoteStore
from tests.unit.conftest import manifest_of
from tests.unit.kube.objects import NOW_S, made

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(operator, "_SETTLE_S", 0.01)
    monkeypatch.setattr(operator, "_PAUSE_S", 0.02)


class Answering:
    """A server that fails with prepared errors, one for each request, and then accepts everything."""

    def __init__(self, *, lists=(), writes=()) -> None:
        self.lists, self.writes, self.written = list(lists), list(writes), asyncio.Event()
        self.requests: list[str] = []

    def list(self, kind, namespace):
        self.requests.append(namespace)
        if namespace == "bad" and self.lists:
            raise self.lists.pop(0)
        return [made(kind.kind, namespace, {"rules": [{"name": "r", "match": {}}]})]

    def put_status(self, kind, body, status):
        if self.writes:
            raise self.writes.pop(0)
        if body["metadata"]["name"] == "bad":
            self.loop.call_soon_threadsafe(self.written.set)


def reconciled(server: Answering, *rounds: tuple[str, ...]) -> list[str]:
    """The requests until namespace ``bad`` has its statuses; a round begins when the errors before it are used up."""

    async def run() -> None:
        server.loop = asyncio.get_running_loop()
        reconciler = Reconciler(server)
        task = asyncio.create_task(reconciler.run())
        for number, namespaces in enumerate(rounds):
            while number and (server.writes or not server.requests):
                await asyncio.sleep(0)
            for namespace in namespaces:
                reconciler.enqueue(POLICIES.kind, namespace)
        await asyncio.wait_for(server.written.wait(), DEADLINE_S)
        assert not task.done()
        task.cancel()

    asyncio.run(run())
    return server.requests


ANSWERS = {
    "a cluster that cannot be reached": {"lists": [ClusterError("gone")]},
    "what nobody thought of": {"lists": [KeyError("spec")]},
    "a write that comes too late": {"writes": [AnsweredError(STALE, "modified")] * 2},
    "a status that is refused": {"writes": [AnsweredError(422, "invalid")] * 2},
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_a_failure_is_retried_and_delays_no_other_namespace(answers, caplog):
    caplog.set_level(logging.CRITICAL)
    requests = reconciled(Answering(**answers), ("bad", "good"))
    assert requests[:2] == ["bad", "good"]
    assert requests.count("bad") == 2


def test_an_object_that_is_gone_is_not_retried():
    server = Answering(writes=[AnsweredError(NOT_FOUND, "gone")])
    assert reconciled(server, ("good",), ("bad",)) == ["good", "bad"]


ID = "w100-149-r2-slow-rank-1"
REFERENCE = f"resnet/run-1/{ID}"


@pytest.fixture
def traces(tmp_path, store, trace) -> RemoteStore:
    manifest = store.put(ID, trace, lambda artefact: manifest_of(ID, artefact))
    place = tmp_path / "traces"
    place.mkdir()
    own = RemoteStore.open(str(place), job=manifest.job, run=manifest.run)
    for artefact in manifest.artefacts:
        own.put_artefact(ID, artefact, store.path(ID, artefact.name).read_bytes())
    own.put_manifest(manifest)
    return RemoteStore.open(str(place))


def deleted(place: str, reference: str = REFERENCE):
    stored = {"store": place, "reference": reference, "size_bytes": 7, "artefacts": []}
    spec = {"job": "resnet", "rank": 2, "reason": "why?"}
    return made("TraceCapture", "c", spec, {"stored": stored}, deletionTimestamp="2027-01-15T08:00:00Z")


def files(store: RemoteStore) -> list[Path]:
    return [path for path in Path(store.place.removeprefix("file://")).rglob("*") if path.is_file()]


def removal_of(traces: RemoteStore, *stores: str, reference: str = REFERENCE, **how: Any) -> tuple[str, str, float]:
    """What becomes of a deleted capture, as the operator with these stores decides; {place} stands for the trace's."""
    found = remove_trace(deleted(traces.place, reference), stores, NOW_S, **how)
    return "wait" if found.wait_s else "release", found.words.replace(traces.place, "{place}"), found.wait_s


def test_a_trace_is_deleted_completely_and_only_once(traces):
    assert len(files(traces)) == 2
    assert removal_of(traces, traces.place)[:2] == ("release", "Its trace in {place} is deleted.")
    assert files(traces) == []
    # WHEN the operator was killed before the object went THEN the next one releases it
    assert removal_of(traces, traces.place)[:2] == ("release", "Its trace is no longer in {place}.")


@pytest.mark.parametrize(("age_s", "action"), [(operator.FRESH_S - 1, "wait"), (operator.FRESH_S + 1, "release")])
def test_a_new_trace_that_comes_back_is_deleted_again(traces, age_s, action):
    """GIVEN a trace that its controller may be completing THEN the object stays until the trace stays away"""
    body, kept = deleted(traces.place), {path: path.read_bytes() for path in files(traces)}
    since = datetime.fromtimestamp(NOW_S - age_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    stored = {"type": "Stored", "status": "True", "reason": "Stored", "message": "x", "lastTransitionTime": since}
    body["status"]["conditions"] = [stored]
    for _ in range(2):
        found = remove_trace(body, [traces.place], NOW_S)
        assert ("wait" if found.wait_s else "release") == action
        assert files(traces) == []
        for path, data in kept.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    traces.remove(REFERENCE)
    assert remove_trace(body, [traces.place], NOW_S).wait_s == 0


def test_the_rest_of_an_interrupted_removal_is_deleted(traces):
    traces.withdraw(REFERENCE)
    assert len(files(traces)) == 1
    assert removal_of(traces, traces.place)[0] == "release"
    assert files(traces) == []


def test_a_pinned_trace_stays(traces):
    traces.pin(REFERENCE)
    assert removal_of(traces, traces.place)[:2] == ("release", "Its trace in {place} is pinned and stays.")
    assert traces.ids() == {REFERENCE}


@pytest.mark.parametrize("stores", [(), ("s3://elsewhere",)])
def test_nothing_is_deleted_in_a_store_that_the_operator_does_not_have(traces, stores):
    action, words, wait_s = removal_of(traces, *stores)
    assert (action, wait_s) == ("wait", RETRY_S)
    assert "is not a store of this operator (--store)" in words
    assert traces.ids() == {REFERENCE}


@pytest.mark.parametrize("reference", ["../../etc", "resnet/run-1", "resnet/../x", "", "a/b/c/d", "resnet/run-1/.."])
def test_a_reference_that_leads_elsewhere_deletes_nothing(traces, reference):
    assert removal_of(traces, traces.place, reference=reference)[0] == "wait"
    assert traces.ids() == {REFERENCE}


def test_an_unreachable_store_is_retried(traces):
    def unreachable(_url: str) -> RemoteStore:
        raise StoreError("s3://traces: connection refused")

    words = "Its trace in {place} cannot be deleted now: s3://traces: connection refused"
    assert removal_of(traces, traces.place, open_store=unreachable) == ("wait", words, RETRY_S)
