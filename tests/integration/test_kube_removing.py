"""Deleting a TraceCapture deletes its trace, or says why not: an operator on a real API server, whose store is real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import RemoteStore
from tests.integration.kube import Cluster, missing, prepared
from tests.integration.kube_captures import CAPTURE_ID, captured, stored_trace
from tests.integration.kube_operators import Operators
from tests.integration.processes import wait_until

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SOON_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with prepared("crds", "rbac") as one:
        yield one


@pytest.fixture
def operator(server, tmp_path, namespace) -> Iterator[Operators]:
    with contextlib.closing(Operators(server, tmp_path, namespace)) as found:
        yield found


@pytest.fixture
def traces(tmp_path) -> tuple[RemoteStore, Manifest]:
    """A store that hosts share, with one capture, and its manifest."""
    (tmp_path / "traces").mkdir()
    return stored_trace(tmp_path, str(tmp_path / "traces"))


def with_finalizer(server: Cluster, namespace: str, store: RemoteStore, manifest: Manifest) -> str:
    """A TraceCapture whose trace is in a store, whose finalizer is there; its name."""
    name = captured(server, namespace, store, manifest)
    finalizers = wait_until(
        lambda: server.get("tracecapture", name, namespace=namespace)["metadata"].get("finalizers"), SOON_S
    )
    assert finalizers == ["sftriage.dev/trace"]
    return name


def gone(server: Cluster, namespace: str) -> Callable[[], bool]:
    return lambda: not server.get("tracecaptures", namespace=namespace)["items"]


def test_deleting_a_capture_deletes_its_trace(server, namespace, operator, traces):
    with operator.running("--store", traces[0].place):
        name = with_finalizer(server, namespace, *traces)
        assert len(traces[0].ids()) == 1
        server.kubectl("delete", "tracecapture", name, "-n", namespace, "--wait=false")
        wait_until(gone(server, namespace), SOON_S)
    assert traces[0].ids() == frozenset()


def test_a_pinned_trace_stays(server, namespace, operator, traces):
    traces[0].pin(CAPTURE_ID)
    with operator.running("--store", traces[0].place):
        name = with_finalizer(server, namespace, *traces)
        server.kubectl("delete", "tracecapture", name, "-n", namespace, "--wait=false")
        wait_until(gone(server, namespace), SOON_S)
        assert "is pinned" in operator.said()
    assert len(traces[0].ids()) == 1


def test_a_trace_is_deleted_though_whoever_should_was_away(server, namespace, operator, traces):
    """GIVEN a capture that is deleted while no operator runs THEN it waits, and the next operator deletes its trace."""
    with operator.running("--store", traces[0].place):
        name = with_finalizer(server, namespace, *traces)
    server.kubectl("delete", "tracecapture", name, "-n", namespace, "--wait=false")
    assert server.get("tracecapture", name, namespace=namespace)["metadata"]["deletionTimestamp"]
    assert len(traces[0].ids()) == 1
    with operator.running("--store", traces[0].place):
        wait_until(gone(server, namespace), SOON_S)
    assert traces[0].ids() == frozenset()


def test_a_trace_in_a_store_that_is_not_ours_is_left_and_that_is_said(server, namespace, operator, traces):
    """GIVEN an operator that was given no store THEN the object waits, says why, and goes once somebody is given it."""
    with operator.running():
        name = with_finalizer(server, namespace, *traces)
        server.kubectl("delete", "tracecapture", name, "-n", namespace, "--wait=false")

        def said() -> bool:
            status = server.get("tracecapture", name, namespace=namespace)["status"]
            return any("is no store of this operator" in one["message"] for one in status["conditions"])

        wait_until(said, SOON_S)
    assert len(traces[0].ids()) == 1
    with operator.running("--store", traces[0].place):
        wait_until(gone(server, namespace), SOON_S)
    assert traces[0].ids() == frozenset()
