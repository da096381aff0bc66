"""Events as they are read, packed block by block."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.reduce.events import Trace
from sftriage.reduce.intervals import Ints
from sftriage.reduce.naming import OWN
from sftriage.reduce.packed import EventBlock, Packed

BLOCK_EVENTS = 1 << 16
"""Events that are packed together: few enough to lie close to each other in time, which is what makes them small."""

MAX_NAMES = 200_000
MAX_NAMES_BYTES = 64 << 20
"""Names kept apart. A program that puts a number into every name would otherwise fill the memory with them."""

MAX_MARKS = 250_000
"""Names of steps and of sftriage's own that are kept apart however many others there are."""

MAX_TRACKS = 20_000

OTHER_NAMES = "(other names)"

LIMIT_NS = 2**61
"""Above this a time is no time, and sums of three would not fit into 64 bits."""

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
        if self.others is not None and not name.startswith(_MARKS):
            return self.others
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
    blocks: list[EventBlock] = field(default_factory=list)
    _singles: tuple[array[int], ...] = field(default_factory=lambda: tuple(array("q") for _ in range(_FIELDS)))
    _waiting: list[tuple[Ints, ...]] = field(default_factory=list)
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
        event = (start_ns, duration_ns, kind, name, track, link if -1 < link < LIMIT_NS else -1)
        for column, value in zip(self._singles, event, strict=True):
            column.append(value)
        if len(self._singles[0]) >= BLOCK_EVENTS:
            self._take_singles()
        return True

    def add_all(
        self,
        start_ns_E: Ints,
        duration_ns_E: Ints,
        kind_E: NDArray[np.integer],
        name_E: NDArray[np.integer],
        track_E: NDArray[np.integer],
        link_E: Ints,
    ) -> None:
        """Take events whose times and links are known to be possible."""
        if not len(start_ns_E):
            return
        self._waiting.append((start_ns_E, duration_ns_E, kind_E, name_E, track_E, link_E))  # type: ignore[arg-type]  # any width
        self._n_waiting += len(start_ns_E)
        if self._n_waiting >= BLOCK_EVENTS:
            self._pack()

    def finish(self) -> tuple[EventBlock, ...]:
        """All events that were taken, packed; no more are to be added."""
        if len(self._singles[0]):
            self._take_singles()
        if self._waiting:
            self._pack()
        blocks = tuple(self.blocks)
        self.blocks.clear()
        return blocks

    def trace(self, *, base_ns: int, absolute: bool, notes: tuple[str, ...]) -> Trace:
        """All that was taken, as a trace whose times are from ``base_ns`` on; no more is to be added."""
        if self.name_ids.others is not None:
            kept = len(self.name_ids) - 1
            notes = (*notes, f"it has more names than the {kept} that are told apart: the others are {OTHER_NAMES!r}")
        return Trace(
            source=self.source,
            blocks=tuple(block.moved(base_ns) for block in self.finish()),
            names=tuple(self.name_ids),
            tracks=tuple(self.track_ids),
            absolute=absolute,
            notes=notes,
        )

    def _take_singles(self) -> None:
        columns = tuple(np.array(column, dtype=np.int64) for column in self._singles)
        for column in self._singles:
            del column[:]
        self.add_all(*columns)

    def _pack(self) -> None:
        self.blocks.append(
            EventBlock(*(Packed.of(np.concatenate(column)) for column in zip(*self._waiting, strict=True)))
        )
        self._waiting.clear()
        self._n_waiting = 0
