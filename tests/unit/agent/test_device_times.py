"""Device times from rings to windows and back from disk: rings as the recorder writes them, a GPU that is a clock."""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from sftriage.runs.recordings import load_recording
from sftriage.trainer.device import IN_FLIGHT
from sftriage.windows.gather import Shape
from sftriage.windows.logs import LogReader
from tests.scenario import Windows
from tests.unit.conftest import run_in
from tests.unit.trainer.fake_cuda import FakeDevice

STAGES, SYNC = ("data", "forward", "backward"), ("backward",)
FORWARD = STAGES.index("forward")
WINDOW = 8
SHAPE = Shape(window_steps=WINDOW, stride_steps=WINDOW, warmup_steps=0)


@pytest.fixture
def device(monkeypatch):
    """One GPU for all ranks: what matters here is which times come when."""
    made = FakeDevice()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=made))
    return made


@pytest.fixture
def rings(places):
    return places["rings"]


@pytest.fixture
def run(tmp_path, rings):
    return run_in(tmp_path / "run", rings=str(rings))


@pytest.fixture
def agent(rings, run):
    made = Windows(rings, run.steps, SHAPE)
    yield made
    made.close()


@pytest.fixture
def monitor(monitor):
    return partial(monitor, stages=STAGES, sync=SYNC, slots=256, device_time=True)


def train(device, *monitors, steps, caught_up=True):
    for _ in range(steps):
        for one in monitors:
            with one.step(), one.stage("forward"):
                device.launch(1000)
        if caught_up:
            device.catches_up()


def known(window):
    """Of each step and rank, whether the device time is there."""
    return np.isfinite(window.device_NRS).all(axis=2)


def test_device_times_come_with_the_windows_and_are_kept(agent, device, monitor, run):
    ranks = monitor(0), monitor(1)
    # WHEN they have trained for a window, and two steps more that show the last one's times
    train(device, *ranks, steps=WINDOW + 2)
    (window,) = agent.poll()
    # THEN the window has both times
    assert window.on_device
    assert known(window).all()
    assert (window.device_NRS[:, :, FORWARD] >= 1e-6).all()
    # AND what has come is on disk, in slots like the host's
    log = LogReader(run.steps / "rank-1.0.device-steps", kind="device-steps")
    assert log.read().step_B[:WINDOW].tolist() == list(range(WINDOW))


def test_a_job_on_cpus_opens_nothing_and_is_what_it_was(agent, monitor, monkeypatch, run):
    # GIVEN a job whose torch has not initialised CUDA, though device time is requested
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    ranks = monitor(0), monitor(1)
    for _ in range(WINDOW):
        for one in ranks:
            with one.step():
                pass
    (window,) = agent.poll()
    assert (window.on_device, window.device_NRS) == (False, None)
    assert not list(run.steps.glob("*.device-steps"))


@pytest.mark.parametrize("observed", [True, False], ids=["with an agent", "without one"])
def test_a_rank_on_a_gpu_without_device_time_is_known_to_be_on_one(agent, device, monitor, run, observed):
    # GIVEN ranks on a GPU that record the host's times alone
    train(device, monitor(0, device_time=False), monitor(1, device_time=False), steps=WINDOW)
    windows = agent.poll() if observed else []
    agent.close()
    # THEN the window says what its times are worth, and so does what is kept of the run
    windows += load_recording(run.path).windows(SHAPE)
    assert [(one.on_device, one.device_NRS) for one in windows] == [(True, None)] * (1 + observed)


def test_windows_stop_waiting_for_device_times_that_have_ended(agent, device, monitor):
    # GIVEN ranks whose CUDA fails in the middle of a window
    ranks = monitor(0), monitor(1)
    train(device, *ranks, steps=4)
    assert agent.poll() == []
    device.broken = True
    train(device, *ranks, steps=1)
    agent.poll()
    # WHEN the hosts are through with the window
    train(device, *ranks, steps=WINDOW - 5)
    windows = agent.poll() + agent.poll()
    assert [window.first_step for window in windows] == [0]
    assert known(windows[0])[:3].all()


def test_a_host_far_ahead_of_its_gpu_misses_steps_and_none_is_filled_in(agent, device, monitor):
    ranks = monitor(0), monitor(1)
    train(device, *ranks, steps=1)
    # GIVEN hosts that run further ahead than there are events for, again and again
    for _ in range(3):
        train(device, *ranks, steps=4 * IN_FLIGHT, caught_up=False)
        device.catches_up()
    train(device, *ranks, steps=IN_FLIGHT)
    # THEN what is missing is missing on the device's clock alone
    windows = agent.poll(ended=True)
    there_NR = np.concatenate([known(window) for window in windows if window.device_NRS is not None])
    assert 0.2 < there_NR.mean() < 0.9
    assert all(np.isfinite(window.durations_NRS[: WINDOW // 2]).all() for window in windows)


def test_a_run_read_from_disk_has_the_same_windows(agent, device, monitor, run):
    # GIVEN a run that has been followed to its end
    ranks = monitor(0), monitor(1)
    observed = []
    for _ in range(4):
        train(device, *ranks, steps=WINDOW)
        observed += agent.poll()
    for one in ranks:
        one.close()
    observed += agent.poll(ended=True)
    agent.close()
    read = list(load_recording(run.path).windows(SHAPE))
    assert [window.first_step for window in read] == [window.first_step for window in observed]
    for one, other in zip(observed, read, strict=True):
        for name in ("durations_NRS", "device_NRS", "device_outside_NRG", "device_between_NR"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.on_device
        assert other.on_device


def test_what_an_agent_that_was_killed_had_not_taken_is_taken_from_the_rings_once(agent, device, monitor, rings, run):
    # GIVEN an agent that ended in the middle of a window
    ranks = monitor(0), monitor(1)
    train(device, *ranks, steps=WINDOW // 2)
    agent.poll()
    agent.close()
    train(device, *ranks, steps=WINDOW)
    # WHEN the run is read from its logs and its rings THEN nothing is missing
    window, *_ = load_recording(run.path).windows(SHAPE)
    assert known(window).all()
    # AND an agent that takes its place has everything, and keeps it once
    other = Windows(rings, run.steps, SHAPE)
    window, *_ = other.poll()
    other.close()
    assert known(window).all()
    log = LogReader(run.steps / "rank-0.0.device-steps", kind="device-steps")
    steps = log.read().step_B.tolist()
    assert steps == list(range(len(steps)))
    assert len(steps) >= WINDOW
