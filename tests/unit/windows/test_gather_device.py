"""Device times in windows: they come some steps after the host's, from some ranks or none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.windows import StageSchema, StepRecord
from sftriage.windows.gather import DEVICE_LAG_STEPS, Gatherer, Shape
from tests.unit.windows.steps import batch

SCHEMA = StageSchema.closed(("data", "backward"), ("backward",))
MS = 1_000_000
LONG = 3 * DEVICE_LAG_STEPS


def step(rank, number, factor=1):
    durations_ns = (factor * MS, factor * 10 * MS, factor * number * MS)
    return StepRecord(rank, number, 0, factor * 7 * MS, durations_ns, (factor * 2 * MS,), True, False)


def gatherer(window=4, ranks=2):
    return Gatherer(SCHEMA, ranks, Shape(window, window, 0))


def host(target, *numbers, ranks=(0, 1)):
    target.add(batch(*(step(rank, number) for number in numbers for rank in ranks)))


def device(target, *numbers, ranks=(0, 1)):
    target.add_device(batch(*(step(rank, number, factor=5) for number in numbers for rank in ranks)))


def test_device_times_stand_beside_the_hosts():
    # GIVEN both times of four steps
    target = gatherer()
    host(target, 0, 1, 2, 3)
    device(target, 0, 1, 2, 3)
    # WHEN the window is cut
    (window,) = target.ready()
    # THEN it has both, each complete
    np.testing.assert_allclose(window.device_NRS, 5 * window.durations_NRS)
    np.testing.assert_allclose(window.device_outside_NRG, 5 * window.outside_NRG)
    np.testing.assert_allclose(window.device_between_NR, 5 * window.between_NR)
    # AND one of steps without has none
    host(target, 4, 5, 6, 7)
    (window,) = target.ready(ended=True)
    assert (window.device_NRS, window.device_outside_NRG, window.device_between_NR) == (None, None, None)


def test_a_step_whose_device_time_is_not_known_is_missing_there_alone():
    target = gatherer()
    host(target, 0, 1, 2, 3)
    device(target, 0, 2, 3)
    device(target, 1, ranks=(0,))
    (window,) = target.ready()
    assert np.isfinite(window.durations_NRS).all()
    missing_NR = np.isnan(window.device_NRS).all(axis=2)
    assert np.argwhere(missing_NR).tolist() == [[1, 1]]


def test_a_step_takes_nothing_over_from_the_one_whose_row_it_has():
    # GIVEN a rank with device times in the job's first steps, and none later on
    target = gatherer()
    for number in range(16):
        host(target, number)
        device(target, number, ranks=(0, 1) if number < 4 else (0,))
    # WHEN the store has gone round
    windows = target.ready() + target.ready(ended=True)
    # THEN no old time stands for a new step
    assert [window.first_step for window in windows] == [0, 4, 8, 12]
    for window in windows[1:]:
        assert np.isfinite(window.device_NRS[:, 0]).all()
        assert np.isnan(window.device_NRS[:, 1]).all()


def test_what_came_before_the_job_was_whole_is_kept():
    # GIVEN a rank that shows both times before the other one has shown anything
    target = gatherer()
    host(target, 0, 1, ranks=(0,))
    device(target, 0, 1, ranks=(0,))
    # WHEN the other one comes
    host(target, 0, 1, ranks=(1,))
    host(target, 2, 3)
    device(target, 2, 3, ranks=(0,))
    # THEN nothing of it is lost
    (window,) = target.ready()
    assert np.isfinite(window.device_NRS[:, 0]).all()
    assert np.isnan(window.device_NRS[:, 1]).all()


def test_a_window_waits_for_device_times_that_are_on_their_way():
    # GIVEN a job whose device times lag three steps behind
    target = gatherer()
    host(target, 0, 1, 2, 3)
    device(target, 0)
    assert target.ready() == []
    # WHEN they come
    host(target, 4, 5, 6)
    device(target, 1, 2, 3)
    # THEN the window has them
    (window,) = target.ready()
    assert np.isfinite(window.device_NRS).all()


@pytest.mark.parametrize(("window", "waits"), [(4, 4), (LONG, DEVICE_LAG_STEPS)])
def test_a_window_does_not_wait_for_ever(window, waits):
    # GIVEN a job whose device times stop after the first step
    target = gatherer(window)
    host(target, 0)
    device(target, 0)
    host(target, *range(1, window + waits - 1))
    assert target.ready() == []
    # WHEN the host is so many steps further
    host(target, window + waits - 1)
    # THEN the window goes out with those it has
    (found,) = target.ready()
    assert np.isfinite(found.device_NRS[0]).all()
    assert np.isnan(found.device_NRS[1:]).all()


def test_what_comes_too_late_or_belongs_to_nobody_is_dropped():
    target = gatherer()
    host(target, *range(4))
    assert len(target.ready()) == 1
    # GIVEN device times of a window that went out, of a rank that there is not, and of a far future
    device(target, 1)
    device(target, 5, ranks=(9, -1))
    device(target, 10**6)
    # WHEN the next window is cut
    host(target, 4, 5, 6, 7)
    (window,) = target.ready()
    # THEN it has none of them
    assert (window.first_step, window.device_NRS) == (4, None)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_however_many_steps_come_at_once_windows_have_both_times(sizes, lag, stride):
    # GIVEN a job whose device times lag behind the host's, looked at now and then
    target = Gatherer(SCHEMA, 2, Shape(4, stride, 0))
    windows, first, given_to = [], 0, 0
    for size in sizes:
        until = max(given_to, first + size - lag)
        host_steps = [step(rank, number) for rank in (0, 1) for number in range(first, first + size)]
        device_steps = [step(rank, number, factor=5) for rank in (1, 0) for number in range(given_to, until)]
        # WHEN what has come is added together
        target.add_both(batch(*host_steps, schema=SCHEMA), batch(*device_steps, schema=SCHEMA))
        windows += target.ready()
        first, given_to = first + size, until
    # THEN every window that went out has all of both
    for window in windows:
        np.testing.assert_allclose(window.device_NRS, 5 * window.durations_NRS)
    assert [window.first_step for window in windows] == list(range(0, max(0, given_to - 3), stride))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 40)), max_size=150))
def test_whatever_comes_when_device_times_stand_at_their_own_step(events):
    # GIVEN host and device times of two ranks in any order, again and again
    target = gatherer()
    windows = []
    for of_device, rank, number in events:
        (device if of_device else host)(target, number, ranks=(rank,))
        windows += target.ready()
    windows += target.ready(ended=True)
    # THEN where there is a device time, it is that step's
    for window in windows:
        if window.device_NRS is not None:
            numbers_N1 = np.arange(window.first_step, window.last_step + 1)[:, None]
            there_NR = np.isfinite(window.device_NRS[:, :, 2])
            expected_NR = np.broadcast_to(numbers_N1 * 5e-3, there_NR.shape)
            np.testing.assert_allclose(window.device_NRS[:, :, 2][there_NR], expected_NR[there_NR])
