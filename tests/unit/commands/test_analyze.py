"""`sftriage analyze` on recordings: what a program reads, what a person reads in tables, and what bad input gets."""

import json

import numpy as np
import pytest
from rich.console import Console

from sftriage.reports.tables import decisions_table, windows_table
from sftriage.words.decisions import decision_values
from tests.scenario import decision, verdict

STAGES = ["data", "forward", "backward", "optimizer", "other"]


def recorded(path, slow_s=0.02, stage=0, rank=2, steps=60, first=0):
    """A calm job of 100 ms steps in which one rank becomes slow in one stage; the others wait for it in backward."""
    noise = np.random.default_rng(7).normal(1.0, 0.01, (steps, 4, len(STAGES)))
    durations = np.array([0.01, 0.03, 0.0, 0.01, 0.001]) * noise
    durations[first:, rank, stage] += slow_s
    arrival = durations[:, :, 0] + durations[:, :, 1]
    arrival[1:] += durations[:-1, :, 3] + durations[:-1, :, 4]
    durations[:, :, 2] = 0.05 + arrival.max(axis=1, keepdims=True) - arrival
    np.savez(path, durations_s=durations, stages=STAGES, sync=["backward"])
    return path


def test_json_is_one_object_a_window_with_the_documented_fields(sftriage, tmp_path):
    # GIVEN 60 steps in which rank 2 is 20 ms late in data
    path = recorded(tmp_path / "job.npz")
    # WHEN they are analysed in windows of 30, one every 15
    outcome = sftriage("analyze", path, "--window", 30, "--stride", 15, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    windows = [json.loads(line) for line in outcome.out.splitlines()]
    # THEN every window is there, and names rank and stage
    assert [(w["first_step"], w["last_step"]) for w in windows] == [(0, 29), (15, 44), (30, 59)]
    for window in windows:
        assert (window["label"], window["reasons"]) == ("suspect", [])
        suspect = window["suspects"][0]
        assert {"scope", "ranks", "rank", "host", "stage", "gain_s", "share", "persistence"} <= suspect.keys()
        assert (suspect["scope"], suspect["ranks"], suspect["rank"], suspect["host"]) == ("rank", [2], 2, None)
        assert suspect["stage"] == "data"
        assert suspect["gain_s"] == pytest.approx(0.02, abs=0.002)
        assert suspect["share"] == pytest.approx(suspect["gain_s"] / window["exposed_s"])
        # AND the advances are the exposed time, exactly
        assert set(window["advances_s"]) == set(window["leaders"]) == set(STAGES)
        assert sum(window["advances_s"].values()) == pytest.approx(window["exposed_s"], rel=1e-12)
        assert window["leaders"]["data"] == 2


def test_a_pause_is_told_beside_what_a_step_takes(sftriage, tmp_path):
    # GIVEN a job whose ranks all stood still in backward once, for 55 s
    path = recorded(tmp_path / "job.npz", slow_s=0.0)
    arrays = dict(np.load(path))
    arrays["durations_s"][30, :, 2] += 55.0
    np.savez(path, **arrays)
    # WHEN analysed THEN a step takes what it does, and the pause has a line of its own
    outcome = sftriage("analyze", path)
    assert "Healthy" in outcome.out
    assert "The job paused for 55.0 s in step 30 (all ranks, in backward)." in outcome.out
    assert all("ms" in line and " 101." in line for line in outcome.out.splitlines() if " to " in line and "│" in line)


def test_what_was_judged_on_the_devices_clock_says_so(sftriage, tmp_path):
    # GIVEN ranks on devices: hosts that see nothing, and a kernel that is slow on rank 1
    device = np.load(recorded(tmp_path / "device.npz", stage=1, rank=1))["durations_s"]
    host = np.broadcast_to(device.sum(axis=2, keepdims=True) / len(STAGES), device.shape)
    np.savez(tmp_path / "job.npz", durations_s=host, device_s=device, stages=STAGES, sync=["backward"])
    # WHEN analysed, THEN the verdict stands on the device's clock, for a person and for a program
    outcome = sftriage("analyze", tmp_path / "job.npz")
    assert "Rank 1 is slow in forward" in outcome.out
    assert "by the devices' clock." in outcome.out
    assert "device clock" in outcome.out
    windows = sftriage("analyze", tmp_path / "job.npz", "--json").out.splitlines()
    assert {json.loads(line)["clock"] for line in windows} == {"device"}


def test_what_only_the_hosts_clock_says_of_devices_is_held(sftriage, tmp_path):
    # GIVEN the hosts' times alone of ranks on devices, one of which takes long in forward
    host = np.load(recorded(tmp_path / "host.npz", stage=1, rank=1))["durations_s"]
    np.savez(tmp_path / "job.npz", durations_s=host, on_device=True, stages=STAGES, sync=["backward"])
    # WHEN analysed, THEN it is held for its clock, and who it would have been is there
    last = json.loads(sftriage("analyze", tmp_path / "job.npz", "--json").out.splitlines()[-1])
    assert (last["label"], last["reasons"], last["clock"]) == ("needs_evidence", ["clock_limited"], "host")
    assert (last["suspects"][0]["rank"], last["suspects"][0]["stage"]) == (1, "forward")
    assert "Held: clock_limited" in sftriage("analyze", tmp_path / "job.npz").out


def test_analysing_writes_nothing(sftriage, tmp_path):
    path = recorded(tmp_path / "job.npz")
    before = sorted(tmp_path.rglob("*"))
    sftriage("analyze", path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_bad_input_is_one_line_on_stderr_and_exit_2(sftriage, tmp_path, as_json):
    path = tmp_path / "job.npz"
    np.savez(path, durations_s=np.full((3, 2, 5), np.nan), stages=STAGES, sync=["backward"])
    err = sftriage("analyze", path, *as_json).refusal
    assert err.count("\n") == 1
    assert "durations_s is not a finite number at step 0, rank 0, stage 0" in err


def test_markup_in_a_name_is_text(sftriage, tmp_path):
    # GIVEN a stage whose name is markup to the terminal's table
    path = tmp_path / "job.npz"
    np.savez(path, durations_s=np.full((9, 2, 2), 0.01), stages=["a/b", "c:d"], sync=["c:d"])
    assert "a/b" in sftriage("analyze", path).out


def printed(table):
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return [line.replace("┃", "│").split("│")[1:-1] for line in captured.get().splitlines()]


@pytest.mark.parametrize("table", [windows_table, lambda some: decisions_table(list(map(decided, some)))])
def test_rows_say_of_which_attempt_they_are_where_there_are_several(table):
    def steps_and_attempts(seen):
        titles, *rows = [[cell.strip() for cell in line] for line in printed(table(seen)) if line]
        return [tuple(row[titles.index(title)] for title in ("attempt", "steps") if title in titles) for row in rows]

    assert steps_and_attempts([verdict(20), verdict(20, attempt=1)]) == [("1", "20 to 69"), ("2", "20 to 69")]
    assert steps_and_attempts([verdict(20), verdict(30)]) == [("20 to 69",), ("30 to 79",)]


def decided(seen):
    return decision_values(decision(seen)) | {"results": []}
