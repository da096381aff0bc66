"""``sftriage explain``: why a window was decided as it was, from what was recorded."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sftriage.controller.controller import Controller
from sftriage.model.events import RemedyChanged
from sftriage.model.windows import StageSchema, Window
from sftriage.policy.loading import find, load
from sftriage.runs.journal import Journal
from sftriage.windows.counting import counted_of
from tests.unit.conftest import run_in

SCHEMA = StageSchema(("data", "backward", "optimizer"), ("backward",))


def window(first_step, late_ms):
    """Four ranks of 50 ms steps; each of the given ranks is late in ``data`` by so many milliseconds."""
    rng = np.random.default_rng(first_step)
    durations_NRS = np.array([0.020, 0.025, 0.005]) * (1.0 + 0.01 * rng.standard_normal((50, 4, 3)))
    for rank, late in late_ms.items():
        durations_NRS[:, rank, 0] += late / 1e3
    wait_NR = durations_NRS[:, :, 0].max(axis=1, keepdims=True) - durations_NRS[:, :, 0]
    durations_NRS[:, :, 1] += wait_NR
    return Window(SCHEMA, first_step, durations_NRS)


def waiting(window, rank, seconds):
    """The window, in which a rank's thread was ready to run for so long in each step, and had no CPU."""
    queued_NR = np.zeros(window.durations_NRS.shape[:2])
    queued_NR[:, rank] = seconds
    return replace(window, counted_NRC=counted_of({"queued_s": queued_NR, "preempted": 500.0 * queued_NR}))


@pytest.fixture(scope="module")
def run(module_path):
    """A run of four windows: healthy, a slow rank, two that are slow alike, and one that waited for a CPU."""
    directory = run_in(module_path / "run")
    journal = Journal(directory.decisions)
    controller = Controller(load(find("default")), journal, directory.state)
    for first_step, late_ms in ((0, {}), (50, {2: 20, 1: 4}), (100, {1: 20, 3: 20})):
        controller.take(window(first_step, late_ms), 1_800_000_000.0 + first_step)
    controller.take(waiting(window(150, {0: 20}), 0, 0.03), 1_800_000_150.0)
    journal.close()
    return directory


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "0-49",
            ["Healthy", "is under", "how much later than usual the last rank", "unhealthy if any of these reached"],
        ),
        ("70", ["Rank 2 is slow in data", "chronic since about step 50", "Runner-up: nobody", "It would be held if"]),
        ("w50-99-r2-slow-rank-1", ["Rank 2 is slow in data", "Decided: capture"]),
        (
            "199",
            [
                "of its lateness",
                "System:    100% of its",
                "was waiting for a CPU; in each step it waited 30.0 ms for a CPU and lost one 15.0 times; see",
            ],
        ),
        ("149", ["Held: co_critical", "a suspect if mending one alone", "What would resolve it: Several"]),
    ],
)
def test_a_window_is_explained_from_its_numbers(sftriage, run, what, said):
    # GIVEN a run, WHEN asked for a window or a capture, THEN what decided is said, and what would have changed it
    outcome = sftriage("explain", what, "--run", run.path)
    assert outcome.code == 0, outcome.err
    for words in said:
        assert words in outcome.out, outcome.out


def test_a_program_gets_the_numbers(sftriage, run):
    found = sftriage("explain", "50-99", "--run", run.path, "--json").json
    checks = {check["name"]: check for check in found["explanation"]["checks"]}
    assert checks["first_share"]["value"] >= checks["first_share"]["threshold"]
    assert found["verdict"]["suspects"][0]["rank"] == 2
    assert found["explanation"]["runner_up"] is None


def test_a_damaged_record_is_named(sftriage, tmp_path):
    run = run_in(tmp_path / "run")
    decision = {"first_step": 0, "last_step": 9, "requests": []}
    run.decisions.write_text(json.dumps({"type": "window", "verdict": {"label": 3}, "decision": decision}) + "\n")
    outcome = sftriage("explain", "5", "--run", run.path)
    assert outcome.code == 2
    assert "1 line of its journal is damaged" in outcome.err


def test_what_had_been_done_about_stragglers_by_then_is_said_of_each_group(sftriage, run):
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
