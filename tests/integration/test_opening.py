"""`sftriage traces open` to real clients: who gets the trace, and who does not."""

import hashlib
import http.client
import json
import os
import signal
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.processes import DEADLINE_S, free_port, wait_until
from tests.scenario import run_at
from tests.unit.conftest import keep

VIEWER = "https://ui.perfetto.dev"
PERFETTO = """<!doctype html><script>
  const url = new URLSearchParams(location.hash.replace("#!/?", "")).get("url");
  fetch(url).then((answer) => answer.blob()).then((blob) => blob.arrayBuffer())
    .then((bytes) => crypto.subtle.digest("SHA-256", bytes)).then((sum) => {
      window.opened = [...new Uint8Array(sum)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    }).catch((error) => { window.opened = String(error); });
</script>"""
"""What Perfetto's viewer does with a link to this machine: it takes the file as a blob."""

TRIES = """async (url) => {
  const tried = {};
  const one = async (name, trying) => {
    try { tried[name] = await trying(); } catch (error) { tried[name] = "refused"; }
  };
  const embedded = (tag) => new Promise((done, failed) => {
    const element = document.createElement(tag);
    element.onload = () => done("loaded");
    element.onerror = () => failed(new Error());
    element.src = url;
    document.body.append(element);
  });
  await one("fetch", () => fetch(url).then((answer) => answer.text()));
  await one("with credentials", () => fetch(url, { credentials: "include" }).then((answer) => answer.text()));
  await one("with a header", () => fetch(url, { headers: { "X-Any": "1" } }).then((answer) => answer.text()));
  await one("without cors", () =>
    fetch(url, { mode: "no-cors" }).then((answer) => answer.text()).then((text) => text || "refused"));
  await one("picture", () => embedded("img"));
  await one("script", () => embedded("script"));
  return tried;
}"""


class Served(NamedTuple):
    process: Any
    link: str
    url: str
    path: str

    def ask(self, method: str = "GET", path: str | None = None, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        where = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=DEADLINE_S)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.putrequest(method, path or where.path, skip_host="Host" in given)
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


def got(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return answer.read()


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with one capture, of a size that no one write takes."""
    directory = run_at(tmp_path / "run").directory
    keep(directory.path, "c-1", content=json.dumps({"traceEvents": [os.urandom(3 << 20).hex()]}))
    return directory.path


@pytest.fixture
def temporary(tmp_path, environment) -> Path:
    path = tmp_path / "temporary"
    path.mkdir()
    environment["TMPDIR"] = str(path)
    return path


@pytest.fixture
def open_trace(start, run, temporary) -> Callable[..., Served]:
    def open_trace(*arguments: object) -> Served:
        port = free_port()
        command = ("traces", "open", "c-1", "--run", run, "--json", "--port", port, "--no-browser", *arguments)
        process = start(*command)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        values = json.loads(line)
        assert values["pid"] == process.pid
        return Served(process, values["url"], values["file_url"], values["path"])

    return open_trace


@pytest.fixture
def sha256(run) -> str:
    return LocalStore(run).manifest("c-1").artefacts[0].sha256


def test_it_is_served_once_to_whom_it_is_meant_for(open_trace, run, temporary, sha256):
    served = open_trace()
    assert served.link == f"{VIEWER}/#!/?url={served.url}"
    assert served.path == str(run / "captures" / "c-1" / "trace.json.gz")
    # GIVEN copies that nobody else can read
    copies = list(temporary.iterdir())
    assert {copy.stat().st_mode & 0o077 for copy in copies} == {0}
    # WHEN another page asks THEN it is refused, and told nothing
    host = urllib.parse.urlsplit(served.url).netloc
    status, headers, body = served.ask(Origin="https://evil.example")
    assert (status, "Access-Control-Allow-Origin" in headers, len(body) < 100) == (403, False, True)
    # AND the viewer's browser may ask
    private = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Private_Network": "true"}
    status, headers, _ = served.ask("OPTIONS", Origin=VIEWER, **private)
    assert (status, headers["Access-Control-Allow-Private-Network"]) == (204, "true")
    # AND what asks for the head, or breaks off, does not use it up
    assert served.ask("HEAD", Origin=VIEWER)[0] == 200
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2]))) as broken:
        broken.sendall(f"GET {urllib.parse.urlsplit(served.url).path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert broken.recv(1000)
    # WHEN the viewer fetches it THEN it gets every byte, and that was it
    status, headers, body = served.ask(Origin=VIEWER)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, VIEWER)
    assert hashlib.sha256(body).hexdigest() == sha256
    assert served.process.wait(DEADLINE_S) == 0
    assert not list(temporary.iterdir())
    with pytest.raises(ConnectionRefusedError):
        served.ask(Origin=VIEWER)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_can_be_ended_and_leaves_nothing_behind(open_trace, temporary, signum, status):
    served = open_trace()
    assert list(temporary.iterdir())
    served.process.send_signal(signum)
    assert served.process.wait(DEADLINE_S) == status
    assert not list(temporary.iterdir())
    assert "Traceback" not in served.process.stderr.read()


def test_the_browser_that_is_asked_for_is_started_with_the_link_and_a_copy_left(
    start, run, environment, tmp_path, sha256
):
    # GIVEN a browser that writes down what it is to show
    browser, noted, there = (tmp_path / name for name in ("browser", "noted", "there"))
    browser.write_text(f'#!/bin/sh\necho "$1" > {noted}.part && mv {noted}.part {noted}\n')
    browser.chmod(0o755)
    there.mkdir()
    environment["BROWSER"] = str(browser)
    command = ("traces", "open", "c-1", "--run", run, "--port", free_port(), "--out", there)
    process = start(*command)
    link = process.stdout.readline().strip()
    wait_until(noted.exists)
    assert noted.read_text().strip() == link
    # WHEN the file is fetched THEN it ends, and its copy is where it was wanted
    got(link.partition("url=")[2])
    assert process.wait(DEADLINE_S) == 0
    (copy,) = there.iterdir()
    assert (copy.name, hashlib.sha256(copy.read_bytes()).hexdigest()) == ("c-1-trace.json.gz", sha256)
    # AND nothing is written over it
    for how in ((), ("--offline",)):
        process = start(*command, "--no-browser", *how)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, "exists already" in err) == (2, True)


def test_a_capture_in_a_store_elsewhere_is_fetched_first(start, run, temporary, tmp_path, sha256):
    uploading = start("traces", "upload", "--run", run, "--store", tmp_path / "elsewhere", "--drop-local")
    assert uploading.wait(DEADLINE_S) == 0
    assert not (run / "captures" / "c-1" / "trace.json.gz").exists()
    for place in (("--run", run), ("--store", tmp_path / "elsewhere")):
        # WHEN it is opened by its run, or by the store THEN the very trace is served
        process = start("traces", "open", "c-1", *place, "--port", free_port(), "--json", "--no-browser")
        values = json.loads(process.stdout.readline())
        assert Path(values["path"]).is_relative_to(temporary)
        assert hashlib.sha256(got(values["file_url"])).hexdigest() == sha256
        assert process.wait(DEADLINE_S) == 0
        assert not list(temporary.iterdir())


def test_offline_it_is_shown_on_our_own_page(start, run):
    process = start("traces", "open", "c-1", "--run", run, "--offline", "--json", "--no-browser")
    values = json.loads(process.stdout.readline())
    assert "Capture of rank" in got(values["url"]).decode()
    assert got(values["file_url"]) == Path(values["path"]).read_bytes()
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0


def test_offline_a_capture_of_a_store_is_fetched_whole_and_shown_from_here(start, run, temporary, tmp_path, sha256):
    # GIVEN a capture in a store that many runs share
    store, kept = tmp_path / "elsewhere", tmp_path / "kept.gz"
    assert start("traces", "upload", "--run", run, "--store", store).wait(DEADLINE_S) == 0
    command = ("traces", "open", "c-1", "--store", store, "--offline", "--json", "--no-browser")
    for ending, code in ((signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)):
        process = start(*command, *(("--out", kept) if not kept.exists() else ()))
        values = json.loads(process.stdout.readline())
        # WHEN the store is gone THEN the page, and the file on it, are still there
        store.rename(tmp_path / "away")
        page = got(values["url"]).decode()
        assert "Capture of rank" in page
        assert store.as_uri() in page
        assert hashlib.sha256(got(values["file_url"])).hexdigest() == sha256
        # AND once it has ended, nothing of it is left but the copy that was asked for
        process.send_signal(ending)
        assert process.wait(DEADLINE_S) == code
        assert not list(temporary.iterdir())
        (tmp_path / "away").rename(store)
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == sha256
    # WHEN it is damaged there THEN it is not shown, and nothing is left of it
    (trace,) = store.glob("*/*/c-1/trace.json.gz")
    data = trace.read_bytes()
    trace.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    process = start(*command, "--out", tmp_path / "again")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, "it was stored as sha256" in err) == (1, "", True)
    assert not list(temporary.iterdir())
    assert not (tmp_path / "again").exists()


@needs.chromium
def test_in_a_real_browser_the_viewer_can_read_it_and_no_other_page(open_trace, browser, sha256):
    # GIVEN Perfetto's viewer, and another page, which somehow knows where the file is; both may ask this machine
    served = open_trace()
    context = browser.new_context()
    context.grant_permissions(["local-network-access"])
    evil = "https://evil.example"
    context.route(f"{evil}/**", lambda route: route.fulfill(body="<!doctype html><body>", content_type="text/html"))
    context.route(f"{VIEWER}/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html"))
    page = context.new_page()
    # WHEN the other one tries what a page can try THEN it reads nothing
    page.goto(f"{evil}/")
    tried = page.evaluate(TRIES, served.url)
    assert tried == dict.fromkeys(tried, "refused")
    assert len(tried) == 6
    # AND the file is not used up by it
    assert served.process.poll() is None
    # WHEN the link is opened THEN the viewer has the very trace
    page.goto(served.link)
    assert page.wait_for_function("window.opened", timeout=60_000).json_value() == sha256
    assert served.process.wait(DEADLINE_S) == 0
    context.close()
