"""A rank that dumps its own stacks, without py-spy: real processes, each with a Monitor."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sftriage.agent.stacks import StacksCapture
from sftriage.model.captures import CaptureRequest
from sftriage.trainer.layout import find_rings
from sftriage.windows.rings import Ring
from tests.integration.processes import wait_until

TRAINER = """
import ctypes, os, sys, threading
from sftriage.trainer.monitor import Monitor
monitor = Monitor(rings=sys.argv[1])
def hangs_here():
    print("up", flush=True)
    {hangs}
def loads():
    threading.Event().wait()
threading.Thread(target=loads, name="loader", daemon=True).start()
with monitor.step(), monitor.stage("data"):
    hangs_here()
"""
HANGS = {
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a read": "os.read(0, 1)",
    "a loop": "while True: pass",
}
KEEPS_INTERPRETER = "ctypes.PyDLL(None).sleep(600)"


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Starts a rank that hangs in some way, where no py-spy is found."""

    python, started = sys.executable, []
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    def start(hangs: str) -> subprocess.Popen:
        command = [python, "-c", TRAINER.format(hangs=hangs), tmp_path]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "up\n"
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate(timeout=30)


def captured(directory: Path, capture_id: str = "c-1", max_seconds: float = 20):
    """The capture of the one rank that records in this directory, and its result."""
    (ring,) = find_rings(directory)
    with Ring(ring) as opened:
        request = CaptureRequest(capture_id, 0, "stacks", 1, 0, max_seconds=max_seconds, max_bytes=10**6)
        capture = StacksCapture(request, opened.info, directory, directory, lambda: None)
    return capture, wait_until(capture.poll, 60)


@pytest.mark.parametrize("hangs", HANGS)
def test_a_rank_that_hangs_says_where_it_stands(trainer, tmp_path, hangs):
    # GIVEN a rank that hangs, and that no other process may read
    process = trainer(HANGS[hangs])
    for capture_id in ("c-1", "c-2"):
        # WHEN its stacks are taken, once and again
        capture, found = captured(tmp_path, capture_id)
        # THEN they are of all its threads but the one that answers, and the notes say how they were taken
        assert (found.state, found.detail.partition(";")[0]) == (
            "stored",
            "taken by the trainer itself, Python frames only: py-spy is not installed: pip install 'sftriage[stacks]'",
        )
        document = json.loads(capture.products()[0].path.read_text(encoding="utf-8"))
        assert (document["taken_by"], document["pid"]) == ("the trainer", process.pid)
        of_threads = {one["thread_name"]: [frame["name"] for frame in one["frames"]] for one in document["threads"]}
        assert set(of_threads) == {"MainThread", "loader"}
        assert of_threads["MainThread"][0] == "hangs_here"
        assert "loads" in of_threads["loader"]
        capture.close()
    # AND without a request, the thread that answers does not run
    assert process.poll() is None
    assert switches(process.pid) == switches(process.pid)


def switches(pid: int) -> str:
    """How often the thread that answers has run."""
    (status,) = [
        path / "status"
        for path in Path(f"/proc/{pid}/task").iterdir()
        if path.name != str(pid) and "fffffffe7ffbfeff" in (path / "status").read_text()
    ]
    return next(line for line in status.read_text().splitlines() if line.startswith("voluntary"))


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_that_cannot_answer_costs_some_seconds_and_says_why(trainer, tmp_path, stopped):
    # GIVEN a rank that is stopped, or hangs in native code that keeps the interpreter
    process = trainer(HANGS["a read"] if stopped else KEEPS_INTERPRETER)
    if stopped:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    else:
        sleeping = Path(f"/proc/{process.pid}/wchan")
        wait_until(lambda: "nanosleep" in sleeping.read_text())
    capture, found = captured(tmp_path, max_seconds=1)
    assert found.state == "failed", found.detail
    assert "not installed: pip install 'sftriage[stacks]'; the trainer does not answer: it is stopped" in found.detail
    capture.close()


def test_signals_come_to_the_program_and_nothing_is_left_when_it_ends(trainer, tmp_path):
    # GIVEN a trainer that waits in a read, and takes SIGTERM for its end
    takes = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
    process = trainer(f"{takes}; print('ready', flush=True); os.read(0, 1)")
    assert process.stdout.readline() == "ready\n"
    time_s = time.monotonic()
    process.terminate()
    # THEN it does at once, and its pipe is gone
    assert process.wait(30) == 3
    assert time.monotonic() - time_s < 20
    assert not list(tmp_path.glob("*.asks"))
