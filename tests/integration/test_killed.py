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

from sftriage.agent.executor import MailboxClient
from sftriage.trainer.layout import find_rings
from tests.integration.killing import (
    Job,
    asked,
    attached,
    capture_again,
    come_to,
    end,
    jobs,
    posted,
    result_of,
    stored,
    storing,
    taken_over,
)
from tests.integration.processes import DEADLINE_S, wait_until

pytest.importorskip("torch")


@pytest.fixture
def job(tmp_path, environment):
    with jobs(tmp_path, environment) as start:
        yield start


def at_state(state: str) -> Callable[[Job, MailboxClient], bool]:
    return lambda _, mailbox: mailbox.progress().state == state


def answered(job: Job, mailbox: MailboxClient) -> bool:
    """The trace is in the spool, and nobody has taken it yet."""
    return posted(job, mailbox) and mailbox.progress().answered


STAGES = {
    "posted": posted,
    "armed": at_state("armed"),
    "recording": at_state("recording"),
    "exporting": at_state("exporting"),
    "answered": answered,
    "storing": storing,
    "stored": stored,
}


def bring_to(running: Job, stage: str) -> str:
    """Have somebody ask for a capture, and wait until it has come to a stage; the id of what was asked."""
    if stage in ("asked", "posted"):
        # (the rank stands still, so that it cannot see what it is asked)
        os.kill(running.trainer(), signal.SIGSTOP)
    if stage == "asked":
        # (and here sftriage is not given the time to decide)
        os.kill(running.process.pid, signal.SIGSTOP)
        return asked(running).request_id
    return come_to(running, stage, STAGES[stage]).request_id


def trainer_killed_at(running: Job, stage: str) -> str:
    """Kill a trainer at a stage of its capture; the id of what was asked. Where it came too late, it is asked again."""
    while True:
        request_id, trainer = bring_to(running, stage), running.trainer()
        os.kill(trainer, signal.SIGSTOP)
        with running.mailbox() as mailbox:
            if STAGES[stage](running, mailbox):
                os.kill(trainer, signal.SIGKILL)
                return request_id
        os.kill(trainer, signal.SIGCONT)
        result_of(running, request_id)


@pytest.mark.parametrize(
    "stages", [("asked", "posted", "armed", "recording"), ("exporting", "answered", "storing", "stored")]
)
def test_sftriage_killed_at_any_stage_of_a_capture_is_taken_over_by_the_next(job, environment, stages):
    # GIVEN a job, captures of which come to some stage, one after the other
    running = job()
    trainers = [pid for pid in running.known() if pid != running.process.pid]
    for stage in stages:
        request_id = bring_to(running, stage)
        # WHEN sftriage is killed there
        running.process.kill()
        running.process.wait(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.trainer(), signal.SIGCONT)
        # THEN what is listed is whole
        running.whole()
        # AND training goes on, with the same processes
        before = running.steps()
        wait_until(lambda before=before: running.steps() > before + 20)
        assert all(Path(f"/proc/{pid}").exists() for pid in trainers), stage
        # AND whoever takes it over carries the capture to its end: the trainer had made it, or makes it now
        running.process = attached(running, environment)
        assert result_of(running, request_id)["state"] == "stored", stage
    # AND the next capture works, the job ends as it would have, and its record has everything once
    assert capture_again(running, environment)["state"] == "stored"
    end(running)


def test_a_trainer_killed_at_any_stage_of_its_capture_costs_the_capture_and_what_it_would_have(job, environment):
    # GIVEN a job that starts again when a rank dies, and captures that come to some stage, one after the other
    stages = ("posted", "armed", "recording", "exporting")
    running = job("--max-restarts", len(stages))
    for number, stage in enumerate(stages):
        killed = running.trainer()
        # WHEN the trainer is killed there
        request_id = trainer_killed_at(running, stage)
        # THEN the capture has failed, with that reason, and nothing of it is listed
        result = result_of(running, request_id)
        assert (result["state"], result["capture_id"] in running.whole()) == ("failed", False), stage
        assert "ended" in result["detail"]
        # AND the job starts again, as it would have
        rings = 2 * (number + 2)
        wait_until(
            lambda rings=rings, killed=killed: (
                len(find_rings(running.rings)) == rings and running.trainer() != killed and running.steps() > 20
            )
        )
        running.known()
    # AND the next capture is one of its new trainer, and it ends as it would have
    assert capture_again(running, environment)["state"] == "stored"
    end(running)


def test_whoever_took_a_job_over_can_let_go_of_it(job, environment):
    # GIVEN a job that was taken over
    running = job()
    taken_over(running, environment)
    for signum in (signal.SIGINT, signal.SIGTERM):
        watching = running.process
        wait_until(lambda watching=watching: str(watching.pid) in running.directory.lock.read_text(encoding="ascii"))
        # AND nobody else can take it over meanwhile
        second = attached(running, environment)
        _, said = second.communicate(timeout=DEADLINE_S)
        assert (second.returncode, f"is already being watched by process {watching.pid}" in said) == (2, True)
        # WHEN it is told to end
        judged = len(running.entries("window"))
        wait_until(lambda judged=judged: len(running.entries("window")) > judged)
        watching.send_signal(signum)
        _, said = watching.communicate(timeout=DEADLINE_S)
        # THEN it says that the job goes on, and the job does
        assert (watching.returncode, "stopped watching, the job continues" in said) == (130, True)
        before = running.steps()
        wait_until(lambda before=before: running.steps() > before + 20)
        # AND the next one takes it over
        running.process = attached(running, environment)
    # AND to its end, after which it cannot be taken over
    wait_until(lambda: str(running.process.pid) in running.directory.lock.read_text(encoding="ascii"))
    end(running)
    late = attached(running, environment)
    _, said = late.communicate(timeout=DEADLINE_S)
    assert (late.returncode, "the job has ended" in said) == (2, True)
