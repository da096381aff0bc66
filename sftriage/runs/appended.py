"""What is appended to a journal, line by line. It lies where others can write to: lines may be of any length."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from sftriage.errors import RingError
from sftriage.events import MAX_EVENT_BYTES, VERSION, JournalCompacted, decode, kind_of
from sftriage.recorder import files

_CHUNK_BYTES = 1 << 20


class Appended:
    """Follows a file, each line once.

    Args:
        path: the file, which need not be there yet.
        take: is given each whole line that is no longer than an event may be.
        anew: is called where the file shrank, or is another one: it is read from its beginning.
        skip: leave out what is there already.
    """

    def __init__(
        self, path: Path, take: Callable[[bytes], object], anew: Callable[[], object], *, skip: bool = False
    ) -> None:
        self._path, self._give, self._anew = path, take, anew
        self._inode = 0
        self._begin()
        if skip:
            with contextlib.suppress(OSError):
                about = path.stat()
                self._inode, self._at = about.st_ino, about.st_size

    def follow(self) -> bool:
        """Read what has been appended; whether there was anything."""
        try:
            descriptor = files.open_regular(self._path, os.O_RDONLY)
        except RingError:
            return False
        try:
            about = os.fstat(descriptor)
            if about.st_ino != self._inode or about.st_size < self._at:
                goes_on = self._place_in(descriptor)
                self._inode = about.st_ino
                self._begin()
                if goes_on is None:
                    self._anew()
                else:
                    self._at = goes_on
            before = self._at
            while data := os.pread(descriptor, self._chunk_bytes, self._at):
                if not self._take(data):
                    break
        except OSError:
            # Read on from there at the next look.
            return False
        finally:
            os.close(descriptor)
        return self._at != before

    def _place_in(self, descriptor: int) -> int | None:
        """Where to read on in a journal that was made of the one that was read so far; None where it was not."""
        first, newline, _ = os.pread(descriptor, MAX_EVENT_BYTES, 0).partition(b"\n")
        try:
            event = decode(first) if newline and kind_of(first) == (VERSION, True) else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(event, JournalCompacted) or event.inode != self._inode or self._at < event.kept_from:
            return None
        return len(first) + 1 + event.older_bytes + self._at - event.kept_from

    def _begin(self) -> None:
        self._at, self._chunk_bytes, self._passing_over = 0, _CHUNK_BYTES, False

    def _take(self, data: bytes) -> bool:
        """Take the whole lines; whether there may be more. What is there of another may yet be cut off."""
        *lines, rest = data.split(b"\n")
        self._at += len(data) - len(rest)
        for line in lines:
            if not self._passing_over:
                self._give(line)
            self._passing_over = False
        # The end of a line that is too long is not the beginning of another.
        self._passing_over = self._passing_over or len(rest) > MAX_EVENT_BYTES
        if self._passing_over:
            self._at += len(rest)
        full = len(data) == self._chunk_bytes
        # One that does not fit is read again, and more of it at once.
        self._chunk_bytes = min(2 * self._chunk_bytes, 2 * MAX_EVENT_BYTES) if full and not lines else _CHUNK_BYTES
        return full
