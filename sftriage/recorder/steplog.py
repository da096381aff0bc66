"""The step log: every step of one rank on disk, in the slots of its ring.

``rank-<rank>.<attempt>.steps`` is a header (see `layout`, with 0 slots: it grows) and slots in a line. The agent
appends to it; the trainer never touches it, so that it may lie on a disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from sftriage.errors import RingError
from sftriage.recorder import files
from sftriage.recorder.layout import HEADER_BYTES, MAGICS, RingInfo, SlotCheck, decode_header, encode_header


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
        self._check = SlotCheck(info)
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
        size = self._check.slot_bytes
        last_seq = self.last_seq
        if len(raw) % size:
            raise RingError(f"{self.path}: {len(raw)} bytes are not whole slots of {size}")
        for at in range(0, len(raw), size):
            seq = self._check.sequence(raw[at : at + size])
            if seq is None or seq <= last_seq:
                raise RingError(f"{self.path}: not a slot that follows number {last_seq}")
            last_seq = seq
        self._write(raw)
        self.last_seq = last_seq

    def unknown(self, raw: bytes) -> bytes:
        """Whole slots without those at their beginning that the log has: it is read again after a restart."""
        size = self._check.slot_bytes
        for at in range(0, len(raw) - size + 1, size):
            seq = self._check.sequence(raw[at : at + size])
            if seq is None or seq > self.last_seq:
                return raw[at:]
        return b""

    def last(self, slots: int) -> bytes:
        """The last slots of the log, at most so many, whole or not.

        Raises:
            RingError: the file cannot be read.
        """
        size = self._check.slot_bytes
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
        size = self._check.slot_bytes
        whole = (self._size_bytes - HEADER_BYTES) // size
        self._size_bytes = HEADER_BYTES + whole * size
        os.ftruncate(self._descriptor, self._size_bytes)
        for index in range(whole - 1, -1, -1):
            slot = files.read_at(self._descriptor, size, HEADER_BYTES + index * size, str(self.path))
            seq = self._check.sequence(slot) if len(slot) == size else None
            if seq is not None:
                return seq
        return 0
