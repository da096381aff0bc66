"""What one turn of triage does first."""

from sftriage.policy.loading import find, load
from sftriage.runs.directory import read_info
from sftriage.runs.journal import read_journal
from sftriage.runtime.local import this_host
from sftriage.runtime.triage import Triage
from tests.unit.conftest import run_going_on
from tests.unit.controller.test_controller import window


def test_what_has_ended_is_noted_before_the_rings_are_read(tmp_path, monkeypatch):
    # GIVEN triage of a run
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    triage = Triage(directory, info, load(find("default")), this_host(directory, info))
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
    triage = Triage(directory, info, load(find("default")), this_host(directory, info))
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
    assert [record.getMessage() for record in caplog.records] == [
        "a window could not be judged: ValueError: no such number"
    ]
    assert "Traceback" not in caplog.text
    # AND at the end, by number
    triage.finish()
    assert caplog.records[-1].getMessage() == "windows that could not be judged: 2"
    triage.close()
