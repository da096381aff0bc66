"""Jobs under watch that tests kill parts of, with -9, and what has to be so afterwards."""

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sftriage.agent.executor import MailboxClient
from sftriage.errors import RingError
from sftriage.model.captures import ManualRequest
from sftriage.runs import requests
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.traces.store import LocalStore
from sftriage.trainer.layout import find_rings
from sftriage.windows.rings import Ring
from tests.integration.policies import policy
from tests.integration.processes import (
    DEADLINE_S,
    FORKED,
    SLOW_DATA,
    TORCHRUN,
    descendants,
    kill,
    sftriage_process,
    wait_until,
)
from tests.scenario import entries

RANK, STEPS, WARMUP_STEPS = 1, 40, 20
"""Long enough for every stage of a capture to be seen."""
LOOK_S = 0.5

POLICY = policy(
    'name: none, match: {label: suspect, gain: ">= 99%"}',
    detection="",
    limits="overhead_budget: 100%, captures_per_hour: 100, captures_per_run: 100",
)


@dataclass
class Job:
    """A job of two ranks under watch, and what is needed to look into it from outside."""

    process: subprocess.Popen
    directory: RunDirectory
    release: Path
    pids: set[int] = field(default_factory=set)
    old: set[str] = field(default_factory=set)
    """The captures that were there when the last one was asked for."""
    posted_before: object = None
    """What the mailbox held then."""
    asks: int = 0

    @property
    def rings(self) -> Path:
        return Path(read_info(self.directory).rings)

    def ring(self, rank: int) -> Ring:
        return Ring(sorted(path for path in find_rings(self.rings) if path.name.startswith(f"rank-{rank}."))[-1])

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
        return entries(self.directory.decisions, kind)

    def whole(self) -> set[str]:
        """The captures that are listed, all of which are there whole, byte for byte."""
        store = LocalStore(self.directory.path)
        listing = store.manifests()
        assert not listing.unfit
        assert {manifest.capture_id for manifest in listing.manifests} == store.ids()
        for manifest in listing.manifests:
            for artefact in manifest.artefacts:
                copy = self.release.with_name("copy")
                store.get(manifest.capture_id, artefact.name, copy, force=True)
        return set(store.ids())


@contextlib.contextmanager
def jobs(tmp_path: Path, environment: dict[str, str], *options: str) -> Iterator[Callable[..., Job]]:
    """Starts jobs; they, and whatever went on without us, are gone when this ends.

    Args:
        tmp_path: where their run goes.
        environment: theirs.
        options: further ones for `sftriage run`.
    """
    policy = tmp_path / "asked-only.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    made: list[Job] = []

    def start(*launcher: object) -> Job:
        release = tmp_path / "release"
        command = ["run", *options, "--policy", policy, "--out", tmp_path / "run", "--"]
        # (nsys is started where a rank's interpreter is)
        command += [*(TORCHRUN if options else FORKED), 2, *launcher, SLOW_DATA, release]
        # (a file: a pipe would fill up, for what goes on without us writes into it too)
        with (tmp_path / "output").open("wb") as output:
            process = sftriage_process(*command, env=environment, stdout=output, stderr=output)
        job = Job(process, RunDirectory(tmp_path / "run"), release)
        made.append(job)
        wait_until(lambda: job.directory.info_file.exists() and len(find_rings(job.rings)) == 2)
        wait_until(lambda: job.steps() >= 10)
        # The agent has found them too.
        wait_until(lambda: len(list(job.directory.steps.glob("*.steps"))) == 2)
        job.known()
        return job

    try:
        yield start
    finally:
        for job in made:
            job.known()
            kill(*job.pids, job.process.pid)
            job.process.wait(DEADLINE_S)


def asked(job: Job, **changes: object) -> ManualRequest:
    job.asks += 1
    job.old = {path.name for path in (job.directory.path / "captures").glob("asked-*")}
    with job.mailbox() as mailbox:
        job.posted_before = mailbox.latest()
    fields = {"steps": STEPS, "warmup_steps": WARMUP_STEPS, **changes}
    ask = ManualRequest(f"ask-{job.asks}", (RANK,), "me", "a look", **fields)
    requests.leave(job.directory, ask)
    return ask


def posted(job: Job, mailbox: MailboxClient) -> bool:
    with contextlib.suppress(RingError):  # (looked at while it is being written)
        return mailbox.latest() != job.posted_before
    return False


def storing(job: Job, _: MailboxClient) -> bool:
    """The trace is being copied and compressed."""
    return any((job.directory.path / "captures").glob(".tmp-*"))


def stored(job: Job, _: MailboxClient) -> bool:
    """It has its name; it may be in the catalogue or not, and is not on record yet."""
    return any(path.name not in job.old for path in (job.directory.path / "captures").glob("asked-*"))


def come_to(job: Job, stage: str, reached: Callable[[Job, MailboxClient], bool], **changes: object) -> ManualRequest:
    """Have somebody ask for a capture, and wait for it to come to a stage.

    Some stages last milliseconds: nothing sleeps longer than that, and where one was missed, it is asked again.
    """
    end_s = time.monotonic() + DEADLINE_S
    while True:
        ask, look_s = asked(job, **changes), time.monotonic() + LOOK_S
        with job.mailbox() as mailbox:
            while not reached(job, mailbox):
                now_s = time.monotonic()
                assert now_s < end_s, f"never {stage}: {[one['result'] for one in job.entries('capture')][-3:]}"
                if now_s > look_s:
                    if results_of(job, ask.request_id):
                        break
                    look_s = now_s + LOOK_S
                time.sleep(0.001)
            else:
                return ask


def results_of(job: Job, request_id: str) -> list[dict]:
    """What has become of the capture that somebody asked for, and that was not refused."""
    decided = [one["decision"] for one in job.entries("manual_request") if one["request"]["request_id"] == request_id]
    assert [one["reason"] for one in decided if one["outcome"] != "capture"] == []
    ids = {request["capture_id"] for one in decided for request in one["requests"]}
    return [one["result"] for one in job.entries("capture") if one["result"]["capture_id"] in ids]


def result_of(job: Job, request_id: str) -> dict:
    (result,) = wait_until(lambda: results_of(job, request_id))
    return result


def attached(job: Job, environment: dict[str, str]) -> subprocess.Popen:
    where = "--run", job.directory.path
    process = sftriage_process("attach", *where, env=environment, stderr=subprocess.PIPE, text=True)
    job.pids.add(process.pid)
    return process


def taken_over(job: Job, environment: dict[str, str]) -> None:
    job.process.kill()
    job.process.wait(DEADLINE_S)
    job.process = attached(job, environment)


def end(job: Job) -> None:
    """Let the job end: as it would have, with everything on record once."""
    job.release.touch()
    # (who took a job over says what it has to say into a pipe)
    _, said = job.process.communicate(timeout=DEADLINE_S)
    assert job.process.returncode == 0, said
    assert not job.rings.exists()
    assert not (job.directory.path / "auto").exists()
    check_record(job)


def capture_again(job: Job, environment: dict[str, str], profiler: str = "torch") -> dict:
    command = [sys.executable, "-m", "sftriage", "capture", "--run", str(job.directory.path), "--rank", str(RANK)]
    done = subprocess.run(
        [*command, "--profiler", profiler, "--steps", "3", "--reason", "again", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert (done.returncode == 0) == (result["state"] == "stored"), done.stderr
    return result


def check_record(job: Job) -> None:
    """Nothing was decided twice, every capture that was asked for has ended once, and what is done is there."""
    windows = Counter((one["verdict"]["attempt"], one["verdict"]["first_step"]) for one in job.entries("window"))
    assert set(windows.values()) <= {1}
    decided = Counter(one["request"]["request_id"] for one in job.entries("manual_request"))
    assert set(decided.values()) <= {1}
    requested = {one["capture_id"] for entry in job.entries("manual_request") for one in entry["decision"]["requests"]}
    ended = Counter(one["result"]["capture_id"] for one in job.entries("capture"))
    assert ended == Counter(requested)
    done = {one["result"]["capture_id"] for one in job.entries("capture") if one["result"]["state"] == "stored"}
    assert job.whole() == done
    assert [path.name for path in job.directory.spool.iterdir()] == []
    assert not list((job.directory.path / "captures").glob(".tmp-*"))
