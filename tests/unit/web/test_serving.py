"""Access control of the servers, their responses, and their limits in number and time."""

import base64
import contextlib
import gzip
import http.client
import os
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sftriage.errors import UsageError
from sftriage.web import serving
from sftriage.web.run_page import RunPage
from sftriage.web.serving import (
    HEADERS,
    Access,
    BackgroundServer,
    address,
    application,
    is_loopback,
    listen,
    metrics_app,
    metrics_server,
    token_of,
    tunnel,
)
from tests.unit.web.client import LOCAL, fetch

TOKEN = "correct-horse-battery-staple"
DEADLINE_S = 30.0


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")),
    ],
)
def test_what_only_this_machine_reaches_wants_no_token_and_all_else_says_how_to_give_one(host, loopback):
    assert is_loopback(host) is loopback
    if loopback:
        assert Access.to(host, None, "").admits("")
    else:
        with pytest.raises(UsageError, match=f"can reach {host}, .*: give one with --a-file"):
            Access.to(host, None, "give one with --a-file")


def test_a_token_is_in_a_file_or_else_in_the_environment(token, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "fedcba9876543210")
    assert token_of(token, "SOME_TOKEN") == "0123456789abcdef"
    assert token_of(None, "SOME_TOKEN") == "fedcba9876543210"
    assert token_of(None, "NO_TOKEN") is None


@pytest.mark.parametrize("token", ["short", "", "x" * 15, "fifteen-letters", "0123456789abcdef\n", "0123456789abcdé0"])
def test_a_token_that_is_guessed_or_mistyped_is_none(token):
    with pytest.raises(UsageError, match="at least 16 printable ASCII"):
        Access.to("127.0.0.1", token, "")


@pytest.fixture
def token(tmp_path):
    """A token file that is its owner's alone."""
    path = tmp_path / "a token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(("file", "directory"), [*((mode, 0o700) for mode in (0o400, 0o600, 0o700)), (0o600, 0o1777)])
def test_a_token_file_that_nobody_else_can_use_or_replace_is_taken(token, file, directory):
    token.chmod(file)
    token.parent.chmod(directory)
    assert token_of(token, "") == "0123456789abcdef"


@pytest.mark.parametrize(
    ("file", "directory", "problem"),
    [
        *((mode, 0o700, f"mode {mode:04o}") for mode in (0o640, 0o604, 0o644, 0o620, 0o602, 0o601, 0o666)),
        *((0o600, mode, "others can replace this token") for mode in (0o720, 0o702, 0o777)),
    ],
)
def test_a_token_file_that_others_can_use_or_replace_is_refused_with_the_fix(token, file, directory, problem):
    token.chmod(file)
    token.parent.chmod(directory)
    with pytest.raises(UsageError, match=problem) as caught:
        token_of(token, "")
    # WHEN the user applies the fix THEN the token is accepted
    subprocess.run(str(caught.value).rpartition(": ")[2], shell=True, check=True)
    assert token_of(token, "") == "0123456789abcdef"


def test_a_link_is_as_good_as_where_it_leads(token, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(token.rename(tmp_path / "open" / "token"))
    with pytest.raises(UsageError, match="others can replace this token"):
        token_of(tmp_path / "link", "")


def test_a_token_may_come_through_a_pipe():
    reads, writes = os.pipe()
    os.write(writes, b"0123456789abcdef\n")
    os.close(writes)
    assert token_of(Path(f"/dev/fd/{reads}"), "") == "0123456789abcdef"
    os.close(reads)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
class TestOfAnotherUser:
    def test_the_token_of_another_user_is_refused(self, token):
        os.chown(token, 4321, -1)
        with pytest.raises(UsageError, match="belongs to another user"):
            token_of(token, "")

    def test_so_is_one_in_the_directory_of_another(self, token):
        os.chown(token.parent, 4321, -1)
        with pytest.raises(UsageError, match="keep it elsewhere"):
            token_of(token, "")

    @pytest.mark.parametrize(("mode", "warned"), [(0o440, False), (0o644, True)])
    def test_one_that_root_shares_is_taken(self, token, mode, warned, caplog, monkeypatch):
        # GIVEN a secret as mounted into a pod: owned by root, and readable by its group or by everyone
        token.chmod(mode)
        monkeypatch.setattr(serving.os, "getuid", lambda: 4321)
        # THEN it is taken, with a warning if everybody can read it
        assert token_of(token, "") == "0123456789abcdef"
        assert ("chmod o-r" in caplog.text) is warned


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        *((("--run", "RUN", "--host", host), "token is required") for host in ("0.0.0.0", "192.0.2.1", "example.org")),
        (("--run", "RUN", "--token-file", "nowhere"), "No such file"),
        (("--run", "RUN", "--token-file", "TOKEN"), "printable ASCII"),
        (("--run", "TOKEN"), "not a directory"),
        (("--run", "RUN", "--port", "TAKEN"), "cannot listen on 127.0.0.1 port TAKEN: Address already in use"),
        (("--run", "RUN", "--store", "/tmp"), "give either a run or a store"),
        (("--store", "ftp://x/y"), "not a store"),
        (("--store", "/nowhere/at/all"), "no such directory"),
        (("--store", "s3://key:secret@bucket/x"), "credentials and options come from the environment"),
        (("--catalogue", "postgresql://u:secret@h/d"), "everyone on this machine can read a command line"),
    ],
)
def test_a_mistake_is_one_line_before_anything_listens(sftriage, run, token, arguments, problem):
    token.write_bytes(b"\xff" * 20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"RUN": run.directory.path, "TOKEN": token, "TAKEN": taken.getsockname()[1]}
        code, _, err = sftriage("ui", *(names.get(one, one) for one in arguments))
    assert (code, err.count("\n")) == (2, 1)
    assert problem.replace("TAKEN", str(names["TAKEN"])) in err
    assert "secret" not in err


def test_an_easy_token_from_the_environment_is_refused_and_not_repeated(sftriage, run, monkeypatch):
    monkeypatch.setenv("SFTRIAGE_UI_TOKEN", "hunter2")
    refusal = sftriage("ui", "--run", run.directory.path, "--host", "0.0.0.0").refusal
    assert "at least 16" in refusal
    assert "hunter2" not in refusal


# The gate.


def basic(password: str, user: str = "me") -> tuple[str, str]:
    return "authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def guarded(run):
    return RunPage(run.source, Access.to("10.1.2.3", TOKEN, "", ["Triage.example.org"])).app


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
@pytest.mark.parametrize("target", ["/", "/captures/c-1", "/static/page.css", "/nowhere"])
def test_nothing_but_reading_is_answered(run, method, target):
    answer = run.get(target, method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


NAMES = ("127.0.0.1", "127.0.0.1:8080", "localhost:1", "LocalHost", "[::1]:8080")
OTHERS = ("evil.example.org", "evil.example.org:8080", "127.0.0.1.evil.example.org", "localhost.evil.example.org")
OTHERS += ("localhost@evil.example.org", "localhost:8080/", "localhost:9400/../x", "10.0.0.1", "", "localhost\x00")


@pytest.mark.parametrize(
    ("hosts", "status"),
    [*(([one], 200) for one in NAMES), *(([one], 421) for one in OTHERS), ([], 421), (["localhost", "evil.org"], 421)],
)
def test_a_name_that_was_made_to_point_here_is_refused_and_a_request_names_one_host(run, hosts, status):
    assert run.get("/", headers=[("host", host) for host in hosts]).status == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("triage.example.org", "TRIAGE.example.org:443", "10.1.2.3:8080")),
        # An address cannot be pointed elsewhere.
        *((host, 200) for host in ("192.168.0.7", "[fe80::1]")),
        *((host, 421) for host in ("evil.example.org", "localhost")),
    ],
)
def test_a_page_for_others_goes_by_its_names_and_by_addresses(guarded, host, status):
    assert fetch(guarded, "/", headers=[("host", host), basic(TOKEN)]).status == status


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ([], 401),
        *(([one], 200) for one in (basic(TOKEN), basic(TOKEN, user=""))),
        *(([one], 401) for one in (basic(TOKEN[:-1]), basic(TOKEN + "x"), basic(""))),
        *(([("authorization", text)], 200) for text in (f"Bearer {TOKEN}", f"bearer   {TOKEN}")),
        *(([("authorization", text)], 401) for text in (f"Bearer {TOKEN}x", "Bearer \xff\xfe", f"Digest {TOKEN}")),
        *(([("authorization", text)], 401) for text in (TOKEN, "Basic !!!", "Basic /w==", "")),
        # two are none
        ([basic(TOKEN), basic(TOKEN)], 401),
    ],
)
@pytest.mark.parametrize(
    "target", ["/", "/events", "/static/page.css", "/captures/x/files/y", "/nowhere", f"/?token={TOKEN}"]
)
def test_without_the_token_there_is_nothing_to_be_seen(guarded, target, authorization, status):
    headers = [("host", "10.1.2.3"), *authorization]
    # (an event stream does not end: its headers will do)
    answer = fetch(guarded, target, headers=headers, method="HEAD" if target == "/events" else "GET")
    if status == 401:
        assert (answer.status, answer.headers["www-authenticate"][:5]) == (401, "Basic")
        assert TOKEN.encode() not in answer.body
    else:
        assert answer.status in (200, 404)


def test_the_token_is_compared_in_constant_time(guarded, monkeypatch):
    # GIVEN a record of all comparisons
    compared = []
    monkeypatch.setattr("sftriage.web.serving.hmac.compare_digest", lambda *both: compared.append(both) or False)
    # WHEN tokens of any length come THEN digests of equal length are compared
    for password in ("", "x", TOKEN, "y" * 10_000):
        assert fetch(guarded, "/", headers=[("host", "10.1.2.3"), basic(password)]).status == 401
    assert len(compared) == 4
    assert {tuple(map(len, both)) for both in compared} == {(32, 32)}


@pytest.mark.parametrize("host", ["localhost", "evil.example.org"])
@pytest.mark.parametrize("target", ["/", "/nowhere", "/static/page.css", "/captures/x", "/heat.bin"])
def test_every_answer_keeps_the_page_in_its_place_and_every_refusal(run, target, host):
    answer = run.get(target, headers=[("host", host)])
    for name, value in HEADERS.items():
        if name != "Cache-Control":
            assert answer.headers[name.lower()] == value
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


# Metrics.


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("something", "Something.", registry=registry).set(7)
    return registry


def test_the_format_is_the_one_that_is_asked_for(registry):
    app = metrics_app(registry, Access.to("127.0.0.1", None, ""))
    plain = fetch(app, "/metrics")
    assert (plain.status, plain.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert "something 7.0" in plain.text
    answer = fetch(app, "/metrics", headers=[*LOCAL, ("accept", "application/openmetrics-text; version=1.0.0")])
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert [family.name for family in parse_openmetrics(answer.text)] == ["something"]
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("token", "request_", "status"),
    [
        (None, {}, 200),
        (None, {"path": "/metrics?name[]=none"}, 200),
        (None, {"path": "/"}, 404),
        (None, {"path": "/metrics/../etc/passwd"}, 404),
        (TOKEN, {}, 401),
        (TOKEN, {"authorization": f"Bearer {TOKEN}", "host": "node-7.cluster.local:9400"}, 200),
    ],
)
def test_who_is_answered(registry, token, request_, status):
    app = metrics_app(registry, Access.to("127.0.0.1", token, "give one"))
    headers = {"host": "127.0.0.1:9400", **request_}
    answer = fetch(app, headers.pop("path", "/metrics"), headers=list(headers.items()))
    assert answer.status == status
    # AND who is refused learns nothing
    assert ("something" in answer.text) is (status == 200)
    if status == 401:
        assert "Bearer" in answer.headers["www-authenticate"]


def test_many_metrics_are_compressed_for_who_takes_them_so(registry):
    for number in range(100):
        Gauge(f"other_{number}", "Another.", registry=registry)
    app = metrics_app(registry, Access.to("127.0.0.1", None, ""))
    plain, packed = (fetch(app, "/metrics", headers=[*LOCAL, *more]) for more in ([], [("accept-encoding", "gzip")]))
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body


# The server.


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
    # GIVEN a server on an address
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
    ("host", "environment", "advice"),
    [
        ("127.0.0.1", {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.5 22"}, "ssh -L 8080:127.0.0.1:8080 10.0.0.5,"),
        ("::1", {"SSH_CONNECTION": "fe80::2 50000 fe80::1 22"}, "ssh -L 8080:[::1]:8080 fe80::1,"),
        ("127.0.0.1", {}, f"ssh -L 8080:127.0.0.1:8080 {socket.gethostname()},"),
        ("127.0.0.1", {"SSH_CONNECTION": "nonsense"}, f"ssh -L 8080:127.0.0.1:8080 {socket.gethostname()},"),
    ],
)
def test_a_tunnel_from_another_machine_is_advised(host, environment, advice):
    assert advice in tunnel(host, 8080, environment)


def test_what_cannot_be_listened_on_is_said_with_the_option_that_names_it():
    with pytest.raises(UsageError, match=r"^cannot listen on 203\.0\.113\.7 port 0: .*; see --metrics-port"):
        metrics_server(CollectorRegistry(), "203.0.113.7", 0, Access.to("203.0.113.7", TOKEN, ""))


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
def served(monkeypatch):
    """A server with room for a few connections, and its address."""
    app = application([Route("/", lambda _: PlainTextResponse("here"))], Access.to("127.0.0.1", None, ""))
    listening = listen("127.0.0.1", 0)
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)
    with BackgroundServer(app, listening):
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
