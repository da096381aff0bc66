"""Learning which parameter's gradient comes last: what is taken for known, and how often all hooks go on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sftriage.recorder.gradients import (
    AUDIT_STEPS,
    CALM_STEPS,
    KEPT,
    LESSON_STEPS,
    MAX_LASTS,
    PATIENCE_STEPS,
    Lessons,
)

USUAL = (1, 2, 3, 4)


def taught(tail=USUAL) -> Lessons:
    lessons = Lessons()
    for _ in range(LESSON_STEPS):
        assert lessons.take(tail, False)
    assert not lessons.learning
    return lessons


def test_it_learns_for_a_few_steps_and_keeps_those_that_came_last():
    # GIVEN a job whose two losses take turns
    lessons = Lessons()
    for tail in (USUAL, (5, 6, 7, 8)) * (LESSON_STEPS // 2):
        assert lessons.learning
        # THEN each step's moment is known already while it learns: all have hooks
        assert lessons.take(tail, False)
    # AND afterwards both that came last stay, with those before the latest one
    assert not lessons.learning
    assert lessons.kept == {4, 5, 6, 7, 8}
    assert lessons.take((4,), False)
    assert lessons.take((8,), False)


def test_what_changes_the_order_makes_the_moment_unknown_and_starts_a_lesson_at_once():
    # GIVEN one that has learnt that 4 comes last
    rows = {
        "the last one stayed away": ((1, 2, 3), False),
        "another came after it": ((1, 2, 4, 3), False),
        "no gradient came at all": ((), False),
        "a frozen parameter was thawed": (USUAL, True),
    }
    for what, (tail, thawed) in rows.items():
        lessons = taught()
        assert lessons.take(USUAL, False), what
        # WHEN a step comes in which it is otherwise THEN its moment is not known, and the next steps are lessons
        assert not lessons.take(tail, thawed), what
        assert lessons.learning, what


def test_a_parameter_thawed_while_it_learns_begins_the_lesson_again():
    lessons = Lessons()
    lessons.take(USUAL, False)
    assert not lessons.take(USUAL, True)
    for _ in range(LESSON_STEPS):
        assert lessons.learning
        assert lessons.take((1, 2, 3, 9), False)
    assert not lessons.learning


def test_without_gradients_it_gives_up_for_a_while():
    lessons = Lessons()
    for _ in range(PATIENCE_STEPS):
        assert lessons.learning
        assert not lessons.take((), False)
    assert (lessons.learning, lessons.fruitless, lessons.kept) == (False, True, frozenset())


def test_an_audit_is_one_step_and_becomes_a_lesson_where_it_finds_something_new():
    for found, more in ((USUAL, 0), ((2, 3, 4, 9), LESSON_STEPS - 1)):
        # GIVEN nothing out of order for a long time
        lessons = taught()
        for _ in range(AUDIT_STEPS):
            assert not lessons.learning
            assert lessons.take(USUAL, False)
        # WHEN all hooks have been on for a step
        assert lessons.learning
        assert lessons.take(found, False)
        # THEN it is over, unless a parameter that was not known came last
        for _ in range(more):
            assert lessons.learning
            lessons.take(found, False)
        assert not lessons.learning


def test_after_a_calm_stretch_a_surprise_is_looked_into_at_once():
    # GIVEN one that has been surprised often, and waits longer and longer
    lessons = Lessons()
    for step in range(2000):
        lessons.take((step,), False)
    while not lessons.take(USUAL, False) or lessons.learning:
        pass
    assert not lessons.take((), False)
    assert not lessons.learning
    # WHEN nothing surprises it for long enough THEN the next surprise starts a lesson
    for _ in range(CALM_STEPS):
        assert lessons.take(USUAL, False)
    assert not lessons.take((), False)
    assert lessons.learning


def test_a_model_that_never_ceases_to_surprise_has_all_hooks_on_in_few_steps():
    lessons = Lessons()
    on = 0
    for step in range(10_000):
        on += lessons.learning
        lessons.take((step,), False)
    assert on <= 0.03 * 10_000


tails = st.lists(st.integers(0, 20), max_size=KEPT, unique=True)


@given(steps=st.lists(st.tuples(tails, st.booleans()), max_size=200))
def test_a_moment_is_known_only_if_its_parameter_was_seen_to_be_last_of_all(steps):
    # GIVEN steps in which anything happens
    lessons = Lessons()
    seen: set[int] = set()
    for tail, thawed in steps:
        learning = lessons.learning
        if learning and tail and not thawed:
            seen.add(tail[-1])
        known = lessons.take(tail, thawed)
        # THEN none is taken for the last that has not been the last of all
        assert not known or tail[-1] in seen
        assert known or not (learning and tail) or thawed
        # AND the hooks that stay are few
        assert len(lessons.kept) <= MAX_LASTS + KEPT
