"""A run that is so long that only some of its older steps are kept: what is said of it, and what is still found."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sftriage.runs.lateness import UNKNOWN, HeatSource
from sftriage.windows.logs import StepLogs
from sftriage.windows.steplog import BLOCK_STEPS, KeptSteps, stay
from tests.unit.recorded import run_at, verdict

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
    """The same job twice: with all of its steps, and with those that there is room for."""
    made = {}
    for name, kept in (("all", ALL), ("thinned", KEPT)):
        run = run_at(module_path / name)
        run.directory.policy_file.unlink()
        run.record(RANKS, range(STEPS), took, kept=kept)
        made[name] = run
    logs = StepLogs(made["thinned"].directory.steps)
    logs.look()
    return SimpleNamespace(**made, logs=logs, whole_from=logs.thinning(0).whole_from_step)


def analysed(sftriage, run):
    code, out, err = sftriage("analyze", run.directory.path, "--stride", 50, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()], err


def test_analyze_finds_in_what_is_left_what_it_finds_in_all_and_says_what_is_not(sftriage, runs):
    # GIVEN a run of which all steps are kept, and the same one thinned
    whole, said = analysed(sftriage, runs.all)
    assert said == ""
    thinned, said = analysed(sftriage, runs.thinned)
    # THEN it is said from which step on all are there
    assert f"Of the steps before {runs.whole_from:,}, the first 128 of every 1,024 are kept" in said
    assert STEPS // 8 < runs.whole_from < STEPS
    # AND who was slow is named in what is left of that, and nobody else in all the rest
    suspects = [one for one in thinned if one["label"] == "suspect"]
    assert {(one["suspects"][0]["rank"], one["suspects"][0]["stage"]) for one in suspects} == {(2, "data")}
    assert {one["first_step"] // 1024 for one in suspects} == {1, 2}
    assert all(one["first_step"] in SLOW or one["last_step"] in SLOW for one in suspects)
    # AND no window is judged of which steps have gone
    for one in thinned:
        assert one["first_step"] >= runs.whole_from or stay(np.arange(one["first_step"], one["last_step"] + 1)).all()
    # AND windows of the steps that are whole are judged as they are where all are kept
    newest = {one["first_step"]: one["label"] for one in whole if one["first_step"] >= runs.whole_from + 600}
    assert newest
    assert newest == {one["first_step"]: one["label"] for one in thinned if one["first_step"] in newest}


@pytest.mark.parametrize(("step", "gone"), [(500, True), (1030, False), (STEPS - 1, False)])
def test_for_step_says_where_what_the_ranks_took_is_kept_no_longer(sftriage, runs, step, gone):
    found = sftriage("traces", "for-step", step, "--run", runs.thinned.directory.path, "--json").json
    assert ("Of the steps before" in (found["kept_no_longer"] or "")) == gone
    said = sftriage("traces", "for-step", step, "--run", runs.thinned.directory.path).err
    assert (f"What each rank took in step {step} is kept no longer" in said) == gone


def test_the_map_shows_what_is_left_and_the_page_says_what_is_not(runs):
    # GIVEN maps of the whole run, and of a part of it that has a column a step
    heat = HeatSource(StepLogs(runs.thinned.directory.steps)).map(0, 0, STEPS - 1)
    starts = np.arange(heat.levels_GC.shape[1]) * heat.column_steps
    # THEN a column of which steps are left shows who was late in them, and another nothing
    left = (starts >= runs.whole_from) | (starts % 1024 < BLOCK_STEPS)
    # (of the column in which the whole ones begin either is right)
    sure = (starts >= runs.whole_from) | (starts + heat.column_steps <= runs.whole_from)
    np.testing.assert_array_equal((heat.levels_GC[2] != UNKNOWN)[sure], left[sure])
    slow = np.isin(starts, SLOW) & left
    assert (heat.levels_GC[2][slow] > 200).all()
    assert (heat.levels_GC[2][left & ~np.isin(starts, SLOW)] < 150).all()
    near = HeatSource(StepLogs(runs.thinned.directory.steps)).map(0, 2000, 2200)
    shown = near.levels_GC[0] != UNKNOWN
    np.testing.assert_array_equal(np.flatnonzero(shown) + 2000, np.arange(2049, 2176))
    # AND the page says so, but of the steps that are whole
    runs.thinned.decide(verdict(20))
    runs.thinned.decide(verdict(STEPS - 50))
    # (which waits for no map of its own for long; who asks for the map does)
    assert runs.thinned.get("/heat.bin").status == 200
    assert f"Of the steps before {runs.whole_from:,}" in runs.thinned.get("/").text
    assert 'id="thinned"' not in runs.thinned.get("/?last=100").text


def test_what_is_to_be_kept_is_checked_before_anything_starts(sftriage, tmp_path):
    for option, value, said in (
        ("--keep-steps", "lots", "--keep-steps: expected a size"),
        ("--keep-steps-for", "10", "--keep-steps-for: expected a duration"),
        ("--keep-steps", "10Ki", "--keep-steps is 1Mi at least"),
        ("--keep-steps-for", "1s", "--keep-steps-for 1m"),
    ):
        outcome = sftriage("run", option, value, "--out", tmp_path / "run", "--", "true")
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err
    assert not (tmp_path / "run").exists()
