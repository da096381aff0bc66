"""Every step counts once, and is accounted with the step before it, however windows are cut."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.frontier.accounting import anchored, by_step
from sftriage.model.windows import StageSchema, Window
from sftriage.sinks.metrics import StepTally

from ..frontier.strategies import windows

SCHEMA = StageSchema(("data", "backward", "optimizer", "other"), ("backward",))


def part(window: Window, start: int, stop: int) -> Window:
    """Some steps of a window."""
    return window.steps(window.first_step + start, window.first_step + stop - 1)


@settings(deadline=None)
@given(run=windows(), window_steps=st.integers(1, 6), stride=st.integers(1, 6))
def test_over_overlapping_windows_the_advances_sum_to_the_runs_exposed_time(run, window_steps, stride):
    # GIVEN a run of any steps, cut into windows that overlap or touch
    stride, n_steps = min(stride, window_steps), len(run.durations_NRS)
    starts = range(0, n_steps - window_steps + 1, stride)
    tally = StepTally()
    # WHEN they are counted in order
    counted = [tally.take(part(run, start, start + window_steps)) for start in starts]
    # THEN every step was new exactly once
    covered = starts[-1] + window_steps if starts else 0
    assert sum(len(complete_N) for _, complete_N in counted) == covered
    assert tally.last_step(run.attempt) == (run.first_step + covered - 1 if starts else None)
    # AND, stage by stage, what was counted is what one window of all of them says
    if not covered:
        return
    whole = anchored(replace(part(run, 0, covered), ready_NR=None))
    advances_S = np.sum([advances_NS.sum(axis=0) for advances_NS, _ in counted], axis=0)
    np.testing.assert_allclose(advances_S, whole.advances_S, rtol=1e-9, atol=1e-9 * whole.exposed_s)
    assert advances_S.sum() == pytest.approx(whole.exposed_s, rel=1e-9)
    assert sum(complete_N.sum() for _, complete_N in counted) == whole.n_steps


@pytest.mark.parametrize("stride", [1, 3, 10])
@pytest.mark.parametrize("gone", [0.0, 0.02])
def test_a_step_that_opens_a_window_is_accounted_with_the_one_before_it(stride, gone):
    # GIVEN ranks that are late after the sync of one step, and so at the sync of the next
    rng = np.random.default_rng(stride)
    times_NRS = rng.gamma(1.0, 0.01, (100, 4, 4))
    between_NR = rng.gamma(1.0, 0.01, (100, 4))
    times_NRS[rng.random((100, 4)) < gone] = np.nan
    run = Window(SCHEMA, 7, times_NRS, between_NR=between_NR)
    tally = StepTally()
    # WHEN windows of 10 steps overlap or touch
    counted = [tally.take(part(run, start, start + 10)) for start in range(0, 91, stride)]
    # THEN nothing is accounted as if it had begun at a window's edge
    whole = anchored(run)
    advances_S = np.sum([advances_NS.sum(axis=0) for advances_NS, _ in counted], axis=0)
    np.testing.assert_allclose(advances_S, whole.advances_S, rtol=1e-9)


@settings(deadline=None)
@given(window=windows())
def test_the_steps_of_a_window_sum_to_the_window(window):
    advances_NS, complete_N = by_step(window)
    whole = anchored(window)
    np.testing.assert_allclose(advances_NS.sum(axis=0), whole.advances_S, rtol=1e-9, atol=1e-9 * whole.exposed_s)
    assert complete_N.sum() == whole.n_steps
    # AND a step that is not complete has no time
    assert not advances_NS[~complete_N].any()
    assert (advances_NS >= 0.0).all()


def steps(first_step: int, n_steps: int, attempt: int = 0) -> Window:
    return Window(SCHEMA, first_step, np.full((n_steps, 2, 4), 0.1), attempt=attempt)


def test_a_window_that_was_counted_brings_nothing_new():
    tally = StepTally()
    assert tally.take(steps(10, 4)) is not None
    assert tally.take(steps(10, 4)) is None
    assert tally.take(steps(8, 3)) is None
    assert tally.last_step(0) == 13


def test_after_a_gap_the_count_goes_on_with_what_is_there():
    tally = StepTally()
    tally.take(steps(0, 4))
    advances_NS, _ = tally.take(steps(100, 4))
    assert (tally.last_step(0), len(advances_NS)) == (103, 4)


def test_another_attempt_counts_its_steps_again_and_the_old_one_no_more():
    tally = StepTally()
    tally.take(steps(0, 4))
    advances_NS, _ = tally.take(steps(0, 4, attempt=1))
    assert (tally.last_step(1), len(advances_NS)) == (3, 4)
    assert tally.take(steps(4, 4, attempt=0)) is None
    assert (tally.last_step(0), tally.last_step(1)) == (None, 3)


def test_times_are_on_the_clock_that_a_window_was_judged_on():
    # GIVEN windows whose device takes twice as long as the host says
    tally, host_s, device_s = StepTally(), 0.0, 0.0
    for number, clock in enumerate(("host", "device", "device", "host")):
        some = steps(4 * number, 4)
        some = replace(some, device_NRS=2 * some.durations_NRS)
        advances_NS, complete_N = tally.take(some, clock)
        assert complete_N.all()
        took_s = advances_NS.sum()
        host_s, device_s = (host_s + took_s, device_s) if clock == "host" else (host_s, device_s + took_s)
    # THEN each counts as it was judged
    assert host_s == pytest.approx(anchored(steps(0, 4)).exposed_s * 2)
    assert device_s == pytest.approx(2 * anchored(steps(0, 8)).exposed_s)
