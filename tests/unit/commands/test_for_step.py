"""From a step to its captures, or the reason there is none; also if a run's older steps were thinned."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sftriage.runs.decisions import MAX_DECISIONS, decided_about, fault_at
from sftriage.runs.lateness import UNKNOWN, HeatSource
from sftriage.traces.catalogue import CaptureRow
from sftriage.traces.manifest import CauseInfo, PlaceInfo
from sftriage.windows.logs import StepLogs
from sftriage.windows.steplog import BLOCK_STEPS, KeptSteps, stay
from tests.scenario import request_of, row, run_at, verdict

ROW = CaptureRow(
    "c-1", "j", "r", 2, "data", "suspect", "rank", 90, 139, 142, 146, 0.01, 100, "0" * 64, "torch", "a", "p",
    "why", "t", "node-1", None, "/somewhere", "c-1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("step", "away"), [(142, 0), (146, 0), (90, 0), (139, 0), (140, 1), (141, 1), (147, 1), (89, 1), (0, 90), (200, 54)]
)
def test_a_capture_belongs_to_its_steps_and_to_the_window_that_led_to_it(step, away):
    assert ROW.distance_from(step) == away


def test_the_decisions_about_a_step_are_the_newest_on_windows_that_contain_it():
    decisions = [{"first_step": first, "last_step": first + 49} for first in range(0, 200, 5)]
    found = decided_about(decisions, 100)
    assert [one["first_step"] for one in found] == list(range(100, 100 - 5 * MAX_DECISIONS, -5))[::-1]
    assert decided_about(decisions, 5000) == []


def test_a_step_without_captures_has_its_decisions(sftriage, tmp_path):
    made = run_at(tmp_path / "run")
    made.decide(verdict(20, "healthy"), "ignore", "healthy")
    run = made.directory.path
    # WHEN a step of that window is selected THEN there is no capture, and the decision says why
    answer = sftriage("traces", "for-step", "42", "--run", run, "--json").json
    assert (answer["captures"], answer["nearest"]) == ([], None)
    assert [one["reason"] for one in answer["decisions"]] == ["healthy"]
    # AND a step outside all windows has no decision
    assert "No decision about step 500" in sftriage("traces", "for-step", "500", "--run", run)[2]


CAUSE = CauseInfo(
    code="checkpoint",
    sure=True,
    sentence="It saves.",
    next_step="Save less.",
    place=PlaceInfo(function="save", file="/job/train.py", line=211, source="torch.save(model.state_dict(), path)"),
)


def fault(first, onset, rank=2, stage="data", captured=(), attempt=0):
    requests = tuple(map(request_of, captured))
    return row(first, "suspect", onset=onset, rank=rank, stage=stage, attempt=attempt, requests=requests)


@pytest.mark.parametrize(
    ("named", "step", "found"),
    [
        # Without a run: from the onset to the end of the capture.
        ([], 70, "c-1"),
        ([], 59, None),
        ([], 147, None),
        # With one: to the end of the last window that names the same since about then.
        ([fault(90, 60, captured=("c-1",)), fault(160, 62)], 200, "c-1"),
        ([fault(90, 60, captured=("c-1",)), fault(160, 62)], 210, None),
        # Not another rank or stage, a later fault of the same rank, or another attempt.
        ([fault(90, 60, captured=("c-1",)), fault(160, 62, rank=3)], 200, None),
        ([fault(90, 60, captured=("c-1",)), fault(160, 62, stage="forward")], 200, None),
        ([fault(90, 60, captured=("c-1",)), fault(160, 180)], 200, None),
        ([fault(90, 60, captured=("c-1",)), fault(160, 62, attempt=1)], 200, None),
    ],
)
def test_a_step_has_the_capture_of_its_fault(named, step, found):
    stored = replace(ROW, onset_step=60)
    control = replace(stored, capture_id="c-2", label="control")
    answer = fault_at(step, [control, stored], named)
    assert (answer and answer.capture_id) == found
    # AND a capture with a cause comes first
    why = replace(stored, capture_id="c-9", cause=CAUSE.model_dump_json(), first_step=500, last_step=504)
    if found and not named:
        answer = fault_at(step, [stored, why], named)
        assert answer is not None
        assert (answer.capture_id, answer.why_slow and answer.why_slow.short) == ("c-9", "torch.save at train.py:211")


RANKS, STEPS, SLOW = 4, 5000, range(1000, 3000)
ALL = KeptSteps(1 << 40, 1e9)
KEPT = KeptSteps(RANKS * 8 * (96 << 10), 1e9)
"""Room for some 1,500 whole steps of each rank, and for some 700 thinned ones."""

_NOISE = np.random.default_rng(7).normal(1.0, 0.02, (STEPS, RANKS, 2))


def took(rank: int, step: int):
    """Steps of 100 ms in which rank 2 loads data for 20 ms longer in some; the others wait for it in backward."""
    local = _NOISE[step] * [10.0, 30.0]
    if step in SLOW:
        local[2, 0] += 20.0
    arrival = local.sum(axis=1)
    return {"data": local[rank, 0], "forward": local[rank, 1], "backward": 60.0 + arrival.max() - arrival[rank]}


@pytest.fixture(scope="module")
def runs(module_path):
    """The same job twice: with all of its steps, and thinned to a size."""
    made = {}
    for name, kept in (("all", ALL), ("thinned", KEPT)):
        run = run_at(module_path / name)
        run.directory.policy_file.unlink()
        run.record(RANKS, range(STEPS), took, kept=kept)
        made[name] = run
    logs = StepLogs(made["thinned"].directory.steps)
    logs.refresh()
    return SimpleNamespace(**made, logs=logs, whole_from=logs.thinning(0).whole_from_step)


def analysed(sftriage, run):
    code, out, err = sftriage("analyze", run.directory.path, "--stride", 50, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()], err


def test_analyze_finds_the_same_in_thinned_steps_and_reports_the_thinning(sftriage, runs):
    # GIVEN a run of which all steps are kept, and the same one thinned
    whole, notes = analysed(sftriage, runs.all)
    assert notes == ""
    thinned, notes = analysed(sftriage, runs.thinned)
    # THEN a note names the first step from which all are kept
    assert f"Of the steps before {runs.whole_from:,}, the first 128 of every 1,024 are kept" in notes
    assert STEPS // 8 < runs.whole_from < STEPS
    # AND the slow rank is named in the kept steps of its fault, and no other rank anywhere
    suspects = [one for one in thinned if one["label"] == "suspect"]
    assert {(one["suspects"][0]["rank"], one["suspects"][0]["stage"]) for one in suspects} == {(2, "data")}
    assert {one["first_step"] // 1024 for one in suspects} == {1, 2}
    assert all(one["first_step"] in SLOW or one["last_step"] in SLOW for one in suspects)
    # AND no window with missing steps is judged
    for one in thinned:
        assert one["first_step"] >= runs.whole_from or stay(np.arange(one["first_step"], one["last_step"] + 1)).all()
    # AND windows of complete steps have the same verdicts as in the whole run
    newest = {one["first_step"]: one["label"] for one in whole if one["first_step"] >= runs.whole_from + 600}
    assert newest
    assert newest == {one["first_step"]: one["label"] for one in thinned if one["first_step"] in newest}


@pytest.mark.parametrize(("step", "gone"), [(500, True), (1030, False), (STEPS - 1, False)])
def test_for_step_reports_a_step_whose_durations_are_gone(sftriage, runs, step, gone):
    found = sftriage("traces", "for-step", step, "--run", runs.thinned.directory.path, "--json").json
    assert ("Of the steps before" in (found["kept_no_longer"] or "")) == gone
    notes = sftriage("traces", "for-step", step, "--run", runs.thinned.directory.path).err
    assert (f"The durations of step {step} are no longer kept" in notes) == gone


def test_the_map_shows_kept_steps_and_the_page_reports_the_thinning(runs):
    # GIVEN maps of the whole run, and of a part with one column per step
    heat = HeatSource(StepLogs(runs.thinned.directory.steps)).map(0, 0, STEPS - 1, 16)
    starts = np.arange(heat.levels_GC.shape[1]) * heat.column_steps
    # THEN a column with kept steps shows the late ranks, and any other is empty
    left = (starts >= runs.whole_from) | (starts % 1024 < BLOCK_STEPS)
    # (the column in which the complete steps begin may be either)
    sure = (starts >= runs.whole_from) | (starts + heat.column_steps <= runs.whole_from)
    np.testing.assert_array_equal((heat.levels_GC[2] != UNKNOWN)[sure], left[sure])
    slow = np.isin(starts, SLOW) & left
    assert (heat.levels_GC[2][slow] > 200).all()
    assert (heat.levels_GC[2][left & ~np.isin(starts, SLOW)] < 150).all()
    near = HeatSource(StepLogs(runs.thinned.directory.steps)).map(0, 2000, 2200, 1)
    shown = near.levels_GC[0] != UNKNOWN
    np.testing.assert_array_equal(np.flatnonzero(shown) + 2000, np.arange(2049, 2176))
    # AND the page reports it, except for complete steps
    runs.thinned.decide(verdict(20))
    runs.thinned.decide(verdict(STEPS - 50))
    # (the page does not wait long for a map; a request for the map does)
    assert runs.thinned.get("/heat.bin").status == 200
    assert f"Of the steps before {runs.whole_from:,}" in runs.thinned.get("/").text
    assert 'id="thinned"' not in runs.thinned.get("/?last=100").text
