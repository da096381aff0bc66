"""The replay engine, against a simulator that is slow and obvious, and dependencies from nothing but recorded times."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.stragglers import graph as graphs
from sftriage.stragglers.graph import graph_of, latest_begins, spans, timeline
from sftriage.stragglers.pipeline import arranged
from tests.unit.stragglers.planted import Job


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
def test_the_own_time_of_a_transfer_is_the_replayed_work(one, shape, seed):
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
    for name in ("whole_N", "finish_N"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(single, name))
    np.testing.assert_array_equal(whole.finish_N, timeline(graph, work_TNW)[1].max(axis=(0, 2)))


def test_a_circle_of_operations_is_refused_by_name():
    # GIVEN two transfers each of which one worker begins only after the other
    dependencies, groups = [(0, 1), (2, 3)], [[0, 3], [1, 2]]
    # WHEN they are put in order, THEN that is refused, and says of one of them what it is
    with pytest.raises(InputError, match="2 operations wait for one another"):
        graph_of(4, dependencies, groups, [False, False], lambda op: f"op {op}")
    with pytest.raises(InputError, match="such as op 0"):
        graph_of(2, [(0, 1), (1, 0)], [], [], lambda op: f"op {op}")


@st.composite
def jobs(draw):
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if stages == 1:
        chunks = 1
    # Interleaved schedules go round in as many microbatches as there are stages.
    microbatches = draw(st.integers(1, 6)) if chunks == 1 else stages * draw(st.integers(1, 3))
    return Job(
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        dps=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 3)),
        overlap=draw(st.booleans()),
        ragged=chunks > 1 and draw(st.booleans()),
        jitter=draw(st.sampled_from([0.001, 0.01, 0.3])),
        seed=draw(st.integers(0, 2**16)),
    )


@given(jobs())
def test_a_recorded_job_is_replayed_as_it_ran(job):
    # GIVEN the recording of a job of any shape, its rows in any order
    operations = arranged(job.rows(shuffled=True))
    # WHEN it is replayed as it was measured
    replayed = operations.replay(np.ones((1, 1), dtype=np.bool_))
    # THEN every step takes as long as it took, to the microsecond
    start, end = job.times()
    took_N = end.max(axis=(0, 2)) - start.min(axis=(0, 2))
    np.testing.assert_allclose(operations.measured_N, took_N, atol=1e-9)
    np.testing.assert_allclose(replayed.whole_N, took_N, atol=1e-6)
    # AND each operation took by itself what was planted
    own = np.sort(operations.work_TNW, axis=0)
    np.testing.assert_allclose(own, np.sort(job.work, axis=0), atol=1e-9)


def test_one_column_beside_one_ideal_column_equals_it_among_all_ideal_columns():
    # GIVEN a job of five data-parallel ranks that differ
    operations = arranged(Job(dps=5, jitter=0.4, seed=3).rows())
    # WHEN each is replayed with one other that stands for four
    alone_NW = operations.each_column_alone()
    # THEN the steps are those of a replay with all of them
    for column in range(5):
        kept_TW = np.arange(5)[None, :] == column
        np.testing.assert_allclose(alone_NW[:, column], operations.replay(kept_TW).finish_N, rtol=1e-14)


def arrays(rows):
    return {name: getattr(rows, name) for name in type(rows).__slots__ if name.endswith("_E")}


def some(rows, kept_E):
    return {name: values_E[kept_E] for name, values_E in arrays(rows).items()}


def without(first=None, **which):
    """The rows without some operations in all steps, or without the first few of them."""

    def change(job, rows):
        gone = job.ops(**which)[:first]
        return some(rows, ~np.isin(np.arange(len(rows.step_E)) // (job.steps * job.dps), gone))

    return change


def test_steps_without_all_operations_are_left_out_with_a_note():
    # GIVEN a recording in which one operation of the second of its steps is missing
    rows = Job(steps=4).rows()
    missing = np.flatnonzero(rows.step_E == 10)[5]
    # WHEN it is taken up, THEN that step alone is left out
    operations = arranged(type(rows)(rows.optypes, **some(rows, np.arange(len(rows.step_E)) != missing)))
    assert operations.steps == (7, 13, 16)
    assert operations.notes == ("1 of 4 steps left out: they lack operations",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _, rows: {"optypes": ["mine" if one == "gc" else one for one in rows.optypes]},
            "unknown optype mine; expected",
        ),
        (lambda _, rows: {"duration_E": -rows.duration_E}, "duration: negative"),
        (lambda _, rows: {"start_E": rows.start_E * np.nan}, "start_ts: not a finite number"),
        (lambda _, rows: {"seq_E": np.zeros_like(rows.seq_E)}, "duplicate operation"),
        (lambda _, rows: {"pp_E": rows.pp_E * 2}, "stage: 3 of 7 stages have no operations"),
        (lambda _, rows: {"optype_E": np.where(rows.optype_E == 1, 0, rows.optype_E)}, "duplicate operation"),
        (lambda _, rows: {"seq_E": rows.seq_E + np.int32(2**30)}, "too many operations in a step"),
        (lambda _, rows: {"step_E": np.arange(len(rows.step_E))}, "the steps have too few operations in common"),
        (lambda _, rows: {"chunk_E": rows.chunk_E * 0 - 1}, "forward-compute 0 of stage 0 has no model chunk"),
        (lambda _, rows: some(rows, slice(0)), "no operations"),
        (without(kind="backward-compute", stage=1), "stage 1 has no backward-compute"),
        (without(kind="forward-recv", stage=1), "stage 1 has no forward-recv"),
        (without(2, kind="forward-recv", stage=1), "stage 1 has 6 forward-recv for 8 forward-compute"),
        (without(kind="backward-recv", stage=0), "backward-send 0 of stage 1 has no match at the other end"),
    ],
)
def test_an_invalid_recording_is_refused_with_a_sentence(change, message):
    # GIVEN a recording with something wrong in it, or one that never has some operations
    job = Job(steps=2)
    rows = job.rows()
    wrong = type(rows)(**({"optypes": rows.optypes, **arrays(rows)} | change(job, rows)))
    # WHEN it is taken up, THEN it says what
    with pytest.raises(InputError, match=message):
        arranged(wrong)
