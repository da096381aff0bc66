"""Device time from a trainer to its verdict: real processes on a queue that takes real time, and on a real GPU."""

import json
import sys

import pytest

from tests import needs
from tests.integration.policies import policy
from tests.integration.processes import JOBS
from tests.integration.runs import named, verdicts

JOB = JOBS / "on_device.py"
STEPS, SLOW_RANK = 200, 1
POLICY = policy("name: anybody, match: {scope: [rank]}", limits="")


@pytest.fixture(params=["queue", pytest.param("cuda", marks=needs.gpu)])
def device(request):
    return request.param


def followed(start, sftriage, environment, tmp_path, device, *, device_time, stage="forward"):
    """Run the job; the verdicts taken while it ran, and those on what is kept of it."""
    (tmp_path / "watch.yaml").write_text(POLICY, encoding="utf-8")
    command = [sys.executable, JOB, device, 3, STEPS, SLOW_RANK, stage]
    out = tmp_path / "run"
    run = start(
        *("run", "--policy", tmp_path / "watch.yaml", "--out", out, "--", *command),
        env={**environment, "SFTRIAGE_DEVICE_TIME": "1" if device_time else "0"},
    )
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    offline = sftriage("analyze", out, "--json").out.splitlines()
    return verdicts(out), [json.loads(line) for line in offline]


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_slow_kernel_is_named_on_the_devices_clock(start, sftriage, environment, tmp_path, device, stage):
    # GIVEN ranks with device time, whose hosts only launch, and a model that is watched; one rank's kernels become
    # slow, also inside the stage in which all wait for each other
    online, offline = followed(start, sftriage, environment, tmp_path, device, device_time=True, stage=stage)
    # THEN that rank and stage are named, while it runs and afterwards, and by which clock
    for judged in (online, offline):
        assert (SLOW_RANK, stage) in map(named, judged)
        assert {one["clock"] for one in judged} == {"device"}
    at = next(one for one in online if named(one) == (SLOW_RANK, stage))
    told = sftriage("explain", at["last_step"], "--run", tmp_path / "run").out
    assert "by the devices' clock" in told


def test_without_device_time_it_is_held_and_what_would_tell_is_said(start, sftriage, environment, tmp_path, device):
    # GIVEN the same job on the host's clock alone
    online, offline = followed(start, sftriage, environment, tmp_path, device, device_time=False)
    # THEN no rank is named for what the hosts cannot see, and the reason is the clock
    for judged in (online, offline):
        assert "forward" not in {found[1] for one in judged if (found := named(one))}
        assert ["clock_limited"] in [one["reasons"] for one in judged]
        assert {one["clock"] for one in judged} == {"host"}
    at = next(one for one in online if one["reasons"] == ["clock_limited"])
    steps = f"{at['first_step']}-{at['last_step']}"
    told = sftriage("explain", steps, "--run", tmp_path / "run").out
    assert "SFTRIAGE_DEVICE_TIME=1" in told
