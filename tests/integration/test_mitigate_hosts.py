"""A real Gloo job on two hosts, with a rank that is late in every step: what triage does about it over the hub."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from sftriage.mitigate.switching import SwitchFile, make_switch
from sftriage.trainer.monitor import Monitor
from tests.integration.namespaces import BOTH, printed_elsewhere, two_hosts
from tests.integration.processes import FORKED, JOBS, descendants, is_controller, wait_until
from tests.integration.remedies import POLICY, STRAGGLAR, remedies, say, states
from tests.integration.runs import on_record

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
JOB = JOBS / "chronic.py"
RANKS_A_HOST, LATE_RANK = 2, 3
SPEC = {"late_s": 0.2, "whole_s": 0.1, "steps": 3000}


IMPATIENT = """
import sys
if "controller" in sys.orig_argv:
    from sftriage.mitigate import loop
    loop.SWITCH_S = 10.0
"""
"""It is waited for less long for ranks to switch."""


class Job:
    def __init__(self, hosts, directory, environment, policy):
        self.hosts, self.directory, self.run = hosts, directory, directory / "run"
        say(directory / "whom", str(LATE_RANK))
        (directory / "policy.yaml").write_text(POLICY + policy)
        path = f"{directory / 'patience'}:{Path(__file__).parents[2]}"
        self.environment = {**environment, "NODES": "2", "MEET_AT": f"{BOTH[0]}:29517", "PYTHONPATH": path}
        self.hub = ["--job-id", f"job-{os.getpid()}", "--hub", BOTH[0], "--creds", directory / "secret"]
        spec = json.dumps(SPEC | {"whom": str(directory / "whom")})
        command = ["run", *self.hub, "--out", self.run, "--policy", directory / "policy.yaml", "--"]
        self.both = [self.start(number, *command, *FORKED, RANKS_A_HOST, JOB, spec) for number in range(2)]

    def start(self, number, *command):
        host = self.directory / f"host-{number}"
        host.mkdir(exist_ok=True)
        whole = ["env", "-C", host, sys.executable, "-m", "sftriage", *command]
        return self.hosts.start(number, whole, self.environment, self.directory / f"said-{number}")

    def kill_controller(self):
        """The controller dies, and another one goes on with the run."""
        known = len(on_record(self.run, "taken_over"))
        (controller,) = [pid for pid in descendants(self.both[0].pid) if is_controller(pid)]
        os.kill(controller, signal.SIGKILL)
        wait_until(lambda: len(on_record(self.run, "taken_over")) > known)

    def judged(self, more):
        known = len(on_record(self.run, "window"))
        wait_until(lambda: len(on_record(self.run, "window")) >= known + more)

    def of_hosts(self):
        """How the group stands, by what each host's file says."""
        found = []
        for number in range(2):
            (path,) = self.hosts.memory(number).glob("**/*.switch")
            with SwitchFile(path) as file:
                found.append(file.status())
        return found


@pytest.fixture
def begin(tmp_path, environment):
    with two_hosts() as hosts:
        yield lambda policy=STRAGGLAR: Job(hosts, tmp_path, environment, policy)


def test_a_remedy_spans_two_hosts_and_outlives_the_controller(begin, tmp_path):
    # GIVEN a rank of the second host that is later than the break-even, and a policy that allows remedies
    job = begin()
    run = job.run
    # WHEN the job continues THEN gradients are reduced around that rank, first on trial and then for good
    wait_until(lambda: len(states(run)) == 2)
    assert states(run) == [("trying", "worthwhile", LATE_RANK), ("kept", "helps", LATE_RANK)]
    kept = remedies(run)[1]["numbers"]
    assert (kept["ring_ranks"], kept["ring_bytes"] > 0) == (2 * RANKS_A_HOST, True)
    assert kept["saves_s"] > 2 * kept["error_s"]
    assert min(kept["on_steps"], kept["off_steps"]) >= 8
    wait_until(lambda: [one.value for one in job.of_hosts()] == [LATE_RANK + 1] * 2)
    # WHEN the controller is killed, and another resumes the run without reports from the second host
    job.both[1].kill()
    job.both[1].wait(60)
    job.kill_controller()
    job.judged(13)
    # THEN the kept remedy stays in force and on record
    assert len(states(run)) == 2
    assert [one.value for one in job.of_hosts()] == [LATE_RANK + 1] * 2
    # WHEN that host reports again, and the straggler moves to the first THEN the remedy is undone, and tried for it
    job.start(1, "agent", *job.hub)
    say(tmp_path / "whom", "1")
    wait_until(lambda: len(states(run)) == 4)
    assert states(run)[2:] == [("undone", "moved", LATE_RANK), ("trying", "worthwhile", 1)]


def test_a_silent_host_ends_a_trial_and_the_loop_resumes_once_it_reports(begin, tmp_path):
    # GIVEN a remedy on trial on ranks of two hosts
    (tmp_path / "patience").mkdir()
    (tmp_path / "patience" / "sitecustomize.py").write_text(IMPATIENT)
    job = begin(STRAGGLAR.replace("steps: 8", "steps: 8, cooldown: 1s"))
    run = job.run
    wait_until(lambda: states(run))
    # WHEN the agent of a host is killed, and its ranks continue
    job.both[1].kill()
    # THEN the trial ends without a result
    wait_until(lambda: len(states(run)) == 2)
    assert states(run) == [("trying", "worthwhile", LATE_RANK), ("undone", "not_switched", LATE_RANK)]
    # AND all ranks have the same value in force, and continue
    before = job.of_hosts()
    assert len({one.value for one in before}) == 1
    wait_until(lambda: all(now.all_begun > was.round + 5 for now, was in zip(job.of_hosts(), before, strict=True)))
    assert [one.value for one in job.of_hosts()] == [one.value for one in before]
    # WHEN the controller is killed too, and another resumes THEN it tries nothing while the host is silent
    job.kill_controller()
    job.judged(3)
    assert len(states(run)) == 2
    # WHEN the agent is back THEN the remedy is tried again, and kept
    job.start(1, "agent", *job.hub)
    wait_until(lambda: len(states(run)) == 4)
    assert states(run)[2:] == [("trying", "worthwhile", LATE_RANK), ("kept", "helps", LATE_RANK)]
    wait_until(lambda: [one.value for one in job.of_hosts()] == [LATE_RANK + 1] * 2)


FROM_A_SIDECAR = """
import sys
from pathlib import Path
from sftriage.agent.agent import Agent
from sftriage.traces.store import LocalStore
rings, kept = map(Path, sys.argv[1:])
agent = Agent(rings, kept, LocalStore(kept), job="job", run="run-1")
agent.rows()
print([one.name for one in agent.switches()])
"""


def test_an_agent_that_cannot_see_the_ranks_processes_finds_their_group(tmp_path):
    # GIVEN an agent in another container than the ranks, such as a sidecar, which cannot see their processes
    rings = tmp_path / "rings"
    rings.mkdir()
    (tmp_path / "steps").mkdir()
    path = make_switch(rings, (0, 1), group="ranks-0.abcd", here=(0,))
    # THEN their group exists while they write their rings, and ends with them
    with Monitor(("data",), sync=(), rank=0, world_size=2, rings=rings):
        assert printed_elsewhere(FROM_A_SIDECAR, rings, tmp_path) == "['ranks-0.abcd']\n"
    assert printed_elsewhere(FROM_A_SIDECAR, rings, tmp_path) == "[]\n"
    assert path.exists()
