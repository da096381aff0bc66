from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.runs.axis import MAX_COLUMNS, Axis, Stretch, axis_of, columns_of, newest_steps
from tests.unit.recorded import row

stretches = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=20).map(
    lambda found: [Stretch(n, first, first + more) for n, (first, more) in enumerate(found)]
)


@given(stretches)
def test_every_step_is_in_one_column_and_later_ones_are_never_before(stretches):
    axis = Axis.of(stretches)
    # GIVEN any attempts of a job THEN there are no more columns than there is room for, of a power of two of steps
    assert axis.columns <= MAX_COLUMNS
    assert axis.column_steps & (axis.column_steps - 1) == 0
    # AND the attempts follow one another, each from its first step to its last one, without a gap
    expected = 0
    for one in axis.stretches:
        assert axis.column(one.attempt, one.first_step) == expected
        expected = axis.column(one.attempt, one.last_step) + 1
        assert axis.column(one.attempt, one.first_step - 1) is axis.column(one.attempt, one.last_step + 1) is None
    assert expected == axis.columns


def test_a_window_is_drawn_at_the_steps_that_no_window_before_it_had():
    # GIVEN windows of 50 steps, ten apart; a stall; and a job that starts again
    rows = [row(20), row(30), row(40, "suspect"), row(95, "stalled"), row(50), row(0, attempt=1), row(10, attempt=1)]
    # THEN the first one is drawn at all of its steps, the others at their newest, and the stall where it is
    assert newest_steps(rows) == [(20, 69), (70, 79), (80, 89), (95, 144), (90, 99), (0, 49), (50, 59)]


def test_steps_that_no_window_has_are_a_gap():
    # GIVEN a job that nobody watched from step 70 to 199
    rows = [row(20), row(200)]
    axis = axis_of(rows, 0, 10**9)
    columns = columns_of(rows, ("data", "forward", "backward", "other"), axis)
    # THEN the axis goes on over it, and nothing is drawn there
    assert (axis.columns, [(one.at, one.width) for one in columns]) == (230, [(0, 50), (180, 50)])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 40))
def test_however_wide_a_column_is_no_window_is_left_out(strides, max_columns):
    firsts = [20]
    for stride in strides:
        firsts.append(firsts[-1] + stride)
    rows = [row(first) for first in firsts]
    axis = axis_of(rows, 0, 10**9, max_columns)
    columns = columns_of(rows, ("data", "forward", "backward", "other"), axis)
    # THEN every window is in some column, each column in one place, and the last one ends where the axis does
    assert min(one.first_step for one in columns) == 20
    assert columns[-1].last_step == rows[-1].last_step
    assert all(one.at + one.width <= after.at for one, after in pairwise(columns))
    assert columns[-1].at + columns[-1].width == axis.columns
    assert sum(one.windows for one in columns) >= len(rows)


@pytest.mark.parametrize(
    ("first", "last", "found"), [(0, 10**9, (20, 129)), (85, 95, (85, 95)), (500, 600, None), (100, 10**9, (100, 129))]
)
def test_an_axis_is_of_the_steps_that_are_asked_for(first, last, found):
    axis = axis_of([row(20), row(80)], first, last)
    assert (axis and (axis.stretches[0].first_step, axis.stretches[0].last_step)) == found
