"""What one turn of triage does first."""

from sftriage.policy.loading import find, load
from sftriage.runs.directory import read_info
from sftriage.runtime.triage import Triage, this_host
from tests.unit.conftest import run_going_on


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
