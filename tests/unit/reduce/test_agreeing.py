"""Trace against signal: stage by stage, and in one word."""

import pytest

from sftriage.reduce.together import compare, overall

SIGNAL = {"data": 0.040, "forward": 0.010, "backward": 0.048, "other": 0.002}


@pytest.mark.parametrize(
    ("changed", "stage", "agrees"),
    [
        ({}, "data", "yes"),
        ({"data": 0.0435}, "data", "yes"),
        ({"data": 0.0445}, "data", "no"),
        ({"data": 0.0355}, "data", "no"),
        ({"forward": 0.0119}, "data", "yes"),
        ({"forward": 0.0125}, "data", "partly"),
        ({"forward": 0.0125}, "forward", "no"),
        ({"backward": 0.055}, None, "no"),
        ({"data": 0.060}, None, "partly"),
        ({"data": 0.060}, "unknown", "partly"),
    ],
)
def test_one_word_for_all_stages(changed, stage, agrees):
    # GIVEN a trace that differs from the signal in one stage; allowed is a tenth of it, or 2 ms of these 100
    found = compare({**SIGNAL, **changed}, SIGNAL, stage=stage, rank=2, numbers=(7, 8))
    assert (found.agrees, found.rank, found.steps, found.first_step, found.last_step) == (agrees, 2, 2, 7, 8)
    # THEN the numbers that decided are there
    for one in found.stages:
        assert one.difference_s == one.trace_s - one.signal_s
        assert one.agrees == (abs(one.difference_s) <= one.allowed_s)


def test_a_stage_that_only_one_of_them_has_took_no_time_in_the_other():
    found = compare(
        {"data": 0.04, "extra": 0.03}, {"data": 0.04, "forward": 0.0001}, stage="data", rank=0, numbers=(1,)
    )
    assert {one.stage: one.agrees for one in found.stages} == {"data": True, "forward": True, "extra": False}
    assert found.agrees == "partly"


@pytest.mark.parametrize(
    ("data", "verdicts_agree", "agrees"),
    [
        ((0.04, 0.04), True, "yes"),
        ((0.04, 0.04), None, "yes"),
        ((0.04, 0.04), False, "partly"),
        ((0.04, 0.09), True, "partly"),
        ((0.09, 0.09), None, "no"),
    ],
)
def test_one_word_for_all_ranks(data, verdicts_agree, agrees):
    ranks = tuple(
        compare({**SIGNAL, "data": its}, SIGNAL, stage="data", rank=rank, numbers=(1,)) for rank, its in enumerate(data)
    )
    assert overall(ranks, verdicts_agree=verdicts_agree) == agrees
