"""The dependencies of a hybrid-parallel step, from nothing but its recorded times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.whatif.pipeline import arranged
from tests.unit.whatif.planted import Job


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


def test_one_column_beside_its_ideal_is_what_it_is_among_all_the_others_at_theirs():
    # GIVEN a job of five data-parallel ranks that differ
    operations = arranged(Job(dps=5, jitter=0.4, seed=3).rows())
    # WHEN each is replayed with one other that stands for four
    alone_NW = operations.each_column_alone()
    # THEN the steps are those of a replay with all of them
    for column in range(5):
        kept_TW = np.arange(5)[None, :] == column
        np.testing.assert_allclose(alone_NW[:, column], operations.replay(kept_TW).finish_N, rtol=1e-14)


def test_steps_without_all_operations_are_left_out_and_it_says_so():
    # GIVEN a recording in which one operation of the second of its steps is missing
    rows = Job(steps=4).rows()
    missing = np.flatnonzero(rows.step_E == 10)[5]
    kept = np.arange(len(rows.step_E)) != missing
    fewer = {name: getattr(rows, name)[kept] for name in type(rows).__slots__ if name.endswith("_E")}
    # WHEN it is taken up, THEN that step alone is left out
    operations = arranged(type(rows)(rows.optypes, **fewer))
    assert operations.steps == (7, 13, 16)
    assert operations.notes == ("1 of 4 steps left out: not all operations are there",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: {"optypes": ["mine" if one == "gc" else one for one in rows.optypes]}, "optype mine: not one of"),
        (lambda rows: {"duration_E": -rows.duration_E}, "duration: less than 0"),
        (lambda rows: {"start_E": rows.start_E * np.nan}, "start_ts: not a finite number"),
        (lambda rows: {"seq_E": np.zeros_like(rows.seq_E)}, "an operation is there twice"),
        (lambda rows: {"pp_E": rows.pp_E * 2}, "stage: 3 of 7 stages have no operation"),
        (lambda rows: {"optype_E": np.where(rows.optype_E == 1, 0, rows.optype_E)}, "an operation is there twice"),
        (lambda rows: {"seq_E": rows.seq_E + np.int32(2**30)}, "too many operations in a step"),
        (lambda rows: {"step_E": np.arange(len(rows.step_E))}, "the steps have hardly any operations in common"),
        (lambda rows: {"chunk_E": rows.chunk_E * 0 - 1}, "forward-compute 0 of stage 0 is of no model chunk"),
        (lambda rows: {name: rows_of[:0] for name, rows_of in arrays(rows).items()}, "no operations"),
    ],
)
def test_what_is_no_such_recording_is_refused_in_words(change, said):
    # GIVEN a recording with something wrong in it
    rows = Job(steps=2).rows()
    wrong = type(rows)(**({"optypes": rows.optypes, **arrays(rows)} | change(rows)))
    # WHEN it is taken up, THEN it says what
    with pytest.raises(InputError, match=said):
        arranged(wrong)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (lambda job: job.ops(kind="backward-compute", stage=1), "stage 1 has no backward-compute"),
        (lambda job: job.ops(kind="forward-recv", stage=1), "stage 1 has no forward-recv"),
        (
            lambda job: job.ops(kind="forward-recv", stage=1)[:2],
            "stage 1 has 6 of forward-recv for 8 of forward-compute",
        ),
        (lambda job: job.ops(kind="backward-recv", stage=0), "backward-send 0 of stage 1 has no other end"),
    ],
)
def test_operations_that_are_missing_in_all_steps_are_said(without, said):
    # GIVEN a recording that never has some operations
    job = Job(steps=2, dps=1)
    rows, gone = job.rows(), without(job)
    n_cells = job.steps * job.dps
    kept = ~np.isin(np.arange(len(rows.step_E)) // n_cells, gone)
    fewer = {name: values[kept] for name, values in arrays(rows).items()}
    # WHEN it is taken up, THEN it says which
    with pytest.raises(InputError, match=said):
        arranged(type(rows)(rows.optypes, **fewer))


def arrays(rows):
    return {name: getattr(rows, name) for name in type(rows).__slots__ if name.endswith("_E")}
