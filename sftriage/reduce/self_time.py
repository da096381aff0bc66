"""Whose the time is, in order of time: of the events that are open in a thread, the one that began last."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sftriage.errors import InputError
from sftriage.reduce.events import Trace
from sftriage.reduce.intervals import Intervals, Ints, Pieces, self_time
from sftriage.reduce.packed import Chosen, Events

MAX_OPEN: Final = 1_000_000
"""Events that may be open at one moment."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A time, its end excluded; None is for ever."""

    since_ns: int | None
    until_ns: int | None


def self_time_slices(
    trace: Trace,
    *,
    kinds: Collection[int],
    names: Chosen | None = None,
    tracks: Chosen | None = None,
    inside: Intervals | None = None,
) -> Iterator[tuple[Slab, Events, Pieces]]:
    """The time of events, split among those of each thread, slab by slab (see `Trace.slabs`).

    Yields:
        The slab; the events that are open in it, those that began earlier first; and the pieces of its time, thread by
        thread, each with the place of its event among them.

    Raises:
        InputError: too many are open at once.
    """
    still_open = Events.joined([])
    since_ns = None
    for until_ns, begun in trace.slabs(kinds=kinds, names=names, tracks=tracks):
        slab = Slab(since_ns, until_ns)
        if inside is not None:
            begun = begun.at(inside.within(begun.start_E, begun.end_E) > 0)
        events = Events.joined([still_open, begun]) if len(still_open) else begun
        yield slab, events, _split(events, slab)
        if until_ns is not None:
            still_open = events.at(events.end_E > until_ns)
            if len(still_open) > MAX_OPEN:
                raise InputError(f"{trace.source}: more than {MAX_OPEN} events are open at one moment")
        since_ns = until_ns


def _split(events: Events, slab: Slab) -> Pieces:
    """The time of a slab, thread by thread."""
    order = np.argsort(events.track_E.astype(np.min_scalar_type(events.track_E.max(initial=0))), kind="stable")
    owners: list[Ints] = []
    starts: list[Ints] = []
    ends: list[Ints] = []
    for its in np.split(order, np.flatnonzero(np.diff(events.track_E[order])) + 1):
        pieces = self_time(events.start_E[its], events.end_E[its])
        start_P = pieces.start_P if slab.since_ns is None else np.maximum(pieces.start_P, slab.since_ns)
        end_P = pieces.end_P if slab.until_ns is None else np.minimum(pieces.end_P, slab.until_ns)
        real = end_P > start_P
        owners.append(its[pieces.owner_P[real]])
        starts.append(start_P[real])
        ends.append(end_P[real])
    return Pieces(*(np.concatenate(parts) for parts in (owners, starts, ends)))
