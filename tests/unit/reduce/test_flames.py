"""What a stage was spent on: nothing of it is lost between the samples and the drawing, and none is there twice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.reduce import samples as module
from sftriage.reduce.samples import OTHERS, Folded, Frame, collapsed, flames, fold
from tests.unit.reduce.test_causes import GET, LOOP, samples

OPEN = Frame("Images.__getitem__", "/job/data.py", 60, "image = Image.open(path)")
DECODE = Frame("decode;all", "/job/data.py", 80, "total += 1")
MAIN = Frame("main", "/job/train.py", 14, "loss.backward()")

frames = st.builds(Frame, st.sampled_from("abc"), st.sampled_from(["x.py", "y.py"]), st.integers(1, 3))
folds = st.builds(
    Folded,
    st.lists(st.tuples(st.lists(frames, min_size=1, max_size=6).map(tuple), st.integers(0, 10**9)), max_size=12),
    st.just(1),
    st.integers(1, 20),
)
measured = st.none() | st.floats(0.0, 10.0)


def names(flame):
    return {one.path: (one.kind, one.frame.function) for one in flame.walk()}


@given(folds, measured)
def test_what_a_function_took_is_what_it_called_and_where_it_stood(folded, took_s):
    root = flames((folded, took_s))
    for one in root.walk():
        if one.kind != "line" and (one.kind == "function" or folded.weight_ns):
            assert sum(below.took_s for below in one.children) == pytest.approx(one.took_s)
    # AND all of it is the time of the stage, as it was measured where that is known
    whole_s = folded.weight_ns * 1e-9 / folded.steps if took_s is None else took_s
    assert root.took_s == pytest.approx(whole_s)


@given(folds, folds, measured, measured)
def test_the_difference_turns_around_with_the_sides(one, other, took_s, beside_s):
    there = flames((one, took_s), (other, beside_s))
    back = {flame.path: flame for flame in flames((other, beside_s), (one, took_s)).walk()}
    assert names(there) == {path: (flame.kind, flame.frame.function) for path, flame in back.items()}
    for flame in there.walk():
        assert flame.more_s == -back[flame.path].more_s
        assert [below.path for below in flame.children] == [below.path for below in back[flame.path].children]


def test_a_function_is_the_same_wherever_in_it_it_was_met_and_its_lines_are_below_it():
    # GIVEN a loop that was met 6 times asleep and twice at work on another line of the same function
    taken = samples(((LOOP, GET), 6), ((LOOP, OPEN), 2))
    # WHEN it is folded
    root = flames((fold(taken, taken.training, "data"), None))
    (main,) = root.children
    (get,) = main.children
    # THEN the function is there once, with the line at which it was the most, and both lines are in it
    assert (main.frame.function, get.frame) == ("main", GET)
    assert [(one.kind, one.frame) for one in get.children] == [("line", GET), ("line", OPEN)]
    assert [one.took_s for one in get.children] == pytest.approx([0.030, 0.010])


def test_a_step_is_the_mean_of_all_that_were_looked_at_though_some_have_no_sample():
    taken = samples(((LOOP,), 8))
    taken = replace(taken, step_N=(1, 1, 1, 1, 4, 4, 4, 4))
    assert flames((fold(taken, taken.training, "data"), None)).took_s == pytest.approx(0.040 / 4)
    assert flames((fold(taken, taken.training, "data", {4, 9}), None)).took_s == pytest.approx(0.020)
    # AND a stage that no sample met took what it took, as far as that was measured
    missed = fold(taken, taken.training, "forward")
    assert [flames((missed, took_s)).took_s for took_s in (None, 0.0005)] == [0.0, 0.0005]


def test_of_very_many_stacks_the_least_are_put_together(monkeypatch):
    # GIVEN more different stacks than are told apart
    monkeypatch.setattr(module, "MAX_STACKS", 3)
    taken = samples(*(((LOOP, replace(GET, line=line)), 6 - line) for line in range(1, 6)))
    # WHEN they are folded THEN nothing is lost
    folded = fold(taken, taken.training, "data")
    assert folded.stacks_ns[-1] == ((OTHERS,), 15_000_000)
    assert folded.weight_ns == 75_000_000
    # AND of a very deep one, its end counts for the last function that is kept
    monkeypatch.setattr(module, "MAX_DEPTH", 2)
    deep = samples(((LOOP, MAIN, GET), 1), ((LOOP, MAIN, OPEN), 1))
    (main,) = flames((fold(deep, deep.training, "data"), None)).children[0].children
    assert (main.frame, main.took_s, [one.kind for one in main.children]) == (MAIN, 0.010, ["line"])


def test_collapsed_stacks_are_a_line_each_with_microseconds():
    taken = samples(((LOOP, GET), 6), ((LOOP, DECODE), 2), other=0.5)
    lines = list(collapsed(taken))
    assert lines == [
        "MainThread;data;main (train.py:12);Images.__getitem__ (data.py:57) 30000",
        "statistics;data;spin (statistics.py:4) 40000",
        "MainThread;data;main (train.py:12);decode:all (data.py:80) 10000",
    ]
