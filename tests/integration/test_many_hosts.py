"""A real job under torchrun on two hosts, with one line on each: who is slow is named, captured there, fetched here."""

import os
import subprocess

import numpy as np
import pytest

from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Shape
from tests.integration.namespaces import two_hosts
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, SLOW_DATA, wait_until
from tests.integration.runs import captures, named, verdicts

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
JOB = f"job/{os.getpid()}"
SLOW = 3
POLICY = policy(
    'name: slow-input, match: {scope: [rank], stage: [data], gain: ">= 20% and >= 10ms"}, '
    "capture: {profiler: torch, steps: 2, warmup_steps: 1, max_seconds: 20}"
)


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


def test_a_slow_rank_of_another_host_is_named_and_its_trace_is_fetched_and_a_host_that_is_cut_off_comes_back(
    sftriage, hosts, tmp_path, environment, start
):
    # GIVEN a job on two hosts, whose rank 3, on the second one, becomes slow in data
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    script, run = (SLOW_DATA, tmp_path / "release", 0.05), tmp_path / "run"
    both = hosts.torchrun(tmp_path, environment, ("--job-id", JOB), *script, ranks=2, port=29511)
    wait_until(lambda: (run / "captures").is_dir() and captures(run))
    # THEN while it goes on, it can be watched from the first host
    live = sftriage("watch", "--run", run, "--once", "--json").json
    assert live["job"] == "slow_data"
    # AND the rank is named, and its stage, and nobody else, for as much as the rule asks for (less than that a busy
    # machine may take from any rank of a job with steps of 10 ms, and from this one in its other stages as well)
    judged = verdicts(run)
    found = [named(one) for one in judged if one["suspects"] and one["suspects"][0]["gain_s"] >= 0.01]
    assert {rank for rank, _ in filter(None, found)} == {SLOW}
    assert (SLOW, "data") in found
    # AND all windows have the steps of all ranks, though the hosts ship at moments of their own
    assert {one["numbers"]["coverage"] for one in judged} == {1.0}
    # AND it was captured on its host
    (capture,) = captures(run)
    assert (capture.capture.rank, capture.capture.host, capture.job) == (SLOW, "node-b", "slow_data")
    # AND its trace is here, with every byte, though nothing is shared
    got = start("traces", "get", capture.capture_id, "--run", run, "--out", tmp_path / "got")
    assert got.wait(60) == 0, got.stderr.read()
    (there,) = (tmp_path / "host-1").glob("sftriage-runs/*.hosts/*/captures/*/trace.json.gz")
    assert (tmp_path / "got").read_bytes() == there.read_bytes()

    # WHEN the link is cut for a while (the ranks wait for each other), and mended
    def windows():
        # (the time without a link is a stall, which has no coverage)
        return [one for one in verdicts(run) if one["label"] != "stalled"]

    before = len(windows())
    hosts.cut(whole=False)
    subprocess.run(["sleep", "15"], check=True)
    hosts.cut(whole=True)
    # THEN the job goes on
    wait_until(lambda: len(windows()) > before + 5)
    (tmp_path / "release").touch()
    codes = [one.wait(DEADLINE_S) for one in both]
    assert codes == [0, 0], "\n".join((tmp_path / f"said-{number}").read_text() for number in range(2))
    # AND windows are whole again, after one at most that did not wait for a host that nothing was heard of
    judged = windows()
    lacking = [one["first_step"] for one in judged if one["numbers"]["coverage"] < 1.0]
    assert max(lacking, default=0) - min(lacking, default=0) < 30
    assert {one["numbers"]["coverage"] for one in judged[-5:]} == {1.0}
    # AND what that host had to say comes after all: no step of any rank is missing from the record
    last_step = judged[-1]["last_step"]
    (window,) = load_recording(run).windows(Shape(last_step, last_step, 0))
    assert np.isfinite(window.durations_NRS).all()
    # AND there was one capture, with the fault in it
    (capture,) = captures(run)
    assert capture.reproduced.answer == "yes"
    # AND nothing of the job is left: no hub, no rings
    assert not list((tmp_path / "run").parent.glob("*.nats"))
    assert not [left for number in range(2) for left in hosts.memory(number).glob("sftriage-*/*")]
