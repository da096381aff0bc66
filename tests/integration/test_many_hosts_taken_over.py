"""A job whose controller dies: what goes on by itself, and what a person types and reads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.hubs import SIMULATED
from tests.integration.namespaces import BOTH, two_hosts
from tests.integration.processes import DEADLINE_S, descendants, ended, free_port, is_controller, wait_until
from tests.integration.runs import verdicts
from tests.integration.terminals import terminals

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
SHELL = ("sh", "-c", '"$@"; status=$?; test $status -le 128 || exec sleep infinity; exit $status', "sh")
"""A person's shell is there still when what was typed into it is killed."""
STEP_S = 0.05


def test_a_controller_that_is_killed_under_sftriage_run_is_started_again(tmp_path, environment):
    # GIVEN a job by one line, on a host
    release, run, log = tmp_path / "release", tmp_path / "sftriage-runs" / "my-job", tmp_path / "said"
    ranks = [sys.executable, SIMULATED, "-", 0, 2, 2, time.time() + 1.0, STEP_S, "", release]
    line = [sys.executable, "-m", "sftriage", "run", "--job-id", "my-job", "--hub", f"127.0.0.1:{free_port()}", "--"]
    environment = {**environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("wb") as out:
        job = subprocess.Popen([*map(str, line + ranks)], cwd=tmp_path, env=environment, stdout=out, stderr=out)
    with ended(job):
        wait_until(lambda: run.exists() and len(verdicts(run)) >= 2, 60.0)
        # WHEN its controller is killed
        (controller,) = [pid for pid in descendants(job.pid) if is_controller(pid)]
        os.kill(controller, signal.SIGKILL)
        judged = len(verdicts(run))
        # THEN another one goes on with the run
        wait_until(lambda: len(verdicts(run)) >= judged + 2, 90.0)
        release.touch()
        # AND the job ends as it would have
        assert job.wait(DEADLINE_S) == 0, log.read_text()
    text = log.read_text()
    assert text.count("the controller was killed; restarting it") == text.count("took over the job") == 1
    # AND no step was left out
    steps = {step for one in verdicts(run) for step in range(one["first_step"], one["last_step"] + 1)}
    assert steps == set(range(min(steps), max(steps) + 1))
    assert {path.name for path in run.parent.iterdir()} == {"my-job", "my-job.hosts"}


def test_one_line_goes_on_where_the_first_host_has_lost_its_sftriage(tmp_path, environment):
    # GIVEN two terminals, on two hosts that share a directory, and the same line in both
    release, run = tmp_path / "release", tmp_path / "sftriage-runs" / "my-job"
    environment = {**environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    with two_hosts() as hosts, terminals(environment) as terminal:

        def typed(number, *arguments):
            here = ["env", "-C", tmp_path, f"NODE_RANK={number}", sys.executable, "-m", "sftriage"]
            return terminal(*SHELL, *hosts.inside(number, [*here, *arguments]), columns=200, lines=40)

        def run_on(number):
            ranks = [sys.executable, SIMULATED, "-", 2 * number, 2, 4, begin_s, STEP_S, "", release]
            return typed(number, "run", "--job-id", "my-job", "--hub", BOTH[0], "--", *ranks)

        begin_s = time.time() + 4.0
        first, second = run_on(0), run_on(1)
        first.wait_for("sftriage: watching under policy default; run directory sftriage-runs/my-job")
        # THEN the first one says who is there
        first.wait_for("sftriage: 4 ranks on 2 hosts: node-a-0 and node-b-1")
        wait_until(lambda: verdicts(run))
        # WHEN it is killed
        os.kill(descendants(first.process.pid)[0], signal.SIGKILL)
        judged = len(verdicts(run))
        # AND somebody types there what is to be typed then
        again = typed(0, "controller", "--run", "sftriage-runs/my-job", "--hub", BOTH[0])
        # THEN hub, controller and the agent of that host are there again
        again.wait_for("sftriage: took over the job, watching under policy default; run directory sftriage-runs/my-job")
        again.wait_for("sftriage: 4 ranks on 2 hosts: node-a-0 and node-b-1")
        # AND windows have all ranks again
        wait_until(lambda: [one for one in verdicts(run)[judged + 1 :] if one["numbers"]["coverage"] == 1.0])
        # AND when the job ends, all of it does
        release.touch()
        assert second.wait_for_end() == 0
        assert again.wait_for_end() == 0
        again.wait_for("windows judged, 0 captures stored; why: sftriage decisions --run sftriage-runs/my-job")
        # AND nothing is left of the hub, and of its password
        assert {path.name for path in (tmp_path / "sftriage-runs").iterdir()} == {"my-job", "my-job.hosts"}
        # AND the second host had nothing to say
        assert not "".join(second.lines())
