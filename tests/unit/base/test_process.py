"""A process is known by its pid and start; a lock is held until its holder ends it or dies."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from sftriage.base.process import Forks, Process, is_locked, locked, parent_of, start_ticks
from sftriage.errors import UsageError
from tests.integration.processes import wait_until

HOLD = """
import sys
from pathlib import Path
from sftriage.base.process import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a file."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_zombie_is_not_alive():
    # GIVEN a child that has ended, and whose parent has not reaped it yet
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert start_ticks(child) is None
        assert not Process.of(child).alive
        assert start_ticks(os.getpid()) is not None
    finally:
        os.waitpid(child, 0)


def test_a_process_is_alive_until_it_ends_and_another_with_its_pid_is_not_it():
    assert Process.of(os.getpid()).alive
    assert not Process(os.getpid(), 1).alive
    assert not Process(-1, 0).alive
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(-1) is None


def test_a_lock_keeps_others_out_until_its_holder_dies(tmp_path, holder):
    lock = tmp_path / "lock"
    for shared in (True, False):
        began_s = time.monotonic()
        with pytest.raises(BlockingIOError), locked(lock, shared=shared, wait_s=0.1):
            pass
        assert time.monotonic() - began_s >= 0.1
    assert is_locked(lock)
    holder.kill()
    with locked(lock, wait_s=None):
        assert is_locked(lock)
    assert not is_locked(lock)
    assert lock.stat().st_mode & 0o777 == 0o600


def test_a_shared_lock_lets_others_share_it(tmp_path):
    lock = tmp_path / "lock"
    with locked(lock, shared=True), locked(lock, shared=True), pytest.raises(BlockingIOError), locked(lock):
        pass
    assert not is_locked(tmp_path / "missing")


def test_forked_children_are_restarted_and_ended_alone(tmp_path):
    """GIVEN children that run functions WHEN one is killed, fails, or is not wanted THEN the others continue"""
    forks, begun = Forks(20.0), tmp_path / "begun"

    def child(name: str, *, fails: bool = False) -> None:
        with begun.open("a") as file:
            file.write(f"{name} {os.getpid()}\n")
        if fails:
            raise UsageError("no such hub")
        signal.pause()

    def pids() -> dict[str, list[int]]:
        forks.turn()
        found: dict[str, list[int]] = {}
        for line in begun.read_text().splitlines() if begun.exists() else ():
            name, pid = line.split()
            found.setdefault(name, []).append(int(pid))
        return found

    forks.want({name: partial(child, name, fails=name == "c") for name in "abc"})
    before = wait_until(lambda: len(found := pids()) == 3 and found)
    os.kill(before["a"][0], signal.SIGKILL)
    after = wait_until(lambda: all(len((found := pids())[name]) > 1 for name in "ac") and found)
    assert after["b"] == before["b"]
    forks.want({"b": partial(child, "b")})
    wait_until(lambda: pids() and forks.running == {"b"})
    assert pids()["b"] == before["b"]
    forks.close()
    assert not forks.running
