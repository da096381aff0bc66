"""The loop that writes statuses goes on, whatever one namespace comes to. `test_kube_operator` has a real server."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sftriage.errors import ClusterError
from sftriage.kube import operator
from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError
from sftriage.kube.objects import POLICIES
from sftriage.kube.operator import Reconciler
from tests.unit.kube.objects import made

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
