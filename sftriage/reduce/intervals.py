"""Time as sets of intervals, in whole nanoseconds: nothing is lost to rounding, so what is split adds up again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Disjoint intervals in order: K starts and K ends, each end after its start and no later than the next start."""

    start_K: Ints
    end_K: Ints

    @property
    def total_ns(self) -> int:
        return int((self.end_K - self.start_K).sum())

    def before(self, moments: Ints) -> Ints:
        """For each moment, how much of the spans lies before it."""
        if not len(self.start_K):
            return np.zeros(len(moments), dtype=np.int64)
        whole_K = np.concatenate([[0], np.cumsum(self.end_K - self.start_K)])
        last = np.searchsorted(self.start_K, moments, side="right") - 1
        inside = np.minimum(moments, self.end_K[last]) - self.start_K[last]
        return np.where(last >= 0, whole_K[last] + inside, 0).astype(np.int64)

    def within(self, start_N: Ints, end_N: Ints) -> Ints:
        return self.before(end_N) - self.before(start_N)

    def hold(self, moments: Ints) -> NDArray[np.bool_]:
        return self.before(moments + 1) > self.before(moments)

    def clipped(self, to: Intervals) -> Intervals:
        return self._pieces(to, inside=True)

    def without(self, other: Intervals) -> Intervals:
        return self._pieces(other, inside=False)

    def _pieces(self, other: Intervals, *, inside: bool) -> Intervals:
        edges = np.unique(np.concatenate([self.start_K, self.end_K, other.start_K, other.end_K]))
        if len(edges) < 2:
            return NOTHING
        start, end = edges[:-1], edges[1:]
        kept = (self.within(start, end) > 0) & ((other.within(start, end) > 0) == inside)
        return union(start[kept], end[kept])


NOTHING = Intervals(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(start_M: Ints, end_M: Ints) -> Intervals:
    """The time that is in at least one of the intervals, in any order, overlapping or not. Empty ones are dropped."""
    real = end_M > start_M
    start_M, end_M = start_M[real], end_M[real]
    if not len(start_M):
        return NOTHING
    order = np.argsort(start_M, kind="stable")
    start_M, reach_M = start_M[order], np.maximum.accumulate(end_M[order])
    opens = np.concatenate([[True], start_M[1:] > reach_M[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Intervals(start_M[opens], reach_M[closes])


MAX_SPANS = 1_000_000
"""Pieces that a stage may be in. What is worked out of them takes some hundred bytes each."""

_GATHERED = 100_000


class IntervalCollector:
    """Intervals that come in parts. At most ``most`` may stay apart; ``source`` names their trace."""

    def __init__(self, source: str, most: int = MAX_SPANS) -> None:
        self._source, self._most = source, most
        self._parts: list[Intervals] = []
        self._n_waiting = self._n_kept = 0

    def add(self, start_M: Ints, end_M: Ints) -> None:
        """Take some, in any order; raises InputError where too many stay apart."""
        part = union(start_M, end_M)
        self._parts.append(part)
        self._n_waiting += len(part.start_K)
        if self._n_waiting > max(_GATHERED, self._n_kept):
            self._n_kept = len(self.spans().start_K)

    def spans(self) -> Intervals:
        """The time that is in at least one of them; raises InputError where too many stay apart."""
        found = both(*self._parts)
        self._parts, self._n_waiting = [found], 0
        if len(found.start_K) > self._most:
            raise InputError(f"{self._source}: its stages are in more than {self._most} pieces")
        return found


def both(*all_spans: Intervals) -> Intervals:
    """The time that is in at least one of several spans."""
    if len(all_spans) < 2:
        return all_spans[0] if all_spans else NOTHING
    return union(*(np.concatenate([getattr(its, edge) for its in all_spans]) for edge in ("start_K", "end_K")))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Disjoint pieces of time in order, each belonging to one event: the index of its owner, its start and its end."""

    owner_P: Ints
    start_P: Ints
    end_P: Ints


def self_time(start_M: Ints, end_M: Ints) -> Pieces:
    """Split the time that events cover among them: each moment belongs to the event that began last of those open.

    For events that nest, as those of one thread do, that is their self time. Pieces are exact in any case: together
    they are the time covered. Of events that begin together the longest is the outermost.
    """
    order = np.lexsort((-end_M, start_M))
    order = order[end_M[order] > start_M[order]]
    if not len(order):
        return Pieces(NOTHING.start_K, NOTHING.start_K, NOTHING.start_K)
    start_M, end_M = start_M[order], end_M[order]
    owner_P, start_P, end_P = _nested(start_M, end_M) or _one_by_one(start_M, end_M)
    return Pieces(order[owner_P], start_P, end_P)


_Owned: TypeAlias = tuple[NDArray[np.intp], Ints, Ints]


def _nested(start_M: Ints, end_M: Ints) -> _Owned | None:
    """Owners, starts and ends of the pieces of events that nest, all at once; None if they do not, or too deeply.

    Between two moments at which something begins or ends the time belongs to whatever is on top of the stack then.
    After a beginning that is the event itself; after an end, the last one that began at the depth that is left.
    """
    n = len(start_M)
    # Of those that end together the innermost does first, and an end comes before a beginning at the same moment.
    by_end = n - 1 - np.argsort(end_M[::-1], kind="stable")
    ends = end_M[by_end]
    at_start = np.arange(n) + np.searchsorted(ends, start_M, side="right")
    at_end = np.arange(n) + np.searchsorted(start_M, ends, side="left")
    begins = np.zeros(2 * n, dtype=np.bool_)
    begins[at_start] = True
    depth = np.cumsum(np.where(begins, 1, -1))
    if depth.max() > np.iinfo(np.int16).max:
        return None
    top = np.zeros(2 * n, dtype=np.intp)
    top[at_start] = np.arange(n)
    # A sort of short numbers, which takes no comparisons; no depth but 0 is reached other than by a beginning.
    by_depth = np.argsort(depth.astype(np.int16), kind="stable")
    began = np.maximum.accumulate(np.where(begins[by_depth], np.arange(2 * n), 0))
    top[by_depth] = top[by_depth[began]]
    if not np.array_equal(top[at_end - 1], by_end):
        return None
    moment = np.empty(2 * n, dtype=np.int64)
    moment[at_start], moment[at_end] = start_M, ends
    owned = np.flatnonzero((depth[:-1] > 0) & (moment[1:] > moment[:-1]))
    return top[owned], moment[owned], moment[owned + 1]


def _one_by_one(start_M: Ints, end_M: Ints) -> _Owned:
    pieces = array("q")
    open_events: list[tuple[int, int]] = []
    reached = 0
    # The last of all closes whatever is open then.
    begun = [*zip(start_M.tolist(), end_M.tolist(), strict=True), (int(end_M.max(initial=0)), 0)]
    for event, (start, end) in enumerate(begun):
        while open_events and open_events[-1][1] <= start:
            top, top_end = open_events.pop()
            if top_end > reached:
                pieces.extend((top, reached, top_end))
                reached = top_end
        if open_events and start > reached:
            pieces.extend((open_events[-1][0], reached, start))
        reached = start
        open_events.append((event, end))
    owner_P, start_P, end_P = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    return owner_P.astype(np.intp), start_P, end_P


class Links:
    """A set of numbers that tie events; those below 0 tie nothing."""

    def __init__(self, parts: Iterable[Ints] = ()) -> None:
        self._parts: list[NDArray[Any]] = []
        for part in parts:
            self.add(part)

    def add(self, link_E: Ints) -> None:
        """Take more of them, in as few bytes as they need: they may be those of half the events."""
        links = np.unique(link_E[link_E >= 0])
        if len(links):
            self._parts.append(links.astype(np.min_scalar_type(int(links[-1]))))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def have(self, link_E: Ints) -> NDArray[np.bool_]:
        """Of each number whether it is one of these."""
        if not self._parts:
            return np.zeros(len(link_E), dtype=np.bool_)
        if len(self._parts) > 1:
            self._parts = [np.unique(np.concatenate(self._parts))]
        (links,) = self._parts
        possible_E = (link_E >= 0) & (link_E <= int(links[-1]))
        # Of one type, or all of these would be widened for each question.
        asked_E = np.where(possible_E, link_E, 0).astype(links.dtype)
        return np.asarray(possible_E & (links[np.searchsorted(links, asked_E)] == asked_E))
