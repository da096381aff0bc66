"""Real processes on one CPU: that a rank waited for it is found, and of one that sleeps beside it, it is not."""

import json
import os
import sys
from pathlib import Path

import pytest

from sftriage.agent.counting import parsed, schedstat
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, JOBS
from tests.integration.runs import named, verdicts

JOB = JOBS / "on_a_busy_cpu.py"
STEPS = 160
POLICY = policy('name: slow-rank, match: {scope: [rank], gain: ">= 5%"}', steps=(40, 20, 20), limits="")
SCHEDSTAT = Path("/proc/self/schedstat")
counts = SCHEDSTAT.exists() and parsed(schedstat, SCHEDSTAT.read_bytes(), 2)[0] >= 0
pytestmark = [
    pytest.mark.skipif(not counts, reason="this kernel does not count how long threads wait for a CPU"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the other ranks need a CPU of their own"),
]


@pytest.mark.parametrize(("what", "least", "most"), [("waits", 0.6, 1.0), ("sleeps", 0.0, 0.4)])
def test_that_a_rank_waited_for_its_cpu_is_found_and_that_it_slept_is_not_taken_for_it(
    start, sftriage, tmp_path, what, least, most
):
    # GIVEN a job whose last rank is late, and has a busy process on its CPU
    run, policy = tmp_path / "run", tmp_path / "policy.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    job = start("run", "--policy", policy, "--out", run, "--", sys.executable, JOB, what, STEPS)
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    # WHEN it waits for the CPU in each step, or sleeps
    judged = verdicts(run)
    found = [one for one in judged if named(one) == (2, "data")]
    # THEN it is a suspect either way: it holds up the job
    assert len(found) >= len(judged) / 2 > 1, judged
    # AND what it was is known, but for steps that nobody read the counters after: the job's last ones
    counted = [one for one in found if one["suspects"][0]["descheduled_fraction"] is not None]
    assert len(counted) >= len(found) / 2, found
    fractions = sorted(one["suspects"][0]["descheduled_fraction"] for one in counted)
    assert least <= fractions[len(fractions) // 2] <= most, fractions
    # AND said, in the decision's own words and in its explanation
    middle = counted[len(counted) // 2]
    shown = sftriage("explain", middle["first_step"] + 1, "--run", run).out
    assert "waiting for a CPU" in shown
    assert ("check what else runs on its cores" in shown) == (what == "waits")
    # AND it is so when the run is judged again from what was kept
    lines = sftriage("analyze", run, "--json").out
    again = {one["first_step"]: one for one in map(json.loads, lines.splitlines())}
    same = again[middle["first_step"]]["suspects"][0]["descheduled_fraction"]
    assert same == pytest.approx(middle["suspects"][0]["descheduled_fraction"], abs=1e-6)
