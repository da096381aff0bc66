"""Sets of intervals and self time: exact, to the nanosecond, whatever overlaps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftriage.reduce.intervals import Intervals, _nested, _one_by_one, self_time, union

EVENTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


def arrays(events):
    start = np.array([start for start, _ in events], dtype=np.int64)
    return start, start + np.array([length for _, length in events], dtype=np.int64)


def moments(spans: Intervals) -> set[int]:
    return {t for start, end in zip(spans.start_K, spans.end_K, strict=True) for t in range(start, end)}


def covered(events) -> set[int]:
    return {t for start, length in events for t in range(start, start + length)}


@given(EVENTS)
def test_each_moment_that_is_covered_belongs_to_the_event_that_began_last(events):
    # GIVEN any events of a thread, nested, crossing, empty or apart
    start, end = arrays(events)
    pieces = self_time(start, end)
    # THEN the pieces are disjoint, and sum to what the events cover
    assert (pieces.end_P - pieces.start_P).sum() == len(covered(events))
    assert (pieces.end_P > pieces.start_P).all()
    assert (pieces.start_P[1:] >= pieces.end_P[:-1]).all()
    # AND each moment is of the one that began last of those open, the shortest of those that began together
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
    for some, others in zip(at_once or (), _one_by_one(start, end), strict=False):
        assert some.tolist() == others.tolist()


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
