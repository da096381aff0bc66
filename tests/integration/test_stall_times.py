"""After how long real jobs are reported to stall, in each kind of wait, with and without a time in the policy."""

import fcntl
import subprocess
import sys

import pytest

from tests.integration.conftest import own_environment
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, JOBS, ended, sftriage_process, wait_until
from tests.integration.runs import verdicts

RULE = "name: stuck, match: {label: stalled}"
LATE_S = 6.0
"""How much later a stall may be reported: the check comes once a second, and the machine may be busy."""


@pytest.mark.parametrize(
    ("kind", "given_s", "threshold_s", "reason", "missing"),
    [
        ("file", None, 10, "no_rank_waits", [0, 1, 2]),
        ("uneven", None, 10, "not_arrived", [2]),
        ("left", None, 10, "left_early", [2]),
        ("between", 4, 4, "outside_steps", []),
        ("first", 4, 4, "not_arrived", [1]),
    ],
)
def test_each_kind_of_wait_is_reported_in_time(tmp_path, kind, given_s, threshold_s, reason, missing):
    # GIVEN a job in which ranks come to wait, and a policy with or without a time
    detection = f"stalled_after: {given_s}s" if given_s else "window_steps: 50"
    (tmp_path / "policy.yaml").write_text(policy(RULE, detection=detection), encoding="utf-8")
    run = tmp_path / "run"
    command = ["run", "--policy", tmp_path / "policy.yaml", "--out", run, "--", sys.executable, JOBS / "waits.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (tmp_path / "shards").open("w") as shards:
        fcntl.flock(shards, fcntl.LOCK_EX)
        job = sftriage_process(*command, tmp_path, kind, env=own_environment(tmp_path), **pipes)
        with ended(job):
            # WHEN they do
            wait_until(lambda: [verdict for verdict in verdicts(run) if verdict["label"] == "stalled"])
            (tmp_path / "release").touch()
            fcntl.flock(shards, fcntl.LOCK_UN)
            out, err = job.communicate(timeout=DEADLINE_S)
    # THEN it is reported after the policy's time, or that of any wait, for the ranks that are missing
    (stall,) = [verdict for verdict in verdicts(run) if verdict["label"] == "stalled"]
    assert (stall["reasons"], sorted(r for one in stall["suspects"] for r in one["ranks"])) == ([reason], missing), err
    numbers = stall["numbers"]
    assert (numbers["threshold_s"], numbers["policy_s"]) == (threshold_s, given_s or 0)
    assert threshold_s <= numbers["still_s"] <= threshold_s + LATE_S
    # AND the job ends as it would have
    assert (job.returncode, out) == (0, "trained\n"), err
