"""However many steps of a rank a message holds: the windows are the same to the bit, and so are the verdicts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet_job import SCHEMA, Job
from bench.fleet_job import Shape as JobShape
from sftriage.controller.windows import WindowAssembly
from sftriage.fleet.incoming import RowBuffer
from sftriage.fleet.shipping import LONGEST_SHIP_S, RANKS_A_SECOND, SHIP_S, ship_s
from sftriage.fleet.wire import Block, decode_shipment, encode
from sftriage.verdicts import Settings, judge
from sftriage.windows.gather import Shape
from sftriage.windows.shipped import RankLocation, Rows
from tests.unit.fleet.shipments import info, shipment

RANKS, RANKS_PER_AGENT, STEPS = 6, 2, 40


@pytest.mark.parametrize(
    ("world_size", "wanted_s"),
    [(1, SHIP_S), (RANKS_A_SECOND, SHIP_S), (2 * RANKS_A_SECOND, 2 * SHIP_S), (100_000, LONGEST_SHIP_S)],
)
def test_only_in_a_very_large_job_it_is_told_less_often(world_size, wanted_s):
    assert ship_s(world_size) == wanted_s


def told(job, ranks, first, last):
    """Some steps of an agent's ranks as its message brings them."""
    infos = {rank: info(rank, world_size=RANKS, schema=SCHEMA) for rank in ranks}
    located = {rank: RankLocation("node-a") for rank in ranks}
    rows = Rows(0, SCHEMA, RANKS, located, job.steps(ranks, first, last))
    (block,) = decode_shipment(encode(shipment(Block(infos, rows)))).blocks
    return dataclasses.replace(block.rows, agent=str(ranks.start), position=last)


def verdicts(job, lengths):
    """Verdicts and windows where each agent's messages hold so many steps, and the accounting of each window."""
    held, gathering, past, found = RowBuffer(60.0), WindowAssembly(Shape(20, 10, 2)), None, []
    sent = [0] * len(lengths)
    for second in range(1, STEPS + 1):
        for agent, length in enumerate(lengths):
            if second % length == 0 or second == STEPS:
                held.add(told(job, job.shape.ranks_of(agent), sent[agent], second), 0.0)
                sent[agent] = second
        for window in gathering.add(held.due(0.0), ended=second == STEPS):
            verdict, past = judge(window, past, Settings())
            found.append((window, verdict))
    return found


@settings(max_examples=15)
@given(
    slow_rank=st.integers(0, RANKS - 1),
    slow_from=st.integers(0, STEPS),
    lengths=st.lists(st.integers(1, 7), min_size=RANKS // RANKS_PER_AGENT, max_size=RANKS // RANKS_PER_AGENT),
)
def test_verdicts_do_not_depend_on_how_many_steps_a_message_holds(slow_rank, slow_from, lengths):
    # GIVEN a job of which a rank becomes slow, on hosts that tell every step, or several at once, each as it likes
    job = Job(JobShape(RANKS, RANKS_PER_AGENT, 1.0, slow_rank, slow_from), 0.0)
    job._kept_steps = STEPS + 1
    while len(job.ends_s) < STEPS:
        job._step()
    # WHEN both are judged
    each, several = verdicts(job, [1] * len(lengths)), verdicts(job, lengths)
    # THEN windows and verdicts are the same, and advances add up to the exposed time
    assert len(each) == len(several) > 0
    for (one, verdict), (other, its) in zip(each, several, strict=True):
        np.testing.assert_array_equal(one.durations_NRS, other.durations_NRS)
        assert verdict == its
        assert sum(its.advances_s.values()) == pytest.approx(its.exposed_s, rel=1e-12)
