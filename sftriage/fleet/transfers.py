"""How far a trace is on its way between hosts: told every so often, as what its capture is doing."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sftriage.decisions import CaptureResult, Report
from sftriage.words.amounts import size

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

TELL_S = 2.0
"""How long a transfer goes on before it is told of, and how often then."""

Tell = Callable[[Report], None]


class Transfer:
    """Counts what moves of one capture, and tells of it.

    Args:
        result: of which capture; its state and numbers do not matter.
        doing: in words: ``sending`` or ``fetching``.
        total_bytes: of all of its files.
        tell: hears of it.
        clock: seconds on a clock that only goes on.
    """

    def __init__(
        self,
        result: CaptureResult,
        doing: str,
        total_bytes: int,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture = result.capture_id, result.rank
        self._doing, self._total_bytes, self._tell, self._clock = doing, total_bytes, tell, clock
        self._moved_bytes, self._told_s = 0, clock()

    def moved(self, more_bytes: int) -> None:
        """So much more has."""
        self._moved_bytes += more_bytes
        if more_bytes and self._clock() >= self._told_s + TELL_S:
            self.say(f"{self._doing} {size(min(self._moved_bytes, self._total_bytes))} of {size(self._total_bytes)}")

    def say(self, what: str) -> None:
        """What is done with the capture now."""
        self._told_s = self._clock()
        self._tell(Report(CaptureResult(*self._capture, "running", what)))

    def reading(self, file: io.BufferedReader) -> io.BufferedIOBase:
        """A file of which is counted what is read."""
        return _Reading(file, self)

    def writing(self, file: io.BufferedWriter) -> io.BufferedIOBase:
        """A file of which is counted what is written."""
        return _Writing(file, self)


class _Reading(io.BufferedIOBase):
    def __init__(self, file: io.BufferedReader, transfer: Transfer) -> None:
        self._file, self._transfer = file, transfer

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = self._file.readinto(buffer)
        self._transfer.moved(count)
        return count


class _Writing(io.BufferedIOBase):
    def __init__(self, file: io.BufferedWriter, transfer: Transfer) -> None:
        self._file, self._transfer = file, transfer

    def write(self, data: ReadableBuffer, /) -> int:
        count = self._file.write(data)
        self._transfer.moved(count)
        return count
