"""Which program shows a capture."""

import contextlib
import json
import socket

import pytest

from sftriage.reduce.opening import program_for
from sftriage.traces.store import FileToStore, LocalStore
from sftriage.web.serving import has_browser
from tests.unit.recorded import run_at


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


@pytest.mark.parametrize(
    ("environment", "platform", "shown"),
    [
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"BROWSER": "firefox"}, "linux", True),
        ({"WSL_DISTRO_NAME": "Debian"}, "linux", True),
        ({}, "darwin", True),
        ({}, "linux", False),
        ({"DISPLAY": "", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, "linux", False),
    ],
)
def test_whether_a_browser_can_be_shown(environment, platform, shown):
    assert has_browser(environment, platform) is shown


@pytest.fixture
def run(tmp_path, trace, make_manifest):
    """A run with a capture of each kind."""
    made = run_at(tmp_path / "run").directory
    store = LocalStore(made.path)
    store.put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    report = tmp_path / "report"
    report.write_bytes(b"an nsys report")
    stacks = tmp_path / "stacks"
    stacks.write_text(json.dumps({"rank": 2, "threads": [{"frames": ["\x1b[2Jmain"]}]}))
    for capture_id, file, name, profiler in (
        ("n-1", report, "trace.nsys-rep", "nsys"),
        ("s-1", stacks, "stacks.json", "stacks"),
    ):

        def build(artefacts, capture_id=capture_id, profiler=profiler):
            manifest = make_manifest(capture_id, artefacts[0])
            capture = manifest.capture.model_copy(update={"profiler": profiler})
            return manifest.model_copy(update={"capture": capture})

        store.put_files(capture_id, [FileToStore(file, name, "application/octet-stream", False)], build)
    return made.path


def test_a_report_is_said_how_to_open(sftriage, run):
    path = run / "captures" / "n-1" / "trace.nsys-rep"
    assert sftriage("traces", "open", "n-1", "--run", run).out == f"nsys-ui {path}\n"
    values = sftriage("traces", "open", "n-1", "--run", run, "--json").json
    assert values == {"path": str(path), "opens_with": "nsys-ui"}


def test_stacks_are_printed_and_do_nothing_to_the_terminal(sftriage, run):
    code, out, _ = sftriage("traces", "open", "s-1", "--run", run)
    assert code == 0
    assert json.loads(out)["threads"] == [{"frames": ["\x1b[2Jmain"]}]
    assert "\x1b" not in out
    assert sftriage("traces", "open", "s-1", "--run", run, "--json").json["content"]["rank"] == 2


def test_a_port_that_is_taken_says_what_to_do(sftriage, run):
    # GIVEN something else that listens
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, out, err = sftriage("traces", "open", "c-1", "--run", run, "--port", port)
    # THEN it is said, and nothing is printed as if it were served
    assert (code, out) == (2, "")
    assert f"port {port} of 127.0.0.1 is taken" in err


def test_the_viewer_asks_on_one_port_alone_and_what_to_do_if_it_is_taken_is_said(sftriage, run):
    # GIVEN that port taken, if not by somebody else then by us
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):
            taken.enter_context(socket.create_server(("127.0.0.1", 9001)))
        code, out, err = sftriage("traces", "open", "c-1", "--run", run)
    assert (code, out) == (2, "")
    for words in ("port 9001 of 127.0.0.1 is taken", "ss -ltnp", "--offline", "on no other port"):
        assert words in err


def test_what_nobody_fetches_ends_and_says_so(sftriage, run, free_port):
    code, out, err = sftriage("traces", "open", "c-1", "--run", run, "--port", free_port, "--no-browser", "--wait", "1")
    assert code == 1
    assert out.startswith(f"https://ui.perfetto.dev/#!/?url=http://127.0.0.1:{free_port}/")
    assert "nobody has fetched" in err
    assert "on port 9001 alone" in err


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["c-9"], 2, "no capture c-9"),
        (["../run.json"], 2, "is not a capture id"),
        (["c-1", "--artefact", "other"], 2, "has no artefact 'other'"),
        (["c-1", "--offline", "--artefact", "trace.json.gz"], 2, "leave --artefact out"),
    ],
)
def test_what_cannot_be_opened_says_why(sftriage, run, arguments, code, said):
    found = sftriage("traces", "open", *arguments, "--run", run)
    assert (found.code, found.out) == (code, "")
    assert said in found.err


def test_a_file_that_is_not_what_was_stored_is_not_served(sftriage, run):
    # GIVEN a trace of which one byte is another
    path = run / "captures" / "c-1" / "trace.json.gz"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    # WHEN it is to be opened THEN it is refused before anything is served
    code, out, err = sftriage("traces", "open", "c-1", "--run", run, "--no-browser", "--wait", "1")
    assert (code, out) == (1, "")
    assert "it was put as sha256" in err
