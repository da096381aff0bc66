"""A trace in memory: the events that matter, packed, whatever file they came from, and unpacked part by part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sftriage.errors import InputError
from sftriage.reduce.packed import Chosen, EventBlock, EventQuery, Events, parts

# What an event is. Kineto's categories and nsys's tables come down to these.
ANNOTATION: Final = 0
OPERATOR: Final = 1
PYTHON: Final = 2
RUNTIME: Final = 3
KERNEL: Final = 4
MEMCPY: Final = 5
MEMSET: Final = 6

ON_HOST: Final = (ANNOTATION, OPERATOR, PYTHON, RUNTIME)
ON_DEVICE: Final = (KERNEL, MEMCPY, MEMSET)

SLAB_EVENTS = 1 << 18
"""Events that are unpacked at once where they are wanted in order of time: some hundred megabytes with what is made of
them."""

MOST_SLABS = 8
"""As many slabs may come to one where times repeat; beyond that the memory is not bounded."""

_SAMPLED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The events of one process. Times are nanoseconds: since the Unix epoch if ``absolute``, else from some moment.

    Attributes:
        source: the file, and what in it.
        blocks: its events in the order of the file, packed; names and tracks as numbers.
        names: the names of events, by number.
        tracks: process and thread (or device and stream), by number.
        rank: its rank, where the trace says so.
        world_size: ranks of the job, where the trace says so.
        job: the job, where sftriage recorded it.
        capture_id: the capture, where sftriage made it.
        notes: what a reader should know about how it was read.
    """

    source: str
    blocks: tuple[EventBlock, ...]
    names: tuple[str, ...]
    tracks: tuple[tuple[str, str], ...]
    absolute: bool
    rank: int | None = None
    world_size: int | None = None
    job: str | None = None
    capture_id: str | None = None
    notes: tuple[str, ...] = ()

    def without_events(self) -> Trace:
        """What is known of the trace, without its events, which take nearly all of its memory."""
        return replace(self, blocks=(), names=())

    @property
    def size_bytes(self) -> int:
        """What its events take in memory, names aside."""
        return sum(block.size_bytes for block in self.blocks)

    def parts(
        self, *, kinds: Collection[int] | None = None, names: Chosen | None = None, tracks: Chosen | None = None
    ) -> Iterator[Events]:
        """The events of some kinds, names and tracks, in the order of the file and some thousands at a time.

        Args:
            kinds: the kinds that are wanted; None for all.
            names: of each name whether it is; None for all.
            tracks: of each track whether it is; None for all.
        """
        return parts(self.blocks, _wanted(kinds, names, tracks))

    def events(
        self,
        *,
        kinds: Collection[int] | None = None,
        names: Chosen | None = None,
        tracks: Chosen | None = None,
        most: int | None = None,
        what: str = "",
    ) -> Events:
        """The same at once, of which there are to be few.

        Raises:
            InputError: there are more than ``most`` of them, which are ``what``.
        """
        found: list[Events] = []
        n_found = 0
        for part in self.parts(kinds=kinds, names=names, tracks=tracks):
            n_found += len(part)
            if most is not None and n_found > most:
                raise InputError(f"{self.source}: more than {most} {what}")
            found.append(part)
        return Events.joined(found)

    def slabs(
        self, *, kinds: Collection[int] | None = None, names: Chosen | None = None, tracks: Chosen | None = None
    ) -> Iterator[tuple[int | None, Events]]:
        """The same in slabs of time, one after the other, none with more than about `SLAB_EVENTS`.

        Yields:
            When the slab ends (None: it is the last), and the events that began in it, in the order of the file. They
            may end in a later one.

        Raises:
            InputError: too many of them begin in one moment.
        """
        wanted = _wanted(kinds, names, tracks)
        n_events, sampled, early = 0, [np.zeros(0, dtype=np.int64)], []
        for part in parts(self.blocks, wanted):
            n_events += len(part)
            # A view would keep all of it.
            sampled.append(part.start_E[::_SAMPLED].copy())
            if n_events <= SLAB_EVENTS:
                early.append(part)
        if n_events <= SLAB_EVENTS:
            yield None, Events.joined(early)
            return
        early.clear()
        edges = np.unique(np.sort(np.concatenate(sampled))[SLAB_EVENTS // _SAMPLED :: SLAB_EVENTS // _SAMPLED])
        since_ns = wanted.since_ns
        for until_ns in (*edges.tolist(), None):
            last_ns = wanted.until_ns if until_ns is None else until_ns
            yield until_ns, self._slab(replace(wanted, since_ns=since_ns, until_ns=last_ns))
            since_ns = last_ns

    def _slab(self, wanted: EventQuery) -> Events:
        found, n_found = [], 0
        for part in parts(self.blocks, wanted):
            found.append(part)
            n_found += len(part)
            if n_found > MOST_SLABS * SLAB_EVENTS:
                raise InputError(
                    f"{self.source}: more than {MOST_SLABS * SLAB_EVENTS} events begin at about one moment"
                )
        return Events.joined(found)


def _wanted(kinds: Collection[int] | None, names: Chosen | None, tracks: Chosen | None) -> EventQuery:
    if kinds is not None:
        of_kind = np.zeros(256, dtype=np.bool_)
        of_kind[list(kinds)] = True
    return EventQuery(None if kinds is None else of_kind, names, tracks)
