"""The traces of all ranks beside each other: one job and one time, or a refusal in words."""

import numpy as np
import pytest

from sftriage.errors import InputError
from sftriage.model.verdicts import Settings
from sftriage.reduce.together import compare, overall, together
from sftriage.runtime.reducing import for_few_steps
from sftriage.verdict.judging import judge
from tests.unit.reduce.heavy import EPOCH_NS, job_events, mark, reduced

DAY_NS = 86_400 * 10**9


def test_the_accounting_names_the_slow_rank_for_any_order_of_traces(tmp_path):
    late = [reduced(tmp_path / f"{r}.json", job_events(r, slow=0), rank=r, world_size=4) for r in (3, 2, 1, 0)]
    window = together(late)
    verdict, _ = judge(window, None, for_few_steps(Settings()))
    assert (verdict.label, verdict.suspects[0].ranks, verdict.suspects[0].stage) == ("suspect", (0,), "data")
    assert (window.first_step, window.last_step) == (100, 107)


def test_a_rank_that_begins_late_is_late_between_steps(tmp_path):
    # GIVEN two ranks whose clocks have a date, one of which begins its first step 3 ms after the other
    some = [
        reduced(tmp_path / f"{r}.json", [mark("ProfilerStep#5", 1000 * (1 + 3 * r), 9000)], rank=r, world_size=2)
        for r in range(2)
    ]
    window = together(some)
    assert window.between_NR.tolist() == [[0.0, pytest.approx(0.003)]]


def test_a_step_that_one_rank_lacks_is_missing_and_a_stage_that_it_lacks_took_no_time(tmp_path):
    steps = [mark("ProfilerStep#1", 0, 50), mark("ProfilerStep#2", 60, 50)]
    a = reduced(tmp_path / "a.json", [*steps, mark("sftriage:data", 5, 10)], rank=0, world_size=2)
    b = reduced(tmp_path / "b.json", [steps[1], mark("sftriage:eval", 65, 10)], rank=1, world_size=2)
    window = together([a, b])
    assert window.schema.stages == ("data", "eval", "other")
    assert np.isnan(window.durations_NRS[0, 1]).all()
    assert window.durations_NRS[1].tolist() == [[0.0, 0.0, 50e-6], [0.0, pytest.approx(1e-5), pytest.approx(4e-5)]]


def of(tmp_path, rank, *, first=1, name="a", world_size=2, **about):
    path = tmp_path / f"{name}.json"
    return reduced(path, [mark(f"ProfilerStep#{first}", 0, 50)], rank=rank, world_size=world_size, **about)


@pytest.mark.parametrize(
    ("world_size", "other", "message"),
    [
        (2, {"rank": 1, "baseTimeNanoseconds": EPOCH_NS + 3 * DAY_NS}, "not of one run: .* 72.0 h apart"),
        (2, {"rank": 1, "baseTimeNanoseconds": EPOCH_NS + DAY_NS // 2}, "not of one run: .* 12.0 h apart"),
        (2, {"rank": 1, "baseTimeNanoseconds": EPOCH_NS + 8 * 10**9}, "not of one run: .* 8.0 s apart"),
        (None, {"rank": 0, "world_size": None}, "two traces of rank 0"),
        (1, {"rank": 1}, "different jobs: their world sizes are 1, 2"),
        (2, {"rank": 1, "first": 9}, "no step in common: rank 0 steps 1 to 1; rank 1 steps 9 to 9"),
        (None, {"rank": 2, "world_size": None}, "not all ranks have a trace: only 0, 2"),
        (4, {"rank": 2}, r"2 ranks have no trace here \(1, 3\)"),
        (2, {"rank": 1, "sftriage.job": "b"}, "different jobs: 'a', 'b'"),
        # A trace without a rank is not given one by its name.
        (2, {"name": "rank1", "rank": None}, "does not name its rank"),
    ],
)
def test_what_does_not_belong_together_is_not_merged(tmp_path, world_size, other, message):
    some = of(tmp_path, 0, world_size=world_size, **{"sftriage.job": "a"})
    with pytest.raises(InputError, match=message):
        together([some, of(tmp_path, **{"name": "b", **other})])


def test_clocks_without_a_date_cannot_be_compared(tmp_path):
    some = [of(tmp_path, rank, name=str(rank), baseTimeNanoseconds=0) for rank in range(2)]
    assert together(some).between_NR.tolist() == [[0.0, 0.0]]
    assert all("no date" in " ".join(one.notes) for one in some)


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
