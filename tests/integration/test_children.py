"""Children: programs with a deadline, those that are started again, and the job, which gets all signals sent to us."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from sftriage.base import process
from sftriage.base.process import LET_GO, MOST_QUICK, BoundedProgram, Supervised, run_bounded, start_ticks, was_killed
from sftriage.errors import CaptureError, UsageError
from sftriage.runtime.launcher import FORWARDED, Launcher
from tests.integration.processes import wait_until


def ended(program):
    return wait_until(program.poll)


def test_a_program_tells_its_status_and_its_output():
    finished = ended(BoundedProgram(["sh", "-c", "echo out; echo err >&2; exit 3"], 60))
    assert (finished.status, finished.output, finished.problem()) == (3, "out\nerr\n", "err")
    assert ended(BoundedProgram(["sh", "-c", "exit 4"], 60)).problem() == "exit status 4"


def test_much_output_does_not_block_and_is_read_up_to_a_bound():
    command = [sys.executable, "-c", "print('x' * 3_000_000)"]
    assert len(ended(BoundedProgram(command, 60, max_output_bytes=1000)).output) == 1000


def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path):
    # GIVEN a program that hangs, and has started another one
    note = tmp_path / "pid"
    program = BoundedProgram(["sh", "-c", f"sleep 100 & echo $! > {note}.new; mv {note}.new {note}; wait"], 1.0)
    with pytest.raises(CaptureError, match=r"sh hung: no answer within 1 s"):
        ended(program)
    # THEN neither of them is there
    pid = int(note.read_text(encoding="ascii"))
    wait_until(lambda: start_ticks(pid) is None, DEADLINE_S)


def test_one_that_cannot_be_started_is_a_reason(tmp_path):
    with pytest.raises(CaptureError, match="nsys cannot be started: No such file"):
        run_bounded([tmp_path / "nsys", "--version"], 5)


def test_a_program_that_needs_a_moment_does_not_cost_a_turn(monkeypatch):
    monkeypatch.setattr(process, "MOMENT_S", 30.0)
    with pytest.raises(StopIteration) as ended_at_once:
        next(BoundedProgram(["true"], 60).wait())
    assert ended_at_once.value.value.status == 0


def test_a_wait_that_is_given_up_kills_the_program():
    program = BoundedProgram(["sleep", "100"], 60)
    turns = program.wait()
    next(turns)
    turns.close()
    assert program._process.returncode is not None


PATIENT = "trap 'exit 7' TERM; echo up; while :; do sleep 0.02; done"


@pytest.fixture
def handlers():
    before = [signal.getsignal(signum) for signum in FORWARDED]
    yield lambda: [signal.getsignal(signum) for signum in FORWARDED] == before
    for signum, handler in zip(FORWARDED, before, strict=True):
        signal.signal(signum, handler)


@pytest.fixture
def launcher(handlers):
    made = Launcher()
    yield made
    made.close()
    assert handlers()


def test_every_signal_but_those_about_this_process_itself_is_the_jobs():
    own = {
        *("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"),
        *("SIGPIPE", "SIGXFSZ", "SIGTTIN", "SIGTTOU"),
    }
    assert set(FORWARDED) == signal.valid_signals() - {signal.Signals[name] for name in own}
    assert {signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU, signal.SIGRTMIN, signal.SIGCONT} < {
        *FORWARDED
    }


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGRTMIN])
def test_a_signal_before_the_start_says_that_there_is_to_be_none(launcher, signum):
    os.kill(os.getpid(), signal.SIGWINCH)
    assert launcher.ended_by is None
    os.kill(os.getpid(), signum)
    assert launcher.ended_by == signum


def test_what_we_ignore_the_job_ignores_too(handlers):
    # GIVEN that we were started under nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher = Launcher()
    os.kill(os.getpid(), signal.SIGHUP)
    assert launcher.ended_by is None
    launcher.start(("sh", "-c", "kill -HUP $$; exit 5"), {})
    # WHEN a hangup comes THEN neither of us dies of it
    os.kill(os.getpid(), signal.SIGHUP)
    assert launcher.wait() == 5
    # AND one that handles it all the same gets it
    launcher.close()
    heeding = Launcher()
    reading, writing = os.pipe()
    heeds = "import signal\nsignal.signal(1, lambda *_: exit(6))\nprint('up', flush=True)\nwhile True: signal.pause()"
    heeding.start((sys.executable, "-c", heeds), {}, writing)
    assert os.read(reading, 2) == b"up"
    os.kill(os.getpid(), signal.SIGHUP)
    assert heeding.wait() == 6
    launcher = heeding
    os.close(reading)
    os.close(writing)
    launcher.close()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ctrl_c_after_the_end_of_the_job_is_a_wish_to_wait_for_no_more(launcher):
    launcher.start(("true",), {})
    assert (launcher.wait(), launcher.hurried) == (0, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not launcher.hurried
    os.kill(os.getpid(), signal.SIGINT)
    assert launcher.hurried


def test_a_command_that_cannot_be_started_leaves_signals_as_they_were(handlers):
    with pytest.raises(UsageError, match="cannot start /no/such/thing"):
        Launcher().start(("/no/such/thing",), {})
    assert handlers()


def test_signals_of_a_fork_that_comes_meanwhile_are_not_lost(launcher):
    # GIVEN threads that send us signals while the job starts
    stop = threading.Event()

    def send():
        while not stop.wait(0.001):
            os.kill(os.getpid(), signal.SIGTERM)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        # THEN the job ends by one of them
        launcher.start(("sleep", "60"), {})
        assert launcher.wait() == 128 + signal.SIGTERM
        assert (launcher.last_signal, launcher.ended.is_set()) == (signal.SIGTERM, True)
    finally:
        stop.set()
        sending.join()


DEADLINE_S = 30.0
SLEEPING = [sys.executable, "-c", "import signal; signal.pause()"]


class Started:
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


@pytest.mark.parametrize(
    ("command", "act", "status"),
    [
        ([sys.executable, "-c", "raise SystemExit(0)"], Supervised.keep, 0),
        ([sys.executable, "-c", "raise SystemExit(2)"], Supervised.keep, 2),
        (SLEEPING, lambda child: [child.keep(), child.terminate()], -signal.SIGTERM),
        (SLEEPING, Supervised.close, -signal.SIGTERM),
    ],
    ids=["ends", "fails", "is ended", "is not kept"],
)
def test_one_that_ends_or_is_ended_is_not_started_again(command, act, status):
    start = Started(command)
    child = Supervised("brief", start, was_killed)
    act(child)
    child.wait(DEADLINE_S)
    child.close()
    assert (start.again, start.processes[0].wait(DEADLINE_S)) == ([False], status)


def test_a_child_that_keeps_ending_is_given_up_with_a_message(caplog):
    start = Started([sys.executable, "-c", "import os; os.abort()"])
    child = Supervised("weak one", start, was_killed, where="its own log")
    child.keep()
    child.wait(DEADLINE_S)
    child.close()
    assert len(start.processes) == MOST_QUICK
    assert "the weak one keeps ending; see its own log" in caplog.text
