"""What one turn of triage does first, and what becomes of one that fails."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.agent import agent
from sftriage.model.captures import ManualRequest
from sftriage.model.events import RingGivenUp
from sftriage.model.windows import JobStatus, RankStatus, StageSchema
from sftriage.policy.loading import find, load
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.glance import glance_of
from sftriage.runs.journal import read_journal
from sftriage.runs.requests import leave, left
from sftriage.runs.source import RunSource
from sftriage.runtime import triage
from sftriage.runtime.local import ThisHost
from sftriage.runtime.triage import LOOKS_S, MAX_LOG_BYTES, STARTING_S, FailedTurns, ManualRequests, Triage
from sftriage.traces.disk import at_once
from sftriage.windows.shipped import status_of
from tests.unit.conftest import run_going_on
from tests.unit.controller.test_controller import window


def test_what_has_ended_is_noted_before_the_rings_are_read(tmp_path, monkeypatch):
    # GIVEN triage of a run
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    triage = Triage(directory, info, load(find("default")), ThisHost(directory, info))
    seen: list[str] = []
    for name in ("reports", "rows"):
        original = getattr(triage._fleet, name)

        def noted(*arguments, name=name, original=original, **options):
            seen.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(triage._fleet, name, noted)
    # WHEN it takes a turn THEN a capture that it finds to have ended has all of its steps in what is read after that
    triage.turn()
    assert seen[:2] == ["reports", "rows"]
    triage.close()


def test_a_window_that_cannot_be_judged_costs_no_other_and_is_counted(tmp_path, monkeypatch, caplog):
    # GIVEN three windows that are ready at once, of which one cannot be judged
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    triage = Triage(directory, info, load(find("default")), ThisHost(directory, info))
    windows = [window(first) for first in (0, 20, 40)]
    monkeypatch.setattr(triage._gathering, "add", lambda rows, ended, hold: windows if not ended else [])
    original = triage._controller.take

    def take(window, *arguments):
        if window.first_step == 20:
            raise ValueError("no such number")
        return original(window, *arguments)

    monkeypatch.setattr(triage._controller, "take", take)
    # WHEN they are judged, twice over THEN the others are on record, and it is said once, without a traceback
    triage.turn()
    triage.turn()
    judged = [event.verdict.first_step for event in read_journal(directory.decisions)]
    assert judged == [0, 40, 0, 40]
    off, on, *more = [record.getMessage() for record in caplog.records]
    assert off.startswith("triage is off: judging a window failed: ValueError: no such number (traceback in ")
    assert (on, more) == ("triage works again", [])
    assert "Traceback" not in caplog.text
    # AND the traceback is in the run directory, once, and the number at the end
    triage.finish()
    assert caplog.records[-1].getMessage().startswith("triage failed 2 times in this run")
    triage.close()
    assert directory.failures.read_text().count("Traceback") == 1


@pytest.mark.parametrize("part", ["reports", "rows", "statuses", "switches", "want", "telemetry"])
def test_while_a_part_of_each_turn_fails_nobody_is_told_that_the_job_is_well(tmp_path, monkeypatch, part):
    # GIVEN a job that is healthy so far
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    clock = SimpleNamespace(now_s=0.0)
    fleet = ThisHost(directory, info)
    triage = Triage(directory, info, load(find("default")), fleet, monotonic_ns=lambda: int(clock.now_s * 1e9))
    triage._controller.take(window(0), time.time())
    source = RunSource(lambda: directory)

    def face() -> str:
        clock.now_s += LOOKS_S
        triage.turn()
        return glance_of(source.view()).outlook.face

    assert face() == "healthy"
    # WHEN what it needs of its agents raises, turn after turn
    original = getattr(triage._fleet, part)

    def raises(*_: object) -> None:
        raise OverflowError("int too big to convert")

    monkeypatch.setattr(triage._fleet, part, raises)
    # THEN the run is not known to be well, with the reason
    assert [face() for _ in range(3)] == ["unknown"] * 3
    stands = glance_of(source.view()).outlook
    assert "Triage is off" in stands.sentence
    assert "OverflowError: int too big to convert" in stands.sentence
    assert "OverflowError" in directory.failures.read_text()
    # AND WHEN it works again THEN it is
    monkeypatch.setattr(triage._fleet, part, original)
    assert face() == "healthy"
    triage.close()


def test_tracebacks_take_a_bounded_part_of_the_disk(tmp_path):
    failures = FailedTurns(tmp_path / "failures.log", tmp_path)

    def fails() -> None:
        raise ValueError("x" * 10_000)

    for number in range(100):
        failures.run(f"part {number}", fails)
    assert (failures.count, failures._path.stat().st_size <= MAX_LOG_BYTES) == (100, True)


def test_a_ring_that_was_given_up_is_on_record_once(tmp_path, monkeypatch):
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    triage = Triage(directory, info, load(find("default")), ThisHost(directory, info))
    rings = Path(info.rings)
    (rings / "rank-1.0.ring").write_bytes(b"no ring at all")
    for _ in range(3):
        triage._reads = True
        triage._judge(ended=True)
        triage._show(ended=True)
    (event,) = [one for one in read_journal(directory.decisions) if isinstance(one, RingGivenUp)]
    assert (event.rank, "not a ring of sftriage" in event.reason) == (1, True)
    triage.close()


SCHEMA = StageSchema(("data", "backward"), sync=("backward",))


def job(*ranks: int) -> JobStatus | None:
    """A job of four, of which these show something."""
    told = tuple(RankStatus(rank, "a", None, 0, 5, 0, 5, False, True) for rank in ranks)
    return status_of(SCHEMA, 4, told) if told else None


@pytest.fixture
def asks(tmp_path):
    return ManualRequests(RunDirectory(tmp_path), at_once)


def leave_one(directory, number, *ranks):
    leave(directory, ManualRequest(f"a-{number}", ranks, "ann", "why not"))


@pytest.mark.parametrize(
    ("asked", "there", "ended", "waits"),
    [
        ((1,), (0, 1, 2, 3), False, False),
        # One that the job has, but that shows nothing yet: it has just started, or again
        ((1,), (0,), False, True),
        ((0, 1), (0,), False, True),
        ((1,), (), False, True),
        # No rank of this job, whoever is there
        ((4,), (0, 1, 2, 3), False, False),
        ((1, 4), (0,), False, False),
        # Nobody starts any more
        ((1,), (0,), True, False),
        ((1,), (), True, False),
    ],
)
def test_a_request_waits_for_ranks_that_may_start(tmp_path, asks, asked, there, ended, waits):
    # GIVEN a request, and a job some of whose ranks are there
    leave_one(RunDirectory(tmp_path), 1, *asked)
    # WHEN it is looked for THEN it is to be decided, or waits
    due = list(asks.due(lambda: job(*there), 100.0, ended=ended))
    assert [ask.ranks for ask, _ in due] == ([] if waits else [asked])
    # AND its file stays as long as it does
    assert len(left(RunDirectory(tmp_path))) == waits


def test_a_rank_that_never_comes_is_not_waited_for_for_ever_and_keeps_nobody_up(tmp_path, asks):
    # GIVEN a request for a rank that is not there, and one for a rank that is
    leave_one(RunDirectory(tmp_path), 1, 1)
    leave_one(RunDirectory(tmp_path), 2, 0)

    def due(now_s):
        return [
            (ask.request_id, status.rank_R.tolist()) for ask, status in asks.due(lambda: job(0), now_s, ended=False)
        ]

    # THEN the latter is decided at once, and the former with what is there once it has waited
    assert due(100.0) == [("a-2", [0])]
    assert due(100.0 + 0.9 * STARTING_S) == []
    assert due(100.0 + STARTING_S) == [("a-1", [0])]
    assert due(200.0) == []


POLICIES = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "said",
    [
        f"| {agent.CANCEL_GRACE_S:.0f} | the capture is called off",
        "| {torch:.0f} (`nsys`: {nsys:.0f}, to make its report) | a rank".format(**agent.ANSWER_GRACE_S),
        f"its trainers are given {triage.ENDING_SHARE * triage.ENDING_S:.0f} s",
        f"is waited for {triage.STARTING_S:.0f} s",
    ],
)
def test_the_times_past_a_time_box_are_documented(said):
    assert said in POLICIES
