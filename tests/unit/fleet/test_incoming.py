"""Rows of hosts that ship at moments of their own come to windows together, however many steps a message holds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet_job import SCHEMA, Job
from bench.fleet_job import Shape as JobShape
from sftriage.controller.agents import WindowAssembly
from sftriage.fleet.incoming import MAX_NAMED, Deduplicator, Refusals, RowBuffer
from sftriage.fleet.shipping import LONGEST_SHIP_S, RANKS_A_SECOND, SHIP_S, ship_s
from sftriage.fleet.wire import Incarnation, decode_shipment, encode
from sftriage.model.verdicts import Settings
from sftriage.verdict.judging import judge
from sftriage.windows.gather import Shape
from sftriage.windows.rings import Rows
from tests.unit.fleet.shipments import info, rows, shipment, steps

HOLD_S = 12.0


def last_steps(released):
    return {one.agent: int(one.steps.step_B.max()) for one in released if len(one.steps)}


def sent(agent, ranks, first, count, position, **more):
    return rows(ranks, first, count, agent=agent, position=position, **more)


def test_what_one_host_is_ahead_waits_for_the_other():
    held = RowBuffer(HOLD_S)
    held.add(sent("a", (0, 1), 0, 100, 1), 0.0)
    assert held.due(0.5) == []
    # WHEN the other host has come as far as step 79
    held.add(sent("b", (2, 3), 0, 80, 2), 0.6)
    released = held.due(0.7)
    # THEN both are released up to that step, which does not settle a's message
    assert last_steps(released) == {"a": 79, "b": 79}
    assert [one.position for one in released] == [0, 2]
    assert held.holds("a", 1)
    # AND the rest once the other has come further
    held.add(sent("b", (2, 3), 80, 60, 3), 1.0)
    assert last_steps(held.due(1.1)) == {"a": 99, "b": 99}
    assert not held.holds("a", 1)
    assert held.holds("b", 3)


def test_rows_do_not_wait_for_ranks_that_are_away_nor_for_ever():
    held = RowBuffer(HOLD_S)
    held.add(sent("a", (0, 1), 0, 10, 1), 0.0)
    assert last_steps(held.due(1.0, away=(2, 3))) == {"a": 9}
    held.add(sent("a", (0, 1), 10, 10, 2), 1.0)
    assert held.due(1.0 + HOLD_S - 0.1) == []
    assert last_steps(held.due(1.0 + HOLD_S)) == {"a": 19}


def test_a_finished_generation_is_released_at_once():
    held = RowBuffer(HOLD_S)
    held.add(sent("a", (0, 1), 0, 10, 1), 0.0)
    held.add(sent("b", (2, 3), 0, 5, 2, generation=1), 0.0)
    assert last_steps(held.due(0.1)) == {"a": 9}


def test_a_generation_is_released_once_all_of_its_ranks_have_appeared():
    # GIVEN a host whose ranks have started again, and have taken steps or none
    held = RowBuffer(HOLD_S)
    held.add(sent("a", (0, 1), 0, 0, 1, generation=1), 0.0)
    assert held.due(0.1) == []
    held.add(sent("a", (0, 1), 0, 3, 2, generation=1), 1.0)
    # THEN what the other host still has to tell of before comes first
    held.add(sent("b", (2, 3), 0, 10, 3), 1.1)
    assert last_steps(held.due(1.2)) == {"b": 9}
    held.add(sent("b", (2, 3), 0, 2, 4, generation=1), 2.0)
    assert last_steps(held.due(2.1)) == {"a": 1, "b": 1}


@settings(max_examples=20)
@given(data=st.data())
def test_every_step_is_released_once_and_in_the_order_of_its_host(data):
    held, released = RowBuffer(HOLD_S), []
    came = {"a": 0, "b": 0}
    for position in range(1, data.draw(st.integers(1, 12))):
        agent = data.draw(st.sampled_from("ab"))
        count = data.draw(st.integers(0, 5))
        ranks = (0, 1) if agent == "a" else (2, 3)
        some = sent(agent, ranks, came[agent], count, position)
        held.add(replace(some, device_steps=some.steps if data.draw(st.booleans()) else None), 0.0)
        came[agent] += count
        if data.draw(st.booleans()):
            released += held.due(0.0)
            # THEN no step is released before all hosts have reached it
            assert all(last <= min(came.values()) - 1 for last in last_steps(released).values())
    released += held.due(HOLD_S)
    for agent, count in came.items():
        mine, rank = [rows for rows in released if rows.agent == agent], 0 if agent == "a" else 2
        lots = [rows.steps.step_B[rows.steps.rank_B == rank] for rows in mine]
        np.testing.assert_array_equal(np.concatenate([np.zeros(0, dtype=int), *lots]), np.arange(count))
        positions = [rows.position for rows in mine if len(rows.steps)]
        assert positions == sorted(positions)


OF = {rank: Incarnation.of("boot-a", info(rank)) for rank in (0, 1)}


def passed_on(dedup, ranks, first, count):
    return sorted(dedup.new(steps(ranks, first, count), OF).step_B.tolist())


def test_what_is_missing_between_two_messages_is_counted():
    dedup = Deduplicator()
    # GIVEN ranks that had taken steps before anybody listened
    passed_on(dedup, (0, 1), 100, 3)
    assert dedup.missed == 0
    # WHEN rank 1 comes back seven steps later
    passed_on(dedup, (1,), 110, 2)
    assert (dedup.steps, dedup.missed) == (8, 7)


def test_ranks_that_are_of_no_known_process_are_left_out():
    dedup = Deduplicator()
    assert dedup.new(steps((0, 1), 0, 3), {1: OF[1]}).rank_B.tolist() == [1, 1, 1]


@given(order=st.permutations(range(8)), split=st.integers(0, 8))
def test_the_order_within_a_message_decides_nothing(order, split):
    dedup, whole = Deduplicator(), steps((0,), 0, 8)
    dedup.new(whole[:split], OF)
    assert sorted(dedup.new(whole[np.array(order)], OF).step_B.tolist()) == list(range(split, 8))
    assert (dedup.steps, dedup.missed) == (8, 0)


def test_a_flood_of_names_is_counted_and_logged_a_few_times(caplog):
    refusals = Refusals()
    names = ["\x1b[31m", "", "a.b", "*", "\u202e", *(f"node-{number}" for number in range(1000))]
    for _ in range(10):
        for name in names:
            refusals.note(name, "garbage")
    assert len(refusals.problems) == len(caplog.messages) <= MAX_NAMED + 1
    assert sum(int(how.split()[0]) for how in refusals.problems.values()) == 10 * len(names)
    assert all(message.isprintable() for message in (*caplog.messages, *refusals.problems))


RANKS, RANKS_PER_AGENT, STEPS = 6, 2, 40


@pytest.mark.parametrize(
    ("world_size", "wanted_s"),
    [(1, SHIP_S), (RANKS_A_SECOND, SHIP_S), (2 * RANKS_A_SECOND, 2 * SHIP_S), (100_000, LONGEST_SHIP_S)],
)
def test_only_a_very_large_job_ships_less_often(world_size, wanted_s):
    assert ship_s(world_size) == wanted_s


def released(job, ranks, first, last):
    """Some steps of an agent's ranks as its message brings them."""
    infos = {rank: info(rank, world_size=RANKS, schema=SCHEMA) for rank in ranks}
    sent = shipment(Rows(0, SCHEMA, RANKS, infos, job.steps(ranks, first, last)))
    return replace(decode_shipment(encode(sent)).rows[0], agent=str(ranks.start), position=last)


def verdicts(job, lengths):
    """Verdicts and windows where each agent's messages hold that many steps, and the accounting of each window."""
    held, gathering, past, found = RowBuffer(60.0), WindowAssembly(Shape(20, 10, 2)), None, []
    sent = [0] * len(lengths)
    for second in range(1, STEPS + 1):
        for agent, length in enumerate(lengths):
            if second % length == 0 or second == STEPS:
                held.add(released(job, job.shape.ranks_of(agent), sent[agent], second), 0.0)
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
