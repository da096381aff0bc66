"""Which program shows a capture, and who gets a trace that is served for Perfetto's viewer."""

import contextlib
import json
import socket
from http import HTTPStatus
from pathlib import Path

import pytest

from sftriage.reduce.opening import program_for
from sftriage.traces.store import FileToStore, LocalStore
from sftriage.web import serving
from sftriage.web.serving import ServedTrace, has_browser
from tests.scenario import run_at
from tests.unit.web.client import fetch


@pytest.mark.parametrize(
    ("name", "profiler", "program"),
    [
        ("trace.json.gz", "torch", "perfetto"),
        ("trace.json", "torch", "perfetto"),
        ("stacks.speedscope.json", "torch", "perfetto"),
        ("stacks.speedscope.json", "stacks", "perfetto"),
        ("trace.nsys-rep", "nsys", "nsys-ui"),
        ("trace.sqlite", "nsys", "sqlite3"),
        ("stacks.json", "stacks", "text"),
        ("flight-recorder.pickle", "stacks", "none"),
        ("trace.json.gz", "stacks", "none"),
    ],
)
def test_what_shows_a_file(name, profiler, program):
    assert program_for(name, profiler) == program


def test_whether_a_browser_can_be_shown():
    screens = {"DISPLAY": ":0"}, {"WAYLAND_DISPLAY": "wayland-0"}, {"BROWSER": "firefox"}, {"WSL_DISTRO_NAME": "Debian"}
    assert all(has_browser(environment, "linux") for environment in screens)
    assert has_browser({}, "darwin")
    remote = {"DISPLAY": "", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}
    assert not any(has_browser(environment, "linux") for environment in ({}, remote))


@pytest.fixture
def run(tmp_path, trace, make_manifest):
    """A run with a capture of each kind."""
    made = run_at(tmp_path / "run").directory
    store = LocalStore(made.path)
    store.put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    stacks = json.dumps({"rank": 2, "threads": [{"frames": ["\x1b[2Jmain"]}]})
    for capture_id, content, name, profiler in (
        ("n-1", "an nsys report", "trace.nsys-rep", "nsys"),
        ("s-1", stacks, "stacks.json", "stacks"),
    ):

        def build(artefacts, capture_id=capture_id, profiler=profiler):
            return make_manifest(capture_id, artefacts[0], profiler=profiler)

        (file := tmp_path / name).write_text(content)
        store.put_files(capture_id, [FileToStore(file, name, "application/octet-stream", False)], build)
    return made.path


def test_a_report_names_the_program_that_opens_it(sftriage, run):
    path = run / "captures" / "n-1" / "trace.nsys-rep"
    assert sftriage("traces", "open", "n-1", "--run", run).out == f"nsys-ui {path}\n"
    values = sftriage("traces", "open", "n-1", "--run", run, "--json").json
    assert values == {"path": str(path), "opens_with": "nsys-ui"}


def test_stacks_are_printed_and_do_nothing_to_the_terminal(sftriage, run):
    _, out, _ = sftriage("traces", "open", "s-1", "--run", run)
    assert json.loads(out)["threads"] == [{"frames": ["\x1b[2Jmain"]}]
    assert "\x1b" not in out
    assert sftriage("traces", "open", "s-1", "--run", run, "--json").json["content"]["rank"] == 2


@pytest.mark.parametrize(
    ("port", "words"), [(0, ()), (9001, ("ss -ltnp", "--offline", "no other port"))], ids=["given", "the viewer's"]
)
def test_a_port_that_is_taken_says_what_to_do(sftriage, run, port, words):
    # GIVEN another program on a port, or on the only port that the viewer can use
    with contextlib.ExitStack() as taken:
        # (the port may be taken already)
        with contextlib.suppress(OSError):
            port = taken.enter_context(socket.create_server(("127.0.0.1", port))).getsockname()[1]
        options = () if words else ("--port", port)
        code, out, err = sftriage("traces", "open", "c-1", "--run", run, *options)
    # THEN the error says so, and no link is printed
    assert (code, out) == (2, "")
    assert all(one in err for one in (f"port {port} of 127.0.0.1 is taken", *words))


def test_a_file_that_is_not_fetched_in_time_is_no_longer_served(sftriage, run, free_port):
    code, out, err = sftriage("traces", "open", "c-1", "--run", run, "--port", free_port, "--no-browser", "--wait", "1")
    assert code == 1
    assert out.startswith(f"https://ui.perfetto.dev/#!/?url=http://127.0.0.1:{free_port}/")
    assert "was not fetched" in err
    assert "only to port 9001" in err


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_a_file_that_is_not_what_was_stored_is_not_served(sftriage, run):
    # GIVEN a trace with one altered byte
    path = run / "captures" / "c-1" / "trace.json.gz"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    # WHEN it is opened THEN it is refused before it is served
    code, out, err = sftriage("traces", "open", "c-1", "--run", run, "--no-browser", "--wait", "1")
    assert (code, out) == (1, "")
    assert "it was stored as sha256" in err


VIEWER = "https://ui.perfetto.dev"
SERVED = ServedTrace(Path(__file__), "c-1-trace.json.gz", 9001, secret="secret")
HOST = "127.0.0.1:9001"
HOSTS = ("evil.example:9001", "localhost:9001", "127.0.0.1", "127.0.0.1:80", "")
ORIGINS = ("https://evil.example", "null", "", "http://ui.perfetto.dev", "https://UI.perfetto.dev")
ORIGINS += (f"{VIEWER}.evil.example", f"{VIEWER}:443")
OK, LEAVE = HTTPStatus.OK, HTTPStatus.NO_CONTENT
ELSEWHERE, WRONG_METHOD = HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.METHOD_NOT_ALLOWED
NOWHERE, FORBIDDEN = HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN


def status_of(method, path, hosts, origins, modes=()) -> int:
    named = (("host", hosts), ("origin", origins), ("sec-fetch-mode", modes))
    return fetch(SERVED.app(), path, method=method, headers=[(key, text) for key, of in named for text in of]).status


@pytest.mark.parametrize(
    ("method", "path", "hosts", "origins", "answer"),
    [
        # Perfetto's viewer, its browser's preflight request, and a client that is no browser
        ("GET", SERVED.path, [HOST], [VIEWER], OK),
        ("HEAD", SERVED.path, [HOST], [VIEWER], OK),
        ("OPTIONS", SERVED.path, [HOST], [VIEWER], LEAVE),
        ("GET", SERVED.path, [HOST], [], OK),
        # the viewer also tries a trace_processor on this port
        ("POST", "/status", [HOST], [VIEWER], WRONG_METHOD),
        *((method, SERVED.path, [HOST], [VIEWER], WRONG_METHOD) for method in ("POST", "PUT", "DELETE", "get", "")),
        # another page, whatever its origin
        *(
            (name, SERVED.path, [HOST], [origin], FORBIDDEN)
            for name in ("GET", "HEAD", "OPTIONS")
            for origin in ORIGINS
        ),
        ("GET", SERVED.path, [HOST], [VIEWER, "https://evil.example"], FORBIDDEN),
        # a page whose host name resolves to this machine (DNS rebinding)
        *(
            ("GET", SERVED.path, hosts, [VIEWER], ELSEWHERE)
            for hosts in ([], [HOST, "evil.example"], [HOST, HOST], *([one] for one in HOSTS))
        ),
        # another path
        *(
            ("GET", path, [HOST], [VIEWER], NOWHERE)
            for path in (
                *("/", "", "/c-1-trace.json.gz", "/Secret/c-1-trace.json.gz", "/secret/%63-1-trace.json.gz", "/%FF"),
                *("/secret/../../etc/passwd", f"{SERVED.path}?x", f"{SERVED.path}/", f"/{SERVED.path}"),
                *(f"/x/..{SERVED.path}", f"http://127.0.0.1:9001{SERVED.path}"),
            )
        ),
    ],
)
def test_who_gets_the_file(method, path, hosts, origins, answer):
    assert status_of(method, path, hosts, origins) == answer


@pytest.mark.parametrize(("mode", "answer"), [("cors", OK), ("navigate", OK), ("no-cors", FORBIDDEN)])
def test_no_page_can_use_the_file_up_by_embedding_it(mode, answer):
    assert status_of("GET", SERVED.path, [HOST], [], [mode]) == answer


def test_an_address_cannot_be_guessed():
    one, other = ServedTrace(Path("t"), "t", 9001), ServedTrace(Path("t"), "t", 9001)
    assert one.path != other.path
    assert len(one.secret) >= 32


def test_the_link_is_the_documented_one():
    assert SERVED.link == ("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:9001/secret/c-1-trace.json.gz")


@pytest.mark.parametrize(
    ("reason", "started", "hint"),
    [
        *(("no such name", started, "cannot be reached from this machine: no such name") for started in (True, False)),
        ("", True, "must be online, and allow the page to reach this machine"),
        ("", False, ""),
    ],
)
def test_an_obstacle_is_reported_at_once_with_what_to_do(monkeypatch, reason, started, hint):
    # GIVEN a viewer that cannot be reached, or a browser that blocks its page's request
    monkeypatch.setattr(serving, "HINT_S", 0.02)
    monkeypatch.setattr(serving.threading, "Thread", AtOnce)
    lines: list[str] = []
    served = ServedTrace(Path("t"), "t", 9001)
    # WHEN the file is not fetched THEN a line has the reason, and the option that needs no viewer
    assert not served.wait(0.04, lines.append, started=started, away=lambda: reason)
    assert len(lines) == bool(hint)
    assert all(hint in line and "--offline" in line for line in lines)


class AtOnce:
    """A thread that runs its target in `start`."""

    def __init__(self, target, **_):
        self.start = target
