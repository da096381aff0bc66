"""Who gets a trace that is served for Perfetto's viewer."""

from http import HTTPStatus
from pathlib import Path

import pytest

from sftriage.web import viewer
from sftriage.web.viewer import ServedTrace
from tests.unit.web.asking import ask

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
    return ask(SERVED.app(), path, method=method, headers=[(name, one) for name, all_ in named for one in all_]).status


@pytest.mark.parametrize(
    ("method", "path", "hosts", "origins", "answer"),
    [
        # Perfetto's viewer, its browser's question before, and what is no web page
        ("GET", SERVED.path, [HOST], [VIEWER], OK),
        ("HEAD", SERVED.path, [HOST], [VIEWER], OK),
        ("OPTIONS", SERVED.path, [HOST], [VIEWER], LEAVE),
        ("GET", SERVED.path, [HOST], [], OK),
        # the viewer looks for a trace_processor on this port as well
        ("POST", "/status", [HOST], [VIEWER], WRONG_METHOD),
        *((method, SERVED.path, [HOST], [VIEWER], WRONG_METHOD) for method in ("POST", "PUT", "DELETE", "get", "")),
        # another page, whatever it calls itself
        *(
            (method, SERVED.path, [HOST], [origin], FORBIDDEN)
            for method in ("GET", "HEAD", "OPTIONS")
            for origin in ORIGINS
        ),
        ("GET", SERVED.path, [HOST], [VIEWER, "https://evil.example"], FORBIDDEN),
        # a page that has its own name point here
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
    ("reason", "started", "said"),
    [
        ("Name or service not known", True, "cannot be reached from this machine: Name or service not known"),
        ("Name or service not known", False, "cannot be reached from this machine: Name or service not known"),
        ("", True, "has to be online, and to let the page ask this machine"),
        ("", False, ""),
    ],
)
def test_what_is_in_the_way_is_said_at_once_and_what_to_do(monkeypatch, reason, started, said):
    # GIVEN a viewer that cannot be reached, or a browser that does not let its page ask
    monkeypatch.setattr(viewer, "HINT_S", 0.02)
    # (the answer is there before it is looked for)
    monkeypatch.setattr(viewer.threading, "Thread", AtOnce)
    heard = []
    served = ServedTrace(Path("t"), "t", 9001)
    # WHEN nobody fetches the file THEN the reason is said, with what needs no viewer
    assert not served.wait(0.04, heard.append, started=started, away=lambda: reason)
    assert len(heard) == bool(said)
    assert all(said in one and "--offline" in one for one in heard)


class AtOnce:
    """A thread that has done its work when it has been started."""

    def __init__(self, target, **_):
        self.start = target
