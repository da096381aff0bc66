"""Stacks of a rank that hangs, taken from outside while it hangs."""

import json
import sys
from pathlib import Path

import pytest

from tests.integration.processes import wait_until

HANG = Path(__file__).parent / "jobs" / "hang.py"
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: hangs}
spec:
  detection: {stalled_after: 3s, window_steps: 20}
  rules:
    - name: stuck
      match: {label: stalled}
      capture: {profiler: stacks, max_seconds: 30, stacks: {flight_recorder: true}}
"""


@pytest.fixture
def hung(start, tmp_path):
    """A job of three ranks under `sftriage run`, of which rank 1 hangs in forward until it is let go."""
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3]
    options = ["--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run"]
    job = start("run", *options, "--", *launcher, HANG, tmp_path, 1, "hang=forward")
    wait_until((tmp_path / "hung").exists)
    return job


def test_the_stacks_of_a_rank_that_hangs_name_the_function_it_hangs_in(hung, tmp_path):
    # GIVEN a rank that hangs in a function of the job's own
    # WHEN its stall has been seen, its stacks are taken while it hangs
    (path,) = wait_until(lambda: list((tmp_path / "run" / "captures").glob("*/manifest.json")))
    assert not (tmp_path / "release").exists()
    manifest = json.loads(path.read_text(encoding="utf-8"))
    stacks = json.loads((path.parent / "stacks.json").read_text(encoding="utf-8"))
    # THEN they are those of that rank and process, in the step and stage it hangs in
    pid = int((tmp_path / "hung").read_text(encoding="ascii"))
    assert (stacks["rank"], stacks["pid"], stacks["step"], stacks["stage"]) == (1, pid, 120, "forward")
    assert stacks["in_stage_s"] >= 3.0
    # AND the thread that trains shows the function, and the one that called it
    names = [[frame["name"] for frame in thread["frames"]] for thread in stacks["threads"]]
    (training,) = [frames for frames in names if "main" in frames]
    assert training.index("hang") < training.index("main")
    # AND of a flight recorder it says that Gloo has none
    assert stacks["flight_recorder"].startswith("none: ")
    # AND the manifest links them to the stall
    assert manifest["capture"]["profiler"] == "stacks"
    assert (manifest["capture"]["rank"], manifest["trigger"]["label"]) == (1, "stalled")
    assert [one["name"] for one in manifest["artefacts"]] == ["stacks.json"]
    assert "function names" in manifest["may_contain"]
    # AND training goes on as if nothing had been
    (tmp_path / "release").touch()
    out, err = hung.communicate(timeout=120)
    assert (hung.returncode, out) == (0, "trained\n"), err
    assert list((tmp_path / "run" / "spool").iterdir()) == []
