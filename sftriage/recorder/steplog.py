"""The step log: every step of one rank on disk, in the slots of its ring.

``rank-<rank>.<attempt>.steps`` is a header (see `layout`, with 0 slots: it grows) and slots in a line. The agent
appends to it; the trainer never touches it, so that it may lie on a disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from sftriage.errors import RingError
from sftriage.recorder.files import OpenFile
from sftriage.recorder.layout import HEADER_BYTES, MAGICS, RingInfo, SlotCheck, encode_header


class StepLog(OpenFile):
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
        super().__init__(Path(directory) / info.file_name(kind), os.O_RDWR | os.O_CREAT)
        self._check = SlotCheck(info)
        header = encode_header(MAGICS[kind], info, 0)
        try:
            self._end = self._size_bytes()
            found = self._read_at(HEADER_BYTES, 0)
            if header.startswith(found) and len(found) < HEADER_BYTES:
                self._end = 0
                self._write(header)
            elif found != header:
                self._header(MAGICS[kind])
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
        there = min(slots, (self._end - HEADER_BYTES) // size)
        return self._read_at(there * size, self._end - there * size)

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
        except OSError as error:
            # A half-written slot in the middle would shift every slot after it.
            os.ftruncate(self._descriptor, self._end)
            raise RingError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._end += len(data)

    def _resume(self) -> int:
        """Cut a half-written slot off the end, and find the last sequence number."""
        size = self._check.slot_bytes
        whole = (self._end - HEADER_BYTES) // size
        self._end = HEADER_BYTES + whole * size
        os.ftruncate(self._descriptor, self._end)
        for index in range(whole - 1, -1, -1):
            slot = self._read_at(size, HEADER_BYTES + index * size)
            seq = self._check.sequence(slot) if len(slot) == size else None
            if seq is not None:
                return seq
        return 0
