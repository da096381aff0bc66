"""What would help, and by how much: worked out by hand, and pipelines against an obvious simulator."""

import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import UsageError
from sftriage.mitigate.advice import (
    NEARLY,
    Messages,
    ScheduledStep,
    Straggler,
    absorbing,
    advice_of,
    blocked,
    is_settled,
    measured_pipeline,
    one_f_one_b,
    order_of,
    pipeline_of,
    planned,
    slow_link,
    step_s,
    straggler_in,
    undelayed,
)
from sftriage.mitigate.switching import Request, StageTimes, SwitchStatus
from sftriage.model.events import Pipeline
from sftriage.stragglers.pipeline import arranged
from tests.unit.stragglers.planted import Job


def late(late_s=0.05, *, step_s=0.25, ranks=(3,), n_ranks=8):
    return Straggler("rank 3", "data", ranks, n_ranks, late_s, step_s)


def remedies(advice):
    return {one.code: one for one in advice.remedies}


@pytest.mark.parametrize(
    ("situation", "named", "who", "settled"),
    [
        ("no windows yet", "", None, False),
        ("no straggler", "..........", None, True),
        ("in too few windows yet", "333", None, False),
        ("since it began", "3333", 3, False),
        ("now and then", "3..3..3..3", None, False),
        ("in half of the windows", "3.3.3.3.3.", 3, True),
        ("in most, and not in the last few", "3333333...", 3, True),
        ("not any more", "333.......", None, True),
        ("in half, and not since", "33333.....", 3, True),
        ("it moves: the windows of before are most still", "33333..111", 3, True),
        ("it moves, and none was named for longer", "3333...111", None, False),
        ("it has moved", "3333..1111", 1, True),
        ("it seemed to move, and none is named any more", "333...111.", None, True),
        ("each time another one", "1230123012", None, True),
        ("it moves again and again", "3131313131", 3, True),
    ],
)
def test_the_chronic_straggler_of_recent_windows(situation, named, who, settled):
    # GIVEN the suspects of the last windows THEN the chronic straggler is the one that still is slow
    recent = [None if one == "." else Straggler(f"rank {one}", "data", (int(one),), 0, 0.05, 0.25) for one in named]
    found = straggler_in(recent, 4)
    assert (found and found.ranks) == (who if who is None else (who,))
    # AND it is settled unless they begin to name another rank
    assert is_settled(recent) == settled


def test_a_chronic_straggler_may_change_stage_and_costs_as_in_the_newest_window():
    where = ("all its local stages", "data") * 5
    recent = [Straggler("rank 3", one, (3,), 0, 0.03 + 0.001 * n, 0.25) for n, one in enumerate(where)]
    assert straggler_in(recent, 4) == Straggler("rank 3", "data", (3,), 4, 0.03 + 0.001 * 9, 0.25)


def test_one_late_rank_of_eight():
    # GIVEN 8 ranks of steps of 250 ms, one of which is 50 ms late, and 1 GB of gradients at 100 ms a GB
    advice = advice_of(late(), Messages(1e9, 0.0, 1e-10), None)
    found = remedies(advice)
    # THEN without it, the others do its work too: 200 ms × 8 / 7
    assert found["take_out"].saves_s == pytest.approx(0.25 - 0.2 * 8 / 7)
    assert found["take_out"].pays_from_s == pytest.approx(0.25 / 8)
    # AND evened out, all are ready after 8 / (7 / 200 ms + 1 / 250 ms)
    assert found["rebalance"].saves_s == pytest.approx(0.25 - 8 / (7 / 0.2 + 1 / 0.25))
    assert found["rebalance"].numbers["its_share"] == pytest.approx(0.8205, abs=1e-4)
    # AND around it, 9/7 and what 50 ms leave of 6/7 of 100 ms, where a ring takes 14/8 of them
    assert found["stragglar"].saves_s == pytest.approx(0.175 - (0.6 / 7 - 0.05 + 0.9 / 7))
    assert found["stragglar"].pays_from_s == pytest.approx(0.03929, abs=1e-5)
    # AND what helps most comes first
    assert advice.best.code == "rebalance"
    assert [one.code for one in advice.remedies] == ["rebalance", "take_out", "stragglar"]


def test_without_message_sizes_advice_is_in_shares():
    found = remedies(advice_of(late(), None, None))["stragglar"]
    assert found.saves_s is None
    assert found.numbers["break_even_of_ring"] == pytest.approx(0.3929 / 1.75, abs=1e-4)
    assert found.numbers["most_of_ring"] == pytest.approx(1 - (9 / 7) / (14 / 8))


@pytest.mark.parametrize(
    ("straggler", "expected"),
    [
        (None, set()),
        (late(ranks=tuple(range(8))), set()),  # all of them: no other rank is left
        (late(ranks=(2, 3)), {"take_out", "rebalance"}),
        (late(ranks=(0,), n_ranks=3), {"take_out", "rebalance"}),  # a ring is never slower among three
        (late(ranks=(0,), n_ranks=100_000), {"take_out", "rebalance", "stragglar"}),
    ],
)
def test_remedies_by_straggler(straggler, expected):
    assert remedies(advice_of(straggler, None, None)).keys() == expected


def test_no_remedy_is_best_if_none_saves_enough():
    assert advice_of(late(1e-4), None, None).best is None
    assert advice_of(None, None, None).best is None


@given(st.floats(0.0, 1.0), st.floats(0.01, 10.0), st.integers(1, 7))
def test_rebalancing_saves_less_than_a_spare(share, step_s, k):
    straggler = late(share * step_s, step_s=step_s, ranks=tuple(range(k)))
    found = remedies(advice_of(straggler, None, None))
    saves_s = found["rebalance"].saves_s
    if saves_s is not None:
        assert -1e-9 <= saves_s <= straggler.late_s + 1e-9
    # taking out pays just where it is later than that
    assert (found["take_out"].saves_s > 0) == (straggler.late_s > found["take_out"].pays_from_s) or share in (0.0, 1.0)


def test_a_pipeline_with_a_slow_link():
    # GIVEN 4 stages, 16 microbatches, and a link that takes two forwards
    pipeline = Pipeline((0.01,) * 4, (0.02,) * 4, (0.0, 0.02, 0.0), 16)
    found = remedies(advice_of(None, None, pipeline))
    # THEN stages before the link further ahead save all but the way there and back
    assert found["pipeline"].ahead == (6, 5, 2, 1)
    assert found["pipeline"].saves_s == pytest.approx(0.89 - 0.61)
    # AND where the device's queue waits for what is sent, a step would be longer still
    assert found["host_transfers"].numbers["held_up_s"] > found["host_transfers"].numbers["not_held_up_s"]
    assert not advice_of(None, None, undelayed(pipeline)).remedies


def test_a_blocking_transfer_delays_its_sender():
    pipeline = Pipeline((1.0, 1.0), (2.0, 2.0), (0.5,), 4)
    held = blocked(pipeline)
    assert (held.forward_S, held.backward_S, held.delay_L) == ((1.5, 1.0), (2.0, 2.5), (0.0,))
    assert step_s(held, one_f_one_b(held)) >= step_s(undelayed(pipeline), one_f_one_b(pipeline))


def test_a_recorded_pipeline():
    # GIVEN the operations of a job of 3 stages, as they were recorded
    job = Job(stages=3, dps=2, steps=3, microbatches=4)
    pipeline = pipeline_of(arranged(job.rows()))
    # THEN its computations and delays are what is usual of each
    assert (len(pipeline.forward_S), len(pipeline.delay_L), pipeline.microbatches) == (3, 2, 4)
    operations = arranged(job.rows())
    index = [one.name for one in operations.types].index("forward-compute")
    of_last = operations.work_TNW[(operations.type_T == index) & (operations.pp_TW[:, 0] == 2)]
    assert pipeline.forward_S[2] == pytest.approx(np.median(of_last))


def test_one_stage_is_no_pipeline_and_interleaving_is_refused():
    assert pipeline_of(arranged(Job(stages=1, dps=2, steps=2).rows())) is None
    operations = arranged(Job(stages=2, dps=2, steps=2).rows())
    operations.chunk_T[0] = 1
    with pytest.raises(UsageError, match="interleaved"):
        pipeline_of(operations)


def test_advice_does_not_import_torch_and_commands_do_not_import_advice():
    code = (
        "import sys, sftriage.trainer, sftriage.agent.agent;"
        "assert not any('mitigate' in name for name in sys.modules);"
        "import sftriage.commands.analyze; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


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
def test_stages_run_ahead_to_absorb_delays(delays, most, expected):
    assert absorbing(uniform(delays, most=most)) == expected


def test_a_stage_runs_ahead_and_then_alternates():
    assert order_of(2, 3) == tuple(
        ScheduledStep(kind, number) for kind, number in [*zip("FFBFBB", (0, 1, 0, 2, 1, 2), strict=True)]
    )


@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
def test_without_delay_1f1b_takes_the_textbook_time(n_stages):
    # GIVEN stages that are all alike WHEN nothing is delayed THEN a step is M + S - 1 microbatches long
    pipeline = uniform((0.0,) * (n_stages - 1))
    assert step_s(pipeline, one_f_one_b(pipeline)) == pytest.approx((16 + n_stages - 1) * 3.0)
    assert planned(pipeline) == one_f_one_b(pipeline)


@given(pipelines())
def test_step_time_equals_a_naive_simulation(pipeline):
    for ahead_S in (one_f_one_b(pipeline), absorbing(pipeline)):
        assert step_s(pipeline, ahead_S) == pytest.approx(obvious(pipeline, ahead_S))


@given(pipelines())
def test_a_plan_is_never_slower_and_fits_the_memory(pipeline):
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
def test_with_enough_memory_a_delay_is_paid_once_each_way(delays):
    # GIVEN stages that are all alike, and microbatches enough WHEN they are as far ahead as the paper says
    pipeline = uniform(delays, microbatches=30)
    ideal_s = step_s(undelayed(pipeline), one_f_one_b(pipeline))
    # THEN a step is longer by the way there and back, and 1F1B by more than that where anything is delayed
    assert step_s(pipeline, absorbing(pipeline)) == pytest.approx(ideal_s + 2 * sum(delays))
    assert step_s(pipeline, planned(pipeline)) == pytest.approx(ideal_s + 2 * sum(delays), rel=NEARLY)
    assert step_s(pipeline, one_f_one_b(pipeline)) >= ideal_s + 2 * sum(delays) - 1e-9


def test_scarce_memory_goes_to_the_slow_link():
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
def test_an_invalid_pipeline_is_refused(change):
    good = {"forward_S": (1.0, 1.0), "backward_S": (1.0, 1.0), "delay_L": (0.0,), "microbatches": 1}
    with pytest.raises(UsageError):
        Pipeline(**{**good, **change})


@pytest.mark.parametrize("ahead_S", [(1, 2), (1, 0), (2,)])
def test_deadlocking_plans_are_refused(ahead_S):
    with pytest.raises(UsageError, match="each must be at least as far ahead"):
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
def test_a_slow_link_stands_out_and_matters_beside_work(delays, expected):
    assert slow_link(uniform(delays)) == expected


def test_a_pipeline_is_known_once_all_its_stages_have_measured():
    # GIVEN what three stages have noted: a delay is that of the longer way
    stages = (
        StageTimes(1.0, 2.0, 0.0, 0.3, 6),
        StageTimes(1.1, 2.1, 0.1, 0.2, 5),
        StageTimes(1.2, 2.2, 0.5, 0.0, 4),
    )
    status = SwitchStatus("name", (0, 1, 2), 9, 9, 0, -1, Request(0, 0, 0), stages=stages, microbatches=8)
    measured = Pipeline((1.0, 1.1, 1.2), (2.0, 2.1, 2.2), (0.3, 0.5), 8, (6, 5, 4))
    assert measured_pipeline(status) == measured
    # AND it is unknown if a stage has not measured, or the group is no pipeline
    missing = stages[0]._replace(forward_s=0.0), *stages[1:]
    assert measured_pipeline(replace(status, stages=missing)) is None
    assert measured_pipeline(replace(status, stages=())) is None
