"""Whoever only holds on to a server keeps nobody out who asks; with real sockets."""

import contextlib
import http.client
import socket
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from sftriage.web import connections
from sftriage.web.access import Access
from sftriage.web.app import application
from sftriage.web.connections import SPARED_S, Bounds, one_too_many, peer_of
from sftriage.web.metrics import MetricsEndpoint
from sftriage.web.serving import BACKLOG, MAX_CONNECTIONS, BackgroundServer, listen
from sftriage.web.viewer import HOST, ServedTrace

DEADLINE_S = 30.0
ROOM = 8
LARGE_BYTES = 16 * 2**20
"""More than the kernel holds between two sockets."""


@dataclass(frozen=True, eq=False)
class Connected:
    peer: str
    owes_since_s: float | None = None
    reads: bool = False


A, B, C = "192.0.2.1", "192.0.2.2", "192.0.2.3"


@pytest.mark.parametrize(
    ("before", "leaves"),
    [
        # There is room.
        ([], None),
        ([Connected(A, 1.0)] * 3, None),
        # A peer has too many: the one of its own that has owed a request the longest goes.
        ([Connected(B, 0.0), Connected(A, 3.0), Connected(A, 2.0), Connected(A), Connected(A, 4.0)], 2),
        # One that is being answered goes for nobody, and one that reads only once it has kept us waiting.
        ([Connected(A)] * 4, "newest"),
        ([Connected(A), Connected(A), Connected(A), Connected(A, 10.0 - SPARED_S / 2, reads=True)], "newest"),
        ([Connected(A), Connected(A), Connected(A), Connected(A, 10.0 - SPARED_S, reads=True)], 3),
        # All peers together have too many: whoever has the most goes first, however short it has owed.
        ([Connected(B, 0.0), Connected(B, 1.0), *(Connected(C, s) for s in (9.0, 8.0, 7.0)), Connected(A)], 4),
        ([Connected(B, 5.0), Connected(C), Connected(C), Connected(C), Connected(A), Connected(A)], 0),
    ],
)  # fmt: skip
def test_who_is_let_go_of(before, leaves):
    newest = Connected(A, 10.0)
    found = one_too_many(newest, [*before, newest], Bounds(6, 4), now_s=10.0)
    assert found is (None if leaves is None else newest if leaves == "newest" else before[leaves])


HELD = st.lists(
    st.builds(Connected, st.sampled_from([A, B, C]), st.none() | st.floats(0.0, 100.0), st.booleans()), max_size=12
)


@given(arriving=HELD)
def test_bounds_hold_whoever_comes(arriving):
    # WHEN connections come one after the other THEN there are never more than there may be, in all or of a peer
    held: list[Connected] = []
    for one in arriving:
        held.append(one)
        leaving = one_too_many(one, held, Bounds(6, 4), now_s=100.0)
        if leaving is not None:
            held.remove(leaving)
            # AND who is being answered stays
            assert leaving is one or leaving.owes_since_s is not None
        assert len(held) <= 6
        assert all(count <= 4 for count in Counter(each.peer for each in held).values())


def test_who_has_just_come_is_heard_before_they_are_one_too_many():
    # GIVEN as many who connect at once as are taken in before any of them is heard, all of one peer
    bounds = Bounds.of(MAX_CONNECTIONS)
    held = [Connected(A, 0.0) for _ in range(bounds.per_peer)]
    arriving = [Connected(A, 1.0) for _ in range(BACKLOG)]
    for one in arriving:
        held.append(one)
        held.remove(one_too_many(one, held, bounds, now_s=1.0))
    # THEN none of them goes before they could say anything
    assert held[-BACKLOG:] == arriving


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
    ],
)
def test_who_is_behind_an_address(address, peer):
    assert peer_of(address) == peer


def large(_: Request) -> StreamingResponse:
    return StreamingResponse(bytes(2**16) for _ in range(LARGE_BYTES // 2**16))


def page(_: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


@pytest.fixture(scope="module")
def served():
    """A server with room for a few; its address."""
    app = application([Route("/", page), Route("/large", large)], Access.to(HOST, None, ""))
    listening = listen(HOST, 0)
    at = listening.getsockname()
    with BackgroundServer(app, listening, max_connections=ROOM):
        yield at


def hostile(at, kind: str) -> socket.socket:
    """Somebody who holds on."""
    one = socket.socket()
    # (little is kept for who does not read)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(DEADLINE_S)
    one.connect(at)
    one.sendall(KINDS[kind])
    return one


WHOLE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
KINDS = {
    "silent": b"",
    "half-open": WHOLE,
    "idle after an answer": WHOLE + b"\r\n",
    "half-open after an answer": WHOLE + b"\r\n" + WHOLE,
    "many requests at a time": (WHOLE + b"\r\n") * 100,
    "a body that never ends": WHOLE + b"Content-Length: 1000\r\n\r\n.",
    "a body in pieces that never ends": WHOLE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n.\r\n",
    "a body that is not wanted": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n.",
    "reads nothing": WHOLE.replace(b"/ ", b"/large ") + b"\r\n",
}


def answered(at, path: str = "/") -> int:
    connection = http.client.HTTPConnection(*at, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def answered_soon(at) -> int:
    """The same of whoever asks again, as browsers do, when all places were taken for a moment."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return answered(at)
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() < end_s


def gone(one: socket.socket) -> bool:
    """Wait until it is let go of."""
    with contextlib.suppress(ConnectionError):
        while one.recv(2**16):
            pass
    one.close()
    return True


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reads nothing"])
def test_whoever_asks_is_answered_though_many_hold_on(served, kind):
    # GIVEN many more connections than there is room for, none of which asks and reads
    with contextlib.ExitStack() as held:
        for _ in range(3 * ROOM):
            one = held.enter_context(hostile(served, kind))
            if kind not in ("silent", "half-open"):
                # (while it is being answered it owes nothing)
                with contextlib.suppress(ConnectionError):
                    one.recv(1)
        # THEN each who asks is answered at once
        assert [answered(served) for _ in range(3)] == [200, 200, 200]


def test_whoever_asks_is_answered_though_many_do_not_read(monkeypatch, served):
    monkeypatch.setattr(connections, "SPARED_S", 0.1)
    with contextlib.ExitStack() as held:
        for _ in range(ROOM):
            held.enter_context(hostile(served, "reads nothing"))
        # (those that have just begun to read may be honest: they are waited for a moment)
        assert answered_soon(served) == 200


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_holds_on_for_ever_where_there_is_room(monkeypatch, served, kind):
    monkeypatch.setattr(connections, "REQUEST_S", 0.05)
    monkeypatch.setattr(connections, "ANSWER_S", 0.1)
    one = hostile(served, kind)
    if kind != "reads nothing":
        assert gone(one)
        return
    # (to read would be to go on: that nobody is there any more is told to who writes)
    end_s = time.monotonic() + DEADLINE_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end_s:
            one.send(b".")
            time.sleep(0.01)
    assert time.monotonic() < end_s
    one.close()


def test_a_head_byte_by_byte_does_not_put_off_the_end(monkeypatch, served):
    monkeypatch.setattr(connections, "REQUEST_S", 0.1)
    one = hostile(served, "half-open")
    end_s = time.monotonic() + DEADLINE_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end_s:
            one.sendall(b"x")
            time.sleep(0.01)
    assert time.monotonic() < end_s
    one.close()


def test_many_requests_at_a_time_are_not_answered(served):
    # GIVEN somebody who asks for more before they have been answered THEN the first answer is all that they get
    one = hostile(served, "many requests at a time")
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := one.recv(2**16):
            said += piece
    assert said.count(b"HTTP/1.1 200") <= 1
    one.close()


def test_whoever_reads_slowly_gets_all_of_it(monkeypatch, served):
    # GIVEN somebody who takes longer over an answer than a request may take
    monkeypatch.setattr(connections, "REQUEST_S", 0.05)
    one = hostile(served, "reads nothing")
    answer = http.client.HTTPResponse(one)
    answer.begin()
    assert gone(hostile(served, "silent"))
    # THEN nothing of it is missing
    assert len(answer.read()) == LARGE_BYTES
    one.close()


@pytest.mark.parametrize("what", ["metrics", "a trace"])
def test_the_other_servers_have_the_same_bounds(what, tmp_path):
    with contextlib.ExitStack() as ending:
        if what == "metrics":
            endpoint = MetricsEndpoint(HOST, 0, Access.to(HOST, None, ""))
            endpoint.serve(CollectorRegistry())
            ending.callback(endpoint.close)
            at, path = (HOST, int(endpoint.url.rsplit(":", 1)[1].partition("/")[0])), "/metrics"
        else:
            (tmp_path / "trace").write_text("a trace")
            listening = listen(HOST, 0)
            at = listening.getsockname()
            trace = ServedTrace(tmp_path / "trace", "trace", at[1])
            ending.enter_context(BackgroundServer(trace.app(), listening))
            path = trace.path
        for _ in range(100):
            ending.enter_context(hostile(at, "half-open"))
        assert answered(at, path) == 200
