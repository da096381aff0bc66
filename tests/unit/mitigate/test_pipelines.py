"""Pipelines under slow links: how far ahead stages are, and what a step takes, against an obvious simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import UsageError
from sftriage.mitigate.advice import (
    NEARLY,
    Pipeline,
    ScheduledStep,
    absorbing,
    one_f_one_b,
    order_of,
    pipeline_seen,
    planned,
    slow_link,
    step_s,
)
from sftriage.mitigate.switching import Request, StageTimes, SwitchStatus


def uniform(delays, *, forward_s=1.0, backward_s=2.0, microbatches=16, most=None):
    n = len(delays) + 1
    most_S = None if most is None else (most,) * n
    return Pipeline((forward_s,) * n, (backward_s,) * n, tuple(delays), microbatches, most_S)


def obvious(pipeline: Pipeline, ahead_S) -> float:
    """When the last computation ends: each begins once the one before it, and what it is sent, are there."""
    order_S = [order_of(ahead, pipeline.microbatches) for ahead in ahead_S]

    @cache
    def end_s(stage: int, at: int) -> float:
        step = order_S[stage][at]
        begin_s = end_s(stage, at - 1) if at else 0.0
        source = stage - 1 if step.kind == "F" else stage + 1
        if 0 <= source < len(ahead_S):
            sent_s = end_s(source, order_S[source].index(step)) + pipeline.delay_L[min(stage, source)]
            begin_s = max(begin_s, sent_s)
        return begin_s + (pipeline.forward_S if step.kind == "F" else pipeline.backward_S)[stage]

    return max(end_s(stage, len(order) - 1) for stage, order in enumerate(order_S))


@st.composite
def pipelines(draw):
    n = draw(st.integers(1, 5))
    seconds = st.floats(0.1, 3.0)
    delays = st.one_of(st.just(0.0), st.floats(0.01, 8.0))
    return Pipeline(
        tuple(draw(st.lists(seconds, min_size=n, max_size=n))),
        tuple(draw(st.lists(seconds, min_size=n, max_size=n))),
        tuple(draw(st.lists(delays, min_size=n - 1, max_size=n - 1))),
        draw(st.integers(1, 10)),
        draw(st.one_of(st.none(), st.lists(st.integers(1, 8), min_size=n, max_size=n).map(tuple))),
    )


@pytest.mark.parametrize(
    ("delays", "most", "expected"),
    [
        # x_3 = 1, x_i = x_(i+1) + ⌈c_i / t_F⌉ + 2
        ((0.0, 0.0, 0.0), None, (7, 5, 3, 1)),
        ((0.0, 2.0, 0.0), None, (9, 7, 3, 1)),
        ((0.0, 2.1, 0.0), None, (10, 8, 3, 1)),
        ((5.0, 0.0, 0.5), None, (13, 6, 4, 1)),
        # as many as a stage can hold, and no stage further ahead than the one before it
        ((0.0, 2.0, 0.0), 6, (6, 6, 3, 1)),
        ((9.0, 9.0, 9.0), None, (16, 16, 12, 1)),
    ],
)
def test_how_far_ahead_delays_are_absorbed(delays, most, expected):
    assert absorbing(uniform(delays, most=most)) == expected


def test_a_stage_goes_ahead_and_then_back_and_forth():
    assert order_of(2, 3) == tuple(
        ScheduledStep(kind, number) for kind, number in [*zip("FFBFBB", (0, 1, 0, 2, 1, 2), strict=True)]
    )


@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
def test_without_delay_1f1b_takes_what_the_books_say(n_stages):
    # GIVEN stages that are all alike WHEN nothing is delayed THEN a step is M + S - 1 microbatches long
    pipeline = uniform((0.0,) * (n_stages - 1))
    assert step_s(pipeline, one_f_one_b(pipeline)) == pytest.approx((16 + n_stages - 1) * 3.0)
    assert planned(pipeline) == one_f_one_b(pipeline)


@given(pipelines())
def test_the_replay_is_the_obvious_simulation(pipeline):
    for ahead_S in (one_f_one_b(pipeline), absorbing(pipeline)):
        assert step_s(pipeline, ahead_S) == pytest.approx(obvious(pipeline, ahead_S))


@given(pipelines())
def test_a_plan_is_never_slower_and_never_holds_more_than_there_is_room_for(pipeline):
    # GIVEN any pipeline WHEN planned THEN it takes no longer than 1F1B, nor than what absorbs all delays
    ahead_S = planned(pipeline)
    best_s = min(step_s(pipeline, one_f_one_b(pipeline)), step_s(pipeline, absorbing(pipeline)))
    assert step_s(pipeline, ahead_S) <= best_s * (1.0 + NEARLY)
    # and no stage ever holds the activations of more microbatches than it can
    for ahead, most in zip(ahead_S, pipeline.most_S or (pipeline.microbatches,) * len(ahead_S), strict=True):
        held, peak = 0, 0
        for step in order_of(ahead, pipeline.microbatches):
            held += 1 if step.kind == "F" else -1
            peak = max(peak, held)
        assert peak == min(ahead, pipeline.microbatches) <= most


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4))
def test_with_room_a_delay_is_waited_for_once_each_way(delays):
    # GIVEN stages that are all alike, and microbatches enough WHEN they are as far ahead as the paper says
    pipeline = uniform(delays, microbatches=30)
    ideal_s = step_s(pipeline.undelayed, one_f_one_b(pipeline))
    # THEN a step is longer by the way there and back, and 1F1B by more than that where anything is delayed
    assert step_s(pipeline, absorbing(pipeline)) == pytest.approx(ideal_s + 2 * sum(delays))
    assert step_s(pipeline, planned(pipeline)) == pytest.approx(ideal_s + 2 * sum(delays), rel=NEARLY)
    assert step_s(pipeline, one_f_one_b(pipeline)) >= ideal_s + 2 * sum(delays) - 1e-9


def test_where_memory_is_short_what_there_is_goes_to_the_slow_link():
    # GIVEN room for two microbatches more than 1F1B needs WHEN one link is slow
    pipeline = uniform((0.0, 4.0, 0.0), most=6)
    # THEN the stages before it are ahead of it, and the step is the faster for it
    ahead_S = planned(pipeline)
    assert ahead_S[0] <= 6
    assert step_s(pipeline, ahead_S) < step_s(pipeline, absorbing(pipeline)) < step_s(pipeline, one_f_one_b(pipeline))


@pytest.mark.parametrize(
    "change",
    [
        {"forward_S": (1.0,)},
        {"delay_L": ()},
        {"microbatches": 0},
        {"forward_S": (0.0, 1.0)},
        {"delay_L": (-1.0,)},
        {"most_S": (0, 1)},
        {"most_S": (1,)},
    ],
)
def test_what_is_no_pipeline_is_refused(change):
    good = {"forward_S": (1.0, 1.0), "backward_S": (1.0, 1.0), "delay_L": (0.0,), "microbatches": 1}
    with pytest.raises(UsageError):
        Pipeline(**{**good, **change})


@pytest.mark.parametrize("ahead_S", [(1, 2), (1, 0), (2,)])
def test_stages_that_would_wait_for_each_other_are_refused(ahead_S):
    with pytest.raises(UsageError, match="each is as far ahead"):
        step_s(uniform((0.0,)), ahead_S)


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ((0.0, 0.0, 0.0), None),
        ((0.1, 1.0, 0.1), 1),
        ((1.0, 0.0, 0.0), 0),
        # as much as the others, or hardly anything of a microbatch's work
        ((1.0, 1.0, 1.0), None),
        ((0.6, 1.0, 0.7), None),
        ((0.01, 0.2, 0.01), None),
        # of two that are slow, the slower one
        ((0.0, 1.0, 2.0, 0.1, 0.1), 2),
        # the only one has nothing to stand out of but work
        ((0.5,), 0),
        ((0.2,), None),
    ],
)
def test_a_link_is_slow_that_stands_out_of_the_others_and_counts_beside_work(delays, expected):
    assert slow_link(uniform(delays)) == expected


def test_a_pipeline_is_known_once_all_its_stages_have_measured():
    # GIVEN what three stages have noted: a delay is that of the longer way
    stages = (
        StageTimes(1.0, 2.0, 0.0, 0.3, 6),
        StageTimes(1.1, 2.1, 0.1, 0.2, 5),
        StageTimes(1.2, 2.2, 0.5, 0.0, 4),
    )
    status = SwitchStatus("name", (0, 1, 2), 9, 9, 0, -1, Request(0, 0, 0), stages=stages, microbatches=8)
    seen = Pipeline((1.0, 1.1, 1.2), (2.0, 2.1, 2.2), (0.3, 0.5), 8, (6, 5, 4))
    assert pipeline_seen(status) == seen
    # AND nothing is said where a stage has not, or of a group that is no pipeline
    missing = stages[0]._replace(forward_s=0.0), *stages[1:]
    assert pipeline_seen(replace(status, stages=missing)) is None
    assert pipeline_seen(replace(status, stages=())) is None
