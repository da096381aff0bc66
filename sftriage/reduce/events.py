"""The packed events of a trace, from any kind of file, unpacked part by part; and time as sets of intervals.

Integers take as few bytes as they need, so that a trace of any size fits into memory. Times are whole nanoseconds:
without rounding, the parts of a split sum exactly. Axes: E events, K intervals, P pieces of time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Disjoint intervals in order: K starts and K ends, each end after its start and not after the next start."""

    start_K: Ints
    end_K: Ints

    @property
    def total_ns(self) -> int:
        return int((self.end_K - self.start_K).sum())

    def before(self, moments: Ints) -> Ints:
        """For each moment, the time of the intervals before it."""
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
    """The union of intervals, in any order, overlapping or not; drops empty ones."""
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
"""Maximum number of pieces of a stage; computing with each takes some hundred bytes."""

_GATHERED = 100_000


class IntervalCollector:
    """Joins intervals that come in parts, into at most ``most`` disjoint ones; ``source`` names their trace."""

    def __init__(self, source: str, most: int = MAX_SPANS) -> None:
        self._source, self._most = source, most
        self._parts: list[Intervals] = []
        self._n_waiting = self._n_kept = 0

    def add(self, start_M: Ints, end_M: Ints) -> None:
        """Add intervals, in any order; raises InputError if too many are disjoint."""
        part = union(start_M, end_M)
        self._parts.append(part)
        self._n_waiting += len(part.start_K)
        if self._n_waiting > max(_GATHERED, self._n_kept):
            self._n_kept = len(self.spans().start_K)

    def spans(self) -> Intervals:
        """The union of all intervals; raises InputError if too many are disjoint."""
        found = both(*self._parts)
        self._parts, self._n_waiting = [found], 0
        if len(found.start_K) > self._most:
            raise InputError(f"{self._source}: its stages are in more than {self._most} pieces")
        return found


def both(*all_spans: Intervals) -> Intervals:
    """The union of several spans."""
    if len(all_spans) < 2:
        return all_spans[0] if all_spans else NOTHING
    return union(*(np.concatenate([getattr(spans, edge) for spans in all_spans]) for edge in ("start_K", "end_K")))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Disjoint pieces of time in order, each of one event: the index of its owner, its start and its end."""

    owner_P: Ints
    start_P: Ints
    end_P: Ints


def self_time(start_M: Ints, end_M: Ints) -> Pieces:
    """Split the time that events cover among them: each moment belongs to the open event that began last.

    For events that nest, as those of one thread do, that is their self time. In any case, the pieces sum exactly to the
    time covered. Of events that begin together, the longest is the outermost.
    """
    order = np.lexsort((-end_M, start_M))
    order = order[end_M[order] > start_M[order]]
    if not len(order):
        return Pieces(NOTHING.start_K, NOTHING.start_K, NOTHING.start_K)
    start_M, end_M = start_M[order], end_M[order]
    pieces = _nested(start_M, end_M) or _one_after_another(start_M, end_M)
    return replace(pieces, owner_P=order[pieces.owner_P])


def _nested(start_M: Ints, end_M: Ints) -> Pieces | None:
    """The pieces of events that nest, all at once; None if they do not, or too deeply.

    Between two begins or ends, the time belongs to the event on top of the stack. After a begin, that is the event
    itself; after an end, the last event that began at the depth that is left.
    """
    n = len(start_M)
    # Of events that end together the innermost ends first, and an end comes before a begin at the same moment.
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
    # (16-bit integers get a radix sort; any depth but 0 is reached by a begin)
    by_depth = np.argsort(depth.astype(np.int16), kind="stable")
    began = np.maximum.accumulate(np.where(begins[by_depth], np.arange(2 * n), 0))
    top[by_depth] = top[by_depth[began]]
    if not np.array_equal(top[at_end - 1], by_end):
        return None
    moment = np.empty(2 * n, dtype=np.int64)
    moment[at_start], moment[at_end] = start_M, ends
    owned = np.flatnonzero((depth[:-1] > 0) & (moment[1:] > moment[:-1]))
    return Pieces(top[owned], moment[owned], moment[owned + 1])


def _one_after_another(start_M: Ints, end_M: Ints) -> Pieces:
    pieces = array("q")
    open_events: list[tuple[int, int]] = []
    reached = 0
    # (the last entry closes all open events)
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
    return Pieces(*np.array(pieces, dtype=np.int64).reshape(-1, 3).T)


class Links:
    """A set of numbers that link events; negative ones link nothing."""

    def __init__(self, parts: Iterable[Ints] = ()) -> None:
        self._parts: list[NDArray[Any]] = []
        for part in parts:
            self.add(part)

    def add(self, link_E: Ints) -> None:
        """Add numbers, in as few bytes as they need: half of the events may have one."""
        links = np.unique(link_E[link_E >= 0])
        if len(links):
            self._parts.append(links.astype(np.min_scalar_type(int(links[-1]))))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def have(self, link_E: Ints) -> NDArray[np.bool_]:
        """Whether each number is in the set."""
        if not self._parts:
            return np.zeros(len(link_E), dtype=np.bool_)
        if len(self._parts) > 1:
            self._parts = [np.unique(np.concatenate(self._parts))]
        (links,) = self._parts
        possible_E = (link_E >= 0) & (link_E <= int(links[-1]))
        # (of one type, so that numpy does not widen the whole set for each call)
        candidate_E = np.where(possible_E, link_E, 0).astype(links.dtype)
        return np.asarray(possible_E & (links[np.searchsorted(links, candidate_E)] == candidate_E))


# The kinds of events, for Kineto's categories and nsys's tables.
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
"""How many events to unpack at once in order of time: some hundred megabytes with all that is computed from them."""

MOST_SLABS = 8
"""How many slabs one may become if times repeat; limits the memory."""

MAX_OPEN = 1_000_000
"""Maximum number of events that are open at one moment."""

ALWAYS_NS: Final = 2**63 - 1

_SAMPLED = 64

Chosen = NDArray[np.bool_]
"""For each possible value of a column, whether to select its events."""


@dataclass(frozen=True, slots=True, eq=False)
class EventQuery:
    """Selects events by kind, name, track (None: any) and start; ``names`` and ``tracks`` are masks."""

    kinds: Collection[int] | None = None
    names: Chosen | None = None
    tracks: Chosen | None = None
    since_ns: int = -ALWAYS_NS
    until_ns: int = ALWAYS_NS


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Unpacked events, in columns of one value per event (E): as in `EventBlock`, with ends."""

    start_E: Ints
    end_E: Ints
    kind_E: Ints
    name_E: Ints
    track_E: Ints
    link_E: Ints

    def __len__(self) -> int:
        return len(self.start_E)

    def at(self, chosen: NDArray[Any]) -> Events:
        return Events(*(getattr(self, column.name)[chosen] for column in fields(self)))

    @staticmethod
    def joined(parts: Sequence[Events]) -> Events:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return Events(*(np.zeros(0, dtype=np.int64) for _ in fields(Events)))
        return Events(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Events)))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Integers as differences from the least, in the narrowest type; without an array if all are equal."""

    size: int
    least: int
    most: int
    above_E: NDArray[Any] | None

    @classmethod
    def of(cls, values_E: Ints) -> Packed:
        """Pack at least one number; their range must be below 2^63."""
        least, most = int(values_E.min()), int(values_E.max())
        above_E = None if least == most else (values_E - least).astype(np.min_scalar_type(most - least))
        return cls(len(values_E), least, most, above_E)

    def numbers(self, at: NDArray[np.intp] | None = None) -> Ints:
        if self.above_E is None:
            return np.full(self.size if at is None else len(at), self.least, dtype=np.int64)
        values_E = (self.above_E if at is None else self.above_E[at]).astype(np.int64)
        values_E += self.least
        return values_E

    def are(self, chosen: Chosen) -> Chosen | bool:
        """Which numbers are chosen; a plain bool if it is the same for all."""
        if self.above_E is None:
            return bool(chosen[self.least])
        return np.asarray(chosen[self.least : self.most + 1][self.above_E])


@dataclass(frozen=True, slots=True, eq=False)
class EventBlock:
    """Some ten thousand consecutive events of a file, packed.

    Names and threads are numbers; ``link`` connects a device's work with the call that launched it (-1: none).
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

    def events(self, query: EventQuery) -> Events | None:
        if self.start.most < query.since_ns or self.start.least >= query.until_ns:
            return None
        kinds: Chosen | None = None
        if query.kinds is not None:
            kinds = np.zeros(_MOST_KINDS, dtype=np.bool_)
            kinds[list(query.kinds)] = True
        kept: Chosen | bool = True
        for column, chosen in ((self.kind, kinds), (self.track, query.tracks), (self.name, query.names)):
            if chosen is not None:
                kept = kept & column.are(chosen)
                if kept is False:
                    return None
        if query.since_ns > self.start.least or query.until_ns <= self.start.most:
            start_E = self.start.numbers()
            kept = kept & (start_E >= query.since_ns) & (start_E < query.until_ns)
        at = None if kept is True else np.flatnonzero(kept)
        start_E = self.start.numbers(at)
        others = (column.numbers(at) for column in (self.kind, self.name, self.track, self.link))
        return Events(start_E, start_E + self.duration.numbers(at), *others)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The events of one process. Times are in nanoseconds: since the Unix epoch if ``absolute``, else from some moment.

    ``blocks`` has them in the order of the file, with indices into ``names`` and ``tracks``: process and thread, or
    device and stream. Rank, world size, job and capture are None if the file does not say them. ``notes`` are remarks.
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

    def check_rank(self) -> int:
        """Its rank; raises InputError if it is unknown."""
        if self.rank is None:
            raise InputError(f"{self.source}: it does not name its rank; give it with --rank FILE=RANK")
        return self.rank

    def thread(self, track: int) -> Chosen:
        return np.asarray(np.arange(len(self.tracks)) == track)

    def process(self, track: int) -> Chosen:
        return np.array([known[0] == self.tracks[track][0] for known in self.tracks], dtype=np.bool_)

    def parts(self, query: EventQuery) -> Iterator[Events]:
        """The selected events, in the order of the file, some thousands at a time."""
        for block in self.blocks:
            found = block.events(query)
            if found is not None and len(found):
                yield found

    def slabs(self, query: EventQuery) -> Iterator[tuple[int, Events]]:
        """The selected events in slabs of time, none with more than about `SLAB_EVENTS`.

        Yields the end of the slab (`ALWAYS_NS` for the last) and the events that began in it, in the order of the file.
        Raises InputError if too many begin at one moment.
        """
        n_events, sampled, early = 0, [], []
        for part in self.parts(query):
            n_events += len(part)
            # (a view would keep the whole part)
            sampled.append(part.start_E[::_SAMPLED].copy())
            if n_events <= SLAB_EVENTS:
                early.append(part)
        if n_events <= SLAB_EVENTS:
            yield ALWAYS_NS, Events.joined(early)
            return
        early.clear()
        edges = np.unique(np.sort(np.concatenate(sampled))[SLAB_EVENTS // _SAMPLED :: SLAB_EVENTS // _SAMPLED])
        most, since_ns = MOST_SLABS * SLAB_EVENTS, query.since_ns
        for until_ns in (*edges.tolist(), ALWAYS_NS):
            parts = self.parts(replace(query, since_ns=since_ns, until_ns=until_ns))
            yield until_ns, gathered(parts, most, f"{self.source}: more than {most} events begin at about one moment")
            since_ns = until_ns


def gathered(parts: Iterable[Events], most: int, problem: str) -> Events:
    """Join parts; raises InputError with ``problem`` if they have more than ``most`` events."""
    found, n_found = [], 0
    for part in parts:
        found.append(part)
        n_found += len(part)
        if n_found > most:
            raise InputError(problem)
    return Events.joined(found)


def self_time_slices(
    trace: Trace, query: EventQuery, inside: Intervals | None = None
) -> Iterator[tuple[int, Events, Pieces]]:
    """Split the time of the selected events within each thread: each moment belongs to the open event that began last.

    Yields, for each slab, its begin; the events that are open in it, earlier begins first; and the pieces of its time,
    thread by thread, each with the index of its event. Only events in ``inside`` count. Raises InputError if too many
    are open at once.
    """
    still_open, since_ns = Events.joined([]), -ALWAYS_NS
    for until_ns, begun in trace.slabs(query):
        if inside is not None:
            begun = begun.at(inside.within(begun.start_E, begun.end_E) > 0)
        events = Events.joined([still_open, begun]) if len(still_open) else begun
        yield since_ns, events, _split(events, since_ns, until_ns)
        still_open = events.at(events.end_E > until_ns)
        if len(still_open) > MAX_OPEN:
            raise InputError(f"{trace.source}: more than {MAX_OPEN} events are open at the same time")
        since_ns = until_ns


def _split(events: Events, since_ns: int, until_ns: int) -> Pieces:
    order = np.argsort(events.track_E.astype(np.min_scalar_type(events.track_E.max(initial=0))), kind="stable")
    parts = []
    for of_thread in np.split(order, np.flatnonzero(np.diff(events.track_E[order])) + 1):
        pieces = self_time(events.start_E[of_thread], events.end_E[of_thread])
        start_P, end_P = np.maximum(pieces.start_P, since_ns), np.minimum(pieces.end_P, until_ns)
        real = end_P > start_P
        parts.append((of_thread[pieces.owner_P[real]], start_P[real], end_P[real]))
    return Pieces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


BLOCK_EVENTS = 1 << 16
"""How many events to pack together: few enough to be close in time, which makes them small."""

MAX_NAMES = 200_000
MAX_NAMES_BYTES = 64 << 20
"""Limit of different names: a program that puts a number into every name would fill the memory."""

MAX_MARKS = 250_000
"""Limit of names of steps and of sftriage, which do not count among the others."""

MAX_TRACKS = 20_000
MAX_HALVES_OPEN = 1_000_000

OTHER_NAMES = "(other names)"

LIMIT_NS = 2**61
"""Times above this are invalid, and sums of three would not fit into 64 bits."""

EPOCH_FROM_NS = 10**18
"""A clock without a base counts from 1970 if it shows more than this (2001), and else from boot."""

IGNORED: Final = 7
"""The kind of an irrelevant event."""

ENDS: Final = 8
"""Added to the kind of a half event that is an end."""

_FIELDS: Final = 6
OWN: Final = "sftriage:"
"""The prefix of sftriage's own annotations."""
_MARKS: Final = (OWN, "ProfilerStep#")
_LONG_BYTES: Final = 1000


class NameIds(dict[str, int]):
    """The number of every name; a new name gets the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = self._marks = 0
        self.others: int | None = None
        """The number that all names beyond the limit share; None before that."""

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
    """Collects the events of one process while they are read."""

    source: str
    name_ids: NameIds = field(default_factory=NameIds)
    track_ids: dict[tuple[str, str], int] = field(default_factory=dict)
    _blocks: list[EventBlock] = field(default_factory=list)
    _singles: array[int] = field(default_factory=lambda: array("q"))
    _waiting: list[tuple[NDArray[np.integer], ...]] = field(default_factory=list)
    _n_waiting: int = 0

    def track_id(self, process: str, thread: str) -> int:
        """The number of a new or known thread; raises InputError beyond `MAX_TRACKS`."""
        number = self.track_ids.setdefault((process, thread), len(self.track_ids))
        if number >= MAX_TRACKS:
            raise InputError(f"{self.source}: more than {MAX_TRACKS} threads")
        return number

    def add(self, start_ns: int, duration_ns: int, kind: int, name: int, track: int, link: int) -> bool:
        """Add an event, and return True, unless its time is invalid."""
        if not (-LIMIT_NS < start_ns < LIMIT_NS and 0 <= duration_ns < LIMIT_NS):
            return False
        self._singles.extend((start_ns, duration_ns, kind, name, track, link if -1 < link < LIMIT_NS else -1))
        if len(self._singles) >= _FIELDS * BLOCK_EVENTS:
            self._take_singles()
        return True

    def add_all(self, possible_E: NDArray[np.bool_], *columns: NDArray[np.integer]) -> int:
        """Add the events with valid times, in the columns of `EventBlock`; return the number of the others."""
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
        """The collected events as a trace, at the end. Times are from ``base_ns`` (0: unknown)."""
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
            notes += (f"it has more than {kept} different names: the others count as {OTHER_NAMES!r}",)
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
    """Pair begin and end events by their nesting; return the number of unpaired ones.

    ``halves`` have no duration, and ends have `ENDS` in their kind; their names and tracks are indices of ``whole``,
    which gets the pairs. Raises InputError if too many are open at once.
    """
    n_left = 0
    open_halves: dict[int, list[tuple[int, int, int]]] = {}
    for _, slab in halves.trace().slabs(EventQuery()):
        # An end comes before a begin at the same moment.
        order = np.lexsort((slab.kind_E < ENDS, slab.start_E))
        rows = (column[order].tolist() for column in (slab.start_E, slab.kind_E, slab.name_E, slab.track_E))
        for moment_ns, kind, name, track in zip(*rows, strict=True):
            opened = open_halves.setdefault(track, [])
            if kind < ENDS:
                opened.append((moment_ns, kind, name))
            elif not opened:
                n_left += 1
            else:
                start_ns, own_kind, own_name = opened.pop()
                if own_kind != IGNORED:
                    whole.add(start_ns, moment_ns - start_ns, own_kind, own_name, track, -1)
        if sum(map(len, open_halves.values())) > MAX_HALVES_OPEN:
            raise InputError(f"{whole.source}: more than {MAX_HALVES_OPEN} events begin and do not end")
    return n_left + sum(map(len, open_halves.values()))
