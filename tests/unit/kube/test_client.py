"""Watched objects are as the server has them, and of several operators one works. `test_kube_*` have a real server."""

import logging
import queue
from types import SimpleNamespace

import pytest

from sftriage.errors import ClusterError
from sftriage.kube import client
from sftriage.kube.client import DURATION_S, GONE, AnsweredError, LeaderElection, ObjectWatch
from tests.unit.kube.objects import KeptObjects

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
        self.versions = []
        """That each list wants; "0" is one from memory."""

    def request(self, method, path, **query):
        self.asked.append(("list", query.get("continue")))
        self.versions.append(query["resourceVersion"])
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


def followed(lists, watches, **how):
    """What was told, what was kept at the end, and what was asked."""
    told, kept, server = followed_by(Server(lists, watches), **how)
    return told, kept, server.asked


def followed_by(server, **how):
    told = queue.SimpleQueue()
    watched = ObjectWatch(
        *(server, "/pods", lambda body: (body["metadata"]["name"], body["phase"]), lambda *change: told.put(change)),
        **how,
    )
    server.watched = watched
    watched.start()
    assert watched._loop.stopping.wait(DEADLINE_S)
    assert watched.end(DEADLINE_S)
    found = []
    while not told.empty():
        found.append(told.get())
    return found, sorted(watched.kept()), server


A, B, ENDED = ("a", "Running"), ("b", "Running"), ("a", "Succeeded")


def test_each_change_is_reported_once():
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


def test_lists_are_read_in_pages():
    told, _, asked = followed([([pod("a")], "more"), ([pod("b")], None)], [])
    assert told == [(None, A), (None, B)]
    assert asked[:2] == [("list", None), ("list", "more")]


@pytest.mark.parametrize(("cached", "versions"), [(False, [None] * 3), (True, ["0", None, None])])
def test_only_a_first_list_may_come_from_the_server_s_memory(cached, versions):
    """GIVEN a first list of two pages, and one after a break THEN later ones and further pages name no version"""
    lists = [([pod("a")], "more"), ([pod("b")], None), ([pod("a")], None)]
    told, _, server = followed_by(Server(lists, [[AnsweredError(GONE, "too old")]]), cached=cached)
    assert server.versions == versions
    assert told == [(None, A), (None, B), (B, None)]


FORGOTTEN = {
    "it has forgotten": AnsweredError(GONE, "too old"),
    "the connection broke": ClusterError("broken"),
    "it refuses": AnsweredError(500, "etcd"),
}


@pytest.mark.parametrize("error", FORGOTTEN.values(), ids=FORGOTTEN)
def test_missed_changes_are_found_by_listing_again(error, caplog):
    caplog.set_level(logging.CRITICAL)
    told, kept, _ = followed([([pod("a"), pod("b")], None), ([pod("a", "Succeeded")], None)], [[error]])
    assert told == [(None, A), (None, B), (A, ENDED), (B, None)]
    assert kept == [ENDED]


def test_known_objects_stay_while_the_server_is_away(caplog):
    caplog.set_level(logging.CRITICAL)
    told, kept, _ = followed([([pod("a")], None), ClusterError("away"), ([pod("a")], None)], [[ClusterError("broken")]])
    assert (told, kept) == ([(None, A)], [A])


LEASE = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/lease"


@pytest.fixture
def candidates():
    server, clock = KeptObjects(), SimpleNamespace(now_s=100.0)
    return server, clock, [LeaderElection(server, "ns", "lease", name, lambda: clock.now_s) for name in "ab"]


HELD = {
    "nobody holds it": ({}, 0.0, True),
    "we do": ({"holderIdentity": "a", "renewTime": "1"}, 0.0, True),
    "another does": ({"holderIdentity": "other", "renewTime": "1"}, DURATION_S - 1, False),
    "another did": ({"holderIdentity": "other", "renewTime": "1"}, DURATION_S + 1, True),
    "it was let go": ({"holderIdentity": "", "renewTime": "1"}, 0.0, True),
    "its clock is wrong": ({"holderIdentity": "other", "renewTime": "1970-01-01T00:00:00Z"}, 1.0, False),
}


@pytest.mark.parametrize(("spec", "later_s", "free"), HELD.values(), ids=HELD)
def test_a_free_or_expired_lease_is_taken(candidates, spec, later_s, free):
    """GIVEN a lease WHEN it stays as it is for some time THEN a candidate takes it or does not"""
    server, clock, (a, _) = candidates
    server.keep(LEASE, {"metadata": {"name": "lease"}, "spec": spec})
    a.try_to_lead()
    clock.now_s += later_s
    assert a.try_to_lead() is free


def test_a_leader_leads_until_it_stops_renewing(candidates):
    server, clock, (a, b) = candidates
    assert [a.try_to_lead(), b.try_to_lead()] == [True, False]
    # WHEN it renews THEN the other one waits on
    for _ in range(5):
        clock.now_s += DURATION_S - 1
        assert [a.try_to_lead(), b.try_to_lead()] == [True, False]
    # WHEN it does not any more THEN the other one leads, and it knows
    clock.now_s += DURATION_S + 1
    assert [b.try_to_lead(), a.try_to_lead()] == [True, False]
    assert server.kept[LEASE]["spec"]["leaseTransitions"] == 2
    # WHEN the leader lets go THEN the other one leads at once
    b.release()
    assert a.try_to_lead()


def test_a_candidate_whose_write_is_stale_does_not_lead(candidates):
    """GIVEN two that see it free in the same moment THEN what the second one writes is refused."""
    server, _, (a, b) = candidates
    request = server.request

    def overtaken(method, path, body=None, **how):
        if method != "GET":
            server.request = request
            assert a.try_to_lead()
        return request(method, path, body, **how)

    server.request = overtaken
    assert not b.try_to_lead()
    assert server.kept[LEASE]["spec"]["holderIdentity"] == "a"
    # AND a server that is away is no reason to fail
    server.away = True
    assert not a.try_to_lead()
