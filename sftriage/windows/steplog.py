"""The step log: every step of one rank on disk, in slots (see `windows.slots`).

The agent appends to it; the trainer never touches it, so that it may lie on a disk.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sftriage.errors import RingError
from sftriage.recorder.files import OpenFile
from sftriage.recorder.layout import DEVICE_LOG_MAGIC, HEADER_BYTES, LOG_MAGIC, RingInfo, encode_header
from sftriage.windows.decoding import StepArrays, sealed
from sftriage.windows.slots import SlotCheck

MAGICS = {"steps": LOG_MAGIC, "device-steps": DEVICE_LOG_MAGIC}


class StepLog(OpenFile):
    """Appends slots to a rank's step log, and goes on where an earlier agent stopped.

    Args:
        directory: where the log lies; it has to exist.
        info: the ring's info.
        kind: ``steps``, or ``device-steps`` for the log of device times.

    Attributes:
        info: what its header says: an earlier agent's log has the stages and the cohort that were known then.
        last_seq: sequence number of the last step in the log, or 0. A reader opened with ``skip=log.last_seq`` goes on
            from there.

    Raises:
        RingError: the log cannot be written, or belongs to another writer.
    """

    def __init__(self, directory: Path | str, info: RingInfo, *, kind: str = "steps") -> None:
        super().__init__(Path(directory) / info.file_name(kind), os.O_RDWR | os.O_CREAT)
        self.info = info
        header = encode_header(MAGICS[kind], info)
        try:
            self._end = self._size_bytes()
            found = self._read_at(HEADER_BYTES, 0)
            if header.startswith(found) and len(found) < HEADER_BYTES:
                self._end = 0
                self._write(header)
            elif found != header:
                # What its writer has declared since is not in it, and it stays what it is.
                self.info = self._header(MAGICS[kind]).info
                if replace(self.info, schema=info.schema, cohort=info.cohort) != info:
                    raise RingError(f"{self.path}: the log of another run of this rank")
            self._check = SlotCheck(self.info.schema)
            self.last_seq = self._resume()
        except BaseException:
            self.close()
            raise

    def append(self, steps: StepArrays) -> None:
        """Append steps of the rank, but for those that the log has: a ring is read again after a restart.

        Raises:
            RingError: the disk did not take them, and none is in the log.
        """
        new = steps[steps.seq_B > self.last_seq]
        if len(new):
            self._write(sealed(new))
            self.last_seq = int(new.seq_B[-1])

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
