"""A real Gloo job on two hosts, with a rank that is late in every step: what triage does about it over the hub."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.mitigate.switching import make_switch
from sftriage.recorder import Monitor
from tests import needs
from tests.integration.namespaces import BOTH, two_hosts
from tests.integration.processes import FORKED, descendants, is_controller, wait_until
from tests.integration.remedies import POLICY, on_record, remedies, say, states

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
JOB = Path(__file__).parent / "jobs" / "chronic.py"
RANKS_A_HOST, LATE_RANK = 2, 3
SPEC = {"late_s": 0.2, "whole_s": 0.1, "steps": 3000}
MITIGATE = "  mitigate: {remedies: [stragglar], min_saving: 1%, steps: 8}\n"


@pytest.fixture
def job(tmp_path, environment):
    """A job of two ranks a host, under triage; its processes, and the run directory. All of it ends with the test."""
    say(tmp_path / "whom", str(LATE_RANK))
    (tmp_path / "policy.yaml").write_text(POLICY + MITIGATE)
    meeting = {"NODES": "2", "MEET_AT": f"{BOTH[0]}:29517", "PYTHONPATH": str(Path(__file__).parents[2])}
    spec = json.dumps(SPEC | {"whom": str(tmp_path / "whom")})
    with two_hosts() as hosts:
        both = []
        for number in range(2):
            run = [sys.executable, "-m", "sftriage", "run", "--job-id", f"job-{os.getpid()}", "--hub", BOTH[0]]
            run += ["--out", tmp_path / "run", "--creds", tmp_path / "secret", "--policy", tmp_path / "policy.yaml"]
            (tmp_path / f"host-{number}").mkdir()
            command = ["env", "-C", tmp_path / f"host-{number}", *run, "--", *FORKED, RANKS_A_HOST, JOB, spec]
            said = tmp_path / f"said-{number}"
            both.append(hosts.start(number, command, {**environment, **meeting}, said))
        yield both, tmp_path / "run"


def test_a_remedy_is_switched_on_ranks_of_two_hosts_and_outlives_the_controller(job, tmp_path):
    # GIVEN a rank of the second host that is later than the break-even, and a policy that allows to do something
    (first, _), run = job
    # WHEN the job goes on THEN gradients are reduced around that rank, in turns at first, and then for good
    wait_until(lambda: len(states(run)) == 2)
    assert states(run) == [("trying", "worthwhile", LATE_RANK), ("kept", "helps", LATE_RANK)]
    kept = remedies(run)[1]["numbers"]
    assert (kept["ring_ranks"], kept["ring_bytes"] > 0) == (2 * RANKS_A_HOST, True)
    assert kept["saves_s"] > 2 * kept["error_s"]
    assert min(kept["on_steps"], kept["off_steps"]) >= 8
    # WHEN the controller is killed, and another one goes on with the run
    (controller,) = [pid for pid in descendants(first.pid) if is_controller(pid)]
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: on_record(run, "taken_over"))
    judged = len(on_record(run, "window"))
    wait_until(lambda: len(on_record(run, "window")) > judged + 12)
    # THEN what was kept stays
    assert len(states(run)) == 2
    # WHEN the straggler moves to the other host THEN the remedy is undone, and tried for the other one
    say(tmp_path / "whom", "1")
    wait_until(lambda: len(states(run)) == 4)
    assert states(run)[2:] == [("undone", "moved", LATE_RANK), ("trying", "worthwhile", 1)]


FROM_A_SIDECAR = """
import sys
from pathlib import Path
from sftriage.agent.agent import Agent
from sftriage.traces.store import LocalStore
rings, kept = map(Path, sys.argv[1:])
agent = Agent(rings, kept, kept, LocalStore(kept), job="job", run="run-1")
agent.rows()
print([one.name for one in agent.switches()])
"""


def test_an_agent_that_cannot_see_the_ranks_processes_finds_their_group(tmp_path):
    # GIVEN an agent in another container than the ranks, as a sidecar is: their process ids say nothing to it
    rings = tmp_path / "rings"
    rings.mkdir()
    path = make_switch(rings, (0, 1), group="ranks-0.abcd", here=(0,))
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", FROM_A_SIDECAR, rings, tmp_path]

    def seen():
        done = subprocess.run(elsewhere, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode and "unshare" in done.stderr:
            pytest.skip(needs.NO_NAMESPACE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # THEN their group is there while they write their rings, and gone with them
    with Monitor(("data",), sync=(), rank=0, world_size=2, rings=rings):
        assert seen() == "['ranks-0.abcd']\n"
    assert seen() == "[]\n"
    assert path.exists()
