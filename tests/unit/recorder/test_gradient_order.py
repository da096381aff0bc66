"""Learning which parameter's gradient comes last: what is taken for known, and how often all hooks go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.recorder.gradients import (
    AUDIT_STEPS,
    KEPT,
    LEARNING_STEPS,
    MAX_ENDINGS,
    MAX_LOOKS,
    STEPS_A_LOOK,
    GradientOrder,
)

USUAL = [(1, 2, 3, 4)]


def learned(visits=USUAL) -> GradientOrder:
    order = GradientOrder()
    for _ in range(LEARNING_STEPS):
        assert order.take(visits, False)
    assert not order.learning
    return order


def test_it_learns_for_a_few_steps_and_keeps_those_that_came_last():
    # GIVEN a job whose two losses take turns, the second one after a backward of its own
    order = GradientOrder()
    other = [(9,), (5, 6, 7, 8)]
    for step in range(LEARNING_STEPS + 1):
        assert order.learning
        # THEN each step's moment is known already while it learns: all have hooks
        assert order.take(other if step % 2 else USUAL, False)
    # AND afterwards both that came last stay, with those before them
    assert not order.learning
    assert order.kept == {1, 2, 3, 4, 5, 6, 7, 8, 9}
    assert order.take([(4,)], False)
    assert order.take([(9,), (8,)], False)


@pytest.mark.parametrize(
    ("visits", "thawed"),
    [([(1, 2, 3)], False), ([(1, 2, 4, 3)], False), ([(3,), (4,)], False), ([], False), (USUAL, True)],
    ids=["the last one stayed away", "another came after it", "another visit", "no gradient", "a parameter thawed"],
)
def test_what_changes_the_order_makes_the_moment_unknown_and_is_learned_at_once(visits, thawed):
    # GIVEN one that has learned that 4 comes last
    order = learned()
    assert order.take(USUAL, False)
    # WHEN a step comes in which it is otherwise THEN its moment is not known, and the next steps are looked at
    assert not order.take(visits, thawed)
    assert order.learning


def test_a_parameter_thawed_while_it_learns_begins_the_learning_again():
    order = GradientOrder()
    order.take(USUAL, False)
    assert not order.take(USUAL, True)
    for _ in range(LEARNING_STEPS):
        assert order.learning
        assert order.take([(1, 2, 3, 9)], False)
    assert not order.learning


def test_without_gradients_it_gives_up_for_a_while():
    order = GradientOrder()
    for _ in range(MAX_LOOKS):
        assert order.learning
        assert not order.take([], False)
    assert (order.learning, order.kept) == (False, frozenset())


@pytest.mark.parametrize(("found", "more"), [(USUAL, 0), ([(2, 3, 4, 9)], LEARNING_STEPS - 1)])
def test_an_audit_is_one_step_and_goes_on_where_it_finds_something_new(found, more):
    # GIVEN nothing out of order for a long time
    order = learned()
    for _ in range(AUDIT_STEPS):
        assert not order.learning
        assert order.take(USUAL, False)
    # WHEN all hooks have been on for a step
    assert order.learning
    assert order.take(found, False)
    # THEN it is over, unless a parameter that was not known came last
    for _ in range(more):
        assert order.learning
        order.take(found, False)
    assert not order.learning


def test_a_surprise_is_looked_into_once_there_is_budget_again():
    # GIVEN one that surprises have cost all it had
    order = GradientOrder()
    step = 0
    while order.learning:
        order.take([(step := step + 1,)], False)
    assert step == MAX_LOOKS
    # WHEN known steps and surprises follow THEN the first surprise that can be paid for is looked into
    for _ in range(LEARNING_STEPS * STEPS_A_LOOK - 2):
        assert order.take([(step,)], False)
    assert not order.take([(0,)], False)
    assert not order.learning
    assert not order.take([(0,)], False)
    assert order.learning


def test_a_model_that_never_ceases_to_surprise_has_all_hooks_on_in_few_steps():
    order = GradientOrder()
    on = 0
    for step in range(10_000):
        on += order.learning
        order.take([(step,)], False)
    assert on <= 0.03 * 10_000


a_visit = st.lists(st.integers(0, 20), min_size=1, max_size=KEPT, unique=True).map(tuple)


@given(steps=st.lists(st.tuples(st.lists(a_visit, max_size=3), st.booleans()), max_size=200))
def test_a_moment_is_known_only_if_its_visits_were_seen_to_end_so(steps):
    # GIVEN steps in which anything happens
    order = GradientOrder()
    seen = set()
    for visits, thawed in steps:
        learning = order.learning
        ending = visits and (visits[-1][-1], frozenset(visit[-1] for visit in visits[:-1]))
        if learning and visits and not thawed:
            seen.add(ending)
        known = order.take(visits, thawed)
        # THEN none is known that has not been seen with all hooks on
        assert not known or ending in seen
        assert known or not (learning and visits) or thawed
        # AND the hooks that stay are few
        assert len(order.kept) <= MAX_ENDINGS * 3 * KEPT
