"""Time as sets of intervals, in whole nanoseconds: nothing is lost to rounding, so what is split adds up again."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Disjoint intervals in order: K starts and K ends, each end after its start and no later than the next start."""

    start_K: Ints
    end_K: Ints

    @property
    def total_ns(self) -> int:
        """How long they last together."""
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
        """For each interval, how much of the spans lies in it."""
        return self.before(end_N) - self.before(start_N)

    def clipped(self, to: Spans) -> Spans:
        """What they share with other spans."""
        edges = np.unique(np.concatenate([self.start_K, self.end_K, to.start_K, to.end_K]))
        return self._pieces(edges, to, inside=True)

    def without(self, other: Spans) -> Spans:
        """What is left of them once other spans are taken out."""
        edges = np.unique(np.concatenate([self.start_K, self.end_K, other.start_K, other.end_K]))
        return self._pieces(edges, other, inside=False)

    def _pieces(self, edges: Ints, other: Spans, *, inside: bool) -> Spans:
        if len(edges) < 2:
            return NOTHING
        start, end = edges[:-1], edges[1:]
        kept = (self.within(start, end) > 0) & ((other.within(start, end) > 0) == inside)
        return union(start[kept], end[kept])


NOTHING = Spans(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(start_M: Ints, end_M: Ints) -> Spans:
    """The time that is in at least one of the intervals, in any order, overlapping or not. Empty ones are dropped."""
    real = end_M > start_M
    start_M, end_M = start_M[real], end_M[real]
    if not len(start_M):
        return NOTHING
    order = np.argsort(start_M, kind="stable")
    start_M, reach_M = start_M[order], np.maximum.accumulate(end_M[order])
    opens = np.concatenate([[True], start_M[1:] > reach_M[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Spans(start_M[opens], reach_M[closes])


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Disjoint pieces of time in order, each belonging to one event: the index of its owner, its start and its end."""

    owner_P: Ints
    start_P: Ints
    end_P: Ints

    @property
    def spans(self) -> Spans:
        """The time they fill."""
        return union(self.start_P, self.end_P)


def self_time(start_M: Ints, end_M: Ints) -> Pieces:
    """Split the time that events cover among them: each moment belongs to the event that began last of those open.

    For events that nest, which those of one thread do, that is their self time. It is as exact where they overlap
    otherwise: the pieces of one event never exceed it, and all pieces together are the time covered, to the nanosecond.
    Of events that begin together the longest is the outermost.
    """
    order = np.lexsort((-end_M, start_M))
    owners, starts, ends = array("q"), array("q"), array("q")
    open_events: list[tuple[int, int]] = []
    reached = 0
    for event, start, end in zip(order.tolist(), start_M[order].tolist(), end_M[order].tolist(), strict=True):
        if end <= start:
            continue
        while open_events and open_events[-1][1] <= start:
            top, top_end = open_events.pop()
            if top_end > reached:
                owners.append(top)
                starts.append(reached)
                ends.append(top_end)
                reached = top_end
        if open_events and start > reached:
            owners.append(open_events[-1][0])
            starts.append(reached)
            ends.append(start)
        reached = start
        open_events.append((event, end))
    while open_events:
        top, top_end = open_events.pop()
        if top_end > reached:
            owners.append(top)
            starts.append(reached)
            ends.append(top_end)
            reached = top_end
    return Pieces(
        *(np.frombuffer(values, dtype=np.int64) if values else NOTHING.start_K for values in (owners, starts, ends))
    )
