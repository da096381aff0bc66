"""The agent on real rings: monitors in this process write them, as trainers would."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sftriage.agent.agent import Agent
from sftriage.errors import RingError
from sftriage.recorder import Monitor, StepLog
from sftriage.records import CaptureRequest
from sftriage.windows.gather import Shape
from tests.recorded import read_log


@pytest.fixture
def places(tmp_path):
    """Where rings, kept steps and traces lie."""
    made = {name: tmp_path / name for name in ("rings", "steps", "spool")}
    for path in made.values():
        path.mkdir()
    return made


@pytest.fixture
def agent(places):
    agent = Agent(**places, shape=Shape(window_steps=4, stride_steps=4, warmup_steps=0))
    yield agent
    agent.close()


@pytest.fixture
def monitor(places):
    """Make the monitor of a rank; all of them are closed in the end."""
    made: list[Monitor] = []

    def monitor(rank: int, world_size: int = 2, **options: object) -> Monitor:
        options = {"stages": ("data", "backward"), "sync": ("backward",), "spool": places["spool"], **options}
        made.append(Monitor(rank=rank, world_size=world_size, rings=places["rings"], **options))
        return made[-1]

    yield monitor
    for one in made:
        one.close()


def train(*monitors: Monitor, steps: int) -> None:
    for _ in range(steps):
        for monitor in monitors:
            with monitor.step(), monitor.stage("data"):
                pass


def request(rank: int) -> CaptureRequest:
    return CaptureRequest(f"w0-3-r{rank}-x-1", rank, "torch", steps=1, warmup_steps=0, max_seconds=5, max_bytes=10**6)


def test_windows_come_out_once_and_every_step_is_kept(agent, monitor, places):
    ranks = monitor(0), monitor(1)
    assert agent.poll() == []
    train(*ranks, steps=6)
    assert [window.first_step for window in agent.poll()] == [0]
    assert agent.poll() == []
    train(*ranks, steps=2)
    assert [window.first_step for window in agent.poll()] == [4]
    for rank in (0, 1):
        kept = read_log(places["steps"] / f"rank-{rank}.0.steps")
        assert [record.step for record in kept.records] == list(range(8))


def test_a_ring_that_is_none_is_said_once_and_the_others_are_read(agent, monitor, places):
    (places["rings"] / "rank-1.0.ring").write_bytes(b"not a ring" * 1000)
    train(monitor(0), steps=8)
    # GIVEN rank 1's ring is foreign, WHEN rank 0 is a window ahead
    (window,) = agent.poll()
    # THEN the window goes out with rank 1 missing, and why is known
    assert window.durations_NRS.shape == (4, 2, 3)
    assert len(agent.telemetry.problems) == 1


def test_a_full_disk_costs_the_log_and_not_the_triage(agent, monitor, monkeypatch, caplog):
    def full(log, raw):
        raise RingError(f"{log.path}: cannot be written: No space left on device")

    monkeypatch.setattr(StepLog, "append", full)
    # GIVEN the disk takes no step, WHEN the job goes on
    ranks = monitor(0), monitor(1)
    train(*ranks, steps=4)
    first = agent.poll()
    train(*ranks, steps=4)
    # THEN its windows are judged all the same, and it is said once a rank
    assert [window.first_step for window in (*first, *agent.poll())] == [0, 4]
    assert [record.message.count("No space left") for record in caplog.records] == [1, 1]


def test_a_rank_that_records_other_stages_counts_as_missing(agent, monitor):
    train(monitor(0), monitor(1, stages=("load", "backward")), steps=8)
    agent.poll()
    (problem,) = agent.telemetry.problems.values()
    assert "records other stages than rank 0" in problem


def test_another_attempt_of_the_job_has_windows_of_its_own(agent, monitor, monkeypatch):
    first = monitor(0), monitor(1)
    train(*first, steps=5)
    assert [(w.attempt, w.first_step) for w in agent.poll()] == [(0, 0)]
    # GIVEN the launcher has started the ranks again, and they count their steps from 0
    for one in first:
        one.close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(monitor(0), monitor(1), steps=4)
    # THEN the windows are of the new attempt, and no window mixes the two
    assert [(w.attempt, w.first_step) for w in agent.poll()] == [(1, 0)]


def test_windows_say_where_the_ranks_are_and_what_roles_they_have(agent, monitor):
    train(monitor(0, host="node-a", cohort="pp0"), monitor(1, host="node-a", cohort="pp1"), steps=4)
    (window,) = agent.poll()
    assert (window.hosts, window.cohorts) == (("node-a", "node-a"), ("pp0", "pp1"))
    assert (window.kinds, window.work_NR, window.ready_NR) == (None, None, None)


def test_an_attempt_that_another_one_has_followed_is_over(agent, monitor, monkeypatch):
    first = monitor(0), monitor(1)
    train(*first, steps=3)
    assert agent.poll() == []
    # GIVEN the job was started again, and a rank of the attempt before still takes steps
    with monkeypatch.context() as environment:
        environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        second = monitor(0), monitor(1)
    train(*second, steps=3)
    assert agent.poll() == []
    train(*first, steps=8)
    # THEN those make no windows
    assert agent.poll() == []
    train(*second, steps=1)
    assert [(w.attempt, w.first_step) for w in agent.poll()] == [(1, 0)]


def test_a_capture_of_a_rank_that_is_not_here_fails_at_once(agent, monitor):
    train(monitor(0), steps=1)
    agent.poll()
    result = agent.capture(request(rank=1))
    assert (result.state, result.detail) == ("failed", "rank 1 has no ring here")


def test_a_refused_capture_comes_back_with_its_reason(agent, monitor, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    rank = monitor(0, world_size=1)
    train(rank, steps=1)
    agent.poll()
    # WHEN a rank that has not imported torch is asked for a capture, and takes its next step
    assert agent.capture(request(rank=0)) is None
    assert agent.results() == []
    train(rank, steps=1)
    # THEN it refuses in words, once
    ((capture, result),) = agent.results()
    capture.close()
    assert (result.state, result.detail) == ("refused", "torch is not imported in this process")
    assert agent.results() == []
    assert agent.running == ()


def test_a_capture_that_is_not_answered_can_be_given_up(agent, monitor):
    only = monitor(0, world_size=1)
    train(only, steps=1)
    agent.poll()
    assert agent.capture(request(rank=0)) is None
    ((given_up, result),) = agent.abandon("w0-3-r0-x-1", "no answer")
    assert (given_up, result.state, result.detail) == (request(rank=0), "failed", "no answer")
    assert agent.abandon("w0-3-r0-x-1", "no answer") == []
    # AND once its rank answers after all, nobody takes that for a result
    train(only, steps=2)
    assert agent.results() == []


def test_steps_that_are_held_no_longer_come_from_the_logs(agent, monitor):
    # GIVEN a job that has gone on for many windows after some steps
    ranks = monitor(0), monitor(1)
    for _ in range(30):
        train(*ranks, steps=4)
        agent.poll()
    # WHEN these are asked for
    window = agent.steps(0, 10, 21)
    # THEN they are there, of all ranks, and just these
    assert (window.first_step, window.last_step, window.durations_NRS.shape[:2]) == (10, 21, (12, 2))
    assert np.isfinite(window.durations_NRS).all()
    # AND steps that nobody took are not
    assert agent.steps(0, 500, 510) is None
    assert agent.steps(7, 10, 21) is None


def test_a_capture_that_cannot_be_started_leaves_no_file_open(agent, monitor):
    # GIVEN a rank that has not answered a capture that was given up
    train(monitor(0, world_size=1), steps=1)
    agent.poll()
    assert agent.capture(request(rank=0)) is None
    agent.abandon("w0-3-r0-x-1", "no answer")
    before = len(list(Path("/proc/self/fd").iterdir()))
    # WHEN it is to be captured again and again
    for number in range(5):
        result = agent.capture(replace(request(rank=0), capture_id=f"again-{number}"))
        # THEN each is refused by its mailbox, and nothing of it stays open
        assert (result.state, "has not answered" in result.detail) == ("failed", True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
