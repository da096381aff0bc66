"""Kill -9 at every stage of a capture: of sftriage, which is agent and controller here, and of the trainer.

Training goes on, or ends as it would have; nothing half written is ever listed; nothing is decided twice; and the next
capture works.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sftriage.recorder import MailboxClient, find_rings
from tests.integration.killing import (
    Job,
    asked,
    attached,
    capture_again,
    check_record,
    jobs,
    stored,
    storing,
    wait_for,
)
from tests.integration.processes import DEADLINE_S, wait_until

pytest.importorskip("torch")


@pytest.fixture
def job(tmp_path, environment):
    with jobs(tmp_path, environment) as start:
        yield start


def at_state(state: str) -> Callable[[Job, MailboxClient], bool]:
    return lambda _, mailbox: mailbox.progress().state == state


def answered(_: Job, mailbox: MailboxClient) -> bool:
    """The trace is in the spool, and nobody has taken it yet."""
    return mailbox.latest() is not None and mailbox.progress().answered


STAGES = {
    "armed": at_state("armed"),
    "recording": at_state("recording"),
    "exporting": at_state("exporting"),
    "answered": answered,
    "storing": storing,
    "stored": stored,
}


@pytest.mark.parametrize("stage", ["asked", "posted", *STAGES])
def test_sftriage_killed_at_any_stage_of_a_capture_is_taken_over_by_the_next(job, environment, stage):
    # GIVEN a job, a capture of which has come to some stage
    running = job()
    trainers = [pid for pid in running.known() if pid != running.process.pid]
    if stage in ("asked", "posted"):
        # (the rank stands still, so that it cannot see what it is asked)
        os.kill(running.trainer(), signal.SIGSTOP)
    if stage == "asked":
        # (and here sftriage is not given the time to decide)
        os.kill(running.process.pid, signal.SIGSTOP)
    ask = asked(running)
    if stage == "posted":
        with running.mailbox() as mailbox:
            wait_until(lambda: mailbox.latest() is not None)
    elif stage != "asked":
        wait_for(running, stage, STAGES[stage])
    # WHEN sftriage is killed there
    running.process.kill()
    running.process.wait(DEADLINE_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.trainer(), signal.SIGCONT)
    # THEN what is listed is whole
    running.whole()
    # AND training goes on, with the same processes
    before = running.steps()
    wait_until(lambda: running.steps() > before + 20)
    assert all(Path(f"/proc/{pid}").exists() for pid in trainers)
    # AND whoever takes it over carries the capture to its end: the trainer had made it, or makes it now
    successor = attached(running, environment)
    wait_until(lambda: running.entries("capture"))
    (first,) = running.entries("capture")
    (decided,) = running.entries("ask")
    assert (decided["ask"]["ask_id"], first["result"]["state"]) == (ask.ask_id, "done"), first
    # AND the next capture works
    assert capture_again(running, environment)["state"] == "done"
    # AND the job ends as it would have, and its record has everything once
    running.release.touch()
    _, said = successor.communicate(timeout=DEADLINE_S)
    assert successor.returncode == 0, said
    assert not running.rings.exists()
    check_record(running)


@pytest.mark.parametrize("stage", ["posted", "armed", "recording", "exporting"])
def test_a_trainer_killed_at_any_stage_of_its_capture_costs_the_capture_and_what_it_would_have(job, environment, stage):
    # GIVEN a job that starts again when a rank dies, and a capture that has come to some stage
    running = job("--max-restarts", 1)
    killed = running.trainer()
    if stage == "posted":
        os.kill(killed, signal.SIGSTOP)
    asked(running)
    if stage == "posted":
        with running.mailbox() as mailbox:
            wait_until(lambda: mailbox.latest() is not None)
    else:
        wait_for(running, stage, STAGES[stage])
    # WHEN the trainer is killed there
    os.kill(killed, signal.SIGKILL)
    # THEN the capture has failed, with that reason, and nothing of it is listed
    wait_until(lambda: running.entries("capture"))
    (failed,) = running.entries("capture")
    assert (failed["result"]["state"], running.whole()) == ("failed", set())
    assert "ended" in failed["result"]["detail"]
    # AND the job starts again, as it would have, and the next capture is one of its new trainer
    wait_until(lambda: len(find_rings(running.rings)) == 4 and running.trainer() != killed and running.steps() > 20)
    running.known()
    assert capture_again(running, environment)["state"] == "done"
    # AND it ends as it would have
    running.release.touch()
    assert running.process.wait(DEADLINE_S) == 0
    check_record(running)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_whoever_took_a_job_over_can_let_go_of_it(job, environment, signum):
    # GIVEN a job that was taken over
    running = job()
    running.process.kill()
    running.process.wait(DEADLINE_S)
    watching = attached(running, environment)
    wait_until(lambda: str(watching.pid) in running.directory.lock.read_text(encoding="ascii"))
    # AND nobody else can take it over meanwhile
    second = attached(running, environment)
    _, said = second.communicate(timeout=DEADLINE_S)
    assert (second.returncode, f"is watched already, by process {watching.pid}" in said) == (2, True)
    # WHEN it is told to end
    wait_until(lambda: len(running.entries("window")) > 2)
    watching.send_signal(signum)
    _, said = watching.communicate(timeout=DEADLINE_S)
    # THEN it says that the job goes on, and the job does
    assert (watching.returncode, "let go of the job" in said) == (130, True)
    before = running.steps()
    wait_until(lambda: running.steps() > before + 20)
    # AND the next one takes it to its end
    successor = attached(running, environment)
    running.release.touch()
    _, said = successor.communicate(timeout=DEADLINE_S)
    assert successor.returncode == 0, said
    check_record(running)


def test_a_job_that_has_ended_cannot_be_taken_over(job, environment):
    running = job()
    running.release.touch()
    assert running.process.wait(DEADLINE_S) == 0
    late = attached(running, environment)
    _, said = late.communicate(timeout=DEADLINE_S)
    assert (late.returncode, "the job has ended" in said) == (2, True)
