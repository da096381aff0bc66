"""The packed events of a trace, whatever file they came from, unpacked part by part; and time as sets of intervals.

Whole numbers take as few bytes as they need, so that a trace of any size fits into memory. Times are whole nanoseconds:
nothing is lost to rounding, so what is split adds up again. Axes: E events, K intervals, P pieces of time.
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
    pieces = _nested(start_M, end_M) or _one_by_one(start_M, end_M)
    return replace(pieces, owner_P=order[pieces.owner_P])


def _nested(start_M: Ints, end_M: Ints) -> Pieces | None:
    """The pieces of events that nest, all at once; None if they do not, or too deeply.

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
    return Pieces(top[owned], moment[owned], moment[owned + 1])


def _one_by_one(start_M: Ints, end_M: Ints) -> Pieces:
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
    return Pieces(*np.array(pieces, dtype=np.int64).reshape(-1, 3).T)


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
            raise InputError(f"{trace.source}: more than {MAX_OPEN} events are open at the same time")
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
