"""What mending one suspect would have saved, against a replay that does it the long way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sftriage.verdict.accounting import medians, segments, walk
from sftriage.verdict.whatif import SAMPLE_RANKS, jitter_s, median_without, replay, roles_of
from tests.scenario import Fault, Job

from .strategies import ORDINARY, windows

VALUES = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=ORDINARY)


def replayed(window):
    roles = roles_of(window)
    return replay([walk(segment, roles.some_X) for segment in segments(window)], roles, len(window.schema.stages))


def local(segment):
    """A segment's local columns as one array, M rows × R ranks × K columns."""
    local_MRK = np.zeros((segment.n_rows, segment.n_ranks, len(segment.local)))
    for k, column in enumerate(segment.local):
        local_MRK[column.offset : column.offset + len(column.values_NR), :, k] = column.values_NR
    return local_MRK


@given(values_MR=VALUES, data=st.data())
def test_the_median_of_the_others_is_just_that(values_MR, data):
    # GIVEN any rows and any one rank of each, ties included
    n_rows, n_ranks = values_MR.shape
    if data.draw(st.booleans()):
        values_MR = np.round(values_MR)
    rank_M = data.draw(hnp.arrays(np.intp, n_rows, elements=st.integers(0, n_ranks - 1)))
    # WHEN its peers' median is taken, THEN it is what deleting the rank and taking the median gives
    expected = [
        np.median(np.delete(row, rank)) if n_ranks > 1 else row[rank]
        for row, rank in zip(values_MR, rank_M, strict=True)
    ]
    own_M = np.take_along_axis(values_MR, rank_M[:, None], axis=1)[:, 0]
    sorted_MR = np.sort(values_MR, axis=1)
    everywhere_M = np.ones(n_rows, dtype=bool)
    assert median_without(sorted_MR, own_M, everywhere_M) == pytest.approx(np.array(expected), rel=1e-15)
    # AND where nobody is to be left out, it is the median
    assert median_without(sorted_MR, own_M, ~everywhere_M) == pytest.approx(np.median(values_MR, axis=1), rel=1e-15)


def saved_s(local_RK, rank, columns, sync_work_s=0.0):
    """Replace a rank's columns by its peers' medians, play the row again: how much earlier does it end?"""
    mended_RK = local_RK.copy()
    if len(local_RK) > 1:
        for k in columns:
            mended_RK[rank, k] = np.median(np.delete(local_RK[:, k], rank))
    before = local_RK.sum(axis=1).max() + sync_work_s
    return before - (mended_RK.sum(axis=1).max() + sync_work_s)


@given(window=windows())
def test_every_gain_is_what_the_naive_replay_saves(window):
    # GIVEN any window
    for segment, seen in zip(segments(window), replayed(window), strict=True):
        local_MRK = local(segment)
        stage_K = [column.stage for column in segment.local]
        n_rows, n_ranks, n_columns = local_MRK.shape
        gain_MS, whole_gain_M = seen.gain_MS, seen.whole_gain_M
        for m in range(n_rows):
            scale = float(local_MRK[m].sum()) + 1e-300
            for rank in range(n_ranks):
                # WHEN every rank's every stage, and every whole rank, is replayed the long way
                for stage in set(stage_K):
                    columns = [k for k in range(n_columns) if stage_K[k] == stage]
                    naive_s = max(0.0, saved_s(local_MRK[m], rank, columns))
                    # THEN the leader's gain is that, and there is nothing to gain from anybody else
                    ours_s = gain_MS[m, stage] if rank == seen.walk.leader_M[m] else 0.0
                    assert ours_s == pytest.approx(naive_s, abs=1e-12 * scale)
                naive_s = max(0.0, saved_s(local_MRK[m], rank, range(n_columns)))
                ours_s = whole_gain_M[m] if rank == seen.walk.leader_M[m] else 0.0
                assert ours_s == pytest.approx(naive_s, abs=1e-12 * scale)


@given(window=windows())
def test_a_gain_is_never_more_than_the_lateness_it_would_mend_or_the_margin_to_the_next(window):
    # GIVEN any window, WHEN replayed, THEN nothing is promised that the next rank to arrive would not let happen
    for seen in replayed(window):
        assert (seen.gain_MS <= seen.margin_M[:, None]).all()
        assert (seen.whole_gain_M <= seen.margin_M).all()
        assert (seen.walk.end_M >= seen.walk.last_M).all()
        assert all((common_MC >= 0.0).all() for common_MC in seen.common_KMC)


def test_two_equal_stragglers_are_late_together_and_neither_gains_anything():
    # GIVEN 20 ms on rank 2's data and 20 ms on rank 1's forward
    seen = replayed(Job(n_steps=50).run(Fault("data", 2, 0.020), Fault("forward", 1, 0.020)))[0]
    # WHEN replayed, THEN the last arrival is 20 ms past its peers' median, and mending one alone would save a fraction
    assert np.median(seen.lateness_M) > 0.018
    assert np.median(seen.whole_gain_M) < 0.003


def test_jitter_is_what_is_left_without_levels_of_steps_and_ranks():
    # GIVEN arrivals of 64 ranks with σ = 1 ms, a rank 50 ms late in all of 100 steps, another in ten, a few slow steps
    rng = np.random.default_rng(0)
    arrival_MR = 0.1 + 0.001 * rng.standard_normal((100, 64))
    arrival_MR[:, 5] += 0.050
    arrival_MR[:10, 6] += 0.050
    arrival_MR[20:25] += 0.200
    # WHEN its scale is estimated, THEN none of that shows, nor do steps that were left out
    assert jitter_s([arrival_MR[:, None]]) == pytest.approx(0.001, rel=0.1)
    assert jitter_s([np.vstack([arrival_MR, np.zeros((500, 64))])[:, None]]) == pytest.approx(0.001, rel=0.1)
    assert jitter_s([np.zeros((5, 1, 64))]) == 0.0


def test_of_very_many_ranks_a_sample_tells_the_median():
    # GIVEN a job of more ranks than are sorted, one of them late
    window = Job(n_ranks=2 * SAMPLE_RANKS, n_steps=4).run(Fault("data", 7, 0.050))
    seen = replayed(window)[0]
    assert seen.walk.segment.local
    for column, reference_MC in zip(seen.walk.segment.local, seen.reference_KMC, strict=True):
        reference_N = reference_MC[column.offset : column.offset + 4, 0]
        jitter_N = column.values_NR.std(axis=1)
        assert (
            np.abs(reference_N - np.median(column.values_NR, axis=1)) <= 3 * 1.25 / SAMPLE_RANKS**0.5 * jitter_N
        ).all()
    assert seen.gain_MS[:4, 0].sum() == pytest.approx(4 * 0.050, rel=0.1)


@given(values=VALUES)
def test_the_medians_are_those_of_numpy(values):
    # GIVEN any rows, WHEN their medians are taken, THEN they are to the bit what numpy says
    assert (medians(values) == np.median(values, axis=-1)).all()
