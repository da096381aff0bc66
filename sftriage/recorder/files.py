"""Creating, opening and reading the recorder's files, and asking whether their writer still lives.

Readers use ``pread`` and never map a file: a map of a file that somebody truncates ends in SIGBUS, a read ends in a
short answer.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.errors import RingError
from sftriage.recorder.layout import HEADER_BYTES, RingInfo, decode_header

if TYPE_CHECKING:
    from typing_extensions import Self


def create_mapped(path: Path, header: bytes, size_bytes: int, *, clobber: bool) -> mmap.mmap:
    """Create a private file of a fixed size that appears under its name fully formed, and map it.

    With ``clobber`` it takes the place of a file of that name.

    Raises:
        FileExistsError: there is a file of that name already.
        OSError: the directory is missing or full, or may not be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Every block now: a store to a hole of a full file system would be a SIGBUS in somebody's training.
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.pwrite(descriptor, header, 0)
        mapped = mmap.mmap(descriptor, size_bytes)
        # Touch every page now, so that no step pays for the page fault. Past the header all is zero anyway.
        for offset in range(HEADER_BYTES, size_bytes, mmap.PAGESIZE):
            mapped[offset] = 0
        # link() refuses where the name is taken, rename() does not.
        if clobber:
            partial.rename(path)
        else:
            os.link(partial, path)
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)
    return mapped


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file that somebody else may have written; a pipe or a link in its place is refused.

    Raises:
        RingError: it cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RingError(f"{path}: cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RingError(f"{path}: not a regular file")
    return descriptor


def read_at(descriptor: int, size_bytes: int, offset: int, name: str) -> bytes:
    """Read up to ``size_bytes``; fewer only where the file ends.

    Raises:
        RingError: the file system answered with an error.
    """
    parts = []
    try:
        while size_bytes and (part := os.pread(descriptor, size_bytes, offset)):
            parts.append(part)
            size_bytes -= len(part)
            offset += len(part)
    except OSError as error:
        raise RingError(f"{name}: cannot be read: {error.strerror}") from error
    return b"".join(parts)


class OpenFile:
    """A file that is kept open until `close`, or the end of a ``with`` block.

    Raises:
        RingError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path | str, flags: int) -> None:
        self.path = Path(path)
        self._descriptor = open_regular(self.path, flags)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_at(self, size_bytes: int, offset: int) -> bytes:
        return read_at(self._descriptor, size_bytes, offset, str(self.path))

    def _header(self, magic: bytes) -> tuple[RingInfo, int]:
        return decode_header(magic, self._read_at(HEADER_BYTES, 0), str(self.path))

    def _size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size


def start_ticks(pid: int) -> int | None:
    """When a process started (clock ticks since boot), or None if it is not running.

    A zombie is not running: it was killed, and only its parent has not looked yet.
    """
    try:
        # The name is in parentheses and may hold anything, parentheses too: the fields count from the last one.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    state, started = fields[0], int(fields[19])
    return None if state in (b"Z", b"X") else started
