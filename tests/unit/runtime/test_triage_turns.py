"""What one turn of triage does first."""

from sftriage.policy.loading import find, load
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.triage import Triage, this_host


def test_what_has_ended_is_noted_before_the_rings_are_read(tmp_path, monkeypatch):
    # GIVEN triage of a run
    rings = tmp_path / "rings"
    rings.mkdir()
    info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("true",), "default", "0" * 64, str(rings))
    directory = create(tmp_path / "run", info, "")
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
