"""What the agent says each rank is doing now."""

import os
import time

from sftriage.recorder import find_rings


def test_before_there_is_a_ring_nobody_does_anything(agent):
    agent.rows()
    assert agent.statuses() is None


def test_each_rank_is_in_its_stage_since_it_entered_it(agent, monitor):
    # GIVEN rank 0 is in data of its second step, and rank 1 has not begun its first
    before_ns = time.monotonic_ns()
    first, _ = monitor(0, host="a"), monitor(1, host="b")
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


def test_who_asks_hears_of_every_rank_that_is_there_by_then(agent, monitor):
    # GIVEN steps that were read when only one rank of the job had started
    monitor(0)
    agent.rows()
    # WHEN the other one starts THEN it counts, before steps are read again
    monitor(1)
    assert [one.rank for one in agent.statuses().ranks] == [0, 1]


def test_a_ring_that_cannot_be_read_any_more_is_a_rank_that_shows_nothing(agent, monitor, places):
    for rank in (0, 1):
        monitor(rank)
    agent.rows()
    os.truncate(find_rings(places["rings"])[1], 100)
    assert [one.rank for one in agent.statuses().ranks] == [0]
    assert list(agent.telemetry().problems.values())
