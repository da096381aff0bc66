"""Triage of a job that hangs: its evidence becomes a cause at once, and a capture once the disk takes it."""

import errno
import time
from dataclasses import replace

import msgspec
import pytest

from sftriage.controller.hang_capture import HangFound
from sftriage.model.captures import CaptureResult
from sftriage.model.events import CaptureChanged, CauseFound, WindowJudged
from sftriage.model.hangs import HANG_NAME, HangEvidence, RankEvidence
from sftriage.model.windows import RankStatus, StageSchema
from sftriage.policy.in_force import load_set
from sftriage.runs.directory import read_info
from sftriage.runs.journal import read_journal
from sftriage.runtime.local import ThisHost
from sftriage.runtime.triage import Triage
from sftriage.traces.store import LocalStore
from sftriage.windows.rings import status_of
from tests.unit.conftest import run_going_on
from tests.unit.policy.making import make_verdict

SCHEMA = StageSchema(("data", "backward"), sync=("backward",))
STALL = replace(make_verdict("stalled", ranks=(1,), reasons=("not_arrived",), first_step=9), last_step=9)
RANKS = tuple(RankEvidence(rank, "h", 100 + rank, step=9, answered=rank != 1) for rank in range(3))


class Job:
    """A run whose agents answer as they are set to, with the triages that watch it one after the other."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.directory, self.step, self.answer, self.polls = run_going_on(tmp_path / "run"), 9, RANKS, 0
        self.store, self._patch = LocalStore(self.directory.path), monkeypatch
        self.triage = self.watched()

    def watched(self, *, resume: bool = False) -> Triage:
        info = read_info(self.directory)
        fleet = ThisHost(self.directory, info)

        def evidence(token, detail):
            self.polls += 1
            return self.answer

        def statuses():
            ranks = [RankStatus(rank, "h", "data", 0, self.step, 0, self.step, False, True) for rank in range(3)]
            return status_of(SCHEMA, 3, tuple(ranks))

        self._patch.setattr(fleet, "hang_evidence", evidence)
        self._patch.setattr(fleet, "statuses", statuses)
        return Triage(self.directory, info, load_set(["default"]), fleet, resume=resume)

    def stall(self) -> str:
        """Decide on a stall; return the id of its capture."""
        judged = self.triage._controller._decided(STALL, time.time(), (0, 2))
        self.triage._order(judged.decision)
        return judged.decision.requests[0].capture_id

    def taken_over(self) -> None:
        self.triage.close()
        self.triage = self.watched(resume=True)
        left, self.triage._left = self.triage._left, None
        self.triage._take_over(left)
        self.triage.turn()

    def events(self) -> list[str]:
        """The events about captures, in order."""
        kinds = {CauseFound: "cause", WindowJudged: "decision"}
        found = read_journal(self.directory.decisions)
        return [
            event.result.state if isinstance(event, CaptureChanged) else kinds[type(event)]
            for event in found
            if isinstance(event, (CauseFound, WindowJudged, CaptureChanged))
        ]

    @property
    def result(self) -> CaptureResult:
        return [event for event in read_journal(self.directory.decisions) if isinstance(event, CaptureChanged)][
            -1
        ].result


@pytest.fixture
def job(tmp_path, monkeypatch):
    made = Job(tmp_path, monkeypatch)
    yield made
    made.triage.close()


def test_a_stall_ends_in_a_cause_and_then_in_a_capture_of_all_ranks(job):
    # GIVEN a stall of a job whose agents still gather
    job.answer = None
    capture_id = job.stall()
    job.triage.turn()
    assert (job.events(), job.polls) == (["decision"], 1)
    # WHEN they have answered THEN the cause is on record first, and the capture is stored in the same turn
    job.answer = RANKS
    job.triage.turn()
    assert job.events() == ["decision", "cause", "stored"]
    manifest = job.store.manifest(capture_id)
    assert (manifest.trigger.rule, manifest.capture.rank, manifest.capture.world_size) == ("stalled", 1, 3)
    evidence = msgspec.json.decode(job.store.path(capture_id, HANG_NAME).read_bytes(), type=HangEvidence)
    assert (evidence.ranks, evidence.hang.kind) == (RANKS, manifest.cause.code)
    # AND it is over, and no agent was ordered to capture anything
    job.triage.turn()
    assert (job.polls, job.triage._captures.unended) == (2, ())


def test_a_disk_that_is_full_delays_the_capture_and_not_the_cause(job, monkeypatch):
    # GIVEN a disk that refuses the evidence once
    put, full = HangFound.put, [OSError(errno.ENOSPC, "No space left on device")]

    def put_later(*arguments):
        if full:
            raise full.pop()
        return put(*arguments)

    monkeypatch.setattr(HangFound, "put", put_later)
    capture_id = job.stall()
    job.triage.turn()
    assert job.events() == ["decision", "cause"]
    # WHEN it works again THEN the capture is stored
    job.triage._disk.drain(30.0)
    job.triage.turn()
    assert job.events() == ["decision", "cause", "stored"]
    assert capture_id in job.store.ids()


def test_evidence_that_cannot_be_stored_fails_with_its_reason(job, monkeypatch):
    def refuses(*arguments):
        raise ValueError("surrogates not allowed")

    monkeypatch.setattr(HangFound, "put", refuses)
    job.stall()
    job.triage.turn()
    assert job.events() == ["decision", "cause", "failed"]
    assert job.result.detail == "surrogates not allowed"


def test_a_controller_that_takes_over_gathers_again_while_the_job_hangs(job):
    job.answer = None
    capture_id = job.stall()
    job.triage.turn()
    job.answer = RANKS
    job.taken_over()
    assert job.events() == ["decision", "cause", "stored"]
    assert capture_id in job.store.ids()


def test_a_controller_that_takes_over_fails_a_capture_of_a_job_that_goes_on(job):
    job.answer = None
    job.stall()
    job.triage.turn()
    job.step, job.polls = 10, 0
    job.taken_over()
    assert (job.events(), job.polls) == (["decision", "failed"], 0)
    assert job.result.detail == "sftriage ended during the capture, and the job no longer hangs there"


def test_a_capture_that_was_stored_before_a_takeover_is_reported(job, monkeypatch):
    # GIVEN a triage that ends between storing and reporting
    monkeypatch.setattr(job.triage, "_take_report", lambda report: None)
    capture_id = job.stall()
    job.triage.turn()
    assert (job.events(), capture_id in job.store.ids()) == (["decision", "cause"], True)
    # WHEN another one takes over THEN it reports the capture, and gathers nothing
    job.polls = 0
    job.taken_over()
    assert (job.events(), job.polls) == (["decision", "cause", "stored"], 0)


def test_a_job_that_ends_meanwhile_keeps_what_is_there(job):
    job.answer = None
    job.stall()
    job.triage.turn()
    job.answer = RANKS
    job.triage.finish()
    assert job.events() == ["decision", "cause", "stored"]


def test_a_job_that_ends_before_its_hosts_answer_has_no_capture(job, monkeypatch):
    monkeypatch.setattr("sftriage.runtime.triage.ENDING_S", 0.5)
    job.answer = None
    job.stall()
    job.triage.finish()
    assert (job.events(), job.result.detail) == (["decision", "expired"], "no answer by the end of the job")
