"""What mending was promised to win beside what it won: over jobs with planted faults, and by truth table."""

from dataclasses import replace
from functools import lru_cache

import pytest

from sftriage.model.events import JobPaused, RemedyChanged
from sftriage.policy.state import Losses
from sftriage.runs.decisions import row_of
from sftriage.runs.promises import AttemptRows, Mend, OtherChange, judgement_of, mends_of
from sftriage.runs.summary import RunSummary
from sftriage.verdict.accounting import anchored
from sftriage.words.run import mend_sentence
from tests.scenario import Fault, Job, at, decision, every, from_step, judged, row, slow_loader, verdict
from tests.unit.runs.test_summary import view
from tests.unit.runs.test_timetable import noted

SLOW = Fault("data", 1, 0.036)


def judged_attempt(window, attempt=0):
    """What the journal keeps of an attempt, window by window, and how long its steps took."""
    losses, rows = Losses(), []
    for of, _ in judged(replace(window, attempt=attempt), stride=10, first=20):
        added = losses.added_by(of)
        losses = losses if added is None else losses.plus(added)
        rows.append(row_of(of, decision(of), lost_s=0.0 if added is None else sum(added.step_s)))
    step_N = anchored(window).advances_NS.sum(axis=1)
    mean_s = lambda first, last: float(step_N[first:last].mean())  # noqa: E731
    return AttemptRows(rows, window.durations_NRS.shape[1], "", mean_s)


@lru_cache
def job(*faults, steps=250, attempt=0, seed=0, **about):
    return judged_attempt(Job(n_steps=steps, **about).run(*faults, seed=seed + attempt), attempt)


def until(attempt, last_step):
    return replace(attempt, rows=[row for row in attempt.rows if row.last_step < last_step])


@pytest.mark.parametrize(
    ("measured", "error", "least", "most", "judgement"),
    [
        (35.0, 0.0, 36.0, 36.0, "kept"),
        (30.7, 0.0, 36.0, 36.0, "kept"),
        (30.5, 0.0, 36.0, 36.0, "less"),
        (30.5, 6.0, 36.0, 36.0, "kept"),
        (41.3, 0.0, 36.0, 36.0, "kept"),
        (41.5, 0.0, 36.0, 36.0, "more"),
        (41.5, 6.0, 36.0, 36.0, "kept"),
        (28.0, 0.0, 27.0, 36.0, "kept"),
        (22.0, 0.0, 27.0, 36.0, "less"),
        (-5.0, 1.0, 36.0, 36.0, "less"),
    ],
)
def test_a_promise_is_kept_within_a_part_of_it_or_within_the_range(measured, error, least, most, judgement):
    assert judgement_of(measured, error, least, most) == judgement


@pytest.mark.parametrize(
    ("before", "after", "by", "judgement"),
    [
        ([SLOW], [], "restart", "kept"),
        ([SLOW], [SLOW], None, None),
        ([SLOW], [Fault("data", 1, 0.024)], None, None),
        ([], [SLOW], None, None),
        ([], [], None, None),
        ([SLOW], [Fault("data", None, 0.036)], "restart", "less"),
        ([SLOW], [Fault("data", 3, 0.036)], "restart", "not_comparable"),
        ([SLOW, Fault("forward", 2, 0.016)], [Fault("forward", 2, 0.016)], "restart", "kept"),
        ([Fault("data", 1, 0.4, every(10))], [], "restart", "kept"),
        ([Fault("forward", 1, 0.1, every(7, 3))], [], "restart", "kept"),
    ],
)
def test_GIVEN_a_restart_WHEN_the_suspect_is_gone_THEN_what_it_won_stands_beside_the_promise(
    before, after, by, judgement
):
    found = mends_of([job(*before, steps=500), job(*after, attempt=1)])
    assert [(mend.by, mend.judgement) for mend in found] == ([(by, judgement)] if by else [])


def test_the_figures_are_those_of_the_verdict_and_of_the_step_times():
    (mend,) = mends_of([job(SLOW), job(attempt=1)])
    assert mend.who == ("rank 1 in data",)
    assert mend.since_step == 20
    assert mend.promised_s == mend.least_s == pytest.approx(0.036, rel=0.1)
    assert mend.measured_s == pytest.approx(0.036, rel=0.1)
    assert 0.0 < mend.error_s < 0.003


def test_a_fault_that_ends_by_itself():
    # GIVEN a fault that lasts until step 300, and the job without it afterwards
    attempt = job(Fault("data", 1, 0.036, from_step(0, 300)), steps=600)
    (mend,) = mends_of([attempt])
    assert (mend.by, mend.judgement) == ("by_itself", "kept")
    assert 300 <= mend.since_step <= 320
    # AND of one that comes back nothing is mended, nor of one that has only just ended
    back = lambda n: from_step(0, 300)(n) | from_step(480)(n)  # noqa: E731
    assert not mends_of([job(Fault("data", 1, 0.036, back), steps=600)])
    assert not mends_of([until(attempt, 390)])


def test_a_recurring_suspect_must_be_away_for_some_periods():
    before, after = job(Fault("data", 1, 0.4, every(60)), steps=1200), job(attempt=1, steps=400)
    assert not mends_of([before, until(after, 180)])
    (mend,) = mends_of([before, after])
    assert mend.promised_s == pytest.approx(0.4 / 60, rel=0.15)
    assert mend.judgement == "kept"


@pytest.mark.parametrize(("left", "judgement"), [(0.0, "kept"), (0.1, "kept"), (0.3, "less")])
def test_what_one_rank_did_alone_may_be_gone_or_be_shared_by_all(left, judgement):
    # GIVEN an evaluation of rank 0 alone, and then none, one that all share, or one that is hardly shorter
    steps = every(20, 19)
    before = noted(Job(n_steps=500).run(Fault("other", 0, 0.4, steps)), 0, "evaluation", steps)
    after = noted(Job(n_steps=500).run(Fault("other", None, left, steps), seed=1), None, "evaluation", steps)
    (mend,) = mends_of([judged_attempt(before), judged_attempt(after, 1)])
    assert (mend.promised_s, mend.least_s) == (pytest.approx(0.02, rel=0.1), pytest.approx(0.015, rel=0.1))
    assert mend.judgement == judgement


def test_two_at_once_promise_together():
    # GIVEN two ranks that are named in turns, and none after a restart
    rows = [row(first, "suspect", rank=rank) for first, rank in zip(range(20, 420, 50), 4 * (1, 2), strict=True)]
    faster = {"data": 0.0, "forward": 0.0, "backward": 0.062, "other": 0.0}
    after = [row(first, attempt=1, advances=faster) for first in (20, 70)]
    (mend,) = mends_of([AttemptRows(rows), AttemptRows(after)])
    assert mend.who == ("rank 1 in data", "rank 2 in data")
    assert (mend.promised_s, mend.measured_s, mend.judgement) == (0.04, pytest.approx(0.038), "kept")
    # AND of two in turn, the first is mended within the attempt, and the second by the restart
    before = Fault("data", 1, 0.05, from_step(0, 300)), Fault("forward", 2, 0.05, from_step(300, 520))
    first, second = mends_of([job(*before, steps=520), job(attempt=1)])
    assert (first.who, first.by, second.who, second.by) == (
        ("rank 1 in data",),
        "by_itself",
        ("rank 2 in forward",),
        "restart",
    )
    assert (first.difference.what, second.judgement) == ("slow", "kept")


@pytest.mark.parametrize(
    ("about", "what", "before", "now"),
    [
        ({"n_ranks": 8}, "ranks", "4", "8"),
        ({"work": 640.0}, "work", "512", "640"),
        ({"stages": (("load", 0.02), ("backward", 0.03), ("other", 0.001))}, "stages", "", ""),
    ],
)
def test_what_does_not_compare_has_no_figure(about, what, before, now):
    (mend,) = mends_of([job(SLOW, work=512.0), job(attempt=1, **{"work": 512.0, **about})])
    assert (mend.measured_s, mend.judgement) == (None, "not_comparable")
    assert (mend.difference.what, mend.difference.before, mend.difference.now) == (what, before, now)


def test_another_run_counts_as_a_restart_and_its_own_mends_are_its_own():
    earlier = [replace(attempt, run="run-1") for attempt in (job(SLOW), job(attempt=1), job(SLOW, attempt=2))]
    (mend,) = mends_of([*earlier, job(seed=7)])
    assert (mend.by, mend.run, mend.judgement) == ("run", "run-1", "kept")
    assert not mends_of([*earlier[:2], job(seed=7)])


def test_a_pause_is_no_part_of_the_mean_step():
    before = job(Fault("data", 1, 0.4, every(10)), steps=500)
    after = job(Fault("forward", None, 4.0, at(120)), attempt=1, steps=500)
    assert mends_of([before, after])[0].judgement == "less"
    (mend,) = mends_of(
        [before, after],
        [
            JobPaused(
                time_s=0.0, attempt=1, first_step=120, last_step=120, lasted_s=4.0, stage="forward", reason="in_sync"
            )
        ],
    )
    assert mend.judgement == "kept"


@pytest.mark.parametrize(("more_s", "who"), [(0.01, ()), (0.03, ("every rank in forward",))])
def test_a_job_that_is_as_fast_as_its_best_again(more_s, who):
    # GIVEN a job whose ranks all become slower, and are not after a restart; or are still, though nothing shows it then
    slower = job(Fault("forward", None, more_s, from_step(400)), steps=900)
    (mend,) = mends_of([slower, job(attempt=1)])
    assert (mend.who, mend.judgement) == (who, "kept")
    assert mend.promised_s == pytest.approx(more_s, rel=0.15)
    assert not mends_of([slower, job(Fault("forward", None, more_s), attempt=1)])


KEPT = RemedyChanged(
    time_s=1.0,
    attempt=0,
    step=400,
    remedy="stragglar",
    state="kept",
    reason="helps",
    rank=1,
    who="rank 1",
    where="data",
    numbers={"expected_s": 0.012, "saves_s": 0.011, "error_s": 0.0004, "on_s": 0.08, "off_s": 0.091},
)
MEND = Mend(("rank 1 in data",), "restart", 400, 0.0356, 0.0356, 0.0349, 0.0006, "kept")


@pytest.mark.parametrize(
    ("mend", "sentence"),
    [
        (
            MEND,
            "Rank 1 in data is mended since step 400 (restart): 34.9 ms a step less (± 0.6 ms), 35.6 ms promised.",
        ),
        (
            replace(MEND, measured_s=-0.003, judgement="less", by="run", run="r-1"),
            "Rank 1 in data is mended since run r-1: 3.0 ms a step more (± 0.6 ms), less than the 35.6 ms promised.",
        ),
        (
            replace(MEND, who=("rank 1 in data", "rank 2 in forward"), by="by_itself", least_s=0.03),
            "Rank 1 in data and rank 2 in forward are mended by step 400: 34.9 ms a step less (± 0.6 ms), "
            "30.0 ms to 35.6 ms promised.",
        ),
        (
            mends_of([], [KEPT])[0],
            "Rank 1 in data is mended since step 400 (remedy): 11.0 ms a step less (± 0.4 ms), 12.0 ms promised.",
        ),
        (
            replace(MEND, measured_s=None, judgement="not_comparable", difference=OtherChange("ranks", "8", "4")),
            "Rank 1 in data is mended since step 400 (restart): 35.6 ms a step promised, not comparable (8 ranks "
            "before, 4 now).",
        ),
        (
            replace(MEND, who=()),
            "The slowdown of the job is mended since step 400 (restart): 34.9 ms a step less (± 0.6 ms), 35.6 ms "
            "promised.",
        ),
    ],
)
def test_each_mend_is_a_sentence(mend, sentence):
    assert mend_sentence(mend) == sentence


def test_the_summary_has_it_wherever_it_is_shown_and_nothing_where_nothing_was_mended():
    summary = RunSummary(view(row(), mends=[MEND]))
    assert summary.mended == (mend_sentence(MEND),)
    assert mend_sentence(MEND) in summary.answers[4].more
    assert not RunSummary(view(row())).mended


def test_a_run_is_compared_with_the_newest_earlier_one_of_its_job_beside_it(tmp_path):
    pytest.importorskip("starlette")
    from tests.scenario import run_at

    # GIVEN earlier runs: of this job with the fault, of another job, of other ranks, and a later one
    def made(name, created_at, rows, ranks=4, **about):
        run = run_at(tmp_path / name)
        from sftriage.runs.directory import read_info, write_info

        info = read_info(run.directory)
        write_info(run.directory, replace(info, run_id=name, created_at=created_at, **about))
        run.record(ranks, range(60), slow_loader)
        for of in rows:
            run.decide(of)
        return run

    slow = [verdict(first, "suspect", onset=20) for first in range(20, 320, 50)]
    made("a", "2027-01-14T01:00:00+00:00", slow)
    made("b", "2027-01-14T02:00:00+00:00", [verdict(20)], job="other")
    made("c", "2027-01-14T03:00:00+00:00", [verdict(20)], ranks=8)
    made("e", "2027-01-16T01:00:00+00:00", [verdict(20)])
    faster = {"data": 0.0, "forward": 0.02, "backward": 0.06, "other": 0.0}
    run = made("d", "2027-01-15T01:00:00+00:00", [verdict(first, advances=faster) for first in range(20, 220, 50)])
    # THEN it is the first that this one mends
    (mend,) = run.source.view().mends
    assert (mend.run, mend.by, mend.promised_s) == ("a", "run", pytest.approx(0.02))
    assert mend.measured_s == pytest.approx(0.02)
