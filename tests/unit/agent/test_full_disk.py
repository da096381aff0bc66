"""An agent whose disk is full, and then is not: every step is judged at once, and kept late."""

import pytest

from sftriage.agent.agent import Agent
from sftriage.recorder import Monitor
from sftriage.traces import disk as module
from sftriage.traces.disk import Disk
from sftriage.traces.store import LocalStore
from tests.disks import small_disk
from tests.recorded import read_log

DEADLINE_S = 20.0


@pytest.mark.parametrize("full_from_the_start", [True, False])
def test_steps_that_a_full_disk_refuses_are_told_at_once_and_kept_late(tmp_path, monkeypatch, full_from_the_start):
    monkeypatch.setattr(module, "RETRY_S", 0.005)
    rings, spool = tmp_path / "rings", tmp_path / "spool"
    rings.mkdir()
    spool.mkdir()
    with small_disk(tmp_path / "disk") as small, Monitor(rings=rings, world_size=1) as monitor:
        disk = Disk()
        agent = Agent(rings, small.path, spool, LocalStore(tmp_path), job="job", run="run-1", do=disk.do)
        told = []

        def go_on(steps: int) -> None:
            for _ in range(steps):
                with monitor.step():
                    pass
            told.extend(step for rows in agent.rows() for step in rows.steps.step_B.tolist())

        # GIVEN a job that goes on for longer than its disk has room
        if full_from_the_start:
            small.fill()
        go_on(20)
        disk.settle()
        small.fill()
        go_on(300)
        # THEN its rank is not given up, and what it does is told
        assert (told, agent.telemetry().problems) == (list(range(320)), {})
        disk.settle()
        assert not disk.well
        # AND of a log that could not be begun there is nothing
        logs = list(small.path.glob("rank-*"))
        assert all(path.stat().st_size for path in logs)
        assert bool(logs) != full_from_the_start
        # WHEN there is room again THEN all of it is kept
        small.empty()
        disk.drain(DEADLINE_S)
        assert [one.step for one in read_log(small.path / "rank-0.0.steps").records] == list(range(320))
        *_, over = disk.news()
        assert (over.lost, over.late["steps"] >= 300) == ({}, True)
        agent.close()
        disk.drain(DEADLINE_S)
        disk.close()
