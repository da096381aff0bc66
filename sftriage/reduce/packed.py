"""Columns of whole numbers in as few bytes as they take: what lets the events of a trace of any size stay in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.reduce.intervals import Ints

Chosen = NDArray[np.bool_]
"""Of each value that a column may have, whether events that have it are wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Some events in plain columns, one place an event (E): the attributes are those of `EventBlock`, with ends."""

    start_E: Ints
    end_E: Ints
    kind_E: Ints
    name_E: Ints
    track_E: Ints
    link_E: Ints

    def __len__(self) -> int:
        return len(self.start_E)

    def at(self, wanted: NDArray[Any]) -> Events:
        """Those at some places, given by a mask or by numbers."""
        return Events(*(getattr(self, column.name)[wanted] for column in fields(self)))

    @staticmethod
    def joined(parts: Sequence[Events]) -> Events:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        nothing = np.zeros(0, dtype=np.int64)
        return Events(
            *(
                np.concatenate([getattr(part, column.name) for part in parts]) if parts else nothing
                for column in fields(Events)
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Whole numbers as how far each is above the least of them, in the narrowest type; nothing where all are alike."""

    size: int
    least: int
    most: int
    above_E: NDArray[Any] | None

    @classmethod
    def of(cls, values_E: Ints) -> Packed:
        """Pack numbers, at least one, of which no two are 2^63 apart."""
        least, most = int(values_E.min()), int(values_E.max())
        above_E = None if least == most else (values_E - least).astype(np.min_scalar_type(most - least))
        return cls(len(values_E), least, most, above_E)

    def numbers(self, at: NDArray[np.intp] | None = None) -> Ints:
        """All of them as they were, or those at some places."""
        if self.above_E is None:
            return np.full(self.size if at is None else len(at), self.least, dtype=np.int64)
        values_E = (self.above_E if at is None else self.above_E[at]).astype(np.int64)
        values_E += self.least
        return values_E

    def are(self, wanted: Chosen) -> Chosen | bool:
        """Which of them are wanted; True or False where that is so of all."""
        if self.above_E is None:
            return bool(wanted[self.least])
        return np.asarray(wanted[self.least : self.most + 1][self.above_E])

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return 0 if self.above_E is None else self.above_E.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class EventBlock:
    """Some ten thousand events that stood together in a file, packed.

    A text that is short says little: the shorter events are written, the less their columns take. So the events of a
    file take a part of its size, however many there are.

    Attributes:
        start: when they began.
        duration: how long they took.
        kind: what they are, as the constants of `events`.
        name: their names, as numbers.
        track: their threads, as numbers.
        link: ties a device's work to the call that launched it; -1 where nothing does.
    """

    start: Packed
    duration: Packed
    kind: Packed
    name: Packed
    track: Packed
    link: Packed

    def __len__(self) -> int:
        return self.start.size

    def moved(self, by_ns: int) -> EventBlock:
        """The same events, all of them later."""
        start = self.start
        return replace(self, start=Packed(start.size, start.least + by_ns, start.most + by_ns, start.above_E))

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(getattr(self, column.name).size_bytes for column in fields(self))

    def events(self, wanted: EventQuery) -> Events:
        """Those of them that are wanted."""
        at: NDArray[np.intp] | None = None
        kept: Chosen | bool = True
        for column, chosen in ((self.kind, wanted.kinds), (self.track, wanted.tracks), (self.name, wanted.names)):
            if chosen is not None and kept is not False:
                its = column.are(chosen)
                kept = its if kept is True else kept if its is True else kept & its
        if kept is not False and (wanted.since_ns > self.start.least or wanted.until_ns <= self.start.most):
            start_E = self.start.numbers()
            kept = kept & (start_E >= wanted.since_ns) & (start_E < wanted.until_ns)
        if kept is not True:
            at = np.flatnonzero(kept) if kept is not False else np.zeros(0, dtype=np.intp)
        start_E = self.start.numbers(at)
        others = (column.numbers(at) for column in (self.kind, self.name, self.track, self.link))
        return Events(start_E, start_E + self.duration.numbers(at), *others)

    def among(self, wanted: EventQuery) -> bool:
        """Whether any of them may be wanted, by the time alone."""
        return self.start.most >= wanted.since_ns and self.start.least < wanted.until_ns


_ALWAYS_NS = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class EventQuery:
    """Which events are wanted: of kinds, names and tracks that are (None: of any), begun at a time that is."""

    kinds: Chosen | None = None
    names: Chosen | None = None
    tracks: Chosen | None = None
    since_ns: int = -_ALWAYS_NS
    until_ns: int = _ALWAYS_NS


def parts(blocks: Sequence[EventBlock], wanted: EventQuery) -> Iterator[Events]:
    """The events that are wanted, block by block; blocks without any are passed over."""
    for block in blocks:
        if block.among(wanted) and len(found := block.events(wanted)):
            yield found
