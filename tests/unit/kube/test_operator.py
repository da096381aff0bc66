"""The operator writes statuses and deletes traces, whatever a namespace contains. `test_kube_operator` has a server."""

import asyncio
import logging
from pathlib import Path

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
    """A server whose answers are given, one for each request; then it takes what it is given."""

    def __init__(self, *, lists=(), writes=()) -> None:
        self.lists, self.writes, self.written = list(lists), list(writes), asyncio.Event()
        self.asked: list[str] = []

    def list(self, kind, namespace):
        self.asked.append(namespace)
        if namespace == "bad" and self.lists:
            raise self.lists.pop(0)
        return [made(kind.kind, namespace, {"rules": [{"name": "r", "match": {}}]})]

    def put_status(self, kind, body, status):
        if self.writes:
            raise self.writes.pop(0)
        if body["metadata"]["name"] == "bad":
            self.loop.call_soon_threadsafe(self.written.set)


ANSWERS = {
    "a cluster that cannot be reached": {"lists": [ClusterError("gone")]},
    "what nobody thought of": {"lists": [KeyError("spec")]},
    "a write that comes too late": {"writes": [AnsweredError(STALE, "modified")] * 2},
    "a status that is refused": {"writes": [AnsweredError(422, "invalid")] * 2},
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_what_fails_is_tried_again_and_keeps_no_other_waiting(answers, caplog):
    caplog.set_level(logging.CRITICAL)

    async def reconciled() -> list[str]:
        server = Answering(**answers)
        server.loop = asyncio.get_running_loop()
        reconciler = Reconciler(server)
        for namespace in ("bad", "good"):
            reconciler.look(POLICIES.kind, namespace)
        task = asyncio.create_task(reconciler.run())
        await asyncio.wait_for(server.written.wait(), DEADLINE_S)
        assert not task.done()
        task.cancel()
        return server.asked

    asked = asyncio.run(reconciled())
    assert asked[:2] == ["bad", "good"]
    assert asked.count("bad") == 2


def test_what_has_gone_meanwhile_is_not_tried_again():
    async def asked() -> list[str]:
        server = Answering(writes=[AnsweredError(NOT_FOUND, "gone")])
        server.loop = asyncio.get_running_loop()
        reconciler = Reconciler(server)
        reconciler.look(POLICIES.kind, "good")
        task = asyncio.create_task(reconciler.run())
        while not server.asked or server.writes:
            await asyncio.sleep(0)
        reconciler.look(POLICIES.kind, "bad")
        await asyncio.wait_for(server.written.wait(), DEADLINE_S)
        task.cancel()
        return server.asked

    assert asyncio.run(asked()) == ["good", "bad"]


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


def test_a_trace_is_deleted_whole_and_once(traces):
    body = deleted(traces.place)
    assert len(files(traces)) == 2
    found = remove_trace(body, {traces.place}, NOW_S)
    assert (found.action, found.words) == ("release", f"Its trace in {traces.place} is deleted.")
    assert files(traces) == []
    # WHEN the object is still there, for the operator was killed just then THEN that is no reason to hold it
    again = remove_trace(body, {traces.place}, NOW_S)
    assert (again.action, again.words) == ("release", f"Its trace is no longer in {traces.place}.")


def test_what_a_removal_left_that_was_cut_short_goes_too(traces):
    traces.withdraw(REFERENCE)
    assert len(files(traces)) == 1
    assert remove_trace(deleted(traces.place), {traces.place}, NOW_S).action == "release"
    assert files(traces) == []


def test_a_pinned_trace_stays(traces):
    traces.pin(REFERENCE)
    found = remove_trace(deleted(traces.place), {traces.place}, NOW_S)
    assert (found.action, found.words) == ("release", f"Its trace in {traces.place} is pinned and stays.")
    assert traces.ids() == {REFERENCE}


@pytest.mark.parametrize("allowed", [set(), {"s3://elsewhere"}])
def test_nothing_is_deleted_in_a_store_that_the_operator_was_not_given(traces, allowed):
    found = remove_trace(deleted(traces.place), allowed, NOW_S)
    assert (found.action, found.wait_s) == ("wait", RETRY_S)
    assert "is not a store of this operator (--store)" in found.words
    assert traces.ids() == {REFERENCE}


@pytest.mark.parametrize("reference", ["../../etc", "resnet/run-1", "resnet/../x", "", "a/b/c/d", "resnet/run-1/.."])
def test_a_reference_that_leads_elsewhere_deletes_nothing(traces, reference):
    found = remove_trace(deleted(traces.place, reference), {traces.place}, NOW_S)
    assert found.action == "wait"
    assert traces.ids() == {REFERENCE}


def test_a_store_that_cannot_be_reached_is_tried_again(traces):
    def unreachable(_url: str) -> RemoteStore:
        raise StoreError("s3://traces: connection refused")

    found = remove_trace(deleted(traces.place), {traces.place}, NOW_S, unreachable)
    assert (found.action, found.wait_s) == ("wait", RETRY_S)
    assert found.words == f"Its trace in {traces.place} cannot be deleted now: s3://traces: connection refused"
