"""Sets of intervals and self time: exact, to the nanosecond, whatever overlaps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftriage.reduce.intervals import Intervals, _drawn_out, _largest, _nested, _one_by_one, self_time, union

EVENTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


def arrays(events):
    start = np.array([start for start, _ in events], dtype=np.int64)
    return start, start + np.array([length for _, length in events], dtype=np.int64)


def moments(spans: Intervals) -> set[int]:
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


@given(EVENTS)
def test_events_that_nest_are_split_at_once_as_one_by_one(events):
    # GIVEN events in order, none of them empty
    start, end = arrays([one for one in events if one[1]])
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    crossing = any(a < c < b < d for a, b in zip(start, end, strict=True) for c, d in zip(start, end, strict=True))
    # THEN those that cross are not split at once, and the others as they would be one by one
    at_once = _nested(start, end) if len(start) else None
    assert (at_once is None) == (crossing or not len(start))
    # AND so are those that cross, with their ends put off
    for split in (at_once, _nested(start, _drawn_out(start, end)) if len(start) else None):
        for some, others in zip(split or (), _one_by_one(start, end), strict=False):
            assert some.tolist() == others.tolist()


def test_events_that_cross_once_in_a_while_are_split_at_once():
    # GIVEN steps of a clock that lets each end a little after the next one began, with operators in them
    start, end = arrays([(begin, 102) for begin in range(0, 1000, 100)] + [(t, 3) for t in range(5, 1000, 10)])
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    assert _nested(start, end) is None
    for some, others in zip(_nested(start, _drawn_out(start, end)), _one_by_one(start, end), strict=True):
        assert some.tolist() == others.tolist()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12))
def test_the_largest_of_ranges(rows):
    values, first, length = (np.array(column) for column in zip(*rows, strict=True))
    first = first % (len(values) + 1)
    last = np.minimum(first + length, len(values))
    found = _largest(values, first, last)
    expected = [max(values[a:b].tolist(), default=np.iinfo(np.int64).min) for a, b in zip(first, last, strict=True)]
    assert found.tolist() == expected


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


@given(EVENTS)
def test_which_moments_spans_hold(events):
    held = union(*arrays(events)).hold(np.arange(100))
    assert set(np.flatnonzero(held).tolist()) == covered(events)
