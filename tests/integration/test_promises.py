"""Real jobs whose fault is mended: what was promised stands beside what it won, in every view."""

import json

import pytest

from tests.integration.processes import FORKED, JOBS, TORCHRUN

pytest.importorskip("torch")
LATE_S = 0.03
WINDOW_STEPS, STRIDE_STEPS = 50, 10
SLOW, CALM = [180, 1, LATE_S, 10_000], [140, 1, 0.0, 0]


def watch(start, environment, folder, name, *attempts):
    """Run a job of three ranks under `sftriage run`, and return what `watch` shows of it at its end."""
    restarting = (*TORCHRUN[:-1], f"--max-restarts={len(attempts) - 1}", TORCHRUN[-1])
    launcher = [*(restarting if len(attempts) > 1 else FORKED), 3]
    options = ["--policy", "observe-only", "--job", "mended", "--out", folder / name]
    # (launchers share one store between all starts, in which ranks find what those before have put there)
    own = {**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = start("run", *options, "--", *launcher, JOBS / "mended.py", json.dumps(attempts), env=own)
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    shown, _ = start("watch", "--run", folder / name, "--once", "--json").communicate(timeout=60)
    return json.loads(shown.splitlines()[0])


def test_a_restart_a_second_run_and_mends_that_change_nothing(start, environment, tmp_path):
    # GIVEN a job whose rank 1 is late until it restarts
    picture = watch(start, environment, tmp_path, "first", SLOW, CALM)
    # THEN the restart has won what the verdict promised
    (mend,) = picture["mends"]
    assert (mend["who"], mend["by"], mend["judgement"]) == (["rank 1 in data"], "restart", "kept")
    assert mend["promised_s"] == pytest.approx(LATE_S, rel=0.15)
    assert mend["measured_s"] == pytest.approx(LATE_S, rel=0.15)
    (cost,) = [answer for answer in picture["answers"] if answer["question"] == "cost"]
    assert any(line.startswith("Rank 1 in data is mended since step 20 (restart): ") for line in cost["more"])
    # AND the report has the sentence
    report, _ = start("report", tmp_path / "first").communicate(timeout=60)
    assert "Rank 1 in data is mended since step 20 (restart)" in report
    # WHEN it restarts with the same fault THEN nothing is mended
    assert watch(start, environment, tmp_path, "second", SLOW, SLOW)["mends"] == []
    # WHEN the next run has no fault THEN it is that run that mended it
    (mend,) = watch(start, environment, tmp_path, "third", CALM)["mends"]
    assert (mend["by"], mend["run"] != "", mend["judgement"]) == ("run", True, "kept")


def test_a_fault_that_ends_by_itself_and_one_that_moves_to_all_ranks(start, environment, tmp_path):
    # GIVEN a rank that is late until step 179, and after a restart one that is, and then all of them
    ends, everywhere = [360, 1, LATE_S, 179], [140, None, LATE_S, 10_000]
    (mend,) = watch(start, environment, tmp_path, "ends", ends)["mends"]
    assert (mend["by"], mend["judgement"]) == ("by_itself", "kept")
    # (a window that begins by step 179 may still name it)
    assert 179 < mend["since_step"] <= 179 + WINDOW_STEPS + STRIDE_STEPS
    # THEN what all have has won nothing
    (mend,) = watch(start, environment, tmp_path, "moves", SLOW, everywhere)["mends"]
    assert (mend["by"], mend["judgement"]) == ("restart", "less")
    assert abs(mend["measured_s"]) <= 0.15 * LATE_S
