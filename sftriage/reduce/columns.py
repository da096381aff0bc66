"""Events as they are read, packed block by block; those that are written as two, a beginning and an end, put together.

Axes: E events.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.reduce.events import EventBlock, EventQuery, Packed, Trace
from sftriage.reduce.naming import OWN

BLOCK_EVENTS = 1 << 16
"""Events that are packed together: few enough to lie close to each other in time, which is what makes them small."""

MAX_NAMES = 200_000
MAX_NAMES_BYTES = 64 << 20
"""Names kept apart. A program that puts a number into every name would otherwise fill the memory with them."""

MAX_MARKS = 250_000
"""Names of steps and of sftriage's own that are kept apart however many others there are."""

MAX_TRACKS = 20_000
MAX_HALVES_OPEN = 1_000_000

OTHER_NAMES = "(other names)"

LIMIT_NS = 2**61
"""Above this a time is no time, and sums of three would not fit into 64 bits."""

EPOCH_FROM_NS = 10**18
"""A clock without a base that shows more than this counts from 1970, where this was 2001; less is time since a boot."""

IGNORED: Final = 7
"""The kind of an event that does not matter."""

ENDS: Final = 8
"""Added to the kind of a half that is an end."""

_FIELDS: Final = 6
_MARKS: Final = (OWN, "ProfilerStep#")
_LONG_BYTES: Final = 1000


class NameIds(dict[str, int]):
    """The number of every name, which a name that is new is given when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = self._marks = 0
        self.others: int | None = None
        """The number of all names that came when there were too many; None if none did."""

    def __missing__(self, name: str) -> int:
        takes = sys.getsizeof(name)
        if name.startswith(_MARKS) and takes < _LONG_BYTES and self._marks < MAX_MARKS:
            self._marks += 1
        elif self.others is not None:
            return self.others
        elif len(self) - self._marks >= MAX_NAMES or self._bytes + takes > MAX_NAMES_BYTES:
            self.others = self[OTHER_NAMES] = self.get(OTHER_NAMES, len(self))
            return self.others
        else:
            self._bytes += takes
        self[name] = number = len(self)
        return number


@dataclass(slots=True)
class Columns:
    """The events of one process as they are read."""

    source: str
    name_ids: NameIds = field(default_factory=NameIds)
    track_ids: dict[tuple[str, str], int] = field(default_factory=dict)
    _blocks: list[EventBlock] = field(default_factory=list)
    _singles: array[int] = field(default_factory=lambda: array("q"))
    _waiting: list[tuple[NDArray[np.integer], ...]] = field(default_factory=list)
    _n_waiting: int = 0

    def track_id(self, process: str, thread: str) -> int:
        """The number of a thread, new or known.

        Raises:
            InputError: there are too many.
        """
        number = self.track_ids.setdefault((process, thread), len(self.track_ids))
        if number >= MAX_TRACKS:
            raise InputError(f"{self.source}: more than {MAX_TRACKS} threads")
        return number

    def add(self, start_ns: int, duration_ns: int, kind: int, name: int, track: int, link: int) -> bool:
        """Take an event, unless its time cannot be; whether it was taken."""
        if not (-LIMIT_NS < start_ns < LIMIT_NS and 0 <= duration_ns < LIMIT_NS):
            return False
        self._singles.extend((start_ns, duration_ns, kind, name, track, link if -1 < link < LIMIT_NS else -1))
        if len(self._singles) >= _FIELDS * BLOCK_EVENTS:
            self._take_singles()
        return True

    def add_all(self, possible_E: NDArray[np.bool_], *columns: NDArray[np.integer]) -> int:
        """Take those events whose times can be.

        Args:
            possible_E: which they are.
            columns: what the events have, in the order of `EventBlock`.

        Returns:
            How many were not taken.
        """
        n_impossible = int(np.count_nonzero(~possible_E))
        if n_impossible:
            columns = tuple(column[possible_E] for column in columns)
        if len(columns[0]):
            self._waiting.append(columns)
            self._n_waiting += len(columns[0])
        if self._n_waiting >= BLOCK_EVENTS:
            self._pack()
        return n_impossible

    def trace(self, base_ns: int = 0, notes: tuple[str, ...] = ()) -> Trace:
        """All that was taken, as a trace; no more is to be added.

        Args:
            base_ns: what the times are from, since the Unix epoch; 0 where that is not known.
            notes: what a reader should know about how it was read.
        """
        self._take_singles()
        if self._waiting:
            self._pack()
        blocks = tuple(block.moved(base_ns) for block in self._blocks)
        self._blocks.clear()
        n_dated = sum(int((block.start.numbers() >= EPOCH_FROM_NS).sum()) for block in blocks) if not base_ns else 0
        absolute = base_ns > 0 or 2 * n_dated > sum(block.start.size for block in blocks)
        if not absolute:
            notes += ("its clock has no date",)
        if self.name_ids.others is not None:
            kept = len(self.name_ids) - 1
            notes += (f"it has more names than the {kept} that are told apart: the others are {OTHER_NAMES!r}",)
        return Trace(self.source, blocks, tuple(self.name_ids), tuple(self.track_ids), absolute, notes=notes)

    def _take_singles(self) -> None:
        columns = np.array(self._singles, dtype=np.int64).reshape(-1, _FIELDS).T
        del self._singles[:]
        self.add_all(np.ones(columns.shape[1], dtype=np.bool_), *columns)

    def _pack(self) -> None:
        columns = (np.concatenate(column) for column in zip(*self._waiting, strict=True))
        self._blocks.append(EventBlock(*(Packed.of(column) for column in columns)))
        self._waiting.clear()
        self._n_waiting = 0


def pair_halves(halves: Columns, whole: Columns) -> int:
    """Put beginnings and ends together by their nesting, once all are there: they are in no order.

    Args:
        halves: both, of no duration, with `ENDS` in the kind of an end; names and tracks are numbers of the others.
        whole: takes the events that come of them.

    Returns:
        How many halves are left over.

    Raises:
        InputError: too many are open at once.
    """
    n_left = 0
    open_halves: dict[int, list[tuple[int, int, int]]] = {}
    for _, slab in halves.trace().slabs(EventQuery()):
        # An end comes before a beginning at the same moment.
        order = np.lexsort((slab.kind_E < ENDS, slab.start_E))
        rows = (column[order].tolist() for column in (slab.start_E, slab.kind_E, slab.name_E, slab.track_E))
        for moment_ns, kind, name, track in zip(*rows, strict=True):
            opened = open_halves.setdefault(track, [])
            if kind < ENDS:
                opened.append((moment_ns, kind, name))
            elif not opened:
                n_left += 1
            else:
                start_ns, its_kind, its_name = opened.pop()
                if its_kind != IGNORED:
                    whole.add(start_ns, moment_ns - start_ns, its_kind, its_name, track, -1)
        if sum(map(len, open_halves.values())) > MAX_HALVES_OPEN:
            raise InputError(f"{whole.source}: more than {MAX_HALVES_OPEN} events begin and do not end")
    return n_left + sum(map(len, open_halves.values()))
