"""A real job that hangs, and ones that only take their time."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from sftriage.runs.journal import read_journal
from tests.integration.processes import wait_until

HANG = Path(__file__).parent / "jobs" / "hang.py"
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: patient}
spec:
  detection: {stalled_after: 3s, window_steps: 20}
  rules: [{name: stalls, match: {label: stalled}}, {name: any, match: {gain: ">= 5%"}}]
"""


@pytest.fixture
def run(start, tmp_path):
    """Start the job under `sftriage run`, each pause of it longer than what would be a stall inside a stage."""
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")

    def run(*doing):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3]
        options = ["--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run"]
        return start("run", *options, "--", *launcher, HANG, tmp_path, 5, *doing)

    return run


def stalls(tmp_path):
    entries = read_journal(tmp_path / "run" / "decisions.jsonl")
    return [entry for entry in entries if entry["type"] == "window" and entry["verdict"]["label"] == "stalled"]


def hung(tmp_path):
    """The pid of the rank that hangs, once it does."""
    wait_until((tmp_path / "hung").exists)
    return int((tmp_path / "hung").read_text(encoding="ascii"))


def test_a_rank_that_hangs_is_named_once_with_its_stage_and_training_goes_on(run, start, tmp_path):
    # GIVEN a job that compiles, evaluates and saves for longer than a stall takes
    job = run("compile", "evaluate", "save", "hang=forward")
    # WHEN a rank of it hangs in forward
    hung(tmp_path)
    (stall,) = wait_until(lambda: stalls(tmp_path))
    # THEN that is the only stall, and it names the rank and the stage in the step in progress
    (suspect,) = stall["verdict"]["suspects"]
    assert (suspect["scope"], suspect["rank"], suspect["stage"]) == ("rank", 1, "forward")
    assert (stall["verdict"]["first_step"], stall["verdict"]["reasons"]) == (120, ["not_arrived"])
    assert stall["verdict"]["exposed_s"] >= 3.0
    # AND once it is released, training ends as it would have
    (tmp_path / "release").touch()
    out, err = job.communicate(timeout=120)
    assert (job.returncode, out) == (0, "trained\n"), err
    assert len(stalls(tmp_path)) == 1
    # AND who watched the terminal was told in one line
    said = [line for line in err.splitlines() if "Stalled" in line]
    assert len(said) == 1
    assert "in step 120" in said[0]
    assert "rank 1 in forward" in said[0]
    # AND it is among the decisions
    decided = json.loads(start("decisions", "--run", tmp_path / "run", "--json").communicate(timeout=60)[0])
    (decision,) = [one for one in decided if one["label"] == "stalled"]
    assert (decision["outcome"], decision["rule"]) == ("ignore", "stalls")
    assert "rank 1 in forward" in decision["reason"]
    assert "stalled" in start("decisions", "--run", tmp_path / "run").communicate(timeout=60)[0]


def test_with_all_ranks_inside_the_sync_stage_nobody_is_named(run, tmp_path):
    job = run("hang=backward")
    hung(tmp_path)
    (stall,) = wait_until(lambda: stalls(tmp_path))
    assert (stall["verdict"]["reasons"], stall["verdict"]["suspects"]) == (["in_sync"], [])
    (tmp_path / "release").touch()
    job.communicate(timeout=120)
    assert (job.returncode, len(stalls(tmp_path))) == (0, 1)


def test_a_rank_that_was_stopped_from_outside_is_found(run, tmp_path):
    # GIVEN a rank that is stopped in forward, where nothing else would hold it
    job = run("hang=forward")
    pid = hung(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    (tmp_path / "release").touch()
    # THEN it is found
    (stall,) = wait_until(lambda: stalls(tmp_path))
    assert [(one["rank"], one["stage"]) for one in stall["verdict"]["suspects"]] == [(1, "forward")]
    # AND goes on when it is let go
    os.kill(pid, signal.SIGCONT)
    job.communicate(timeout=120)
    assert (job.returncode, len(stalls(tmp_path))) == (0, 1)
