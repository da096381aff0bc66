"""Who of several operators works. `test_kube_jobs` has two of them, and a real server."""

from __future__ import annotations

import pytest

from sftriage.errors import ClusterError
from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError
from sftriage.kube.lease import DURATION_S, LeaderElection, ObservedLease

CASES = {
    "nobody holds it": ({}, 0.0, True),
    "we do": ({"holderIdentity": "me", "renewTime": "1"}, 0.0, True),
    "another does": ({"holderIdentity": "other", "renewTime": "1"}, DURATION_S - 1, False),
    "another did": ({"holderIdentity": "other", "renewTime": "1"}, DURATION_S + 1, True),
    "it was let go": ({"holderIdentity": "", "renewTime": "1"}, 0.0, True),
    "its clock is wrong": ({"holderIdentity": "other", "renewTime": "1970-01-01T00:00:00Z"}, 1.0, False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_lease_is_taken_that_is_free(case):
    spec, later_s, free = case
    seen = ObservedLease().after(spec, 100.0).after(spec, 100.0 + later_s)
    assert seen.free_for("me", DURATION_S, 100.0 + later_s) is free


def test_one_that_is_renewed_is_not_free_however_long_it_is_held():
    seen = ObservedLease()
    for second in range(0, 100, 10):
        seen = seen.after({"holderIdentity": "other", "renewTime": str(second)}, second)
        assert not seen.free_for("me", DURATION_S, second + 9)


class Server:
    """A server with one lease, which refuses what is not written to what it has."""

    def __init__(self) -> None:
        self.body, self.away = None, False

    def ask(self, method, path, body=None):
        if self.away:
            raise ClusterError("away")
        if method == "GET":
            if self.body is None:
                raise AnsweredError(NOT_FOUND, "none")
            return {**self.body, "spec": dict(self.body["spec"])}
        version = 0 if self.body is None else int(self.body["metadata"]["resourceVersion"])
        if (method == "POST") != (self.body is None) or int(body["metadata"].get("resourceVersion", 0)) != version:
            raise AnsweredError(STALE, "modified")
        self.body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version + 1)}}
        return self.body


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def three():
    server, clock = Server(), Clock()
    return server, clock, [LeaderElection(server, "ns", "lease", name, clock) for name in "ab"]


def test_of_two_one_leads_until_it_is_not_heard_of(three):
    server, clock, (a, b) = three
    assert [a._tried(), b._tried()] == [True, False]
    # WHEN it renews THEN the other one waits on
    for _ in range(5):
        clock.now_s += DURATION_S - 1
        assert [a._tried(), b._tried()] == [True, False]
    # WHEN it does not any more THEN the other one leads, and it knows
    clock.now_s += DURATION_S + 1
    assert [b._tried(), a._tried()] == [True, False]
    assert server.body["spec"]["leaseTransitions"] == 2


def test_one_that_lets_go_is_followed_at_once(three):
    _, _, (a, b) = three
    assert a._tried()
    a.release()
    assert b._tried()


def test_who_comes_too_late_does_not_lead(three):
    """GIVEN two that see it free in the same moment THEN what the second one writes is refused."""
    server, _, (a, b) = three
    before = server.ask
    server.ask = lambda method, path, body=None: (
        before(method, path, body) if method == "GET" else (a._tried_now(), before(method, path, body))[1]
    )
    a._tried_now = lambda: (setattr(server, "ask", before), a._tried())
    assert not b._tried()
    assert server.body["spec"]["holderIdentity"] == "a"


def test_a_server_that_is_away_is_no_reason_to_fail(three):
    server, _, (a, _) = three
    server.away = True
    assert not a._tried()
