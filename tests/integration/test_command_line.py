"""What commands import, complete, and do once nobody reads on or nothing more can be written."""

import io
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sftriage.errors import EXTRAS
from tests.integration.processes import DEADLINE_S, output_of
from tests.integration.runs import run_with_capture
from tests.unit.conftest import keep, run_in

ASKING = """
import atexit, json, sys
atexit.register(lambda: sys.stderr.write(json.dumps(sorted(sys.modules))))
sys.argv[0] = "sftriage"
from sftriage.commands import main
main()
"""
OPTIONAL = {*EXTRAS, "obstore", "psycopg", "prometheus_client"}
HEAVY = {*OPTIONAL, "numpy", "msgspec"}
HEAVY |= {"sftriage.controller.controller", "sftriage.agent.agent"}


def python(code, *words, env):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = run_with_capture(tmp_path_factory.mktemp("run"))
    # (a catalogue is made once, which takes what makes one)
    output_of(sys.executable, "-m", "sftriage", "traces", "list", "--run", run)
    return run


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (["--help"], {*HEAVY, "rich", "pydantic", "sftriage.traces"}),
        (["--version"], {*HEAVY, "rich"}),
        (["traces", "--help"], {*HEAVY, "rich"}),
        *(([name, "--help"], HEAVY) for name in ("demo", "run", "attach", "capture", "ui", "decisions")),
        (["traces", "list", "--run", "RUN"], HEAVY),
        (["traces", "list", "--run", "RUN", "--step", "160..170", "--json"], HEAVY - {"msgspec"}),
        (["traces", "show", "c-1", "--run", "RUN"], HEAVY - {"msgspec"}),
        (["traces", "get", "c-1", "--run", "RUN", "--out", "RUN/got", "--force"], HEAVY),
        (["traces", "for-step", "162", "--run", "RUN"], HEAVY - {"msgspec"}),
        (["decisions", "--run", "RUN"], HEAVY - {"msgspec"}),
        (["watch", "--run", "RUN", "--once"], OPTIONAL),
        (["run", "--out", "OUT", "--", "true"], OPTIONAL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_no_more_than_it_needs(environment, run, tmp_path, command, without):
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in command]
    done = python(ASKING, *words, env=environment)
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert done.returncode == 0
    assert modules & without == set()


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
from sftriage.commands import main
main()
"""
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: mine}
spec:
  active: {cron: "CRON"}
  rules: [{name: slow, match: {gain: ">= 10%"}, notify: [NOTIFY]}]
"""


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [
        ("jinja2", "ui", ["report", "--run", "RUN"]),
        ("starlette", "ui", ["ui", "--run", "RUN"]),
        ("uvicorn", "ui", ["traces", "open", "c-1", "--run", "RUN", "--no-browser"]),
        ("mcp", "mcp", ["mcp", "--runs", "RUN"]),
        ("apscheduler", "schedules", ["run", "--policy", "hours.yaml", "--out", "out", "--", "touch", "started"]),
        ("urllib3", "notify", ["run", "--policy", "notify.yaml", "--out", "out", "--", "touch", "started"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_without_an_extra_a_command_names_it_and_does_nothing(
    environment, run, tmp_path, monkeypatch, module, extra, command
):
    # GIVEN an installation without a library, and policies that need one
    monkeypatch.chdir(tmp_path)
    notify = "{webhook: {url_from_env: HOOK}}"
    Path("hours.yaml").write_text(POLICY.replace("CRON", "* 20-23 * * *").replace("NOTIFY", ""))
    Path("notify.yaml").write_text(POLICY.replace("CRON", "* * * * *").replace("NOTIFY", notify))
    # WHEN a command needs it
    done = python(WITHOUT, module, *(word.replace("RUN", str(run)) for word in command), env=environment)
    # THEN it ends as other mistakes do, before a job starts or a directory is made
    advice = f"sftriage: this needs {module}: pip install 'sftriage[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", advice)
    assert {path.name for path in tmp_path.iterdir()} == {"hours.yaml", "notify.yaml"}


def test_each_library_is_in_the_extra_that_its_advice_names():
    for module, extra in EXTRAS.items():
        needs = [need.lower() for need in metadata.requires("sftriage") if f"extra == '{extra}'" in need]
        assert any(need.startswith(module) for need in needs), f"{module} is not in {extra}"


@pytest.mark.parametrize("command", ["show", "get", "pin"])
def test_a_shell_completes_the_captures_of_the_run(environment, tmp_path, command):
    # GIVEN a run with captures
    run_in(tmp_path / "run")
    for name in ("w1-a", "w1-b", "w2-c"):
        keep(tmp_path / "run", name)
    # WHEN bash asks how a line may go on
    words = f"sftriage traces {command} --run {tmp_path / 'run'} w1"
    asked = {"_SFTRIAGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = "import sys; sys.argv = ['sftriage']; from sftriage.commands import main; main()"
    done = python(script, env={**os.environ, **environment, **asked})
    # THEN it is told the captures that begin so
    assert (done.stdout.split(), done.stderr) == (["w1-a", "w1-b"], "")


SIGPIPE_EXIT = 141


COMMANDS = [
    ["--help"],
    ["traces", "list", "--help"],
    ["traces", "schema"],
    ["traces", "list", "--run", "RUN"],
    ["traces", "show", "c-1", "--run", "RUN"],
    ["watch", "--run", "RUN", "--once"],
    ["watch", "--run", "RUN", "--json"],
]


def ran(environment, run, command, **outputs):
    words = [sys.executable, "-m", "sftriage", *(str(run) if word == "RUN" else word for word in command)]
    return subprocess.Popen(words, env=environment, text=True, **outputs)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_ends_a_command_without_a_word(environment, run, command):
    # GIVEN a reader that takes nothing
    reading, writing = os.pipe()
    os.close(reading)
    process = ran(environment, run, command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    # THEN it ends as SIGPIPE ends a command
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (SIGPIPE_EXIT, "")


@pytest.mark.parametrize(
    "command", [["--help"], ["traces", "list", "--run", "RUN"], ["traces", "schema"]], ids=" ".join
)
def test_a_full_disk_is_said_in_one_line(environment, run, command):
    with Path("/dev/full").open("w") as full:
        process = ran(environment, run, command, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (1, "sftriage: No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_has_a_form_of_what_is_printed(sftriage, monkeypatch, tmp_path, encoding):
    # GIVEN a run in a place whose name has characters that few encodings have, and a byte that is no text
    folder = tmp_path / "l\u00e4ufe-\u6f22-\udcff"
    folder.mkdir()
    run = run_with_capture(folder)
    # WHEN commands print it, or tables
    for command in (
        ["traces", "list", "--run", "RUN"],
        ["traces", "get", "c-1", "--run", "RUN", "--out", str(folder / "got")],
        ["decisions", "--run", "RUN"],
        ["watch", "--run", "RUN", "--once"],
        ["report", "RUN"],
    ):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding, write_through=True))
        code = sftriage(*(run if word == "RUN" else word for word in command)).code
        out, err = (stream.buffer.getvalue().decode(encoding) for stream in (sys.stdout, sys.stderr))
        # THEN they do what they do elsewhere, and what the encoding lacks has the nearest form
        assert (code, "Unicode" in err) == (0, False), (command, err)
        if command[:2] == ["traces", "list"]:
            assert ("+--" in out, "\u2503" in out) == (encoding != "utf-8", encoding == "utf-8")
        if command[:2] == ["traces", "get"]:
            name = {"ascii": "laufe-?-?", "latin-1": "l\u00e4ufe-?-?", "utf-8": "l\u00e4ufe-\u6f22-?"}[encoding]
            assert name in out + err


def test_without_any_output_it_does_what_it_is_to_do(environment, run, tmp_path):
    words = f"{sys.executable} -m sftriage traces get c-1 --run {run} --out {tmp_path / 'got'}"
    done = subprocess.run(["sh", "-c", f"{words} >&- 2>&-"], env=environment, timeout=DEADLINE_S, check=False)
    assert (done.returncode, (tmp_path / "got").exists()) == (0, True)


def test_a_job_goes_on_when_nobody_reads_what_is_said_of_it(environment, tmp_path):
    # GIVEN a job whose watcher has lost its terminal
    reading, writing = os.pipe()
    os.close(reading)
    job = ["sh", "-c", f"sleep 0.5; touch {tmp_path / 'done'}; exit 7"]
    command = ["run", "--out", str(tmp_path / "run"), "--", *job]
    process = ran(environment, None, command, stdout=writing, stderr=writing)
    os.close(writing)
    # THEN it is watched to its end, and its exit status is what counts
    assert process.wait(DEADLINE_S) == 7
    assert (tmp_path / "done").exists()
