"""Logs on disk: segments of records, and the step log: one rank's newest steps in full, and older ones thinned.

Each segment (see `log_files`) is a header (see `sftriage.trainer.layout`) and consecutive records: 64-bit words in
native order, of which the first grows from record to record, and the last is the CRC-32 of the bytes before it.

The agent appends to them, never the trainer: they may lie on a disk. When full steps are removed, some stay in a second
log, ``thinned-steps``: the same ones of every rank, and enough in a row to judge windows over them.

The kernel's counters of a rank are in a log named ``counters``. A reading is a record::

    at_ns  when it was taken, on the host's monotonic clock
    ...    the counters in the order of `COUNTERS` in `sftriage.model.windows`, in nanoseconds or as counts; -1: unknown
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
    """Limits of a job's logs, bytes for all ranks together and an age; or of one log of one rank.

    Of its share, a rank uses a quarter for whole steps, an eighth for thinned ones, the same again for device times,
    and a quarter for readings of its counters. A log that has just begun another segment has up to a quarter less.
    """

    max_bytes: int
    age_s: float

    def whole(self, world_size: int) -> KeptSteps:
        """The limits of one rank's whole steps, or of the readings of its counters."""
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
        """Write whole records, or the header; if the disk fails, the file stays as it was."""
        try:
            self.write_at(data, at)
        except RingError:
            # A half-written record would shift every later one.
            os.ftruncate(self._descriptor, at)
            raise
        self.end = at + len(data)

    def ends(self, *, newest: bool) -> tuple[int, int] | None:
        """The first word and the time of the first whole record, or of the newest one."""
        size = self._record_bytes
        places = range(HEADER_BYTES, self.end, size)
        for at in reversed(places) if newest else places:
            raw = self.read_at(size, at)
            if len(raw) == size and crc32(raw[:-WORD_BYTES]) == _WORD.unpack_from(raw, size - WORD_BYTES)[0]:
                number, time_ns = _WORD.unpack_from(raw)[0], _WORD.unpack_from(raw, self._time_at)[0]
                # A valid checksum does not prove a correct writer.
                if 1 <= number < MAX_COUNT:
                    return number, time_ns
        return None


class _Full(NamedTuple):
    """A segment that is no longer written to: its bytes, and the time of its last record."""

    path: Path
    bytes: int
    last_ns: int


def same_writer(first: RingInfo, other: RingInfo) -> bool:
    """Whether two headers come from one process. It may declare stages, and join a cohort, later."""
    return replace(first, schema=other.schema, cohort=other.cohort) == other


class SegmentedLog:
    """Appends records to the newest segment of a log, begins new ones, and continues where an earlier agent stopped.

    Args:
        kind: the suffix of its files.
        magic: the start of its headers.
        record_bytes: the size of a record, by the rank's stages.
        time_word: the word of a record that has its time: nanoseconds, monotonic clock.
        limits: the size and age from which segments are old.
        there: its files, oldest first; by default those in the directory.

    Attributes:
        info: the content of its headers: an earlier agent's log has the stages and the cohort that were known then.
        last: the first word of its last record, or 0.

    Raises RingError if the log cannot be written, or belongs to another writer.
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
                # To readers of the run, a log without a header is damaged.
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

        Raises RingError if the disk failed. The records up to `last` are in the log.
        """
        size, at = self._record_bytes, 0
        self._newest.wake()
        while at < len(raw):
            if self._is_full(raw, at):
                self._begin(raw, at)
            free_bytes = self._limits.segment_bytes - self._newest.end
            part = raw[at : at + max(1, free_bytes // size) * size]
            self._newest.write(part, self._newest.end)
            if self._first_ns is None:
                self._first_ns = self._time(part, 0)
            at += len(part)
            self.last, self._last_ns = _WORD.unpack_from(part, len(part) - size)[0], self._time(part, len(part) - size)

    def join(self, cohort: str) -> None:
        """Set the rank's cohort: the next record begins a segment with it."""
        self.info, self._joined = replace(self.info, cohort=cohort), True

    def old(self) -> list[Path]:
        """The segments beyond the limits, oldest first."""
        total = sum(segment.bytes for segment in self._full) + self._limits.segment_bytes
        old = []
        for segment in self._full:
            if total <= self._limits.max_bytes and self._last_ns - segment.last_ns <= self._limits.age_ns:
                break
            total -= segment.bytes
            old.append(segment.path)
        return old

    def drop(self, path: Path) -> None:
        """Remove a segment that is no longer written to.

        Raises RingError if it cannot be removed; the next writer of the log tries again.
        """
        self._full = [segment for segment in self._full if segment.path != path]
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RingError(f"cannot remove {path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the newest segment; the next append opens it again. A second call does nothing."""
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
        """The content of a header as written: it lacks later declarations of its writer."""
        found = layout.decode_header(self._magic, header, str(path)).info
        if not same_writer(found, self.info):
            raise RingError(f"{path}: the log belongs to another run of this rank")
        return found

    def _take_up(self, segment: _Segment) -> None:
        segment.resume(self._record_bytes, self._time_word)
        self.last, self._last_ns = segment.ends(newest=True) or (self.last, self._last_ns)

    def _is_full(self, raw: bytes, at: int) -> bool:
        if self._joined:
            # (an empty segment that was begun for this record has its name)
            return self._path(_WORD.unpack_from(raw, at)[0]) != self._newest.path
        if self._first_ns is None:
            return False
        full = self._newest.end + self._record_bytes > self._limits.segment_bytes
        return full or self._time(raw, at) - self._first_ns > self._limits.age_ns // SEGMENTS

    def _begin(self, raw: bytes, at: int) -> None:
        """Begin another segment; if the disk fails, the current one stays the newest."""
        path = self._path(_WORD.unpack_from(raw, at)[0])
        # (a file of that name is left from a failed attempt)
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
"""Thinned steps keep the first of every ``BLOCKS_A_PERIOD`` blocks of ``BLOCK_STEPS`` steps, counted from step 0."""

PERIOD_STEPS = BLOCK_STEPS * BLOCKS_A_PERIOD


def blocks_of(steps: StepArrays) -> set[int]:
    """The blocks that thinning keeps because a profiler touched them, and the blocks before these."""
    captured = np.unique(steps.step_B[steps.capturing_B] // BLOCK_STEPS).tolist()
    # The cause of a capture lies before it.
    return {block - before for block in captured for before in (0, 1)}


def stay(step_B: IntArray, blocks: Set[int] = frozenset()) -> BoolArray:
    """Which steps, by number, thinning keeps; those of some ``blocks`` too."""
    block_B = step_B // BLOCK_STEPS
    return np.asarray((block_B % BLOCKS_A_PERIOD == 0) | np.isin(block_B, list(blocks)))


class StepLog(SegmentedLog):
    """Appends steps to a rank's step log, and continues where an earlier agent stopped.

    A reader of the rank's ring opened with ``skip=log.last`` continues there.

    Args:
        kind: ``steps``, or ``device-steps`` for the log of device times.
        kept: its limits; by default none.
        there: its files, whole and thinned, by kind and oldest first; by default those in the directory.

    Raises RingError if the log cannot be written, or belongs to another writer.
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
        """Append steps of the rank, except those in the log: after a restart, the ring is read again.

        Args:
            steps: in order.
            blocks: the blocks of steps that thinning keeps (see `blocks_of`).

        Raises RingError if the disk failed.
        """
        new = steps[steps.seq_B > self.last]
        if not len(new):
            return
        self.extend(sealed(new))
        for path in self.old():
            try:
                self._thin(path, blocks)
            finally:
                # Also if the disk is full: that frees space.
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
    """Appends readings to a rank's log of them, and continues where an earlier agent stopped.

    Args:
        limits: its limits; by default none.

    Raises RingError if the log cannot be written, or belongs to another writer.
    """

    def __init__(self, directory: Path, info: RingInfo, limits: KeptSteps | None = None) -> None:
        limits = limits or EVERYTHING.whole(1)
        super().__init__(directory, info, COUNTERS_KIND, COUNTERS_MAGIC, lambda _: READING_BYTES, 0, limits)

    def add(self, reading: tuple[int, ...]) -> None:
        """Append a reading, and remove old ones; raises RingError if the disk failed, and the log is unchanged."""
        words = _READING.pack(*reading)
        self.extend(words + _WORD.pack(crc32(words)))
        for path in self.old():
            self.drop(path)
