"""Outputs that go away: what a command does once nobody reads on, or nothing more can be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import DEADLINE_S
from tests.integration.runs import run_with_capture

SIGPIPE_EXIT = 141


@pytest.fixture
def run(tmp_path):
    return run_with_capture(tmp_path)


COMMANDS = [
    ["--help"],
    ["--version"],
    ["traces", "--help"],
    ["traces", "list", "--help"],
    ["traces", "schema"],
    ["traces", "list", "--run", "RUN"],
    ["traces", "list", "--run", "RUN", "--json"],
    ["traces", "show", "c-1", "--run", "RUN"],
    ["traces", "show", "c-1", "--run", "RUN", "--json"],
    ["traces", "for-step", "162", "--run", "RUN"],
    ["policy", "show", "default"],
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
def test_any_encoding_has_a_form_of_what_is_printed(environment, tmp_path, encoding):
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
        with_encoding = {**environment, "PYTHONIOENCODING": encoding}
        process = ran(with_encoding, run, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding=encoding)
        out, err = process.communicate(timeout=DEADLINE_S)
        # THEN they do what they do elsewhere, and what the encoding lacks has the nearest form
        assert (process.returncode, "Unicode" in err) == (0, False), (command, err)
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
