"""A child that is started again: when it is, when it is not, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from sftriage.base.children import LET_GO, MOST_QUICK, Supervised, was_killed

DEADLINE_S = 30.0
SLEEPING = [sys.executable, "-c", "import signal; signal.pause()"]


class Started:
    """Starts processes of a command, and says when."""

    def __init__(self, *commands):
        self._commands, self.processes, self.again = list(commands), [], []
        self.changed = threading.Condition()

    def __call__(self, again):
        with self.changed:
            command = self._commands[min(len(self.processes), len(self._commands) - 1)]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            self.again.append(again)
            self.changed.notify_all()
            return self.processes[-1]

    def wait_for(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.processes) >= number, DEADLINE_S)


@pytest.mark.parametrize(
    ("status", "killed"),
    [(0, False), (2, False), (-signal.SIGKILL, True), (-signal.SIGSEGV, True), (-signal.SIGTERM, False),
     (-signal.SIGINT, False), (-LET_GO, False), (-signal.SIGUSR1, True)],
)  # fmt: skip
def test_what_a_process_ends_with_says_whether_it_was_killed(status, killed):
    assert was_killed(status) == killed


def test_one_that_is_killed_is_started_again_until_it_is_closed():
    start = Started(SLEEPING)
    child = Supervised("sleeper", start, was_killed)
    child.keep()
    # WHEN it is killed
    os.kill(child.pid, signal.SIGKILL)
    # THEN another one is there
    start.wait_for(2)
    assert start.again == [False, True]
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    # AND none once it is closed
    child.close()
    assert [one.wait(DEADLINE_S) for one in start.processes] == [-signal.SIGKILL, -signal.SIGTERM]
    assert len(start.processes) == 2


@pytest.mark.parametrize("status", [0, 2])
def test_one_that_ends_by_itself_has_ended(status):
    start = Started([sys.executable, "-c", f"raise SystemExit({status})"])
    child = Supervised("brief", start, was_killed)
    child.keep()
    child.wait(DEADLINE_S)
    child.close()
    assert start.again == [False]


def test_one_that_is_told_to_end_is_not_started_again():
    start = Started(SLEEPING)
    child = Supervised("sleeper", start, was_killed)
    child.keep()
    child.terminate()
    child.wait(DEADLINE_S)
    child.close()
    assert start.again == [False]


def test_one_that_ends_again_and_again_is_given_up_and_that_is_said(caplog):
    start = Started([sys.executable, "-c", "import os; os.abort()"])
    child = Supervised("weak one", start, was_killed, where="its own log")
    child.keep()
    child.wait(DEADLINE_S)
    child.close()
    assert len(start.processes) == MOST_QUICK
    assert "the weak one has ended, again and again; its own log says why" in caplog.text


def test_one_that_is_not_kept_is_ended_as_well():
    start = Started(SLEEPING)
    Supervised("sleeper", start).close()
    assert start.processes[0].wait(DEADLINE_S) == -signal.SIGTERM
