"""Stacks from outside: of a real process by the real py-spy, and every way in which that may fail."""

import json
import os
import subprocess
import sys
import time

import pytest

from sftriage.agent import stacks
from sftriage.agent.stacks import StacksCapture
from sftriage.base.process import Finished, start_ticks
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest
from sftriage.model.windows import RankStatus
from tests.scenario import info_of

WAITS = "def waits_here():\n    print('up', flush=True)\n    input()\nwaits_here()\n"


def info(pid):
    return info_of(1, 2, pid=pid, pid_start_ticks=start_ticks(pid) or 0)


def request(**changes):
    fields = {"steps": 1, "warmup_steps": 0, "max_seconds": 60, "max_bytes": 10**7, "options": {}}
    return CaptureRequest("c-1", 1, "stacks", **{**fields, **changes})


def look():
    return RankStatus(1, "node-a", "data", 10**9, 7, 2 * 10**9, 6, False, True)


def fails(directory, **changes):
    """The reason for which a capture fails, of which nothing is left."""
    capture = StacksCapture(request(**changes), info(os.getpid()), directory, directory, look)
    found = result(capture)
    assert found.state == "failed"
    capture.close()
    assert not list(directory.glob("c-1*"))
    return found.detail


def result(capture):
    end_s = time.monotonic() + 100
    while (found := capture.poll()) is None:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return found


@pytest.fixture
def process():
    """A process that waits in a function of its own."""
    started = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "up\n"
    yield started
    started.kill()
    started.communicate(timeout=30)


@pytest.fixture
def py_spy(monkeypatch, tmp_path):
    """Put a script in py-spy's place."""

    def put(script):
        path = tmp_path / "py-spy"
        path.write_text("#!/bin/sh\n" + script, encoding="utf-8")
        path.chmod(0o700)
        monkeypatch.setattr(stacks, "find_py_spy", lambda: path)
        return path

    return put


def test_the_stacks_of_a_process_are_taken_and_it_goes_on(process, tmp_path):
    # GIVEN a rank's process, in the middle of a function
    capture = StacksCapture(request(), info(process.pid), tmp_path, tmp_path, look)
    capture.start()
    found = result(capture)
    # THEN they are one document that says whose they are, and where it stands
    assert (found.state, found.first_step, found.last_step) == ("stored", 7, 7), found.detail
    (product,) = capture.products()
    document = json.loads(product.path.read_text(encoding="utf-8"))
    assert (document["rank"], document["pid"], document["step"], document["stage"]) == (1, process.pid, 7, "data")
    assert 1.0 <= document["in_stage_s"] < 100.0
    assert (document["calls"], document["groups"]) == ([], [])
    names = [frame["name"] for thread in document["threads"] for frame in thread["frames"]]
    assert "waits_here" in names
    assert product.path.stat().st_mode & 0o077 == 0
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    capture.close()
    assert list(tmp_path.iterdir()) == []


def test_requested_native_frames_are_there_or_a_reason(process, tmp_path):
    capture = StacksCapture(request(options={"native": True}), info(process.pid), tmp_path, tmp_path, look)
    found = result(capture)
    assert found.state == "stored"
    document = json.loads(capture.products()[0].path.read_text(encoding="utf-8"))
    names = [frame["name"] for thread in document["threads"] for frame in thread["frames"]]
    assert "waits_here" in names
    assert "(native frames)" in found.detail or any(name.endswith(("read", "main")) for name in names)
    capture.close()


def test_a_process_that_is_gone_is_a_reason(process, tmp_path):
    gone = info(process.pid)
    process.kill()
    process.wait(30)
    found = result(StacksCapture(request(), gone, tmp_path, tmp_path, look))
    assert (found.state, found.detail.partition(";")[0]) == ("failed", f"process {process.pid} is gone")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Error: Permission Denied: Try running again with elevated permissions", "ptrace denied"),
        ("Error: Failed to attach: Operation not permitted (os error 1)", "ptrace denied"),
        ("Error: EPERM: Operation not permitted", "kernel.yama.ptrace_scope=0"),
        ("Error: No such process (os error 3)", "is gone"),
        ("warning\nError: Failed to find python version from target process", "py-spy: Error: Failed to find python"),
        ("", "py-spy: exit status 1"),
    ],
)
def test_what_py_spy_says_becomes_a_reason(output, reason):
    assert reason in stacks.reason_of(Finished(1, output), os.getpid())


@pytest.mark.parametrize("output", ["", "[]", "{}", "Error", '[{"frames": ['])
def test_what_is_no_stack_is_a_reason(output):
    with pytest.raises(CaptureError, match=r"py-spy"):
        stacks.threads_of(output)


def test_py_spy_that_is_not_there_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install 'sftriage[stacks]'" in fails(tmp_path)


def test_a_py_spy_that_hangs_is_tried_without_stopping_the_process_and_says_so(py_spy, tmp_path, monkeypatch):
    # GIVEN a process that cannot be stopped (it is stopped already): py-spy waits for ever
    monkeypatch.setattr(stacks, "DUMP_S", 0.3)
    py_spy("""case "$*" in *--nonblocking*) echo 'WARN: symbols'; echo '[{"frames": []}]';; *) exec sleep 100;; esac""")
    found = result(StacksCapture(request(), info(os.getpid()), tmp_path, tmp_path, look))
    assert (found.state, "py-spy hung: no answer within 0.3 s" in found.detail) == ("stored", True)


@pytest.mark.parametrize(
    ("script", "bounds", "reason"),
    [
        ("exec sleep 100", {"max_seconds": 0.6}, "hung"),
        ("""echo '[{"frames": []}]'""", {"max_bytes": 100}, "at most 100 were allowed"),
    ],
)
def test_stacks_over_their_bounds_are_not_kept(py_spy, tmp_path, script, bounds, reason):
    py_spy(script)
    assert reason in fails(tmp_path, **bounds)


def test_stacks_that_are_called_off_are_not_taken(tmp_path):
    capture = StacksCapture(request(), info(os.getpid()), tmp_path, tmp_path, look)
    capture.cancel()
    assert (capture.poll().detail, capture.needs_trainer) == ("cancelled", True)
    capture.close()


def test_an_option_that_is_none_is_refused():
    with pytest.raises(CaptureError, match="unknown options: speed"):
        StacksCapture(request(options={"speed": True}), info(os.getpid()), None, None, look)
