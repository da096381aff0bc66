"""A trainer in a PID namespace of its own, as in another container of a pod: its agent counts what it waits for."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from sftriage.agent.reading import RankRings
from sftriage.model.windows import COUNTERS
from tests import needs
from tests.integration.processes import DEADLINE_S, wait_until

TRAINER = """
import sys, time
from sftriage import Monitor
monitor = Monitor(stages=("data",), sync=(), rank=0, world_size=1, rings=sys.argv[1])
print("up", flush=True)
while True:
    with monitor.step(), monitor.stage("data"):
        sum(range(200_000))
"""
ELSEWHERE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture
def trainer(tmp_path):
    if shutil.which("unshare") is None or subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode:
        pytest.skip(needs.NO_NAMESPACE)
    # (longer than the path of a socket may be)
    rings = tmp_path / ("rings" * 20)
    rings.mkdir()
    process = subprocess.Popen(
        [*ELSEWHERE, sys.executable, "-c", TRAINER, str(rings)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    yield rings, process
    process.kill()
    process.communicate()


def test_an_agent_counts_what_a_trainer_in_another_container_waits_for(trainer, tmp_path, caplog):
    rings, process = trainer
    (tmp_path / "steps").mkdir()
    agent, known = RankRings(rings, tmp_path / "steps"), set[str]()

    def counts() -> bool:
        for rows in agent.rows():
            if rows.steps.counted_BC is not None:
                known.update(COUNTERS[at] for at in np.flatnonzero(np.isfinite(rows.steps.counted_BC).any(axis=0)))
        return {"minor_faults", "major_faults", "system_s", "stopped_s", "preempted", "woken"} <= known

    # GIVEN a trainer whose process id says nothing here WHEN its steps are read THEN their counters come
    wait_until(counts, 60)
    # AND a second agent, as after a restart, has them too
    agent.close()
    (tmp_path / "again").mkdir()
    agent = RankRings(rings, tmp_path / "again")
    known.clear()
    wait_until(counts, 60)
    # AND when the trainer has ended, nothing is left of it, and there was no complaint
    process.kill()
    process.wait(DEADLINE_S)
    agent.rows()
    agent.close()
    assert list(rings.glob("*.socket")) == []
    assert [message for message in caplog.messages if "cannot see" in message] == []
