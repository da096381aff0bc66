"""Parts of a job on two hosts are killed, cut off and starved for minutes: `make soak CHAOS='--seed 7 --rounds 20'`.

A round that fails names its seed: with it, and as many --seconds, the same befalls another job at the same times.
"""

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sftriage.agent.reading import RankRings
from sftriage.runtime.hub_server import HubServer, make_secret
from tests.chaos.checking import actions
from tests.chaos.world import play
from tests.integration.processes import DEADLINE_S, TORCHRUN, ended, wait_until

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
LONGEST_S = 30.0
SLOW_DATA = Path(__file__).parents[1] / "integration" / "jobs" / "slow_data.py"
HUB = ("127.0.0.1", 27422)
PAIRS, PHASE_S, KILLED_EVERY_S = 6, 10.0, 2.5


def test_each_fault_ends_as_one_decision_with_one_outcome(tmp_path, environment, seed, request):
    seconds = request.config.getoption("--seconds")
    some = actions(seed, last_s=seconds, every_s=4.0, longest_s=LONGEST_S)
    played = play(tmp_path, environment, some, seed)
    outcome = played.outcome
    found = {
        "seed": seed,
        "actions": len(some),
        "faults": dict(outcome.faults),
        "captures": dict(outcome.captures),
        "windows": outcome.windows,
        "taken_over": outcome.taken_over,
    }
    sys.stdout.write(f"\n  {json.dumps(found)}")
    assert not outcome.problems, f"--seed {seed} --seconds {seconds}\n{played.text}"


def test_step_times_while_an_agent_is_killed_around_paired_against_none(tmp_path, environment):
    """A real job under torchrun, of which phases with an agent, and phases without one, come by turns: a ratio."""
    rings, host, secret, release = (tmp_path / one for one in ("rings", "host", "secret", "release"))
    steps = tmp_path / "steps"
    for path in (rings, steps):
        path.mkdir()
    make_secret(secret)
    hub = ("--job-id", "job", "--nats", f"nats://{HUB[0]}:{HUB[1]}", "--creds", secret)

    def start(*command: object) -> subprocess.Popen:
        process = subprocess.Popen([*map(str, command)], env={**environment, "SFTRIAGE_RINGS": str(rings)})
        held.enter_context(ended(process))
        return process

    def agent() -> subprocess.Popen:
        where = ("--rings", rings, "--directory", host, "--name", "host")
        return start(sys.executable, "-m", "sftriage", "agent", *hub, *where)

    with contextlib.ExitStack() as held:
        held.callback(HubServer(HUB, tmp_path / "nats", secret).close)
        start(sys.executable, "-m", "sftriage", "controller", *hub, "--out", tmp_path / "run")
        job = start(*TORCHRUN, "2", SLOW_DATA, release, 0.005)
        reading, phases = RankRings(rings, steps), []
        wait_until(lambda: reading.rows() and reading.telemetry().steps > 200)
        for _ in range(PAIRS):
            for with_agent in (False, True):
                begin_s = time.monotonic()
                while time.monotonic() < begin_s + PHASE_S:
                    killed = agent() if with_agent else None
                    time.sleep(KILLED_EVERY_S)
                    if killed is not None:
                        killed.send_signal(signal.SIGKILL)
                        killed.wait(DEADLINE_S)
                found = [rows.steps for rows in reading.rows() if len(rows.steps)]
                took_ns = [ns for one in found for ns in one.durations_ns_BS.sum(axis=1)[one.rank_B == 0].tolist()]
                phases.append(statistics.median(took_ns) / 1e6)
        reading.close()
        release.touch()
        assert job.wait(DEADLINE_S) == 0
    ratios = [after / before for before, after in zip(phases[::2], phases[1::2], strict=True)]
    found = {"step_ms": phases, "ratios": ratios, "median_ratio": statistics.median(ratios)}
    sys.stdout.write(f"\n  {json.dumps(found)}")
