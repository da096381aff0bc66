"""The printed address works here or from where it says, and connections are limited in number and time."""

import contextlib
import http.client
import socket
import time
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sftriage.errors import UsageError
from sftriage.web import serving
from sftriage.web.serving import Access, BackgroundServer, MetricsEndpoint, address, application, listen, tunnel
from sftriage.web.viewer import ServedTrace

TOKEN = "0123456789abcdef"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "begins"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://"),
        ("0.0.0.0", "http://"),
        pytest.param("::1", "http://[::1]:", marks=needs_ipv6),
        pytest.param("::", "http://[", marks=needs_ipv6),
    ],
)
def test_what_is_printed_can_be_opened_and_is_let_in(host, begins):
    # GIVEN what listens on an address
    listening = listen(host, 0)
    app = application([Route("/", lambda _: PlainTextResponse("here"))], Access.to(host, TOKEN, ""))
    with BackgroundServer(app, listening):
        link = address(listening)
        assert link.startswith(begins)
        at = urlsplit(link)
        assert at.hostname not in ("0.0.0.0", "::")
        # WHEN the link is opened as it is printed THEN it answers, under the name that the link has for it
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=30)
        connection.request("GET", "/", headers={"Host": at.netloc, "Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200
        connection.close()


def test_what_listens_on_all_addresses_goes_by_its_name_where_it_has_one():
    with listen("0.0.0.0", 0) as everywhere, listen("127.0.0.1", 0) as here:
        port = everywhere.getsockname()[1]
        assert address(everywhere, "triage.example.org") == f"http://triage.example.org:{port}/"
        # AND what listens on one alone by that
        assert address(here, "triage.example.org").startswith("http://127.0.0.1:")


def test_a_machine_without_a_network_opens_its_own(monkeypatch):
    def unreachable(*_):
        raise OSError("Network is unreachable")

    with listen("0.0.0.0", 0) as everywhere:
        monkeypatch.setattr(socket.socket, "connect", unreachable)
        assert address(everywhere) == f"http://127.0.0.1:{everywhere.getsockname()[1]}/"


@pytest.mark.parametrize(
    ("host", "environment", "said"),
    [
        ("127.0.0.1", {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.5 22"}, "ssh -L 8080:127.0.0.1:8080 10.0.0.5,"),
        ("::1", {"SSH_CONNECTION": "fe80::2 50000 fe80::1 22"}, "ssh -L 8080:[::1]:8080 fe80::1,"),
        ("127.0.0.1", {}, f"ssh -L 8080:127.0.0.1:8080 {socket.gethostname()},"),
        ("127.0.0.1", {"SSH_CONNECTION": "nonsense"}, f"ssh -L 8080:127.0.0.1:8080 {socket.gethostname()},"),
    ],
)
def test_how_another_machine_gets_there_is_said(host, environment, said):
    assert said in tunnel(host, 8080, environment)


def test_what_cannot_be_listened_on():
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.7 port 0"):
        listen("203.0.113.7", 0)


DEADLINE_S = 30.0
HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
INCOMPLETE = {
    "silent": b"",
    "half a head": HEAD,
    "idle after an answer": HEAD + b"\r\n",
    "half a head after an answer": HEAD + b"\r\n" + HEAD,
    "many requests at once": (HEAD + b"\r\n") * 100,
    "a body that never ends": HEAD + b"Content-Length: 1000\r\n\r\n.",
    "a chunked body that never ends": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n.\r\n",
    "a refused body": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n.",
}


@pytest.fixture
def served():
    """A server with room for a few connections, and its address."""
    app = application([Route("/", lambda _: PlainTextResponse("here"))], Access.to("127.0.0.1", None, ""))
    listening = listen("127.0.0.1", 0)
    with BackgroundServer(app, listening, max_connections=4):
        yield listening.getsockname()


def closed(connection: socket.socket) -> bool:
    """Read until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**16):
            pass
    connection.close()
    return True


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_a_connection_without_a_complete_request_is_closed(monkeypatch, served, kind):
    monkeypatch.setattr(serving, "REQUEST_S", 0.05)
    connection = socket.create_connection(served, DEADLINE_S)
    connection.sendall(INCOMPLETE[kind])
    assert closed(connection)


@pytest.mark.parametrize("before", ["half a head", "a body that never ends"])
def test_sending_byte_by_byte_does_not_extend_the_time_limit(monkeypatch, served, before):
    monkeypatch.setattr(serving, "REQUEST_S", 0.1)
    connection = socket.create_connection(served, DEADLINE_S)
    connection.sendall(INCOMPLETE[before])
    end_s = time.monotonic() + DEADLINE_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end_s:
            connection.sendall(b"x")
            time.sleep(0.01)
    assert time.monotonic() < end_s
    connection.close()


def test_requests_on_connections_over_the_limit_are_answered_503(served):
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(socket.create_connection(served, DEADLINE_S))
        connection = http.client.HTTPConnection(*served, timeout=DEADLINE_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 503
        connection.close()


@pytest.mark.parametrize("what", ["metrics", "a trace"])
def test_the_other_servers_have_the_same_limits(monkeypatch, what, tmp_path):
    monkeypatch.setattr(serving, "REQUEST_S", 0.05)
    with contextlib.ExitStack() as ending:
        if what == "metrics":
            endpoint = MetricsEndpoint("127.0.0.1", 0, Access.to("127.0.0.1", None, ""))
            endpoint.serve(CollectorRegistry())
            ending.callback(endpoint.close)
            at = ("127.0.0.1", urlsplit(endpoint.url).port)
        else:
            listening = listen("127.0.0.1", 0)
            at = listening.getsockname()
            trace = ServedTrace(tmp_path / "trace", "trace", at[1])
            ending.enter_context(BackgroundServer(trace.app(), listening))
        connection = socket.create_connection(at, DEADLINE_S)
        connection.sendall(HEAD)
        assert closed(connection)
