"""Captures over a hub that are cut short, whatever ends in the middle of them: each ends once, and says why."""

import os
import signal
import socket
from collections import Counter

import pytest

from sftriage.model.captures import ENDED
from sftriage.model.events import CaptureChanged
from sftriage.runs.journal import read_journal
from sftriage.trainer.layout import find_rings
from sftriage.windows.rings import Ring
from tests.integration.hubs import BesideHub
from tests.integration.killing import POLICY
from tests.integration.processes import DEADLINE_S, FORKED, SLOW_DATA, wait_until
from tests.integration.runs import captures, on_record

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
RANK = 1
BOUNDED = """
from sftriage.fleet import hub, shipping, transfers
hub.MAX_TRACE_BYTES, transfers.REPORT_S = shipping.SLACK_BYTES + 64_000, 0.0
"""
"""The hub has room for stacks, and for no operators; and how far they are is told, however quick they are."""


@pytest.fixture
def job(tmp_path, environment):
    found = BesideHub(tmp_path, environment, POLICY, BOUNDED)
    yield found
    found.close()


def states(job):
    return [one.result for one in read_journal(job.run / "decisions.jsonl") if isinstance(one, CaptureChanged)]


def ask(job, start, profiler, steps=3):
    options = ["--rank", RANK, "--profiler", profiler, "--steps", steps, "--reason", "a look", "--max-seconds", 60]
    return start("capture", "--run", job.run, *options)


def in_the_middle(job, start, steps):
    before = len(states(job))
    asked = ask(job, start, "stacks", steps)
    wait_until(lambda: "running" in [one.state for one in states(job)[before:]], 60.0)
    return asked


def train(job):
    launcher = job.start(*FORKED, 2, SLOW_DATA, job.release, 0.05)
    wait_until(lambda: on_record(job.run, "window"))
    return launcher


def test_a_capture_ends_once_and_says_why_whatever_ends_in_the_middle_of_it(job, start):
    launcher = train(job)
    # WHEN a small trace is asked for THEN it is stored
    small = ask(job, start, "stacks")
    assert small.wait(DEADLINE_S) == 0, small.stderr.read()
    # AND how far it was on its way was on record
    details = [one.detail.partition(":")[0] for one in states(job) if one.detail]
    assert details == ["sending from host-0", f"fetching from {socket.gethostname()}"]
    # AND no other agent carries out what is asked of this host
    other = job.start_agent()
    # WHEN one is asked for that the hub has no room for
    large = ask(job, start, "torch", 30)
    # THEN that is said, where it lies, and what would help
    assert large.wait(DEADLINE_S) == 1
    said = large.stderr.read()
    assert "exceed what the hub takes" in said
    assert f"it is stored on host-0 in {job.host}/captures/" in said
    assert "give the job a --store, or capture fewer steps" in said
    # WHEN the agent is killed in the middle of one, and started again
    cut = in_the_middle(job, start, 25)
    job.kill(job.agent)
    job.agent = job.start_agent()
    # THEN it is stored all the same
    assert cut.wait(DEADLINE_S) == 0, cut.stderr.read()
    # WHEN the rank is killed in the middle of one, and the job ends because of that
    cut = in_the_middle(job, start, 400)
    (ring,) = (path for path in find_rings(job.host / "rings") if path.name.startswith(f"rank-{RANK}."))
    with Ring(ring) as its:
        pid = its.info.pid
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(DEADLINE_S) == 1
    job.agent.terminate()
    # THEN it has failed, because of that, which who asked is told of, and the controller has seen the job's end
    assert cut.wait(DEADLINE_S) == 1
    assert "the trainer ended during the capture" in cut.stderr.read()
    assert job.controller.wait(DEADLINE_S) == 0, job.said
    # AND each that was asked for has ended once
    found = [one for one in states(job) if one.state in ENDED]
    assert [one.state for one in found] == ["stored", "failed", "stored", "failed"]
    assert set(Counter(one.capture_id for one in found).values()) == {1}
    assert len(captures(job.run)) == 2
    assert other.wait(DEADLINE_S) == 2
    assert f"{job.host} is already being watched" in job.said
