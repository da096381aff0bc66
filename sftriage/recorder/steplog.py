"""The step log: every step of one rank on disk, in the slots of its ring.

``rank-<rank>.<attempt>.steps`` is a header (see `layout`, with 0 slots: it grows) and slots in a line. The agent
appends to it; the trainer never touches it, so that it may lie on a disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from sftriage.errors import RingError
from sftriage.recorder import files
from sftriage.recorder.layout import HEADER_BYTES, MAGICS, RingInfo, SlotCodec, decode_header, encode_header
from sftriage.records import StepRecord

_SLOTS_AT_A_TIME = 4096


class LoggedSteps(NamedTuple):
    """What a step log holds. ``skipped`` slots were damaged, half-written or out of order."""

    info: RingInfo
    records: list[StepRecord]
    skipped: int


class StepLog:
    """Appends slots to a rank's step log, and goes on where an earlier agent stopped.

    Args:
        directory: where the log lies; it has to exist.
        info: the ring's info.
        kind: ``steps``, or ``device-steps`` for the log of device times.

    Attributes:
        last_seq: sequence number of the last step in the log, or 0. A reader opened with ``skip=log.last_seq`` goes on
            from there.

    Raises:
        RingError: the log cannot be written, or belongs to another writer.
    """

    def __init__(self, directory: Path | str, info: RingInfo, *, kind: str = "steps") -> None:
        self.path = Path(directory) / info.file_name(kind)
        self._codec = SlotCodec(info)
        header = encode_header(MAGICS[kind], info, 0)
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RingError(f"{self.path}: cannot be opened: {error.strerror}") from error
        try:
            self._size_bytes = os.fstat(self._descriptor).st_size
            found = files.read_at(self._descriptor, HEADER_BYTES, 0, str(self.path))
            if header.startswith(found) and len(found) < HEADER_BYTES:
                self._size_bytes = 0
                self._write(header)
            elif found != header:
                decode_header(MAGICS[kind], found, str(self.path))
                raise RingError(f"{self.path}: the log of another run of this rank")
            self.last_seq = self._resume()
        except BaseException:
            self.close()
            raise

    def append(self, raw: bytes) -> None:
        """Append whole slots, as `Batch.raw` has them.

        Raises:
            RingError: not whole, valid slots that follow the last one; or the disk did not take them, and none is in
                the log.
        """
        size = self._codec.slot_bytes
        last_seq = self.last_seq
        if len(raw) % size:
            raise RingError(f"{self.path}: {len(raw)} bytes are not whole slots of {size}")
        for at in range(0, len(raw), size):
            found = self._codec.decode(raw[at : at + size])
            if found is None or found[0] <= last_seq:
                raise RingError(f"{self.path}: not a slot that follows number {last_seq}")
            last_seq = found[0]
        self._write(raw)
        self.last_seq = last_seq

    def unknown(self, raw: bytes) -> bytes:
        """Whole slots without those at their beginning that the log has: it is read again after a restart."""
        size = self._codec.slot_bytes
        for at in range(0, len(raw) - size + 1, size):
            seq = self._codec.sequence(raw[at : at + size])
            if seq is None or seq > self.last_seq:
                return raw[at:]
        return b""

    def last(self, slots: int) -> bytes:
        """The last slots of the log, at most so many, whole or not.

        Raises:
            RingError: the file cannot be read.
        """
        size = self._codec.slot_bytes
        there = min(slots, (self._size_bytes - HEADER_BYTES) // size)
        return files.read_at(self._descriptor, there * size, self._size_bytes - there * size, str(self.path))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._size_bytes + written)
        except OSError as error:
            # A half-written slot in the middle would shift every slot after it.
            os.ftruncate(self._descriptor, self._size_bytes)
            raise RingError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._size_bytes += len(data)

    def _resume(self) -> int:
        """Cut a half-written slot off the end, and find the last sequence number."""
        size = self._codec.slot_bytes
        whole = (self._size_bytes - HEADER_BYTES) // size
        self._size_bytes = HEADER_BYTES + whole * size
        os.ftruncate(self._descriptor, self._size_bytes)
        for index in range(whole - 1, -1, -1):
            slot = files.read_at(self._descriptor, size, HEADER_BYTES + index * size, str(self.path))
            found = self._codec.decode(slot) if len(slot) == size else None
            if found is not None:
                return found[0]
        return 0


class LogReader:
    """Reads a step log from its beginning to its end, a bounded number of steps at a time.

    No file is open between two reads: the logs of a job's every rank can be read side by side.

    Args:
        path: the log.
        kind: see `StepLog`.

    Attributes:
        info: who wrote the ring that it was taken from.
        skipped: slots so far that were damaged, half-written or out of order.

    Raises:
        RingError: the header cannot be read: foreign, truncated, of another version or byte order, or damaged.
    """

    def __init__(self, path: Path | str, *, kind: str = "steps") -> None:
        self.path = Path(path)
        self.info, _ = decode_header(MAGICS[kind], self._bytes_at(0, HEADER_BYTES), str(path))
        self.skipped = 0
        self._codec = SlotCodec(self.info)
        self._last_seq = 0
        self._at: int | None = HEADER_BYTES

    def read(self, slots: int = _SLOTS_AT_A_TIME) -> bytes:
        """The next steps' slots, at most so many, as `Batch.raw` has them; nothing once all have been read.

        Raises:
            RingError: the file has gone, or the file system answered with an error.
        """
        size = self._codec.slot_bytes
        whole: list[bytes] = []
        while self._at is not None and not whole:
            data = self._bytes_at(self._at, slots * size)
            self._at = self._at + len(data) if len(data) == slots * size else None
            for start in range(0, len(data), size):
                slot = data[start : start + size]
                seq = self._codec.sequence(slot) if len(slot) == size else None
                if seq is None or seq <= self._last_seq:
                    self.skipped += 1
                else:
                    self._last_seq = seq
                    whole.append(slot)
        return b"".join(whole)

    def _bytes_at(self, offset: int, size_bytes: int) -> bytes:
        descriptor = files.open_regular(self.path, os.O_RDONLY)
        try:
            return files.read_at(descriptor, size_bytes, offset, str(self.path))
        finally:
            os.close(descriptor)


def read_log(path: Path | str) -> LoggedSteps:
    """Every step of a log that can be read, whatever happened to the rest of the file.

    Raises:
        RingError: as `LogReader`.
    """
    reader = LogReader(path)
    codec, size = SlotCodec(reader.info), reader.info.slot_bytes
    records: list[StepRecord] = []
    while raw := reader.read():
        found = (codec.decode(raw[at : at + size]) for at in range(0, len(raw), size))
        records += [record for _, record in filter(None, found)]
    return LoggedSteps(reader.info, records, reader.skipped)
