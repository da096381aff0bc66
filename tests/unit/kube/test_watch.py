"""Objects that are watched are as the server has them, whatever was missed. `test_kube_operator` has a real one."""

from __future__ import annotations

import logging
import queue

import pytest

from sftriage.errors import ClusterError
from sftriage.kube import client
from sftriage.kube.client import GONE, AnsweredError, ObjectWatch

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client, "_PAUSE_S", 0.01)


def pod(name, phase="Running", version="1"):
    return {"metadata": {"name": name, "namespace": "ml", "resourceVersion": version}, "phase": phase}


class Server:
    """A server whose lists and watches are given one after the other; a watch for which there is none ends it."""

    def __init__(self, lists, watches) -> None:
        self.lists, self.watches, self.asked = list(lists), list(watches), []

    def ask(self, method, path, **query):
        self.asked.append(("list", query.get("continue")))
        found = self.lists.pop(0)
        if isinstance(found, Exception):
            raise found
        pods, token = found
        return {"items": pods, "metadata": {"resourceVersion": "7", "continue": token}}

    def watch(self, path, seconds, **query):
        self.asked.append(("watch", query["resourceVersion"]))
        if not self.watches:
            self.watched.end()
            return
        for event in self.watches.pop(0):
            if isinstance(event, Exception):
                raise event
            kind, body = event
            yield {"type": kind, "object": body}


def followed(lists, watches):
    """What was told, what was kept at the end, and what was asked."""
    server, told = Server(lists, watches), queue.SimpleQueue()
    watched = ObjectWatch(
        server, "/pods", lambda body: (body["metadata"]["name"], body["phase"]), lambda *change: told.put(change)
    )
    server.watched = watched
    watched.start()
    assert watched._loop.stopping.wait(DEADLINE_S)
    assert watched.end(DEADLINE_S)
    found = []
    while not told.empty():
        found.append(told.get())
    return found, sorted(watched.kept()), server.asked


A, B, ENDED = ("a", "Running"), ("b", "Running"), ("a", "Succeeded")


def test_what_happens_is_told_once():
    events = [
        ("ADDED", pod("b", version="8")),
        ("MODIFIED", pod("b", version="9")),
        ("MODIFIED", pod("a", "Succeeded", "10")),
        ("DELETED", pod("b", version="11")),
        ("BOOKMARK", {"metadata": {"resourceVersion": "20"}}),
    ]
    told, kept, asked = followed([([pod("a")], None)], [events])
    assert told == [(None, A), (None, B), (A, ENDED), (B, None)]
    assert kept == [ENDED]
    # AND the next watch begins where this one has ended
    assert asked == [("list", None), ("watch", "7"), ("watch", "20")]


def test_many_are_read_in_pages():
    told, _, asked = followed([([pod("a")], "more"), ([pod("b")], None)], [])
    assert told == [(None, A), (None, B)]
    assert asked[:2] == [("list", None), ("list", "more")]


FORGOTTEN = {
    "it has forgotten": AnsweredError(GONE, "too old"),
    "the connection broke": ClusterError("broken"),
    "it refuses": AnsweredError(500, "etcd"),
}


@pytest.mark.parametrize("error", FORGOTTEN.values(), ids=FORGOTTEN)
def test_what_went_unseen_is_found_when_all_is_listed_again(error, caplog):
    caplog.set_level(logging.CRITICAL)
    told, kept, _ = followed([([pod("a"), pod("b")], None), ([pod("a", "Succeeded")], None)], [[error]])
    assert told == [(None, A), (None, B), (A, ENDED), (B, None)]
    assert kept == [ENDED]


def test_while_the_server_is_away_what_was_seen_stays(caplog):
    caplog.set_level(logging.CRITICAL)
    told, kept, _ = followed([([pod("a")], None), ClusterError("away"), ([pod("a")], None)], [[ClusterError("broken")]])
    assert (told, kept) == ([(None, A)], [A])
