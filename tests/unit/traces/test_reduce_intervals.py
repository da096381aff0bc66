"""Sets of intervals and self time: exact, to the nanosecond, whatever overlaps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftriage.traces.reduce.intervals import Spans, self_time, union

EVENTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


def arrays(events):
    start = np.array([start for start, _ in events], dtype=np.int64)
    return start, start + np.array([length for _, length in events], dtype=np.int64)


def moments(spans: Spans) -> set[int]:
    return {t for start, end in zip(spans.start_K, spans.end_K, strict=True) for t in range(start, end)}


def covered(events) -> set[int]:
    return {t for start, length in events for t in range(start, start + length)}


@given(EVENTS)
def test_self_times_sum_to_the_time_covered(events):
    # GIVEN any events of a thread, nested, crossing, empty or apart
    start, end = arrays(events)
    # WHEN their time is split among them
    pieces = self_time(start, end)
    # THEN the pieces are disjoint, sum to what the events cover, and none lies outside its event
    assert (pieces.end_P - pieces.start_P).sum() == len(covered(events))
    assert (pieces.end_P > pieces.start_P).all()
    assert (pieces.start_P[1:] >= pieces.end_P[:-1]).all()
    assert (pieces.start_P >= start[pieces.owner_P]).all()
    assert (pieces.end_P <= end[pieces.owner_P]).all()


@given(EVENTS)
def test_each_moment_belongs_to_the_event_that_began_last(events):
    start, end = arrays(events)
    pieces = self_time(start, end)
    for owner, begin, finish in zip(pieces.owner_P, pieces.start_P, pieces.end_P, strict=True):
        for t in range(begin, finish):
            open_then = [(s, -length) for s, length in events if s <= t < s + length]
            assert (start[owner], start[owner] - end[owner]) == max(open_then)


def test_self_time_of_events_that_nest_is_what_their_children_leave():
    # GIVEN a step of 100 with a stage of 60 in it, and in that two operators of 20 and 10
    start, end = arrays([(0, 100), (10, 60), (20, 20), (50, 10)])
    pieces = self_time(start, end)
    # THEN each keeps what is not in its children
    spent = np.bincount(pieces.owner_P, weights=pieces.end_P - pieces.start_P)
    assert spent.tolist() == [40, 30, 20, 10]


@given(EVENTS, EVENTS)
def test_spans_are_sets_of_moments(some, others):
    a, b = union(*arrays(some)), union(*arrays(others))
    assert moments(a) == covered(some)
    assert moments(a.clipped(b)) == covered(some) & covered(others)
    assert moments(a.without(b)) == covered(some) - covered(others)
    assert a.total_ns == len(covered(some))


@given(EVENTS, st.integers(0, 100), st.integers(0, 100))
def test_what_lies_within_an_interval(events, one, other):
    begin, finish = min(one, other), max(one, other)
    found = union(*arrays(events)).within(np.array([begin]), np.array([finish]))
    assert found.tolist() == [len(covered(events) & set(range(begin, finish)))]
