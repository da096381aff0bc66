"""A job of somebody's own under torchrun, watched with a policy of their own."""

import json
import sys
from pathlib import Path

import pytest

from tests.integration.policies import policy
from tests.integration.processes import FORKED, JOBS
from tests.integration.runs import named

LAUNCHERS = {
    # the script's options: who launches it, and the job's name
    (): ((Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node"), "accumulate"),
    ("watched",): (FORKED, "launch"),
}
RULE = """name: slow-input, match: {scope: [rank], stage: [data], gain: ">= 20% and >= 50ms"},
  capture: {profiler: torch, steps: 2, warmup_steps: 1, max_seconds: 20}"""
POLICY = policy(RULE, name="input")


@pytest.mark.parametrize("options", LAUNCHERS)
def test_a_slow_data_set_is_found_through_workers_and_gradient_accumulation(start, sftriage, tmp_path, options):
    # GIVEN a job with data loader workers (forks of the trainer) and several micro-batches a step, of which one is
    # synchronised, or all, with their gradients watched; rank 1's data set becomes slow
    (tmp_path / "input.yaml").write_text(POLICY, encoding="utf-8")
    launcher, name = LAUNCHERS[options]
    job = [*launcher, 2, JOBS / "accumulate.py", 100, 1, *options]
    run = start("run", "--policy", tmp_path / "input.yaml", "--out", tmp_path / "run", "--", *job)
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    # THEN the suspect is that rank's data, in the job's own step numbers
    lines = sftriage("analyze", tmp_path / "run", "--json").out.splitlines()
    windows = [json.loads(line) for line in lines]
    assert windows[0]["first_step"] == 1010
    assert (1, "data") in [named(window) for window in windows]
    # AND it was captured under the policy's rule, for as many steps as that says
    (row,) = sftriage("traces", "list", "--run", tmp_path / "run", "--json").json
    assert (row["rank"], row["rule"], row["policy"], row["job"]) == (1, "slow-input", "input", name)
    assert row["last_step"] - row["first_step"] == 1
    assert row["first_step"] > row["window_last_step"] >= 1040
    # AND every rank recorded every step, its workers none
    assert all(w["numbers"]["coverage"] == 1.0 for w in windows)
