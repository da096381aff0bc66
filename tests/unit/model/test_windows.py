"""Records that check and work out what passes between rooms."""

import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftriage.model.captures import CaptureRequest
from sftriage.model.windows import COUNTERS, StageSchema, Window, accounting, accounts, axes_of

SIZES = {"R": 3, "S": 4, "G": 2, "C": 5}
SCHEMA = StageSchema.closed(("data", "forward", "backward"), ("forward", "backward"))
WITH_AXES = tuple(one.name for one in fields(Window) if axes_of(one.name))
OPTIONAL = tuple(name for name in WITH_AXES if name != "durations_NRS")


def window(names=OPTIONAL, n_steps=5, first_step=0):
    """A window in which every value of every array is another one, and tells where it is from."""

    def values(name):
        shape = tuple({"N": n_steps, **SIZES}[axis] for axis in axes_of(name))
        numbers = first_step * int(np.prod(shape[1:])) + np.arange(np.prod(shape), dtype=float).reshape(shape)
        if name in ("hosts", "cohorts", "kinds"):
            return tuple(f"{name}-{number:.0f}" for number in numbers)
        if name == "noted_NR":
            return numbers.astype("U16")
        return numbers % 2 == 1 if name == "capturing_N" else numbers

    return Window(SCHEMA, first_step, **{name: values(name) for name in ("durations_NRS", *names)}, on_device=True)


def assert_same(one, other):
    for name in (each.name for each in fields(Window)):
        mine, its = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == its.dtype, name
            np.testing.assert_array_equal(mine, its, err_msg=name)
        else:
            assert mine == its, name


def test_every_field_of_a_window_has_its_axes_in_its_name():
    # GIVEN the fields that have none: whoever adds one decides
    plain = {"schema", "first_step", "attempt", "on_device", "links"}
    assert plain == {one.name for one in fields(Window)} - set(WITH_AXES)
    assert all(axes_of(name)[0] == "N" or axes_of(name) == "R" for name in WITH_AXES)


@given(data=st.data(), names=st.sets(st.sampled_from(OPTIONAL)), n_steps=st.integers(1, 6), first=st.integers(0, 9))
def test_parts_of_a_window_joined_again_are_the_window(data, names, n_steps, first):
    # GIVEN a window with some of the arrays there are
    whole = window(names, n_steps, first)
    # WHEN it is cut anywhere
    cuts = sorted({0, n_steps, *data.draw(st.sets(st.integers(0, n_steps)))})
    parts = [whole.steps(first + a, first + b - 1) for a, b in pairwise(cuts)]
    # THEN of each part every array there is has its steps, and no array more is there
    for part in parts:
        n_part = part.last_step - part.first_step + 1
        for name in WITH_AXES:
            assert (getattr(part, name) is None) == (getattr(whole, name) is None)
            if getattr(part, name) is not None:
                sizes = {"N": n_part, **SIZES}
                assert np.shape(getattr(part, name)) == tuple(sizes[axis] for axis in axes_of(name))
    # AND together they are what was cut
    assert_same(Window.joined(parts), whole)


@given(names=st.sets(st.sampled_from(OPTIONAL)), ranks=st.permutations(range(3)), n=st.integers(1, 3))
def test_selecting_ranks_selects_them_in_every_array(names, ranks, n):
    whole, ranks = window(names), ranks[:n]
    some = whole.of_ranks(ranks)
    for name in WITH_AXES:
        values = getattr(whole, name)
        if values is None or "R" not in axes_of(name):
            assert getattr(some, name) is values
        else:
            wanted = np.take(np.asarray(values), ranks, axis=axes_of(name).index("R"))
            np.testing.assert_array_equal(np.asarray(getattr(some, name)), wanted)
    # AND it makes no difference whether steps or ranks are chosen first
    assert_same(some.steps(1, 3), whole.steps(1, 3).of_ranks(ranks))
    # AND all of them are the window
    assert_same(whole.of_ranks(range(3)), whole)


def test_an_array_of_only_some_windows_is_unknown_in_the_others():
    # GIVEN a window that has everything, and one after it that has durations alone
    whole = Window.joined((window(), window((), first_step=5)))
    # THEN what refines durations goes without, where a step without it would not be complete
    assert (whole.outside_NRG, whole.between_NR) == (None, None)
    # AND the rest is what says nothing
    assert set(whole.noted_NR[5:].ravel().tolist()) == {""}
    assert (whole.kinds[5:], whole.work_NR[5:].any(), whole.capturing_N[5:].any()) == (("",) * 5, False, False)
    for name in ("ready_NR", "device_NRS", "device_outside_NRG", "device_between_NR", "device_ready_NR"):
        values = getattr(whole, name)
        assert np.isfinite(values[:5]).all(), name
        assert (len(values), np.isnan(values[5:]).all()) == (10, True), name
    # AND ranks are where they were
    assert (whole.hosts, whole.cohorts, whole.on_device) == (window().hosts, window().cohorts, True)


@pytest.mark.parametrize(
    "after",
    [
        window((), first_step=6),
        window((), first_step=4),
        replace(window((), first_step=5), attempt=1),
        replace(window((), first_step=5), schema=StageSchema(("a", "b", "c", "d"))),
        window((), first_step=5).of_ranks((0, 1)),
    ],
    ids=("a gap", "an overlap", "another attempt", "other stages", "other ranks"),
)
def test_windows_that_are_not_consecutive_are_not_joined(after):
    with pytest.raises(ValueError, match="do not continue those up to 4"):
        Window.joined((window(()), after))


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (2, 5), (3, 2)])
def test_steps_that_a_window_does_not_have_are_refused(first, last):
    with pytest.raises(ValueError, match="are not in 0 to 4"):
        window(()).steps(first, last)


def test_a_trainer_that_imports_the_records_does_not_import_numpy():
    script = "import sys, sftriage.trainer, sftriage.model.windows; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def request(steps=5, period=0, phase=0):
    return CaptureRequest("c-1", 0, "torch", steps, 1, 60.0, 2**20, period_steps=period, phase=phase)


@given(steps=st.integers(1, 40), period=st.integers(2, 64), data=st.data(), step=st.integers(0, 10_000))
def test_a_capture_of_a_recurring_fault_has_it_and_waits_at_most_one_period(steps, period, data, step):
    wanted = request(steps, period, data.draw(st.integers(0, period - 1)))
    first = wanted.begins_at(step)
    recorded = range(first, first + steps)
    assert any(one % period == wanted.phase for one in recorded)
    assert step <= first < step + period


@pytest.mark.parametrize(("period", "phase"), [(0, 1), (5, 5), (5, -1), (-1, 0)])
def test_a_phase_is_within_its_period(period, phase):
    with pytest.raises(ValueError, match="phase"):
        request(period=period, phase=phase)


@pytest.mark.parametrize(
    ("sync", "split"),
    [((), None), (("forward",), "forward"), (("forward", "backward"), "backward"), (("data", "forward"), "data")],
)
def test_the_last_gradient_splits_backward_or_else_the_first_sync_stage(sync, split):
    assert StageSchema.closed(("data", "forward", "backward"), sync).split_sync == split


ACCOUNTED = {
    # What was counted over the peers' in steps that were late by 30 ms -> the code, whether it was counted, and
    # whether it needs no line of the program.
    "nothing": ({}, None),
    "its cgroup keeps it from running, where it stands in the queue": (
        {"throttled_s": 0.025, "queued_s": 0.027},
        ("cgroup_throttled", True, True),
    ),
    "its cgroup keeps it from running a little, and others do the rest": (
        {"throttled_s": 0.005, "queued_s": 0.027},
        ("descheduled", True, True),
    ),
    "a stopped rank": ({"stopped_s": 0.04, "queued_s": 0.002}, ("stopped", True, True)),
    "its pages are read from disk": ({"major_faults": 7.0, "disk_s": 0.028}, ("page_faults", True, True)),
    "it reads files": ({"major_faults": 0.2, "disk_s": 0.028, "read_bytes": 9e6}, ("disk", True, False)),
    "it reads files, and the kernel counts no waits for disks": ({"io_s": 0.028}, ("disk", False, False)),
    "its memory is reclaimed": ({"memory_s": 0.02}, ("memory_pressure", False, True)),
    "it touches fresh memory": ({"minor_faults": 16384.0, "system_s": 0.024}, ("page_faults", False, False)),
    "it is in the kernel, for something else": ({"minor_faults": 12.0, "system_s": 0.024}, None),
    "its segments are sent again": ({"retransmitted": 0.1}, ("network", False, False)),
    "its GPU runs at a lower clock": ({"gpu_s": 0.02}, ("gpu_throttled", False, False)),
    "some of everything, and not half of it": ({"queued_s": 0.014, "stopped_s": 0.014, "disk_s": 0.014}, None),
    "a counted cause comes before an inferred one": (
        {"queued_s": 0.016, "memory_s": 0.030},
        ("descheduled", True, True),
    ),
    "less than its peers": (dict.fromkeys(COUNTERS, -1.0), None),
}


@pytest.mark.parametrize(("over", "found"), ACCOUNTED.values(), ids=ACCOUNTED)
def test_the_cause_of_a_lateness(over, found):
    account = accounting(over, 0.030)
    assert (account and (account.code, account.counted, account.alone is not None)) == found
    # AND who is not late has nothing to account for
    assert accounting(over, 0.0) is None


AMOUNTS = st.dictionaries(st.sampled_from(COUNTERS), st.floats(-10.0, 10.0))


@example(over={}, late_s=5e-324, of="throttled_s")
@given(over=AMOUNTS, late_s=st.floats(0.0, 5.0), of=st.sampled_from(("throttled_s", "stopped_s")))
def test_a_cause_explains_at_least_half_and_more_of_it_never_explains_less(over, late_s, of):
    found = accounting(over, late_s)
    assert found is None or (found in list(accounts(over)) and found.took_s >= 0.5 * late_s)
    assert found is None or (found.took_s > 0.0 and late_s > 0.0)
    more = accounting({**over, of: max(0.0, over.get(of, 0.0)) + late_s}, late_s)
    assert (more is None) == (late_s == 0.0)
    assert more is None or more.counted
