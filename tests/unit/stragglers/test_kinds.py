"""A truth table: one kind of stragglers planted in a job, that kind named and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.runs.operations import load_operations
from sftriage.stragglers.kinds import attributed, remedies_of, step_with
from sftriage.stragglers.pipeline import arranged
from sftriage.stragglers.slowdown import slowdown_of
from tests.needs import NO_REAL_TRACES
from tests.unit.stragglers.planted import PLANTED, Job, result_of
from tests.unit.stragglers.test_published import DATA, PUBLISHED

SEEDS = {"AR": range(200, 202), "ST": range(200, 205)}

SHAPES = {
    "as the published one": {"stages": 4, "dps": 4},
    "data-parallel alone": {"stages": 1, "dps": 8},
    "pipeline alone": {"stages": 4, "dps": 1},
    "small": {"stages": 2, "dps": 2, "microbatches": 4},
    "interleaved": {"stages": 2, "dps": 8, "chunks": 2},
    "overlapped": {"stages": 3, "dps": 4, "overlap": True},
    "wide": {"stages": 2, "dps": 40, "steps": 10},
}
PLANTS = ("slow_worker", "last_stage", "sequence_lengths", "garbage_collection", "communication")


def published(name):
    """The operations of a published trace, if it is there."""
    return load_operations([DATA / f"trace-{name}.parquet"])


@pytest.mark.parametrize("name", PUBLISHED or [pytest.param("", marks=pytest.mark.skip(NO_REAL_TRACES))])
@pytest.mark.parametrize("plant", PLANTED)
def test_a_kind_planted_in_a_published_trace_is_named_and_no_other(name, plant):
    # GIVEN a published trace, mended, with a kind of stragglers planted in it, by several seeds
    operations = published(name)
    results = [result_of(operations, plant, seed) for seed in SEEDS[name]]
    # WHEN it costs enough to be attributed, THEN that is named, and no other, with the workers that have it
    for named_kinds, workers, expected, expected_workers in filter(None, results):
        assert set(named_kinds) == set(expected)
        assert expected_workers is None or set(workers) == expected_workers
    assert any(results) or (name, plant) in (("ST", "nothing"), ("ST", "slow_stage"))


def named(job):
    operations = arranged(job.rows())
    return {kind.code: kind for kind in attributed(operations, slowdown_of(operations)).kinds}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_kind_is_named_and_no_other(plant, shape):
    # GIVEN a job with one kind of stragglers; a single stage is no last one that others could be compared with
    job = Job(**SHAPES[shape], seed=5)
    planted = getattr(job, plant)()
    kinds = named(job)
    if (plant, shape) == ("last_stage", "data-parallel alone"):
        assert kinds == {}
        return
    # WHEN it is analysed, THEN that kind is named, and no other, and its remedy wins much of the slowdown
    assert list(kinds) == [plant]
    assert kinds[plant].share > 0.4
    # AND the one slow worker is the one that was planted
    if plant == "slow_worker":
        assert kinds[plant].workers == (planted,)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_without_stragglers_has_no_kind(shape):
    # GIVEN a job whose operations vary by a hundredth
    operations = arranged(Job(**SHAPES[shape]).rows())
    # WHEN it is analysed, THEN it is not slowed down enough to attribute anything
    found = slowdown_of(operations)
    assert found.s < 1.03
    assert (found.m_w, found.m_s, found.by_worker(), attributed(operations, found).kinds) == (None, None, {}, ())


@settings(max_examples=20)
@given(
    stages=st.integers(2, 4),
    dps=st.integers(2, 6),
    steps=st.integers(4, 8),
    plant=st.sampled_from(PLANTS),
    seed=st.integers(0, 2**16),
)
def test_at_any_size_the_planted_kind_has_the_largest_share(stages, dps, steps, plant, seed):
    # GIVEN a job of some size, and one kind of stragglers in it
    job = Job(stages=stages, dps=dps, steps=steps, microbatches=8, seed=seed)
    getattr(job, plant)()
    # WHEN it is analysed, THEN that kind is named first; where chance has few to choose from, another may be too
    assert next(iter(named(job)), None) == plant


@pytest.mark.parametrize(
    "plants",
    [("slow_worker", "sequence_lengths"), ("last_stage", "sequence_lengths"), ("last_stage", "garbage_collection")],
)
def test_two_kinds_at_once_are_both_named(plants):
    # GIVEN a job with two kinds of stragglers, of about the same weight
    job = Job(stages=4, dps=4, steps=8, seed=1)
    strengths = {"slow_worker": 2.0, "last_stage": 2.0, "sequence_lengths": 0.35, "garbage_collection": 0.04}
    for plant in plants:
        getattr(job, plant)(strengths[plant])
    # WHEN it is analysed, THEN both are named
    kinds = named(job)
    assert set(plants) <= set(kinds), {code: kind.share for code, kind in kinds.items()}


def test_shares_add_up_where_a_remedy_wins_little_before_the_others():
    # GIVEN a job with a worker that is twice as slow, where microbatches differ so much that replacing it wins little
    job = Job(stages=4, dps=4, steps=8, seed=1)
    slow = job.slow_worker(2.0)
    job.sequence_lengths(0.6)
    operations = arranged(job.rows())
    # WHEN it is analysed, THEN both are named, and the slow worker wins more once the lengths are even
    found = attributed(operations, slowdown_of(operations))
    assert {kind.code for kind in found.kinds} == {"sequence_lengths", "slow_worker"}
    (worker,) = (kind for kind in found.kinds if kind.code == "slow_worker")
    assert worker.workers == (slow,)
    assert worker.wins_last_s > 1.5 * worker.wins_s
    # AND the shares and the jitter that remains are all there is
    assert sum(kind.share for kind in found.kinds) + found.jitter == pytest.approx(1.0)
    assert 0.0 <= found.jitter < 0.15


@pytest.mark.parametrize("spread", [0.6, 0.8, 1.0])
def test_layers_moved_win_little_where_lengths_vary(spread):
    # GIVEN a job whose last stage computes a little longer, and long sequences in all stages
    job = Job(stages=2, dps=8, steps=12, microbatches=8, seed=1)
    job.last_stage(1.3)
    job.sequence_lengths(spread)
    operations = arranged(job.rows())
    found = slowdown_of(operations)
    # WHEN it is analysed, THEN an ideal last stage would win more than half, as it has no more long sequences
    assert found.m_s.share > 0.5
    # AND the remedy, layers moved until both stages have equal work, wins little, even lengths almost all
    remedies = {remedy.kind.code: remedy for remedy in remedies_of(operations)}
    before_s = step_with(operations, [])
    won = {code: (before_s - step_with(operations, [remedy])) / found.lost_s for code, remedy in remedies.items()}
    assert won["last_stage"] < 0.1
    assert won["sequence_lengths"] > 0.85


def test_a_slow_worker_of_the_last_stage_is_not_the_stage():
    # GIVEN a job in which one worker of the last stage is slow, and its peers there are not
    job = Job(stages=4, dps=4, seed=2)
    for way in ("forward", "backward"):
        job.work[job.ops(way, 3), :, 2] *= 1.8
    # WHEN it is analysed, THEN an ideal stage would recover as much, and still it is the worker that is named
    operations = arranged(job.rows())
    found = slowdown_of(operations)
    assert found.m_s.share > 0.9
    assert [(kind.code, kind.workers) for kind in attributed(operations, found).kinds] == [("slow_worker", ((2, 3),))]


def test_stalls_of_one_worker_alone_are_no_garbage_collection():
    # GIVEN a job in which forward computations of one worker stall now and then, and no other worker's do
    job = Job(stages=2, dps=4, steps=8, seed=2)
    forwards = job.ops("forward", 0)
    job.work[forwards[::3], :, 1] += 0.080
    # WHEN it is analysed, THEN that is no garbage collection, which comes to all
    assert {code: kind.workers for code, kind in named(job).items()} == {"stalls": ((1, 0),)}


def test_recorded_collections_count_too():
    # GIVEN a job whose recording has the collector's own runs, of one worker after the other
    job = Job(stages=2, dps=4, steps=8, seed=2)
    for stage in range(2):
        hit = np.arange(8)[:, None] % 4 == np.arange(4)[None, :]
        job.work[job.ops(kind="gc", stage=stage)] = 0.150 * hit
    # WHEN it is analysed, THEN they are what it is named for
    kind = named(job)["garbage_collection"]
    assert (kind.share > 0.9, kind.numbers["of_workers"], kind.numbers["of_steps"]) == (True, 1.0, 1.0)


def test_every_type_of_operation_that_is_slow_is_the_one_named():
    # GIVEN a job whose transfers between stages are slow in every third step, forward
    job = Job(stages=4, dps=4, steps=9, seed=2)
    for kind in ("forward-send", "forward-recv"):
        job.work[job.ops(kind=kind)[:, None], np.arange(0, 9, 3)] += 0.030
    # WHEN it is analysed, THEN it is communication, and says which
    kinds = named(job)
    assert {code: kind.part for code, kind in kinds.items()} == {"communication": "forward-pp-comm"}
