"""What mending one suspect would have saved, against a replay that does it the long way; and what a job is known by."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sftriage.model.verdicts import Settings
from sftriage.verdict.accounting import medians, segments
from sftriage.verdict.judging import judge
from sftriage.verdict.whatif import (
    MAX_REGIMES,
    MAX_SAMPLES,
    SAMPLE_RANKS,
    Baseline,
    OwnTimes,
    Samples,
    Typical,
    jitter_s,
    median_without,
    profile,
    replayed,
    roles_of,
)
from tests.scenario import Fault, Job, classify, every, judged_windows, past_of

from .strategies import ORDINARY, windows

SETTINGS = Settings()

VALUES = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=ORDINARY)


def local(segment):
    """A segment's local columns as one array, M rows × R ranks × K columns."""
    local_MRK = np.zeros((segment.n_rows, segment.n_ranks, len(segment.local)))
    for k, column in enumerate(segment.local):
        local_MRK[column.offset : column.offset + len(column.values_NR), :, k] = column.values_NR
    return local_MRK


@given(values_MR=VALUES, data=st.data())
def test_the_median_of_the_others_is_exact(values_MR, data):
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
    # AND if none is to be left out, it is the median
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
    for segment, observed in zip(segments(window), replayed(window, roles_of(window))[0], strict=True):
        local_MRK = local(segment)
        stage_K = [column.stage for column in segment.local]
        n_rows, n_ranks, n_columns = local_MRK.shape
        gain_MS, whole_gain_M = observed.gain_MS, observed.whole_gain_M
        for m in range(n_rows):
            scale = float(local_MRK[m].sum()) + 1e-300
            for rank in range(n_ranks):
                # WHEN every rank's every stage, and every whole rank, is replayed the long way
                for stage in set(stage_K):
                    columns = [k for k in range(n_columns) if stage_K[k] == stage]
                    naive_s = max(0.0, saved_s(local_MRK[m], rank, columns))
                    # THEN the leader's gain is that, and there is nothing to gain from anybody else
                    ours_s = gain_MS[m, stage] if rank == observed.leader_M[m] else 0.0
                    assert ours_s == pytest.approx(naive_s, abs=1e-12 * scale)
                naive_s = max(0.0, saved_s(local_MRK[m], rank, range(n_columns)))
                ours_s = whole_gain_M[m] if rank == observed.leader_M[m] else 0.0
                assert ours_s == pytest.approx(naive_s, abs=1e-12 * scale)


def test_two_equal_stragglers_are_late_together_and_neither_gains_anything():
    # GIVEN 20 ms on rank 2's data and 20 ms on rank 1's forward
    window = Job(n_steps=50).run(Fault("data", 2, 0.020), Fault("forward", 1, 0.020))
    observed, *_ = replayed(window, roles_of(window))[0]
    # WHEN replayed, THEN the last arrival is 20 ms past its peers' median, and mending one alone would save a fraction
    assert np.median(observed.lateness_M) > 0.018
    assert np.median(observed.whole_gain_M) < 0.003


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


def test_for_many_ranks_a_sample_gives_the_median():
    # GIVEN a job of more ranks than are sorted, one of them late
    window = Job(n_ranks=2 * SAMPLE_RANKS, n_steps=4).run(Fault("data", 7, 0.050))
    observed, *_ = replayed(window, roles_of(window))[0]
    assert observed.segment.local
    for column, reference_MC in zip(observed.segment.local, observed.reference_KMC, strict=True):
        reference_N = reference_MC[column.offset : column.offset + 4, 0]
        jitter_N = column.values_NR.std(axis=1)
        assert (
            np.abs(reference_N - np.median(column.values_NR, axis=1)) <= 3 * 1.25 / SAMPLE_RANKS**0.5 * jitter_N
        ).all()
    assert observed.gain_MS[:4, 0].sum() == pytest.approx(4 * 0.050, rel=0.1)


@given(values=VALUES)
def test_the_medians_are_those_of_numpy(values):
    # GIVEN any rows, WHEN their medians are taken, THEN they are to the bit what numpy says
    assert (medians(values) == np.median(values, axis=-1)).all()


REGIME = ("", None)


@cache
def after(n_windows, job=None, *faults, past=None):
    """The last verdict, and the past after windows of a job with these faults."""
    verdict = None
    for seed in range(n_windows):
        first_step = 0 if past is None else past.ranks.next_step
        verdict, past = judge((job or Job()).run(*faults, seed=seed, first_step=first_step), past, SETTINGS)
    return verdict, past


def test_healthy_windows_teach_the_medians_of_a_step():
    # GIVEN ten healthy windows, WHEN learned from
    baseline = after(10)[1].baseline
    # THEN the levels are the job's: data 20, forward 30, backward none of its own locally, optimizer 8, other 2 ms
    assert baseline.n_windows == 10
    typical = baseline.typical(REGIME)
    assert typical.level_CS[0] == pytest.approx([0.020, 0.030, 0.0, 0.008, 0.002], rel=0.03, abs=1e-6)
    # (backward: 35 of the rank that is last plus 5 of exchange, less the arrivals' spread)
    assert typical.sync_S[2] == pytest.approx(0.041, rel=0.05)


@pytest.mark.parametrize(
    "faults",
    [
        (Fault("data", 1, 0.030),),
        (Fault("data", None, 0.030),),
        (Fault("backward", 1, 0.060),),
        (Fault("data", 0, 0.030), Fault("forward", 1, 0.030)),
        (Fault("data", 0, 0.120, every(4)),),
    ],
    ids=["one rank", "all ranks", "inside the sync", "co-critical", "every fourth step"],
)
def test_a_slow_window_teaches_nothing(faults):
    # GIVEN a job with a baseline
    _, known = after(10)
    # WHEN slow windows follow, as many as one likes
    verdict, past = after(15, None, *faults, past=known)
    # THEN they stay slow, and the baseline stays what it was
    assert verdict.label != "healthy"
    assert past.baseline is known.baseline


def test_one_window_more_or_less_hardly_matters():
    # GIVEN a job known from twenty windows
    _, known = after(20)
    # WHEN a window is a little slower, under every threshold
    verdict, past = judge(Job().run(Fault("data", None, 0.010), seed=99), known, SETTINGS)
    # THEN it is healthy, and the median over all of them does not follow it
    assert verdict.label == "healthy"
    before, now = known.baseline.typical(REGIME), past.baseline.typical(REGIME)
    assert now.level_CS == pytest.approx(before.level_CS, rel=0.01)


def test_a_slowdown_that_creeps_does_not_become_the_norm():
    # GIVEN a job that becomes slower by 1 % of its step with every window
    creeps = (Job().run(Fault("data", None, 0.001 * n), seed=n, first_step=50 * n) for n in range(60))
    found = [verdict for verdict, _ in judged_windows(creeps)]
    labels = [verdict.label for verdict in found]
    # THEN it is slower than its best one day, later a rank is found, and both stay so
    first, slower = labels.index("suspect"), labels.index("needs_evidence")
    assert (set(labels[:slower]), set(labels[slower:first])) == ({"healthy"}, {"needs_evidence"})
    assert set(labels[first:]) == {"suspect"}
    assert (found[-1].suspects[0].scope, found[-1].suspects[0].stage) == ("all", "data")


def test_samples_stay_spread_over_the_whole_job():
    # GIVEN a thousand healthy windows, each a little longer than the one before
    known = Samples()
    for n in range(1000):
        known = known.after(Typical(np.full((1, 1), float(n)), np.full((1, 1), float(n)), np.zeros(1), 0.0))
    # THEN a bounded sample of them is kept, and its median is from the middle of the job
    assert known.n_offered == 1000
    assert len(known.kept) <= MAX_SAMPLES
    assert Baseline({("", None): known}).typical(("", None)).level_CS[0, 0] == pytest.approx(500.0, rel=0.05)


@pytest.mark.parametrize(
    ("situation", "slower"),
    [
        ("a step of twice the work", Job(work=2.0, stages=tuple((name, 2 * s) for name, s in Job().stages))),
        ("steps of a longer sort", Job(kinds=("long",) * 50, stages=tuple((name, 3 * s) for name, s in Job().stages))),
    ],
)
def test_like_is_compared_with_like(situation, slower):
    # GIVEN a job that is known
    _, known = after(10, Job(work=1.0) if slower.work else None)
    # WHEN its steps become other steps, and say so
    verdict, past = judge(slower.run(seed=5), known, SETTINGS)
    # THEN that is no slowdown, and both regimes are known from now on
    assert verdict.label == "healthy"
    assert len(past.baseline.known) == 2
    # AND a slowdown of the new ones is found against their own past
    verdict = classify(slower.run(Fault("data", None, 0.150), seed=6), past)
    assert (verdict.label, verdict.suspects[0].scope, verdict.suspects[0].stage) == ("suspect", "all", "data")


def test_a_job_whose_work_never_repeats_takes_bounded_memory():
    # GIVEN windows of ever more work
    past = past_of(Job(n_steps=3, work=2.0 ** (n / 4)).run() for n in range(2 * MAX_REGIMES))
    # THEN no more regimes are kept than there is room for, the newest among them
    assert len(past.baseline.known) == MAX_REGIMES
    assert ("", 2 * MAX_REGIMES - 1) in past.baseline.known


def test_a_job_that_only_roams_gets_a_level_but_may_not_be_late():
    # GIVEN a job in which another rank is late each step, from its first step on
    turns = [Fault("data", rank, 0.040, every(4, rank)) for rank in range(4)]
    # WHEN it is judged for ten windows
    first, _ = after(1, None, *turns)
    verdict, past = after(10, None, *turns)
    # THEN it has a baseline for what its ranks share, and being late is as little normal to it as in the first window
    assert verdict.reasons == ("roaming",)
    assert past.baseline.n_windows == 10
    assert past.baseline.typical(REGIME).level_CS[0, 0] == pytest.approx(0.020, rel=0.05)
    assert verdict.numbers["late_excess_s"] == pytest.approx(first.numbers["late_excess_s"], rel=0.05)


def test_lateness_that_creeps_up_does_not_become_the_norm():
    # GIVEN two ranks that are late together, by 1 % of a step more in each window
    windows = (Job().run(Fault("forward", (1, 3), 0.001 * n), seed=n, first_step=50 * n) for n in range(31))
    found = [verdict for verdict, _ in judged_windows(windows)]
    # WHEN the last rank is late by 10 % beyond jitter
    late = [
        one for one in found if one.numbers["lateness_s"] - 2 * one.numbers["jitter_s"] > one.numbers["min_lateness_s"]
    ]
    # THEN that is never healthy, however late the windows before were
    assert len(late) > 10
    assert {one.reasons[0] for one in late} == {"co_critical"}


def test_one_of_two_ranks_is_compared_with_windows_before_its_onset_if_there_are_any():
    # GIVEN four windows, of which the last two have a fault that was not likely yet
    own = OwnTimes()
    for number, late_s in enumerate((0.0, 0.0, 0.1, 0.1)):
        window = Job(n_ranks=2).run(Fault("data", 1, late_s))
        roles = roles_of(window)
        observed = profile(replayed(window, roles)[0], roles)
        own = own.after(REGIME, observed, 69 + 10 * number)
    # THEN what is known before the 80th step does not have it
    before_KR = own.known(REGIME, 2, 80)
    assert before_KR.shape == (2, 2)
    assert abs(before_KR[:, 1] - before_KR[:, 0]).max() < 0.02
    assert own.known(REGIME, 2, 90).shape == (3, 2)
    # AND before the first of them there is nothing else to hold it against
    assert own.known(REGIME, 2, 60).shape == own.known(REGIME, 2).shape == (4, 2)
    # AND of another kind of step, or of as many ranks, nothing is known
    assert own.known(("evaluation", None), 2, 80).shape == (0, 2)
    assert own.known(REGIME, 3, 80).shape == (0, 3)
