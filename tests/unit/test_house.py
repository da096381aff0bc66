"""The check that the tree does not grow back: what it counts, and that budgets only go down."""

import ast

import pytest

from tests import house, house_mechanisms


def test_a_count_over_its_budget_fails_and_one_without_a_budget_too():
    counted = {"lines": {"a": 3, "b": 1}, "classes": {}, "words": {}}
    budgets = {"lines": {"a": 2}, "classes": {}, "words": {}}
    assert [line.split(", ")[0] for line in house.excesses(counted, budgets)] == ["lines: a: 3", "lines: b: 1"]


def test_budgets_only_go_down():
    # GIVEN counts that are more, less and gone
    counted = {"lines": {"more": 5, "less": 1, "new": 1}}
    assert house.lowered(counted, {"lines": {"more": 4, "less": 2, "gone": 2}}) == {"lines": {"more": 4, "less": 1}}


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("what was told", 1),
        ("def told_by(self)", 1),
        ("class CaptureAsked:", 1),
        ("ask it so many times", 2),
        ("a task, masked; a lanes", 0),
    ],
)
def test_words_are_found_in_prose_and_in_names(text, times):
    assert len(house._WORD.findall(text)) == times


@pytest.mark.parametrize(
    ("loop", "is_one"),
    [
        ("while True:\n try:\n  act()\n except OSError:\n  time.sleep(1)", True),
        ("while not over.wait(1):\n act()", False),
        ("for one in many:\n try:\n  act()\n except OSError:\n  pass", False),
    ],
)
def test_a_loop_that_waits_before_it_tries_again_is_a_retry_loop(loop, is_one):
    assert ("retry" in {mechanism for _, mechanism in house_mechanisms.uses(ast.parse(loop))}) == is_one
