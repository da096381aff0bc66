"""What a person types and reads whose job is on two hosts, one of which loses its `sftriage run`."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.integration.namespaces import BOTH, two_hosts
from tests.integration.processes import wait_until
from tests.integration.runs import verdicts
from tests.integration.terminals import terminals

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
STEPPING = Path(__file__).parent / "jobs" / "stepping.py"


def test_one_line_goes_on_where_the_first_host_has_lost_its_sftriage(tmp_path, environment):
    # GIVEN two terminals, on two hosts that share a directory, and the same line in both
    release, run = tmp_path / "release", tmp_path / "sftriage-runs" / "my-job"
    environment = {**environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    with two_hosts() as hosts, terminals(environment) as terminal:

        def typed(number, *arguments):
            here = ["env", "-C", tmp_path, f"NODE_RANK={number}", sys.executable, "-m", "sftriage"]
            return terminal(*hosts.inside(number, [*here, *arguments]), columns=200, lines=40)

        def run_on(number):
            ranks = [sys.executable, STEPPING, 2 * number, 2, 4, begin_s, release]
            return typed(number, "run", "--job-id", "my-job", "--hub", BOTH[0], "--", *ranks)

        begin_s = time.time() + 4.0
        first, second = run_on(0), run_on(1)
        first.wait_for("sftriage: watching under policy default; run directory sftriage-runs/my-job")
        # THEN the first one says who is there
        first.wait_for("sftriage: 4 ranks on 2 hosts: node-a-0 and node-b-1")
        wait_until(lambda: verdicts(run))
        # WHEN it is killed
        os.kill(first.process.pid, signal.SIGKILL)
        judged = len(verdicts(run))
        # AND somebody types there what is to be typed then
        again = typed(0, "controller", "--run", "sftriage-runs/my-job", "--hub", BOTH[0])
        # THEN hub, controller and the agent of that host are there again
        again.wait_for("sftriage: took over the job, watching under policy default; run directory sftriage-runs/my-job")
        again.wait_for("sftriage: 4 ranks on 2 hosts: node-a-0 and node-b-1")
        wait_until(lambda: len(verdicts(run)) > judged + 1)
        # AND when the job ends, all of it does
        release.touch()
        assert second.wait_for_end() == 0
        assert again.wait_for_end() == 0
        again.wait_for("windows judged, 0 captures stored; why: sftriage decisions --run sftriage-runs/my-job")
        # AND every window had all ranks
        assert {one["numbers"]["coverage"] for one in verdicts(run)} == {1.0}
        # AND nothing is left of the hub, and of its password
        assert {path.name for path in (tmp_path / "sftriage-runs").iterdir()} == {"my-job", "my-job.hosts"}
        # AND the second host had nothing to say
        print("\n".join(first.lines()), "\n".join(again.lines()), "\n".join(second.lines()))
        assert not "".join(second.lines())
