"""An agent, the controller or the hub is killed while a job goes on: no step is lost or twice."""

import os
import signal
from collections import Counter
from itertools import groupby
from operator import attrgetter

import numpy as np
import pytest

from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Shape
from tests.integration.hubs import SHAPE, SLOW, WORLD_SIZE, Hosts
from tests.integration.processes import wait_until
from tests.integration.runs import named, on_record

pytest.importorskip("nats", reason="many hosts want the extra `nats`")


@pytest.fixture
def hosts(tmp_path, environment):
    found = Hosts(tmp_path, environment)
    yield found
    found.close()


def test_nothing_is_lost_and_nothing_counts_twice_whatever_is_killed(hosts):
    # GIVEN a job on two hosts, of which windows are judged
    hosts.judged(40)
    # WHEN the controller is killed while it fetches a capture, and another one goes on with its run
    fetched = hosts.run / "spool" / "fetch-half" / "trace.json"
    fetched.parent.mkdir()
    fetched.write_text("{")
    hosts.kill(hosts.controller)
    hosts.controller = hosts.start_controller("--run", hosts.run)
    hosts.judged(40)
    # THEN that one says so, and has removed what was half fetched
    assert hosts.said.count("sftriage: took over the job") == 1
    assert not fetched.parent.exists()
    # WHEN an agent is killed, and started again
    hosts.kill(hosts.agents[1])
    hosts.agents[1] = hosts.start_agent(1)
    hosts.judged(40)
    # AND the hub is killed, and started again
    os.kill(hosts.hub.pid, signal.SIGKILL)
    hosts.hub.close()
    hosts.hub = hosts.start_hub()
    hosts.judged(40)
    steps = hosts.end()
    # THEN every step of every rank is on record
    recording = load_recording(hosts.run)
    (window,) = recording.windows(Shape(steps, steps, 0))
    assert window.durations_NRS.shape[:2] == (steps, WORLD_SIZE)
    assert not np.isnan(window.durations_NRS).any()
    # AND every window that was judged has all of them, and was judged once
    windows = hosts.windows
    assert {one["numbers"]["coverage"] for one in windows} == {1.0}
    assert {one["attempt"] for one in windows} == {0}
    assert set(Counter(one["first_step"] for one in windows).values()) == {1}
    # AND no step was left out
    judged = {step for one in windows for step in range(one["first_step"], one["last_step"] + 1)}
    assert judged == set(range(SHAPE.warmup_steps, max(judged) + 1))
    assert max(judged) >= steps - SHAPE.stride_steps
    # AND the slow rank is the one that is named, and what was asked for because of it has ended once
    # (when a busy machine lets the trainers begin their steps is beyond this test, so that another stage may look slow)
    found = [suspect for one in windows if (suspect := named(one)) is not None]
    assert {rank for rank, _ in found} == {SLOW}
    assert (SLOW, "data") in found
    asked = [one["capture_id"] for e in on_record(hosts.run, "window") for one in e["decision"]["requests"]]
    ended = [one["result"] for one in on_record(hosts.run, "capture")]
    final = [one for one in ended if one["state"] in ("stored", "failed", "refused", "expired")]
    assert Counter(one["capture_id"] for one in final) == Counter(asked)
    assert len(asked) == 1


def test_a_job_that_starts_again_with_another_host_is_another_generation(hosts):
    # GIVEN a job on two hosts
    hosts.judged(40)
    # WHEN it starts again, from its first step on, and one of the hosts is another one
    hosts.agents[1].terminate()
    hosts.agents[1] = hosts.start_agent(2)
    hosts.train_again(0, 2)
    wait_until(lambda: [one for one in hosts.windows if one["attempt"] == 1], 60.0)
    hosts.judged(40)
    steps = hosts.end()
    # THEN the windows from then on are of another generation, though each host counts starts of its own
    again = [one for one in hosts.windows if one["attempt"] == 1]
    assert {one["attempt"] for one in hosts.windows} == {0, 1}
    assert [one["first_step"] for one in again] == list(range(SHAPE.warmup_steps, steps - 39, SHAPE.stride_steps))
    # AND they hold the steps of all of its ranks, and of nobody else
    assert {one["numbers"]["coverage"] for one in again} == {1.0}
    window = max(load_recording(hosts.run).windows(Shape(steps, steps, 0)), key=lambda one: one.attempt)
    assert (window.attempt, window.hosts) == (1, ("host-0", "host-0", "host-2", "host-2"))
    assert not np.isnan(window.durations_NRS).any()


def test_a_job_that_starts_again_while_nobody_looks_is_known_for_that(hosts):
    # GIVEN a job on two hosts
    hosts.judged(40)
    # WHEN the controller is killed, and an agent, and meanwhile the job starts again twice, the second time each host
    # with the ranks of the other one
    for one in (hosts.controller, hosts.agents[1]):
        hosts.kill(one)
    for numbers in ((0, 1), (1, 0)):
        hosts.train_again(*numbers)
        hosts.kept(0, "rank-0.1" if numbers == (0, 1) else "rank-2.*")
    hosts.agents[1] = hosts.start_agent(1)
    hosts.controller = hosts.start_controller("--run", hosts.run)
    wait_until(lambda: [one for one in hosts.windows if one["attempt"] == 2], 60.0)
    hosts.judged(40)
    steps = hosts.end()
    # THEN its steps are on record as of three generations, with the ranks on the hosts where they were
    found = {attempt: list(some) for attempt, some in groupby(whole(hosts.run), attrgetter("attempt"))}
    assert [{one.hosts for one in some} for some in found.values()] == [
        {("host-0", "host-0", "host-1", "host-1")},
        {("host-0", "host-0", "host-1", "host-1")},
        {("host-1", "host-1", "host-0", "host-0")},
    ]
    assert len(found[2]) == steps
    assert all(np.isfinite(one.durations_NRS).all() for one in found[2])
    # AND every window of the newest was judged, once, and of all ranks
    again = [one for one in hosts.windows if one["attempt"] == 2]
    assert [one["first_step"] for one in again] == list(range(SHAPE.warmup_steps, steps - 39, SHAPE.stride_steps))
    assert {one["numbers"]["coverage"] for one in again} == {1.0}


def whole(run):
    return list(load_recording(run).windows(Shape(1, 1, 0)))
