"""A job that hangs where nobody may look into its processes: no ptrace, no right to it, nothing in its script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.capture.stacks import find_py_spy
from tests.integration.processes import FORKED, ended, wait_until
from tests.integration.runs import captures, verdicts
from tests.integration.test_auto_seams import UNEDITED

POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: hangs}
spec:
  detection: {stalled_after: 3s, window_steps: 20}
  rules:
    - name: stuck
      match: {label: stalled}
      capture: {profiler: stacks, max_seconds: 30}
  limits: {captures_per_run: 1}
"""
WITHOUT_PTRACE = ("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace", "--ambient-caps=-sys_ptrace")


@pytest.mark.skipif(not shutil.which("setpriv") or os.geteuid() != 0, reason="setpriv, as root: to give up ptrace")
def test_a_rank_that_hangs_where_ptrace_is_denied_says_itself_where_it_stands(tmp_path, environment):
    # GIVEN an unedited script, in processes that may not be looked into, of a user without CAP_SYS_PTRACE
    find_py_spy()
    (tmp_path / "policy.yaml").write_text(POLICY)
    run = tmp_path / "run"
    options = ("--auto", "--policy", tmp_path / "policy.yaml", "--out", run)
    triage = (sys.executable, "-m", "sftriage", "run", *options)
    command = (*WITHOUT_PTRACE, *triage, "--", *FORKED, 2, UNEDITED / "hangs.py", tmp_path)
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen([*map(str, command)], env=environment, stdout=said, stderr=said, text=True)
    with ended(job):
        # WHEN rank 1 waits for a lock for ever
        (manifest,) = wait_until(lambda: captures(run))
    # THEN it is named with its stage, and its own stacks say what it waits for, and how they were taken
    (stall,) = [one for one in verdicts(run) if one["label"] == "stalled"][:1]
    assert (stall["suspects"][0]["rank"], stall["suspects"][0]["stage"]) == (1, "data")
    assert manifest.capture.rank == 1
    assert manifest.capture.detail.startswith("taken by the trainer itself, of Python alone: process ")
    assert "ptrace denied" in manifest.capture.detail
    stacks = json.loads((run / "captures" / manifest.capture_id / "stacks.json").read_text())
    assert stacks["pid"] == int((tmp_path / "hangs").read_text())
    (main,) = [one for one in stacks["threads"] if one["thread_name"] == "MainThread"]
    assert (main["frames"][0]["name"], Path(main["frames"][0]["filename"]).name) == ("__getitem__", "hangs.py")
