"""Kill -9 at every stage of a capture: of sftriage, which is agent and controller here, and of the trainer.

Training goes on, or ends as it would have; nothing half written is ever listed; nothing is decided twice; and the next
capture works.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sftriage.commands import asks
from sftriage.controller import read_journal
from sftriage.recorder import MailboxClient, RingReader, find_rings
from sftriage.records import Ask
from sftriage.traces import LocalStore
from sftriage.traces.rundir import RunDirectory, read_info
from tests.integration.processes import DEADLINE_S, descendants, wait_until

pytest.importorskip("torch")

SLOW_DATA = Path(__file__).parent / "jobs" / "slow_data.py"
RANK, STEPS, WARMUP_STEPS = 1, 40, 20
"""Long enough for every stage of a capture to be seen."""

POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: asked-only}
spec:
  rules: [{name: none, match: {label: suspect, gain: ">= 99%"}}]
  limits: {overhead_budget: 100%, captures_per_hour: 20, captures_per_run: 20}
"""


@dataclass
class Job:
    """A job of two ranks under watch, and what is needed to look into it from outside."""

    process: subprocess.Popen
    directory: RunDirectory
    release: Path
    pids: set[int] = field(default_factory=set)

    @property
    def rings(self) -> Path:
        return Path(read_info(self.directory).rings)

    def ring(self, rank: int) -> RingReader:
        """The newest ring of a rank."""
        return RingReader(sorted(path for path in find_rings(self.rings) if path.name.startswith(f"rank-{rank}."))[-1])

    def mailbox(self) -> MailboxClient:
        """The newest mailbox of the rank that is captured."""
        return MailboxClient(sorted(self.rings.glob(f"rank-{RANK}.*.mailbox"))[-1])

    def steps(self) -> int:
        """How many steps every rank has taken, at least."""
        with contextlib.ExitStack() as opened:
            return min(opened.enter_context(self.ring(rank)).status().published for rank in (0, 1))

    def trainer(self) -> int:
        """The process of the rank that is captured."""
        with self.ring(RANK) as ring:
            return ring.info.pid

    def known(self) -> list[int]:
        """The processes of the job; all that were ever seen are ended when the test is."""
        found = descendants(self.process.pid)
        self.pids.update(found)
        return found

    def entries(self, kind: str) -> list[dict]:
        return [entry for entry in read_journal(self.directory.decisions) if entry["type"] == kind]

    def whole(self) -> set[str]:
        """The captures that are listed, all of which are there whole, byte for byte."""
        store = LocalStore(self.directory.path)
        listing = store.manifests()
        assert listing.problems == ()
        assert {manifest.capture_id for manifest in listing.manifests} == store.ids()
        for manifest in listing.manifests:
            for artefact in manifest.artefacts:
                copy = self.release.with_name("copy")
                store.get(manifest.capture_id, artefact.name, copy, force=True)
        return set(store.ids())


@pytest.fixture
def job(tmp_path, environment):
    """Starts jobs; they, and whatever went on without us, are gone when the test ends."""
    policy = tmp_path / "asked-only.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    jobs: list[Job] = []

    def job(*launcher: object) -> Job:
        release = tmp_path / "release"
        command = ["run", "--policy", policy, "--out", tmp_path / "run", "--", sys.executable, "-m"]
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", 2, *launcher, SLOW_DATA, release]
        # (a file: a pipe would fill up, for what goes on without us writes into it too)
        with (tmp_path / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sftriage", *map(str, command)], env=environment, stdout=output, stderr=output
            )
        made = Job(process, RunDirectory(tmp_path / "run"), release)
        jobs.append(made)
        wait_until(lambda: made.directory.info_file.exists() and len(find_rings(made.rings)) == 2)
        wait_until(lambda: made.steps() >= 10)
        # The agent has found them too.
        wait_until(lambda: len(list(made.directory.steps.glob("*.steps"))) == 2)
        made.known()
        return made

    yield job
    for made in jobs:
        made.known()
        for pid in (*made.pids, made.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        made.process.wait(DEADLINE_S)


def asked(job: Job, number: int = 1) -> Ask:
    """Somebody asks for a capture."""
    ask = Ask(f"ask-{number}", (RANK,), "me", "a look", steps=STEPS, warmup_steps=WARMUP_STEPS)
    asks.leave(job.directory, ask)
    return ask


def at_state(state: str) -> Callable[[Job, MailboxClient], bool]:
    return lambda _, mailbox: mailbox.progress().state == state


def answered(_: Job, mailbox: MailboxClient) -> bool:
    """The trace is in the spool, and nobody has taken it yet."""
    return mailbox.latest() is not None and mailbox.progress().answered


def storing(job: Job, _: MailboxClient) -> bool:
    """The trace is being copied and compressed."""
    return any((job.directory.path / "captures").glob(".tmp-*"))


def stored(job: Job, _: MailboxClient) -> bool:
    """It has its name; it may be in the catalogue or not, and is not on record yet."""
    return any((job.directory.path / "captures").glob("asked-*"))


STAGES = {
    "armed": at_state("armed"),
    "recording": at_state("recording"),
    "exporting": at_state("exporting"),
    "answered": answered,
    "storing": storing,
    "stored": stored,
}


def wait_for(job: Job, stage: str) -> None:
    """Wait for a capture to come to a stage. Some last milliseconds: they are not waited for by sleeping."""
    reached, end_s = STAGES[stage], time.monotonic() + DEADLINE_S
    with job.mailbox() as mailbox:
        while not reached(job, mailbox):
            assert time.monotonic() < end_s, f"never {stage}"


def attached(job: Job, environment: dict[str, str]) -> subprocess.Popen:
    """Take the job over."""
    command = [sys.executable, "-m", "sftriage", "attach", "--run", str(job.directory.path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    job.pids.add(process.pid)
    return process


def capture_again(job: Job, environment: dict[str, str]) -> dict:
    """Have it captured by a person; the result."""
    command = [sys.executable, "-m", "sftriage", "capture", "--run", str(job.directory.path), "--rank", str(RANK)]
    done = subprocess.run(
        [*command, "--steps", "3", "--reason", "again", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    return result


def check_record(job: Job) -> None:
    """Nothing was decided twice, every capture that was asked for has ended once, and what is done is there."""
    windows = Counter((one["verdict"]["attempt"], one["verdict"]["first_step"]) for one in job.entries("window"))
    assert set(windows.values()) <= {1}
    decided = Counter(one["ask"]["ask_id"] for one in job.entries("ask"))
    assert set(decided.values()) <= {1}
    requested = {one["capture_id"] for entry in job.entries("ask") for one in entry["decision"]["requests"]}
    ended = Counter(one["result"]["capture_id"] for one in job.entries("capture"))
    assert ended == Counter(requested)
    done = {one["result"]["capture_id"] for one in job.entries("capture") if one["result"]["state"] == "done"}
    assert job.whole() == done
    assert [path.name for path in job.directory.spool.iterdir()] == []
    assert not list((job.directory.path / "captures").glob(".tmp-*"))


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
        wait_for(running, stage)
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
        wait_for(running, stage)
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
