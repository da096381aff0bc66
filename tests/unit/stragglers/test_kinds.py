"""A truth table: one kind of stragglers planted in a job, that kind named and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.stragglers.pipeline import arranged
from sftriage.stragglers.slowdown import kinds_of, slowdown_of
from tests.unit.stragglers.planted import Job

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


def named(job):
    operations = arranged(job.rows())
    return {kind.code: kind for kind in kinds_of(operations, slowdown_of(operations))}


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
    # WHEN it is analysed, THEN that kind is named, and no other, and most of the slowdown would go with it
    assert list(kinds) == [plant]
    assert kinds[plant].share > 0.5
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
    assert (found.m_w, found.m_s, found.by_worker(), kinds_of(operations, found)) == (None, None, {}, ())


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


def test_a_hidden_kind_is_found_once_the_others_are_fixed():
    # GIVEN a job with a worker that is twice as slow, where microbatches differ so much that mending it wins little
    job = Job(stages=4, dps=4, steps=8, seed=1)
    slow = job.slow_worker(2.0)
    job.sequence_lengths(0.6)
    # WHEN it is analysed, THEN both are named, the one behind the other, and together they are about all there is
    first, second = named(job).values()
    assert (first.code, first.hidden_by) == ("sequence_lengths", ())
    assert (second.code, second.workers, second.hidden_by) == ("slow_worker", (slow,), ("sequence_lengths",))
    assert first.share + second.share == pytest.approx(1.0, abs=0.1)


def test_a_slow_worker_of_the_last_stage_is_not_the_stage():
    # GIVEN a job in which one worker of the last stage is slow, and its peers there are not
    job = Job(stages=4, dps=4, seed=2)
    for way in ("forward", "backward"):
        job.work[job.ops(way, 3), :, 2] *= 1.8
    # WHEN it is analysed, THEN mending the stage would recover as much, and still it is the worker that is named
    operations = arranged(job.rows())
    found = slowdown_of(operations)
    assert found.m_s.share > 0.9
    assert [(kind.code, kind.workers) for kind in kinds_of(operations, found)] == [("slow_worker", ((2, 3),))]


def test_stalls_of_one_worker_alone_are_no_garbage_collection():
    # GIVEN a job in which forward computations of one worker stall now and then, and no other worker's do
    job = Job(stages=2, dps=4, steps=8, seed=2)
    forwards = job.ops("forward", 0)
    job.work[forwards[::3], :, 1] += 0.080
    # WHEN it is analysed, THEN that is no garbage collection, which comes to all
    assert {code: kind.workers for code, kind in named(job).items()} == {"slow_worker": ((1, 0),)}


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
