"""The job as our child: whatever we are sent, from the first moment on, is its."""

import os
import signal
import subprocess

import pytest

from sftriage.errors import UsageError
from sftriage.runtime.launcher import FORWARDED, Launcher

PATIENT = "trap 'exit 7' TERM; echo up; while :; do sleep 0.02; done"


@pytest.fixture
def handlers():
    before = [signal.getsignal(signum) for signum in FORWARDED]
    yield lambda: [signal.getsignal(signum) for signum in FORWARDED] == before
    for signum, handler in zip(FORWARDED, before, strict=True):
        signal.signal(signum, handler)


def test_a_signal_before_the_job_is_waited_for_is_passed_on(handlers):
    # GIVEN a job that has started, and nobody waits for it yet
    reading, writing = os.pipe()
    launcher = Launcher(("sh", "-c", PATIENT), {}, writing)
    assert os.read(reading, 2) == b"up"
    # WHEN we are sent a signal
    os.kill(os.getpid(), signal.SIGTERM)
    # THEN it is the job's, and ours are what they were once it has ended
    assert launcher.wait() == 7
    assert handlers()
    os.close(reading)
    os.close(writing)


def test_a_signal_while_the_job_is_being_started_is_kept_for_it(handlers, monkeypatch):
    # GIVEN a signal that comes just before there is a child
    real = subprocess.Popen

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    # THEN the child gets it, and we do not die of it
    assert Launcher(("sleep", "60"), {}).wait() == 128 + signal.SIGTERM
    assert handlers()


def test_a_job_that_does_not_end_when_told_is_not_waited_for_beyond_patience(handlers):
    # GIVEN a job that does not heed SIGTERM
    reading, writing = os.pipe()
    launcher = Launcher(
        ("sh", "-c", "trap '' TERM; trap 'exit 7' HUP; echo up; while :; do sleep 0.02; done"), {}, writing
    )
    assert os.read(reading, 2) == b"up"
    alarm = signal.getsignal(signal.SIGALRM)
    # WHEN it is told to end
    os.kill(os.getpid(), signal.SIGTERM)
    # THEN who waits hears after a while that it has not
    assert launcher.wait(0.2) is None
    assert launcher.told
    # AND may wait again, and pass on what comes
    os.kill(os.getpid(), signal.SIGHUP)
    assert launcher.wait() == 7
    assert handlers()
    assert signal.getsignal(signal.SIGALRM) is alarm
    os.close(reading)
    os.close(writing)


def test_a_job_that_ends_when_told_is_waited_for_as_ever(handlers):
    launcher = Launcher(("sleep", "60"), {})
    os.kill(os.getpid(), signal.SIGTERM)
    assert launcher.wait(60.0) == 128 + signal.SIGTERM
    assert handlers()


def test_a_command_that_cannot_be_started_leaves_signals_as_they_were(handlers):
    with pytest.raises(UsageError, match="cannot start /no/such/thing"):
        Launcher(("/no/such/thing",), {})
    assert handlers()
