"""Rows of hosts that ship at moments of their own come to windows together."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.fleet.together import Together
from tests.unit.fleet.shipments import rows

HOLD_S = 12.0


def last_steps(told):
    return {one.agent: int(one.steps.step_B.max()) for one in told if len(one.steps)}


def sent(agent, ranks, first, count, position, **more):
    return rows(ranks, first, count, agent=agent, position=position, **more)


def test_what_one_host_is_ahead_waits_for_the_other():
    held = Together(HOLD_S)
    held.add(sent("a", (0, 1), 0, 100, 1), 0.0)
    assert held.told(0.5) == []
    # WHEN the other host has come as far as step 79
    held.add(sent("b", (2, 3), 0, 80, 2), 0.6)
    told = held.told(0.7)
    # THEN both are told up to that step; nothing of a's message is settled by that
    assert last_steps(told) == {"a": 79, "b": 79}
    assert [one.position for one in told] == [0, 2]
    assert held.holds("a", 1)
    # AND the rest once the other has come further
    held.add(sent("b", (2, 3), 80, 60, 3), 1.0)
    assert last_steps(held.told(1.1)) == {"a": 99, "b": 99}
    assert not held.holds("a", 1)
    assert held.holds("b", 3)


def test_nobody_waits_for_ranks_that_are_away_nor_for_ever():
    held = Together(HOLD_S)
    held.add(sent("a", (0, 1), 0, 10, 1), 0.0)
    assert last_steps(held.told(1.0, away=(2, 3))) == {"a": 9}
    held.add(sent("a", (0, 1), 10, 10, 2), 1.0)
    assert held.told(1.0 + HOLD_S - 0.1) == []
    assert last_steps(held.told(1.0 + HOLD_S)) == {"a": 19}


def test_a_generation_that_is_over_waits_for_nobody():
    held = Together(HOLD_S)
    held.add(sent("a", (0, 1), 0, 10, 1), 0.0)
    held.add(sent("b", (2, 3), 0, 5, 2, generation=1), 0.0)
    assert last_steps(held.told(0.1)) == {"a": 9}


def test_a_generation_is_not_told_of_before_all_of_its_ranks_have_come():
    # GIVEN a host whose ranks have started again, and have taken steps or none
    held = Together(HOLD_S)
    held.add(sent("a", (0, 1), 0, 0, 1, generation=1), 0.0)
    assert held.told(0.1) == []
    held.add(sent("a", (0, 1), 0, 3, 2, generation=1), 1.0)
    # THEN what the other host still has to tell of before comes first
    held.add(sent("b", (2, 3), 0, 10, 3), 1.1)
    assert last_steps(held.told(1.2)) == {"b": 9}
    held.add(sent("b", (2, 3), 0, 2, 4, generation=1), 2.0)
    assert last_steps(held.told(2.1)) == {"a": 1, "b": 1}


@settings(max_examples=20)
@given(data=st.data())
def test_every_step_is_told_once_and_each_hosts_in_its_order(data):
    held, told = Together(HOLD_S), []
    came = {"a": 0, "b": 0}
    for position in range(1, data.draw(st.integers(1, 12))):
        agent = data.draw(st.sampled_from("ab"))
        count = data.draw(st.integers(0, 5))
        ranks = (0, 1) if agent == "a" else (2, 3)
        some = sent(agent, ranks, came[agent], count, position)
        held.add(replace(some, device_steps=some.steps if data.draw(st.booleans()) else None), 0.0)
        came[agent] += count
        if data.draw(st.booleans()):
            told += held.told(0.0)
            # THEN nobody is told of a step that another host has not come to
            assert all(last <= min(came.values()) - 1 for last in last_steps(told).values())
    told += held.told(HOLD_S)
    for agent, count in came.items():
        lots = [one.steps.step_B[one.steps.rank_B == (0 if agent == "a" else 2)] for one in told if one.agent == agent]
        np.testing.assert_array_equal(np.concatenate([np.zeros(0, dtype=int), *lots]), np.arange(count))
        positions = [one.position for one in told if one.agent == agent and len(one.steps)]
        assert positions == sorted(positions)
