"""Exact means exact: where the exposed time went adds up to the exposed time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from sftriage.model.windows import OTHER, StageSchema
from sftriage.verdict.accounting import anchored, complete_steps, segments, walk, walked
from tests.scenario import Fault, Job, exactly, gaussian

from .strategies import ANY, windows

QUIET = gaussian(0.0)


def unsynchronised(window):
    """The same times of ranks that never wait for one another."""
    schema = replace(window.schema, sync=())
    return replace(window, schema=schema, outside_NRG=None, between_NR=None, ready_NR=None)


def plain(window):
    """The accounting that is cut nowhere: each rank measured from its own step start."""
    return anchored(unsynchronised(window))


@given(window=windows(elements=ANY))
@settings(max_examples=150)
@pytest.mark.parametrize("account", [plain, anchored])
def test_advances_are_never_negative_and_sum_to_the_exposed_time(account, window):
    # GIVEN any window: any schema, sync stages anywhere, with or without refinements, vectors missing
    # WHEN its exposed time is accounted
    accounting = account(window)
    # THEN the advances are a partition of it
    assert (accounting.advances_S >= 0.0).all()
    assert accounting.advances_S.sum() == pytest.approx(accounting.exposed_s, rel=1e-12, abs=0.0)


def exchanging(window):
    """The window, with its last sync stage under the name of exchanges that may lie anywhere."""
    name = window.schema.sync_in_order[-1]
    stages, sync = (
        tuple("exchange" if one == name else one for one in names)
        for names in (window.schema.stages, window.schema.sync)
    )
    return replace(window, schema=StageSchema(stages, sync))


@given(window=windows(elements=ANY).filter(lambda window: window.schema.sync))
@settings(max_examples=150)
def test_with_exchanges_anywhere_advances_still_partition_and_no_wait_is_exposed(window):
    # GIVEN any window with a sync stage WHEN that is one of exchanges that may lie anywhere
    accounting = anchored(exchanging(window))
    assert (accounting.advances_S >= 0.0).all()
    assert accounting.advances_S.sum() == pytest.approx(accounting.exposed_s, rel=1e-12, abs=0.0)
    # THEN no more is exposed than where all of a rank's time in it counted
    assert accounting.exposed_s <= anchored(window).exposed_s * (1.0 + 1e-12)


def test_an_exchange_that_ranks_leave_together_is_like_any_sync_stage():
    # GIVEN ranks of which one is late before an exchange, and all leave it together
    window = Job(noise=QUIET, sync=("backward",)).run(Fault("data", 1, 0.02), Fault("optimizer", 2, 0.03))
    # THEN where the time went is the same
    one, other = anchored(window), anchored(exchanging(window))
    np.testing.assert_allclose(other.advances_S, one.advances_S, atol=1e-9)


def test_an_absent_exchange_cuts_nothing():
    window = Job(noise=QUIET).run(Fault("data", 1, 0.02))
    stages = (*window.schema.stages[:-2], "exchange", *window.schema.stages[-2:])
    durations_NRS = np.insert(window.durations_NRS, -2, 0.0, axis=2)
    outside_NRG = np.concatenate([window.outside_NRG, np.zeros((*window.outside_NRG.shape[:2], 1))], axis=2)
    schema = StageSchema(stages, (*window.schema.sync, "exchange"))
    with_one = replace(window, schema=schema, durations_NRS=durations_NRS, outside_NRG=outside_NRG)
    assert [len(one.columns) for one in segments(with_one)] == [len(one.columns) for one in segments(window)]
    assert anchored(with_one).exposed_s == anchored(window).exposed_s


@given(window=windows(elements=ANY))
def test_without_a_sync_stage_it_is_the_frontier_of_the_paper(window):
    # GIVEN a window whose ranks never wait for one another, and nothing known from between its steps
    window = unsynchronised(window)
    # WHEN accounted by its formula (arXiv 2606.06751): c[r,j] = Σ_{i≤j} d[r,i]; f_j = max_r c[r,j]; a_j = f_j - f_{j-1}
    frontier_NS = window.durations_NRS[complete_steps(window)].cumsum(axis=2).max(axis=1)
    advances_S = np.diff(frontier_NS, axis=1, prepend=0.0).sum(axis=0)
    # THEN it is the same
    ours = anchored(window)
    np.testing.assert_allclose(ours.advances_S, advances_S, rtol=1e-9, atol=1e-12 * ours.exposed_s)


def test_a_missing_vector_removes_its_step_and_is_not_zero():
    # GIVEN three steps of 5 s, in the second of which a rank's vector is missing
    window = exactly(np.full((3, 2, 2), 2.5), ("forward", "backward"), ("backward",))
    window.durations_NRS[1, 0] = np.nan
    # WHEN accounted, THEN two steps are
    for accounting in (plain(window), anchored(window)):
        assert accounting.n_steps == 2
        assert accounting.exposed_s == pytest.approx(10.0)


@pytest.mark.parametrize("name", ["outside_NRG", "between_NR", "ready_NR"])
def test_a_step_whose_refinement_is_missing_is_left_out_too(name):
    # GIVEN a job's window in which one rank's refinement of step 3 is not known
    window = Job(n_steps=10).run(split=True)
    getattr(window, name)[3, 1] = np.nan
    # WHEN accounted, THEN nine steps are, and no NaN spreads
    accounting = anchored(window)
    assert accounting.n_steps == 9
    assert np.isfinite(accounting.advances_S).all()


def test_a_delay_after_the_last_sync_keeps_its_stage_and_its_rank():
    """The case that the paper's accounting gets wrong, with the numbers measured on a real job."""
    # GIVEN four ranks whose `backward` takes 12 ms and whose `optimizer` 0.7 ms, with 20 ms more on rank 2
    job = Job(
        stages=(("data", 0.005), ("forward", 0.010), ("backward", 0.010), ("optimizer", 0.0007), (OTHER, 0.0)),
        exchange_s=0.002,
        outside_s=0.0,
        noise=QUIET,
    )
    window = job.run(Fault("optimizer", 2, 0.020))
    backward, optimizer = (window.schema.stages.index(stage) for stage in ("backward", "optimizer"))
    # WHEN it is accounted from each rank's own step start
    theirs = plain(window)
    # THEN the delay shows as all other ranks' `backward`, and rank 2 leads it nowhere (but where it is not yet felt)
    assert theirs.advances_S[backward] / 49 == pytest.approx(0.032, abs=0.0005)
    assert theirs.leaders_S[backward] != 2
    assert theirs.advances_S[optimizer] / 49 == pytest.approx(0.001, abs=0.0005)
    # WHEN it is cut at the end of `backward` instead
    ours = anchored(window)
    # THEN it is `optimizer`, led by rank 2 in every step, and the exposed time is the wall clock
    assert ours.advances_S[optimizer] / 50 == pytest.approx(0.0207, abs=1e-9)
    assert ours.leaders_S[optimizer] == 2
    assert ours.advances_S[backward] / 50 == pytest.approx(0.012, abs=1e-9)
    opening = walk(segments(window)[0])
    assert (opening.leader_M[1:50] == 2).all()
    assert ours.exposed_s == pytest.approx(50 * (0.005 + 0.010 + 0.012 + 0.0207))


@pytest.mark.parametrize("sync", [(), ("forward",), ("forward", "backward"), ("backward", "optimizer"), ("data",)])
def test_ranks_end_a_segment_together(sync):
    # GIVEN a job with any set of sync stages, and a rank that is late
    window = Job(sync=sync).run(Fault("data", 1, 0.02), Fault("optimizer", 2, 0.02))
    # WHEN cut into segments
    parts = segments(window)
    # THEN there is one a sync stage (one without any), and in all but the first row (whose beginning is unknown) and
    # the last (which is cut short) the ranks have spent the same time in it
    assert len(parts) == max(1, len(sync))
    for part in parts:
        if part.own is not None:
            n_steps = len(part.own.values_NR)
            spent_MR = (walk(part).arrival_MR[:n_steps] + part.own.values_NR)[1:-1]
            assert np.ptp(spent_MR, axis=1).max() < 1e-9


def test_the_simulator_and_the_anchored_accounting_agree_on_the_wall_clock():
    # GIVEN a job with two sync stages, noise, time between its steps and delays everywhere
    job = Job(sync=("forward", "backward"), between_s=0.004)
    window = job.run(Fault("between", 0, 0.01), Fault("outside-1", 1, 0.02), Fault("other", 3, 0.03))
    # WHEN accounted
    exposed_s = anchored(window).exposed_s
    # THEN it is the time from the first step to the moment the slowest rank is through with the last
    assert window.between_NR is not None
    elapsed_R = window.durations_NRS.sum(axis=(0, 2)) + window.between_NR.sum(axis=0)
    assert exposed_s == pytest.approx(elapsed_R.max(), rel=1e-9)


@given(window=windows())
def test_a_walk_of_a_few_rows_at_a_time_is_a_walk(window):
    # GIVEN any window, WHEN its segments are walked row by row, as those of a large job are
    for segment in segments(window):
        whole = walk(segment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sftriage.verdict.accounting.BLOCK_BYTES", 8)
            by_row = walk(segment)
        # THEN nothing differs from walking them at once
        for name in ("arrival_MR", "leader_M", "last_M", "end_M", "advance_KM", "ahead_KM"):
            assert (getattr(by_row, name) == getattr(whole, name)).all()
        # AND everybody arrives when its local times are over
        reached_MR = np.zeros((segment.n_rows, segment.n_ranks))
        for column in segment.local:
            reached_MR[column.offset : column.offset + column.n_steps] += column.values_NR
        assert (whole.arrival_MR == reached_MR).all()


@given(window=windows())
def test_complete_steps_are_those_in_which_nothing_is_missing(window):
    # GIVEN any window, WHEN walked without looking for what is missing first
    walks, complete_N = walked(window)
    # THEN the steps that count are still those in which all is there
    assert (complete_N == complete_steps(window)).all()
    there_N = np.isfinite(window.durations_NRS).all(axis=(1, 2))
    assert (complete_N <= there_N).all()
    # AND the others take no time
    assert all(np.isfinite(one.end_M).all() for one in walks)
    assert all((one.end_M[: len(there_N)] >= 0.0).all() for one in walks)
