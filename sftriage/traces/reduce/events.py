"""A trace in memory: the events that matter, in columns, whatever file they came from."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sftriage.traces.reduce.intervals import Ints

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

MAX_NAMES = 500_000
"""Names kept apart. A program that puts a number into every name would otherwise fill the memory with them."""

MANY_NAMES = "(other names)"

LIMIT_NS = 2**61
"""Above this a time is no time, and sums of three would not fit into 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The events of one process. Times are nanoseconds: since the Unix epoch if ``absolute``, else from some moment.

    Attributes:
        source: the file, and what in it.
        start_E: when each of the E events began.
        end_E: when it ended; not before it began.
        kind_E: what it is, as the constants of this module.
        name_E: its name, an index into ``names``.
        track_E: its process and thread (or device and stream), an index into ``tracks``.
        link_E: ties a device's work to the call that launched it; -1 where nothing does.
        rank: its rank, where the trace says so.
        world_size: ranks of the job, where the trace says so.
        job: the job, where sftriage recorded it.
        capture_id: the capture, where sftriage made it.
        notes: what a reader should know about how it was read.
    """

    source: str
    start_E: Ints
    end_E: Ints
    kind_E: NDArray[np.uint8]
    name_E: NDArray[np.int32]
    track_E: NDArray[np.int32]
    link_E: Ints
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
        nothing = {name: getattr(self, name)[:0].copy() for name in ("start_E", "end_E", "kind_E", "name_E", "track_E")}
        return replace(self, **nothing, link_E=self.link_E[:0].copy(), names=())

    def of_kinds(self, *kinds: int) -> NDArray[np.bool_]:
        """Which events are of these kinds (E)."""
        wanted = np.zeros(256, dtype=np.bool_)
        wanted[list(kinds)] = True
        return np.asarray(wanted[self.kind_E])

    def named(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which events (E) have a name that is wanted, given for each name whether it is."""
        return np.asarray(wanted[self.name_E]) if len(wanted) else np.zeros(len(self.name_E), dtype=np.bool_)


@dataclass(slots=True)
class Columns:
    """Events as they are read, one after the other."""

    start: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    kind: bytearray = field(default_factory=bytearray)
    name: array[int] = field(default_factory=lambda: array("i"))
    track: array[int] = field(default_factory=lambda: array("i"))
    link: array[int] = field(default_factory=lambda: array("q"))
    name_ids: dict[str, int] = field(default_factory=dict)
    track_ids: dict[tuple[str, str], int] = field(default_factory=dict)

    def name_id(self, name: str) -> int:
        """The number of a name, new or known."""
        known = self.name_ids.get(name)
        if known is not None:
            return known
        if len(self.name_ids) >= MAX_NAMES:
            name = MANY_NAMES
        return self.name_ids.setdefault(name, len(self.name_ids))

    def track_id(self, process: str, thread: str) -> int:
        """The number of a thread, new or known."""
        return self.track_ids.setdefault((process, thread), len(self.track_ids))

    def add(self, start_ns: int, duration_ns: int, kind: int, name: int, track: int, link: int) -> bool:
        """Take an event, unless its time cannot be; whether it was taken."""
        if not (-LIMIT_NS < start_ns < LIMIT_NS and 0 <= duration_ns < LIMIT_NS):
            return False
        self.start.append(start_ns)
        self.duration.append(duration_ns)
        self.kind.append(kind)
        self.name.append(name)
        self.track.append(track)
        self.link.append(link if -1 < link < LIMIT_NS else -1)
        return True

    def trace(self, source: str, *, base_ns: int, absolute: bool, notes: tuple[str, ...]) -> Trace:
        """All that was taken; the columns are handed over, not copied, and are not to be added to any more."""
        start_E = np.frombuffer(self.start, dtype=np.int64) if self.start else np.zeros(0, dtype=np.int64)
        start_E += base_ns
        end_E = np.frombuffer(self.duration, dtype=np.int64) if self.start else np.zeros(0, dtype=np.int64)
        end_E += start_E
        return Trace(
            source=source,
            start_E=start_E,
            end_E=end_E,
            kind_E=np.frombuffer(self.kind, dtype=np.uint8),
            name_E=np.frombuffer(self.name, dtype=np.int32) if self.name else np.zeros(0, dtype=np.int32),
            track_E=np.frombuffer(self.track, dtype=np.int32) if self.track else np.zeros(0, dtype=np.int32),
            link_E=np.frombuffer(self.link, dtype=np.int64) if self.link else np.zeros(0, dtype=np.int64),
            names=tuple(self.name_ids),
            tracks=tuple(self.track_ids),
            absolute=absolute,
            notes=notes,
        )
