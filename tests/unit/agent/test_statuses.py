"""What the agent says each rank is doing now."""

import os
import time

import pytest

from sftriage.agent.agent import Agent
from sftriage.recorder import Monitor, find_rings
from sftriage.traces.store import LocalStore


@pytest.fixture
def places(tmp_path):
    made = {name: tmp_path / name for name in ("rings", "steps", "spool")}
    for path in made.values():
        path.mkdir()
    return made


@pytest.fixture
def agent(places):
    agent = Agent(**places, store=LocalStore(places["steps"].parent), job="job", run="run-1")
    yield agent
    agent.close()


@pytest.fixture
def monitor(places):
    made: list[Monitor] = []

    def monitor(rank: int, host: str = "h") -> Monitor:
        stages, sync = ("data", "backward"), ("backward",)
        made.append(Monitor(stages, sync, rank=rank, world_size=2, host=host, rings=places["rings"]))
        return made[-1]

    yield monitor
    for one in made:
        one.close()


def test_before_there_is_a_ring_nobody_does_anything(agent):
    agent.rows()
    assert agent.statuses() is None


def test_each_rank_is_in_its_stage_since_it_entered_it(agent, monitor):
    # GIVEN rank 0 is in data of its second step, and rank 1 has not begun its first
    before_ns = time.monotonic_ns()
    first, _ = monitor(0, "a"), monitor(1, "b")
    with first.step():
        pass
    with first.step(), first.stage("data"):
        agent.rows()
        job = agent.statuses()
    assert (job.schema.sync, job.world_size, job.attempt) == (("backward",), 2, 0)
    in_data, not_begun = job.ranks
    assert (in_data.rank, in_data.host, in_data.stage, in_data.step, in_data.published) == (0, "a", "data", 1, 1)
    assert 0 <= in_data.stage_age_ns <= in_data.step_age_ns <= time.monotonic_ns() - before_ns
    # THEN the latter has been so since it started, not since the host did
    assert (not_begun.rank, not_begun.host, not_begun.stage, not_begun.published) == (1, "b", None, 0)
    assert 0 <= not_begun.stage_age_ns <= time.monotonic_ns() - before_ns
    assert (not_begun.closed, not_begun.alive) == (False, True)


def test_only_the_newest_attempt_counts(agent, monitor):
    for rank in (0, 1):
        monitor(rank).close()
    agent.rows()
    assert [one.closed for one in agent.statuses().ranks] == [True, True]
    # WHEN rank 0 starts again
    monitor(0)
    agent.rows()
    job = agent.statuses()
    assert (job.attempt, [(one.rank, one.closed) for one in job.ranks]) == (1, [(0, False)])


def test_a_ring_that_cannot_be_read_any_more_is_a_rank_that_shows_nothing(agent, monitor, places):
    for rank in (0, 1):
        monitor(rank)
    agent.rows()
    os.truncate(find_rings(places["rings"])[1], 100)
    assert [one.rank for one in agent.statuses().ranks] == [0]
    assert list(agent.telemetry.problems.values())
