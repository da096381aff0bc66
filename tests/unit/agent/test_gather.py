"""Windows from the ranks' steps, in whatever order they come."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent import Gatherer, Shape
from sftriage.agent.gather import MAX_GAP_STEPS
from sftriage.records import StageSchema, StepRecord

SCHEMA = StageSchema.closed(("data", "backward"), ("backward",))
MS = 1_000_000


def step(rank: int, number: int, *, complete: bool = True, capturing: bool = False) -> StepRecord:
    """A step whose first duration tells which rank and step it is."""
    return StepRecord(
        rank=rank,
        step=number,
        start_ns=0,
        between_ns=7 * MS,
        durations_ns=(number * MS + rank, 10 * MS, 3 * MS),
        outside_ns=(2 * MS,),
        complete=complete,
        capturing=capturing,
    )


def gatherer(ranks: int = 2, window: int = 4, stride: int = 2, warmup: int = 0) -> Gatherer:
    return Gatherer(SCHEMA, ranks, Shape(window, stride, warmup))


def fed(target: Gatherer, steps: list[StepRecord]) -> list[tuple[int, int]]:
    """Give the steps one by one; first and last step of every window that came out."""
    found = []
    for record in steps:
        target.add(record)
        found += [(window.first_step, window.last_step) for window in target.ready()]
    return found


def test_windows_come_at_every_stride_once_every_rank_has_passed_their_end():
    # GIVEN two ranks, windows of 4 steps, one every 2
    # WHEN both have recorded 8 steps
    # THEN the windows 0-3, 2-5 and 4-7 came out, each once
    assert fed(gatherer(), [step(rank, n) for n in range(8) for rank in (0, 1)]) == [(0, 3), (2, 5), (4, 7)]


def test_a_window_waits_for_the_slower_rank():
    target = gatherer()
    # GIVEN rank 0 is five steps in and rank 1 only three
    # THEN nothing is ready
    assert fed(target, [step(0, n) for n in range(5)] + [step(1, n) for n in range(3)]) == []
    # WHEN rank 1 arrives at the window's last step
    # THEN it is
    assert fed(target, [step(1, 3)]) == [(0, 3)]


def test_warm_up_steps_are_in_no_window():
    assert fed(gatherer(warmup=3), [step(rank, n) for n in range(7) for rank in (0, 1)]) == [(3, 6)]


def test_a_job_resumed_at_a_later_step_starts_its_windows_there():
    # GIVEN a job that goes on at step 5000
    assert fed(gatherer(), [step(rank, n) for n in range(5000, 5004) for rank in (0, 1)]) == [(5000, 5003)]


def test_values_units_and_refinements_arrive_where_they_belong():
    target = gatherer(window=2, stride=2)
    for n in range(2):
        for rank in (1, 0):
            target.add(step(rank, n, capturing=(n, rank) == (1, 1)))
    (window,) = target.ready()
    assert window.durations_NRS.shape == (2, 2, 3)
    np.testing.assert_allclose(window.durations_NRS[1, 1], [(MS + 1) * 1e-9, 0.010, 0.003])
    np.testing.assert_allclose(window.outside_NRG, np.full((2, 2, 1), 0.002))
    np.testing.assert_allclose(window.between_NR, np.full((2, 2), 0.007))
    assert window.capturing_N.tolist() == [False, True]


def test_a_rank_that_never_records_does_not_hold_the_others_up_and_is_never_filled_in():
    # GIVEN rank 1 records nothing
    # WHEN rank 0 is a whole window past the first one's end
    target = gatherer()
    windows = []
    for n in range(8):
        target.add(step(0, n))
        windows += target.ready()
    # THEN the first window goes out with rank 1 missing
    assert [window.first_step for window in windows] == [0]
    assert np.isnan(windows[0].durations_NRS[:, 1]).all()
    assert np.isfinite(windows[0].durations_NRS[:, 0]).all()


def test_at_the_end_of_the_job_what_is_missing_stays_missing():
    target = gatherer()
    fed(target, [step(0, n) for n in range(6)] + [step(1, n) for n in range(5)])
    # WHEN the job ends with rank 1 a step short of the second window's end
    (window,) = target.ready(ended=True)
    assert (window.first_step, int(np.isnan(window.durations_NRS[:, :, 0]).sum())) == (2, 1)


def test_a_step_left_half_way_counts_as_missing():
    target = gatherer(ranks=1, window=2, stride=2)
    target.add(step(0, 0))
    target.add(step(0, 1, complete=False))
    (window,) = target.ready()
    assert np.isnan(window.durations_NRS[1, 0]).all()


def test_a_jump_in_the_numbering_starts_over_instead_of_filling_memory():
    # GIVEN a job at step 3 whose numbering jumps by more than any gap
    target = gatherer()
    fed(target, [step(rank, n) for n in range(4) for rank in (0, 1)])
    far = MAX_GAP_STEPS * 1000
    # THEN the windows go on from there, and none of what nobody recorded comes out
    assert fed(target, [step(rank, far + n) for n in range(4) for rank in (0, 1)]) == [(far, far + 3)]


def test_a_shorter_gap_that_nobody_recorded_makes_no_windows():
    target = gatherer()
    steps = [*range(4), *range(100, 108)]
    found = fed(target, [step(rank, n) for n in steps for rank in (0, 1)])
    assert found[0] == (0, 3)
    assert all(last >= 100 for first, last in found[1:] if first > 3)


def test_ranks_beyond_the_world_size_are_ignored():
    assert fed(gatherer(ranks=1), [step(rank, n) for n in range(4) for rank in (0, 9)]) == [(0, 3)]


@given(st.permutations([(rank, n) for n in range(1, 6) for rank in range(3)]))
def test_the_order_in_which_steps_come_changes_no_number(order):
    def gathered(steps: list[tuple[int, int]]) -> np.ndarray:
        target = gatherer(ranks=3, window=6, stride=6)
        for rank, n in [(0, 0), (1, 0), (2, 0), *steps]:
            target.add(step(rank, n))
        (window,) = target.ready()
        return window.durations_NRS

    # GIVEN every rank's first step, and then the others in any order: rings are read in turns
    # THEN the window is the one that steps in order make
    np.testing.assert_array_equal(gathered(order), gathered(sorted(order, key=lambda step: step[1])))
