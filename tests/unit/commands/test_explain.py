"""``sftriage explain``: why a window was decided as it was, from what was recorded."""

import json
from contextlib import closing

from sftriage.model.events import RemedyChanged
from sftriage.runs.journal import Journal
from tests.golden.said import four_windows
from tests.unit.conftest import run_in


def test_a_damaged_record_is_named(sftriage, tmp_path):
    run = run_in(tmp_path / "run")
    decision = {"first_step": 0, "last_step": 9, "requests": []}
    run.decisions.write_text(json.dumps({"type": "window", "verdict": {"label": 3}, "decision": decision}) + "\n")
    outcome = sftriage("explain", "5", "--run", run.path)
    assert outcome.code == 2
    assert "1 line of its journal is damaged" in outcome.err


def test_what_had_been_done_about_stragglers_by_then_is_said_of_each_group(sftriage, tmp_path):
    run = four_windows(tmp_path / "run")
    # GIVEN a run in which remedies of two groups changed before a window was decided, and after
    about = {"attempt": 0, "step": 9, "remedy": "pipeline", "who": "a link", "where": "it", "reason": "worthwhile"}
    with closing(Journal(run.decisions)) as journal:
        for time_s, switch, rank, state in (
            (10.0, "one", 1, "trying"),
            (20.0, "one", 1, "kept"),
            (60.0, "two", 2, "trying"),
            (140.0, "two", 2, "undone"),
        ):
            told = RemedyChanged(1_800_000_000.0 + time_s, **about, switch=switch, rank=rank, state=state)
            journal.append(told)
    # THEN of each group the last by then is said
    found = sftriage("explain", "100-149", "--run", run.path, "--json").json["remedies"]
    assert [(one["switch"], one["state"]) for one in found] == [("one", "kept"), ("two", "trying")]
    assert sftriage("explain", "100-149", "--run", run.path).out.count("Remedy: ") == 2
    assert sftriage("explain", "0-49", "--run", run.path, "--json").json["remedies"] == []
