"""The replay engine, against a simulator that is slow and obvious."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.whatif import graph as graphs
from sftriage.whatif.graph import graph_of, latest_begins, spans, timeline


def simulate(n_ops, dependencies, groups, joined, work):
    """When each operation begins and ends, by (operation, column): by recursion, without levels, arrays or blocks."""
    n_columns = len(work[0])
    group_of = {op: group for group, ops in enumerate(groups) for op in ops}

    @cache
    def begin(op, column):
        return max((end(earlier, column) for earlier, later in dependencies if later == op), default=0.0)

    @cache
    def end(op, column):
        if op not in group_of:
            return begin(op, column) + work[op][column]
        group = group_of[op]
        columns = range(n_columns) if joined[group] else [column]
        together = max(begin(peer, at) for peer in groups[group] for at in columns)
        return together + work[op][column]

    every = [(op, column) for op in range(n_ops) for column in range(n_columns)]
    return {one: begin(*one) for one in every}, {one: end(*one) for one in every}


@st.composite
def graphs_of_operations(draw):
    """Operations in some order, each waiting for earlier ones; some of them in groups that nothing leads in and out of.

    A group's members wait for operations of earlier groups alone, so that no two groups wait for each other.
    """
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    shuffled = draw(st.permutations(range(sum(sizes))))
    groups, joined, dependencies, before = [], [], [], []
    for size in sizes:
        members = [shuffled[len(before) + at] for at in range(size)]
        for op in members:
            earlier = draw(st.lists(st.sampled_from(before), max_size=3)) if before else []
            # One that is given twice is one.
            dependencies += [(one, op) for one in earlier]
        before += members
        if draw(st.booleans()):
            groups.append(members)
            joined.append(draw(st.booleans()))
    return len(before), dependencies, groups, joined


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4))


@given(graphs_of_operations(), SHAPES, st.integers(0, 2**32 - 1))
def test_every_operation_begins_and_ends_when_the_obvious_simulator_says(one, shape, seed):
    # GIVEN any operations, and what each takes in some steps and columns, also less than nothing (two clocks)
    n_ops, dependencies, groups, joined = one
    n_steps, n_columns = shape
    work_TNW = np.random.default_rng(seed).uniform(-0.1, 1.0, (n_ops, n_steps, n_columns))
    # WHEN all are replayed at once
    start_TNW, end_TNW = timeline(graph_of(n_ops, dependencies, groups, joined), work_TNW)
    # THEN each step is what it is alone, operation by operation
    for step in range(n_steps):
        begins, ends = simulate(n_ops, dependencies, groups, joined, work_TNW[:, step].tolist())
        for (op, column), end_s in ends.items():
            assert start_TNW[op, step, column] == pytest.approx(begins[op, column], abs=1e-12)
            assert end_TNW[op, step, column] == pytest.approx(end_s, abs=1e-12)


@given(graphs_of_operations(), SHAPES, st.integers(0, 2**32 - 1))
def test_a_transfer_by_itself_gives_back_what_was_replayed(one, shape, seed):
    # GIVEN a replay, and so begin and end of every operation
    n_ops, dependencies, groups, joined = one
    work_TNW = np.random.default_rng(seed).uniform(0.0, 1.0, (n_ops, *shape))
    graph = graph_of(n_ops, dependencies, groups, joined)
    start_TNW, end_TNW = timeline(graph, work_TNW)
    # WHEN each end is taken less the latest begin in its group, THEN that is what it took
    np.testing.assert_allclose(end_TNW - latest_begins(graph, start_TNW), work_TNW, atol=1e-12)


@given(graphs_of_operations(), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_steps_are_the_same_however_many_are_replayed_at_a_time(one, n_steps, seed):
    # GIVEN any operations in several steps
    n_ops, dependencies, groups, joined = one
    work_TNW = np.random.default_rng(seed).uniform(0.0, 1.0, (n_ops, n_steps, 2))
    graph = graph_of(n_ops, dependencies, groups, joined)
    final_T = np.ones(n_ops, dtype=np.bool_)

    def fill(some, work_TBW):
        work_TBW[:] = work_TNW[:, some]

    # WHEN replayed one by one, and all at once
    whole = spans(graph, fill, n_steps, 2, final_T)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BLOCK_BYTES", 1)
        single = spans(graph, fill, n_steps, 2, final_T)
    # THEN they begin and end at the same times, and nothing ends later than the step does
    for name in ("first_N", "last_N", "finish_N"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(single, name))
    np.testing.assert_array_equal(whole.finish_N, timeline(graph, work_TNW)[1].max(axis=(0, 2)))


def test_operations_that_wait_for_one_another_in_a_circle_are_refused_by_name():
    # GIVEN two transfers each of which one worker begins only after the other
    dependencies, groups = [(0, 1), (2, 3)], [[0, 3], [1, 2]]
    # WHEN they are put in order, THEN that is refused, and says of one of them what it is
    with pytest.raises(InputError, match="2 operations wait for one another"):
        graph_of(4, dependencies, groups, [False, False], lambda op: f"op {op}")
    with pytest.raises(InputError, match="op 0 among them"):
        graph_of(2, [(0, 1), (1, 0)], [], [], lambda op: f"op {op}")
