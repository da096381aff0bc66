"""The packed events of a trace, whatever file they came from, unpacked part by part.

Whole numbers take as few bytes as they need, so that a trace of any size fits into memory. Axes: E events, P pieces of
time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.reduce.intervals import Intervals, Ints, Pieces, self_time

# What an event is. Kineto's categories and nsys's tables come down to these.
ANNOTATION: Final = 0
OPERATOR: Final = 1
PYTHON: Final = 2
RUNTIME: Final = 3
KERNEL: Final = 4
MEMCPY: Final = 5
MEMSET: Final = 6
_MOST_KINDS: Final = 256

ON_HOST: Final = (ANNOTATION, OPERATOR, PYTHON, RUNTIME)
ON_DEVICE: Final = (KERNEL, MEMCPY, MEMSET)

SLAB_EVENTS = 1 << 18
"""Events that are unpacked at once where they are wanted in order of time: some hundred megabytes with what is made of
them."""

MOST_SLABS = 8
"""As many slabs may come to one where times repeat; beyond that the memory is not bounded."""

MAX_OPEN = 1_000_000
"""Events that may be open at one moment."""

ALWAYS_NS: Final = 2**63 - 1

_SAMPLED = 64

Chosen = NDArray[np.bool_]
"""Of each value that a column may have, whether events that have it are wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class EventQuery:
    """Selects events by kind, name, track (None: any) and begin; ``names`` and ``tracks`` are masks."""

    kinds: Collection[int] | None = None
    names: Chosen | None = None
    tracks: Chosen | None = None
    since_ns: int = -ALWAYS_NS
    until_ns: int = ALWAYS_NS


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
        return Events(*(getattr(self, column.name)[wanted] for column in fields(self)))

    @staticmethod
    def joined(parts: Sequence[Events]) -> Events:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return Events(*(np.zeros(0, dtype=np.int64) for _ in fields(Events)))
        return Events(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Events)))


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


@dataclass(frozen=True, slots=True, eq=False)
class EventBlock:
    """Some ten thousand events that stood together in a file, packed.

    Names and threads are numbers; ``link`` ties a device's work to the call that launched it (-1: nothing does).
    """

    start: Packed
    duration: Packed
    kind: Packed
    name: Packed
    track: Packed
    link: Packed

    def moved(self, by_ns: int) -> EventBlock:
        start = self.start
        return replace(self, start=replace(start, least=start.least + by_ns, most=start.most + by_ns))

    def events(self, wanted: EventQuery) -> Events | None:
        if self.start.most < wanted.since_ns or self.start.least >= wanted.until_ns:
            return None
        kinds: Chosen | None = None
        if wanted.kinds is not None:
            kinds = np.zeros(_MOST_KINDS, dtype=np.bool_)
            kinds[list(wanted.kinds)] = True
        kept: Chosen | bool = True
        for column, chosen in ((self.kind, kinds), (self.track, wanted.tracks), (self.name, wanted.names)):
            if chosen is not None:
                kept = kept & column.are(chosen)
                if kept is False:
                    return None
        if wanted.since_ns > self.start.least or wanted.until_ns <= self.start.most:
            start_E = self.start.numbers()
            kept = kept & (start_E >= wanted.since_ns) & (start_E < wanted.until_ns)
        at = None if kept is True else np.flatnonzero(kept)
        start_E = self.start.numbers(at)
        others = (column.numbers(at) for column in (self.kind, self.name, self.track, self.link))
        return Events(start_E, start_E + self.duration.numbers(at), *others)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The events of one process. Times are nanoseconds: since the Unix epoch if ``absolute``, else from some moment.

    ``blocks`` has them in the order of the file, with numbers of ``names`` and of ``tracks``: process and thread, or
    device and stream. The file may not say a rank, world size, job or capture. ``notes`` says how it was read.
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

    def thread(self, track: int) -> Chosen:
        """Of each track whether it is this one."""
        return np.asarray(np.arange(len(self.tracks)) == track)

    def process(self, track: int) -> Chosen:
        return np.array([its[0] == self.tracks[track][0] for its in self.tracks], dtype=np.bool_)

    def parts(self, wanted: EventQuery) -> Iterator[Events]:
        """The events that are wanted, in the order of the file and some thousands at a time."""
        for block in self.blocks:
            found = block.events(wanted)
            if found is not None and len(found):
                yield found

    def slabs(self, wanted: EventQuery) -> Iterator[tuple[int, Events]]:
        """The selected events in slabs of time, none with more than about `SLAB_EVENTS`.

        Yields when the slab ends (`ALWAYS_NS` for the last) and the events that began in it, in the order of the file.
        Raises InputError where too many begin in one moment.
        """
        n_events, sampled, early = 0, [], []
        for part in self.parts(wanted):
            n_events += len(part)
            # A view would keep all of it.
            sampled.append(part.start_E[::_SAMPLED].copy())
            if n_events <= SLAB_EVENTS:
                early.append(part)
        if n_events <= SLAB_EVENTS:
            yield ALWAYS_NS, Events.joined(early)
            return
        early.clear()
        edges = np.unique(np.sort(np.concatenate(sampled))[SLAB_EVENTS // _SAMPLED :: SLAB_EVENTS // _SAMPLED])
        most, since_ns = MOST_SLABS * SLAB_EVENTS, wanted.since_ns
        for until_ns in (*edges.tolist(), ALWAYS_NS):
            parts = self.parts(replace(wanted, since_ns=since_ns, until_ns=until_ns))
            yield until_ns, gathered(parts, most, f"{self.source}: more than {most} events begin at about one moment")
            since_ns = until_ns


def gathered(parts: Iterable[Events], most: int, problem: str) -> Events:
    """Parts as one; raises InputError with ``problem`` where they have more than ``most`` events."""
    found, n_found = [], 0
    for part in parts:
        found.append(part)
        n_found += len(part)
        if n_found > most:
            raise InputError(problem)
    return Events.joined(found)


def self_time_slices(
    trace: Trace, wanted: EventQuery, inside: Intervals | None = None
) -> Iterator[tuple[int, Events, Pieces]]:
    """Split the time of the selected events among those of each thread: of those open, the one that began last has it.

    Yields, slab by slab, when the slab begins; the events that are open in it, those that began earlier first; and the
    pieces of its time, thread by thread, each with the place of its event. Only events that are in ``inside`` count.
    Raises InputError where too many are open at once.
    """
    still_open, since_ns = Events.joined([]), -ALWAYS_NS
    for until_ns, begun in trace.slabs(wanted):
        if inside is not None:
            begun = begun.at(inside.within(begun.start_E, begun.end_E) > 0)
        events = Events.joined([still_open, begun]) if len(still_open) else begun
        yield since_ns, events, _split(events, since_ns, until_ns)
        still_open = events.at(events.end_E > until_ns)
        if len(still_open) > MAX_OPEN:
            raise InputError(f"{trace.source}: more than {MAX_OPEN} events are open at one moment")
        since_ns = until_ns


def _split(events: Events, since_ns: int, until_ns: int) -> Pieces:
    order = np.argsort(events.track_E.astype(np.min_scalar_type(events.track_E.max(initial=0))), kind="stable")
    parts = []
    for its in np.split(order, np.flatnonzero(np.diff(events.track_E[order])) + 1):
        pieces = self_time(events.start_E[its], events.end_E[its])
        start_P, end_P = np.maximum(pieces.start_P, since_ns), np.minimum(pieces.end_P, until_ns)
        real = end_P > start_P
        parts.append((its[pieces.owner_P[real]], start_P[real], end_P[real]))
    return Pieces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


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
OWN: Final = "sftriage:"
"""Begins the names of sftriage's own annotations."""
_MARKS: Final = (OWN, "ProfilerStep#")
_LONG_BYTES: Final = 1000


class NameIds(dict[str, int]):
    """The number of every name; a new name gets the next one."""

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
class EventColumns:
    """The events of one process as they are read."""

    source: str
    name_ids: NameIds = field(default_factory=NameIds)
    track_ids: dict[tuple[str, str], int] = field(default_factory=dict)
    _blocks: list[EventBlock] = field(default_factory=list)
    _singles: array[int] = field(default_factory=lambda: array("q"))
    _waiting: list[tuple[NDArray[np.integer], ...]] = field(default_factory=list)
    _n_waiting: int = 0

    def track_id(self, process: str, thread: str) -> int:
        """The number of a thread, new or known; raises InputError beyond `MAX_TRACKS`."""
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
        """Take the events whose times are possible, in the columns of `EventBlock`; the number of the others."""
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
        """All that was taken, as a trace; nothing is added after that. Times are from ``base_ns`` (0: unknown)."""
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


def pair_halves(halves: EventColumns, whole: EventColumns) -> int:
    """Pair beginnings and ends by their nesting; the number of halves that are left over.

    ``halves`` have no duration, and `ENDS` in the kind of an end; their names and tracks are numbers of ``whole``,
    which takes the pairs. Raises InputError where too many are open at once.
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
