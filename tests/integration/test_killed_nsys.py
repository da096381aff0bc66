"""Kill -9 at the stages of a capture that is made from outside: of sftriage, of the trainer, and of nsys itself.

As with torch's profiler (`test_killed`): training goes on or ends as it would have, nothing half written is listed, and
the next capture works. And nsys does not go on collecting for nobody.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.agent.executor import MailboxClient
from sftriage.agent.stacks import find_py_spy
from sftriage.errors import CaptureError
from sftriage.runs.directory import read_info
from sftriage.runtime.nsys_launch import place_in
from sftriage.trainer.layout import find_rings
from tests import needs
from tests.integration.killing import (
    RANK,
    Job,
    attached,
    capture_again,
    come_to,
    end,
    jobs,
    posted,
    result_of,
    stored,
    storing,
)
from tests.integration.processes import DEADLINE_S, descendants, wait_until

pytest.importorskip("torch")


def of_nsys(job: Job) -> list[int]:
    """The processes of the run's nsys, whoever their parents are by now."""
    place = place_in(job.directory)
    assert place is not None
    marks = (f"={place.prefix}-".encode(), f"{place.tmp}/".encode())
    return [pid for pid, words in commands() if any(mark in word for mark in marks for word in words)]


def commands() -> list[tuple[int, list[bytes]]]:
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append((int(cmdline.parent.name), cmdline.read_bytes().split(b"\0")))
    return found


@pytest.fixture
def job(tmp_path, environment):
    """Starts jobs under nsys, of which nothing is left when the test ends."""
    started = []
    with jobs(tmp_path, environment, "--nsys", "--nsys-trace", "nvtx,osrt") as start:

        def job(*launcher):
            started.append(start(*launcher))
            return started[-1]

        yield job
    for one in started:
        for pid in of_nsys(one):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def tmp_of(job: Job) -> Path:
    place = place_in(job.directory)
    assert place is not None
    return place.tmp


def note_of(job: Job) -> Path:
    """There while nsys collects for the rank, or while it is being stopped."""
    return tmp_of(job) / f"collecting-{RANK}"


def collecting(job: Job, mailbox: MailboxClient) -> bool:
    return note_of(job).exists() and mailbox.progress().state == "recording"


def answered(job: Job, mailbox: MailboxClient) -> bool:
    return posted(job, mailbox) and mailbox.progress().answered


def stopping(job: Job, mailbox: MailboxClient) -> bool:
    """The steps are in, and nsys has been told to stop."""
    return note_of(job).exists() and answered(job, mailbox)


def converting(job: Job, mailbox: MailboxClient) -> bool:
    """What nsys left is being made a report of."""
    return answered(job, mailbox) and not note_of(job).exists() and any(tmp_of(job).glob("asked-*.qdstrm"))


def exporting(job: Job, mailbox: MailboxClient) -> bool:
    """The report is being opened, to see what is in it."""
    return answered(job, mailbox) and any(tmp_of(job).glob("asked-*.sqlite"))


STAGES = {
    "starting": lambda job, _: note_of(job).exists(),
    "collecting": collecting,
    "stopping": stopping,
    "converting": converting,
    "exporting": exporting,
    "storing": storing,
    "stored": stored,
}


def kill(job: Job) -> None:
    job.process.kill()
    job.process.wait(DEADLINE_S)


def check_goes_on(job: Job, trainer: int) -> None:
    before = job.steps()
    wait_until(lambda: job.steps() > before + 20)
    assert job.trainer() == trainer


def check_gone(job: Job) -> None:
    assert not tmp_of(job).exists()
    wait_until(lambda: not of_nsys(job))


@needs.nsys
@pytest.mark.parametrize("stages", [tuple(STAGES)[:4], tuple(STAGES)[4:]], ids="-".join)
def test_sftriage_killed_at_any_stage_of_a_capture_by_nsys_is_taken_over_by_the_next(job, environment, stages):
    # GIVEN a job under nsys, captures of which come to some stage, one after the other
    running = job()
    trainer = running.trainer()
    for stage in stages:
        ask = come_to(running, stage, STAGES[stage], profiler="nsys")
        # WHEN sftriage is killed there
        kill(running)
        # THEN what is listed is whole, and training goes on, in the same process
        listed = running.whole()
        check_goes_on(running, trainer)
        # AND whoever takes it over says that this capture was lost, or, where it was stored already, has it
        running.process = attached(running, environment)
        result = result_of(running, ask.request_id)
        # (between seeing that it is being stored and killing whoever does, it may have been)
        expected = "stored" if result["capture_id"] in listed else "failed"
        assert result["state"] == expected, (stage, result)
        assert expected in {"storing": ("failed", "stored"), "stored": ("stored",)}.get(stage, ("failed",)), stage
        assert (expected == "stored") == (result["capture_id"] in running.whole())
        assert expected == "stored" or "sftriage ended during the capture" in result["detail"]
        # AND nothing is left of it, where the next report is made or on the way there
        assert not note_of(running).exists()
        assert not list(tmp_of(running).glob("asked-*"))
    # AND the next capture works
    again = capture_again(running, environment, "nsys")
    assert again["state"] == "stored", again
    # AND the job ends as it would have, its record has everything once, and nsys is gone with it
    end(running)
    check_gone(running)


@needs.nsys
def test_where_nobody_takes_over_nsys_is_stopped_all_the_same_soon_after_the_time_box(job, environment):
    # GIVEN a capture of three seconds at the most, for which nsys collects
    running = job()
    come_to(running, "collecting", collecting, profiler="nsys", steps=1000, max_seconds=3.0)
    # WHEN sftriage is killed, and nobody comes after it
    kill(running)
    # THEN the rank's own script ends the collection, and keeps nothing of it
    wait_until(lambda: not note_of(running).exists())
    assert not list(tmp_of(running).glob("asked-*"))
    listed = subprocess.run(
        ["nsys", "sessions", "list"],
        env={**environment, "TMPDIR": str(tmp_of(running))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    ours = [line.split() for line in listed.stdout.splitlines() if read_info(running.directory).run_id in line]
    states = {words[-1].rpartition("-")[2]: words[2] for words in ours}
    assert states == {"0.0": "Launched", "1.0": "Launched"}, listed.stdout
    # AND training goes on
    check_goes_on(running, running.trainer())
    # AND where somebody takes over after all, the next capture works
    running.process = attached(running, environment)
    wait_until(lambda: running.entries("capture"))
    assert capture_again(running, environment, "nsys")["state"] == "stored"
    end(running)
    check_gone(running)


@needs.nsys
def test_what_a_killed_sftriage_and_its_job_leave_is_swept_by_the_next_run(job, environment, tmp_path):
    # GIVEN a job whose sftriage was killed while nsys collected, and that has ended since, all alone
    running = job()
    come_to(running, "collecting", collecting, profiler="nsys")
    kill(running)
    # (any other run of this user on the host may sweep it, and is kept from that for as long)
    with (running.rings / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        running.release.touch()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running.pids))
        assert running.rings.exists()
        assert tmp_of(running).exists()
    # WHEN another job is run
    other = ["run", "--out", tmp_path / "other", "--", sys.executable, "-c", ""]
    command = [sys.executable, "-m", "sftriage", *map(str, other)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=DEADLINE_S)
    # THEN nothing is left of it but its run directory, without what was temporary in it
    assert not running.rings.exists()
    check_gone(running)
    assert not list(running.directory.path.glob("nsys-*"))


@needs.nsys
def test_a_trainer_killed_while_nsys_looks_at_it_costs_the_capture_and_what_it_would_have(job, environment):
    # GIVEN a job that starts again when a rank dies, and captures of a rank
    running = job("--max-restarts", 2)
    for number, stage in enumerate(("collecting", "converting")):
        killed = running.trainer()
        ask = come_to(running, stage, STAGES[stage], profiler="nsys")
        # WHEN the trainer is killed
        os.kill(killed, signal.SIGKILL)
        # THEN the capture has failed, if its steps were not all in; and what is listed is whole
        result = result_of(running, ask.request_id)
        expected = "failed" if stage == "collecting" else "stored"
        assert result["state"] == expected, result
        assert (result["capture_id"] in running.whole()) == (expected == "stored")
        # AND the job starts again, as it would have
        rings = 2 * (number + 2)
        wait_until(
            lambda rings=rings, killed=killed: (
                len(find_rings(running.rings)) == rings and running.trainer() != killed and running.steps() > 20
            )
        )
        running.known()
    # AND the next capture is one of its new trainer, and it ends as it would have
    again = capture_again(running, environment, "nsys")
    assert again["state"] == "stored", again
    end(running)
    check_gone(running)


@needs.nsys
def test_nsys_killed_while_it_collects_costs_the_capture_and_its_reason_is_said_from_then_on(job, environment):
    # GIVEN a capture for which nsys collects
    running = job()
    place = place_in(running.directory)
    trainer = running.trainer()
    come_to(running, "collecting", collecting, profiler="nsys")
    # WHEN all of nsys that looks after this rank is killed
    name = f"--session-name={place.prefix}-{RANK}.0".encode()
    agents = [pid for pid, words in commands() if name in words]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    # THEN the capture has failed, and nothing of it is listed
    wait_until(lambda: running.entries("capture"))
    (ended,) = running.entries("capture")
    assert (ended["result"]["state"], running.whole()) == ("failed", set()), ended
    # AND training goes on, in the same process
    check_goes_on(running, trainer)
    # AND this rank's next capture by nsys says why it cannot be; by torch it can
    again = capture_again(running, environment, "nsys")
    assert again["state"] == "failed"
    assert "session" in again["detail"]
    assert capture_again(running, environment)["state"] == "stored"
    # AND the job ends as it would have
    end(running)
    check_gone(running)


@pytest.fixture
def plain(tmp_path, environment):
    with jobs(tmp_path, environment) as start:
        yield start


def test_sftriage_killed_while_stacks_are_taken_is_taken_over_by_the_next(plain, environment):
    try:
        find_py_spy()
    except CaptureError as error:
        pytest.skip(str(error))
    # GIVEN a capture of stacks, for which py-spy looks into the trainer
    running = plain()
    trainer = running.trainer()

    def taking(*_: object) -> bool:
        below = set(descendants(running.process.pid))
        return any(pid in below and words[0].endswith(b"py-spy") for pid, words in commands())

    ask = come_to(running, "taken", taking, profiler="stacks", options={"stacks": {"native": True}})
    # WHEN sftriage is killed meanwhile
    kill(running)
    # THEN training goes on, in the same process: py-spy lets go of it
    check_goes_on(running, trainer)
    running.whole()
    # AND whoever takes over says that it was lost, and the next one works
    running.process = attached(running, environment)
    wait_until(lambda: running.entries("capture"))
    assert result_of(running, ask.request_id)["state"] == "failed"
    assert capture_again(running, environment, "stacks")["state"] == "stored"
    end(running)
