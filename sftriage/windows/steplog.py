"""Logs on disk: segments of records, and the step log, the newest steps of one rank whole and older ones thinned.

Each segment (see `log_files`) is a header (see `sftriage.trainer.layout`) and records in a line: 64-bit words in native
order, of which the first grows from record to record, and the last is the CRC-32 of the bytes before it.

The agent appends to them, and the trainer never does: they may lie on a disk. Of steps beyond those kept whole, some
stay in a log beside, ``thinned-steps``: the same ones of every rank, and enough in a row to judge windows over them.

What the kernel counted of a rank is kept in a log named ``counters``. A reading is a record::

    at_ns  when it was taken, on the host's monotonic clock
    ...    the counters in the order of `counters.COUNTERS`, in nanoseconds or as counts; -1 where unknown
    crc    CRC-32 of the bytes before it
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from sftriage.base.files import open_regular
from sftriage.errors import RingError
from sftriage.model.windows import COUNTERS, StageSchema
from sftriage.trainer import layout
from sftriage.trainer.layout import COUNTERS_MAGIC, HEADER_BYTES, MAX_COUNT, WORD_BYTES, OpenFile, RingInfo
from sftriage.windows.decoding import START, BoolArray, IntArray, StepArrays, checked, sealed, slot_bytes
from sftriage.windows.log_files import find_segments, thinned_kind

MAX_SEGMENT_BYTES = 4 << 20
MIN_SEGMENT_BYTES = 16 << 10
SEGMENTS = 4
"""Minimum segments of a full log: when the oldest one is removed, most of it stays."""

_WORD = struct.Struct("=q")


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """How much is kept of a job's steps: bytes for all its ranks together, and for how long; or of one log of a rank.

    Each rank has its share: a quarter of it for whole steps, an eighth for thinned ones, the same again for device
    times, and a quarter for readings of its counters. Of a log that has just begun another segment, up to a quarter
    less is there.
    """

    max_bytes: int
    age_s: float

    def whole(self, world_size: int) -> KeptSteps:
        """What is kept of the steps of one rank as they are, or of the readings of its counters."""
        return replace(self, max_bytes=self.max_bytes // (4 * world_size))

    @property
    def age_ns(self) -> int:
        return round(self.age_s * 1e9)

    @property
    def segment_bytes(self) -> int:
        return max(MIN_SEGMENT_BYTES, min(self.max_bytes // SEGMENTS, MAX_SEGMENT_BYTES))


EVERYTHING = KeptSteps(1 << 62, 1e9)


class _Segment(OpenFile):
    """One file. ``end`` is where its whole records end."""

    end = HEADER_BYTES
    _record_bytes, _time_at = WORD_BYTES, 0

    def wake(self) -> None:
        if self._descriptor < 0:
            self._descriptor = open_regular(self.path, RingError, os.O_RDWR)

    def resume(self, record_bytes: int, time_word: int) -> None:
        """Cut a half-written record off the end."""
        self._record_bytes, self._time_at = record_bytes, time_word * WORD_BYTES
        self.end = HEADER_BYTES + max(0, self.length_bytes() - HEADER_BYTES) // record_bytes * record_bytes
        os.ftruncate(self._descriptor, self.end)

    def write(self, data: bytes, at: int) -> None:
        """Write whole records, or the header; nothing of them is in the file where the disk does not take them."""
        try:
            self.write_at(data, at)
        except RingError:
            # A half-written record in the middle would shift every one after it.
            os.ftruncate(self._descriptor, at)
            raise
        self.end = at + len(data)

    def ends(self, *, newest: bool) -> tuple[int, int] | None:
        """The first word and the time of the first record that was written whole, or of the newest such record."""
        size = self._record_bytes
        places = range(HEADER_BYTES, self.end, size)
        for at in reversed(places) if newest else places:
            raw = self.read_at(size, at)
            if len(raw) == size and crc32(raw[:-WORD_BYTES]) == _WORD.unpack_from(raw, size - WORD_BYTES)[0]:
                number, time_ns = _WORD.unpack_from(raw)[0], _WORD.unpack_from(raw, self._time_at)[0]
                # A right checksum does not make a right writer.
                if 1 <= number < MAX_COUNT:
                    return number, time_ns
        return None


class _Full(NamedTuple):
    """A segment that is written to no more: its bytes, and when its last record was."""

    path: Path
    bytes: int
    last_ns: int


def same_writer(one: RingInfo, other: RingInfo) -> bool:
    """Whether two headers are of one process. What it declares, and which cohort it joins, may come later."""
    return replace(one, schema=other.schema, cohort=other.cohort) == other


class SegmentedLog:
    """Appends records to the newest segment of a log, begins others, and goes on where an earlier agent stopped.

    Args:
        kind: what its files are called.
        magic: what its headers begin with.
        record_bytes: of one record, of a rank with these stages.
        time_word: the word of a record that says when it was: nanoseconds, monotonic clock.
        limits: from where on segments are old.
        there: its files, oldest first; by default those in the directory.

    Attributes:
        info: what its headers say: an earlier agent's log has the stages and the cohort that were known then.
        last: the first word of its last record, or 0.

    Raises:
        RingError: the log cannot be written, or belongs to another writer.
    """

    def __init__(
        self,
        directory: Path,
        info: RingInfo,
        kind: str,
        magic: bytes,
        record_bytes: Callable[[StageSchema], int],
        time_word: int,
        limits: KeptSteps,
        there: Sequence[Path] | None = None,
    ) -> None:
        self._directory, self._kind, self._magic, self._time_word = directory, kind, magic, time_word
        self._limits, self.info = limits, info
        try:
            found = find_segments(directory, [info.rank]) if there is None else []
            paths = [path for name, path in found if (name.attempt, name.kind) == (info.attempt, kind)]
            paths += there or ()
        except OSError as error:
            raise RingError(f"cannot read {directory}: {error.strerror}") from error
        self._newest = _Segment(paths[-1] if paths else self._path(0), os.O_RDWR | os.O_CREAT)
        self._full: list[_Full] = []
        # The first word and the time of the last record.
        self.last, self._last_ns = 0, 0
        try:
            self._check_header(paths[:-1])
            self._record_bytes = record_bytes(self.info.schema)
            for path in paths[:-1]:
                with _Segment(path, os.O_RDWR) as segment:
                    self._take_up(segment)
                self._full.append(_Full(path, segment.end, self._last_ns))
            self._take_up(self._newest)
            first = self._newest.ends(newest=False)
        except BaseException:
            self.close()
            if not paths:
                # Whoever reads the run takes a log without a header for a damaged one.
                with contextlib.suppress(OSError):
                    self._newest.path.unlink()
            raise
        self._first_ns = None if first is None else first[1]
        self._joined = False

    @property
    def path(self) -> Path:
        return self._newest.path

    def extend(self, raw: bytes) -> None:
        """Append whole records, each later than those that the log has.

        Raises:
            RingError: the disk did not take them. Those up to `last` are in the log.
        """
        size, at = self._record_bytes, 0
        self._newest.wake()
        while at < len(raw):
            if self._is_full(raw, at):
                self._begin(raw, at)
            room = self._limits.segment_bytes - self._newest.end
            part = raw[at : at + max(1, room // size) * size]
            self._newest.write(part, self._newest.end)
            if self._first_ns is None:
                self._first_ns = self._time(part, 0)
            at += len(part)
            self.last, self._last_ns = _WORD.unpack_from(part, len(part) - size)[0], self._time(part, len(part) - size)

    def join(self, cohort: str) -> None:
        """The rank is of this cohort: the next segment says so, and begins with the next record."""
        self.info, self._joined = replace(self.info, cohort=cohort), True

    def old(self) -> list[Path]:
        """The segments that are beyond the limits, oldest first."""
        total = sum(one.bytes for one in self._full) + self._limits.segment_bytes
        found = []
        for one in self._full:
            if total <= self._limits.max_bytes and self._last_ns - one.last_ns <= self._limits.age_ns:
                break
            total -= one.bytes
            found.append(one.path)
        return found

    def drop(self, path: Path) -> None:
        """Remove a segment that is written to no more.

        Raises:
            RingError: it cannot be removed; the next writer of the log tries again.
        """
        self._full = [one for one in self._full if one.path != path]
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RingError(f"cannot remove {path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the newest segment, until something is appended. A second call does nothing."""
        self._newest.close()

    def _path(self, first: int) -> Path:
        kind = f"{first}.{self._kind}" if first else self._kind
        return self._directory / self.info.file_name(kind)

    def _time(self, raw: bytes, at: int) -> int:
        return int(_WORD.unpack_from(raw, at + self._time_word * WORD_BYTES)[0])

    def _check_header(self, before: list[Path]) -> None:
        found = self._newest.read_at(HEADER_BYTES, 0)
        if len(found) == HEADER_BYTES:
            self.info = self._of_this_writer(self._newest.path, found)
            return
        if before:
            with _Segment(before[-1], os.O_RDONLY) as segment:
                self.info = self._of_this_writer(before[-1], segment.read_at(HEADER_BYTES, 0))
        header = layout.encode_header(self._magic, self.info)
        if not header.startswith(found):
            self._of_this_writer(self._newest.path, found)
        self._newest.write(header, 0)

    def _of_this_writer(self, path: Path, header: bytes) -> RingInfo:
        """The content of a header, which stays as written: it lacks what its writer has declared since."""
        found = layout.decode_header(self._magic, header, str(path)).info
        if not same_writer(found, self.info):
            raise RingError(f"{path}: the log belongs to another run of this rank")
        return found

    def _take_up(self, segment: _Segment) -> None:
        segment.resume(self._record_bytes, self._time_word)
        self.last, self._last_ns = segment.ends(newest=True) or (self.last, self._last_ns)

    def _is_full(self, raw: bytes, at: int) -> bool:
        if self._joined:
            # (one that was begun for this very record, and is empty, has its name)
            return self._path(_WORD.unpack_from(raw, at)[0]) != self._newest.path
        if self._first_ns is None:
            return False
        full = self._newest.end + self._record_bytes > self._limits.segment_bytes
        return full or self._time(raw, at) - self._first_ns > self._limits.age_ns // SEGMENTS

    def _begin(self, raw: bytes, at: int) -> None:
        """Begin another segment; where the disk does not take it, the one that is there stays the newest."""
        path = self._path(_WORD.unpack_from(raw, at)[0])
        # (one of that name is what was left of the last try)
        following = _Segment(path, os.O_RDWR | os.O_CREAT)
        try:
            following.write(layout.encode_header(self._magic, self.info), 0)
            following.resume(self._record_bytes, self._time_word)
        except RingError:
            following.close()
            path.unlink(missing_ok=True)
            raise
        self._full.append(_Full(self._newest.path, self._newest.end, self._last_ns))
        self._newest.close()
        self._newest, self._first_ns, self._joined = following, None, False


MAGICS = {"steps": layout.LOG_MAGIC, "device-steps": layout.DEVICE_LOG_MAGIC}

BLOCK_STEPS = 128
BLOCKS_A_PERIOD = 8
"""Where steps are thinned, one of so many blocks of so many steps is kept, counted from step 0: the first one."""

PERIOD_STEPS = BLOCK_STEPS * BLOCKS_A_PERIOD


def blocks_of(steps: StepArrays) -> set[int]:
    """The blocks of steps that stay, with those before them, where others are thinned: a profiler touched them."""
    captured = np.unique(steps.step_B[steps.capturing_B] // BLOCK_STEPS).tolist()
    # The cause of a capture lies before it.
    return {block - before for block in captured for before in (0, 1)}


def stay(step_B: IntArray, blocks: Set[int] = frozenset()) -> BoolArray:
    """Which steps, by their numbers, are kept where steps are thinned; those of some blocks too."""
    block_B = step_B // BLOCK_STEPS
    return np.asarray((block_B % BLOCKS_A_PERIOD == 0) | np.isin(block_B, list(blocks)))


class StepLog(SegmentedLog):
    """Appends steps to a rank's step log, and goes on where an earlier agent stopped.

    A reader of the rank's ring opened with ``skip=log.last`` goes on from there.

    Args:
        kind: ``steps``, or ``device-steps`` for the log of device times.
        kept: how much of it is kept; by default all.
        there: its files, whole and thinned, by kind and oldest first; by default those in the directory.

    Raises:
        RingError: the log cannot be written, or belongs to another writer.
    """

    def __init__(
        self,
        directory: Path | str,
        info: RingInfo,
        *,
        kind: str = "steps",
        kept: KeptSteps | None = None,
        there: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        self._there = there
        self._thinned: SegmentedLog | None = None
        limits = (kept or EVERYTHING).whole(info.world_size)
        super().__init__(Path(directory), info, kind, MAGICS[kind], slot_bytes, START, limits, self._files(kind))

    def append(self, steps: StepArrays, blocks: Set[int] = frozenset()) -> None:
        """Append steps of the rank, but for those that the log has: a ring is read again after a restart.

        Args:
            steps: in order.
            blocks: of steps that stay where others are thinned (see `blocks_of`).

        Raises:
            RingError: the disk did not take all of them.
        """
        new = steps[steps.seq_B > self.last]
        if not len(new):
            return
        self.extend(sealed(new))
        for path in self.old():
            try:
                self._thin(path, blocks)
            finally:
                # Also where the disk is full: there it is in the way.
                self.drop(path)

    def close(self) -> None:
        super().close()
        if self._thinned is not None:
            self._thinned.close()

    def _files(self, kind: str) -> Sequence[Path] | None:
        return None if self._there is None else self._there.get(kind, ())

    def _thin(self, path: Path, blocks: Set[int]) -> None:
        if self._thinned is None:
            kind, limits = thinned_kind(self._kind), replace(self._limits, max_bytes=self._limits.max_bytes // 2)
            about = self._directory, self.info, kind, self._magic, slot_bytes, START, limits, self._files(kind)
            self._thinned = SegmentedLog(*about)
        with OpenFile(path, os.O_RDONLY) as file:
            raw = file.read_at(file.length_bytes(), HEADER_BYTES)
        steps, sound_B = checked(self.info.rank, raw, self.info.schema)
        steps = steps[sound_B]
        left = steps[stay(steps.step_B, blocks | blocks_of(steps)) & (steps.seq_B > self._thinned.last)]
        if len(left) and self._last_ns - int(left.start_ns_B[-1]) <= self._limits.age_ns:
            self._thinned.extend(sealed(left))
        for older in self._thinned.old():
            self._thinned.drop(older)


COUNTERS_KIND = "counters"

_READING = struct.Struct(f"={1 + len(COUNTERS)}q")
READING_BYTES = _READING.size + WORD_BYTES


class CountersLog(SegmentedLog):
    """Appends readings to a rank's log of them, and goes on where an earlier agent stopped.

    Args:
        limits: how much of it is kept; by default all.

    Raises:
        RingError: the log cannot be written, or is that of another writer.
    """

    def __init__(self, directory: Path, info: RingInfo, limits: KeptSteps | None = None) -> None:
        limits = limits or EVERYTHING.whole(1)
        super().__init__(directory, info, COUNTERS_KIND, COUNTERS_MAGIC, lambda _: READING_BYTES, 0, limits)

    def add(self, reading: tuple[int, ...]) -> None:
        """Append a reading; old ones go.

        Raises:
            RingError: the disk did not take it, and nothing of it is in the log.
        """
        words = _READING.pack(*reading)
        self.extend(words + _WORD.pack(crc32(words)))
        for path in self.old():
            self.drop(path)
