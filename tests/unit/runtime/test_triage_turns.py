"""What one turn of triage does first, and what becomes of one that fails."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.events import RingGivenUp
from sftriage.policy.loading import find, load
from sftriage.runs.directory import read_info
from sftriage.runs.glance import glance_of
from sftriage.runs.journal import read_journal
from sftriage.runs.source import RunSource
from sftriage.runtime.local import ThisHost
from sftriage.runtime.triage import LOOKS_S, MAX_LOG_BYTES, Clock, Failures, Triage
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
    times = Clock(lambda: int(clock.now_s * 1e9), time.time)
    triage = Triage(directory, info, load(find("default")), ThisHost(directory, info), clock=times)
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
    failures = Failures(tmp_path / "failures.log", tmp_path)

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
