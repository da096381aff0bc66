"""The address that is printed can be opened: here, or from where it says."""

import http.client
import socket
from urllib.parse import urlsplit

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sftriage.errors import UsageError
from sftriage.web.access import Access
from sftriage.web.app import application
from sftriage.web.browsers import tunnel
from sftriage.web.serving import BackgroundServer, address, listen

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
