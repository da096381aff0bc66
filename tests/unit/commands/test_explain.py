"""``sftriage explain``: the reasons of a decision, from the record of the run."""

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


def test_each_group_has_its_last_remedy_before_the_window(sftriage, tmp_path):
    run = four_windows(tmp_path / "run")
    # GIVEN a run with remedies of two groups, before and after the decision about a window
    about = {"attempt": 0, "step": 9, "remedy": "pipeline", "who": "a link", "where": "it", "reason": "worthwhile"}
    with closing(Journal(run.decisions)) as journal:
        for time_s, switch, rank, state in (
            (10.0, "one", 1, "trying"),
            (20.0, "one", 1, "kept"),
            (60.0, "two", 2, "trying"),
            (140.0, "two", 2, "undone"),
        ):
            journal.append(RemedyChanged(1_800_000_000.0 + time_s, **about, switch=switch, rank=rank, state=state))
    # THEN each group has its last change before the window
    found = sftriage("explain", "100-149", "--run", run.path, "--json").json["remedies"]
    assert [(remedy["switch"], remedy["state"]) for remedy in found] == [("one", "kept"), ("two", "trying")]
    assert sftriage("explain", "100-149", "--run", run.path).out.count("Remedy: ") == 2
    assert sftriage("explain", "0-49", "--run", run.path, "--json").json["remedies"] == []
