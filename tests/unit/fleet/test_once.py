"""Steps that come twice are told once, and those that never come are counted, in whatever order they lie."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftriage.fleet.messages import Incarnation
from sftriage.fleet.once import Once
from tests.unit.fleet.shipments import info, steps

OF = {rank: Incarnation.of("boot-a", info(rank)) for rank in (0, 1)}


def told(once, ranks, first, count):
    return sorted(once.new(steps(ranks, first, count), OF).step_B.tolist())


def test_what_has_been_told_is_not_told_again():
    once = Once()
    assert told(once, (0, 1), 0, 3) == [0, 0, 1, 1, 2, 2]
    # WHEN the agent is started again, and reads its rings from their beginning
    assert told(once, (0, 1), 0, 5) == [3, 3, 4, 4]
    assert told(once, (0, 1), 0, 5) == []
    assert (once.steps, once.missed) == (10, 0)


def test_what_is_missing_between_two_messages_is_counted():
    once = Once()
    # GIVEN ranks that had taken steps before anybody listened
    told(once, (0, 1), 100, 3)
    assert once.missed == 0
    # WHEN rank 1 comes back seven steps later
    told(once, (1,), 110, 2)
    assert (once.steps, once.missed) == (8, 7)


def test_ranks_that_are_of_no_known_process_are_left_out():
    once = Once()
    assert once.new(steps((0, 1), 0, 3), {1: OF[1]}).rank_B.tolist() == [1, 1, 1]


@given(order=st.permutations(range(8)), split=st.integers(0, 8))
def test_the_order_within_a_message_decides_nothing(order, split):
    once, whole = Once(), steps((0,), 0, 8)
    once.new(whole[:split], OF)
    assert sorted(once.new(whole[np.array(order)], OF).step_B.tolist()) == list(range(split, 8))
    assert (once.steps, once.missed) == (8, 0)
