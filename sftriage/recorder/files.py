"""Creating, opening and reading the recorder's files, and checking whether their writer still lives.

Readers use ``pread`` and never map a file: a truncated map ends in SIGBUS, a read in a short answer.

A writer holds a POSIX record lock on its ring. Such a lock is visible from another PID namespace, forked children do
not inherit it, and it goes with the process. But it also goes when the process closes *any* descriptor of the file, so
that a reader in the writer's own process gives the lock back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.base.files import create, open_regular
from sftriage.base.process import start_ticks
from sftriage.errors import RingError
from sftriage.recorder.layout import HEADER_BYTES, Header, RingInfo, decode_header

if TYPE_CHECKING:
    from typing_extensions import Self

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""

_locked: dict[tuple[int, int], int] = {}
"""Descriptors on which this process holds a lock, by device and inode."""


def create_whole(
    path: Path, size_bytes: int, header: Callable[[bool], bytes], *, clobber: bool = False, lock: bool = False
) -> int:
    """Create a file of a fixed size that appears under its name fully formed; its descriptor, open for both.

    ``header`` makes its beginning, given whether it is locked: with ``lock``, where the file system has locks. With
    ``clobber`` it replaces a file of that name.

    Raises:
        FileExistsError: there is a file of that name already.
        OSError: the directory is missing or full, or may not be written; or the mode or group cannot be set.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    descriptor = create(partial)
    try:
        # Every block now: a store to a hole of a full file system would be a SIGBUS in somebody's training.
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.pwrite(descriptor, header(lock and _lock(descriptor)), 0)
        # link() refuses where the name is taken, rename() does not.
        if clobber:
            partial.rename(path)
        else:
            os.link(partial, path)
    except BaseException:
        close(descriptor)
        raise
    finally:
        partial.unlink(missing_ok=True)
    return descriptor


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False where the file system has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    _locked[_inode(descriptor)] = descriptor
    return True


def close(descriptor: int) -> None:
    """Close a file, with its lock if this descriptor holds one, and without the lock of another one of the process."""
    inode = _inode(descriptor)
    holder = _locked.get(inode)
    os.close(descriptor)
    if holder == descriptor:
        del _locked[inode]
    elif holder is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def forget_locks() -> None:
    """In a forked child: the locks are its parent's."""
    _locked.clear()


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class OpenFile:
    """A file that is kept open until `close`, or the end of a ``with`` block.

    Raises:
        RingError: it cannot be opened, or is no regular file; of every method: the file system answered with an error.
    """

    def __init__(self, path: Path | str, flags: int) -> None:
        self.path = Path(path)
        self._descriptor = open_regular(self.path, RingError, flags)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_at(self, size_bytes: int, offset: int) -> bytes:
        """Read up to so many bytes; fewer only where the file ends."""
        parts = []
        try:
            while size_bytes and (part := os.pread(self._descriptor, size_bytes, offset)):
                parts.append(part)
                size_bytes -= len(part)
                offset += len(part)
        except OSError as error:
            raise RingError(f"{self.path}: cannot be read: {error.strerror}") from error
        return b"".join(parts)

    def write_at(self, data: bytes, offset: int) -> None:
        """Write bytes."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], offset + written)
        except OSError as error:
            raise RingError(f"{self.path}: cannot be written: {error.strerror}") from error

    def checked_header(self, magic: bytes) -> Header:
        """What its header says, which has to be that of a file of this kind."""
        return decode_header(magic, self.read_at(HEADER_BYTES, 0), str(self.path))

    def length_bytes(self) -> int:
        """How many bytes it has just now."""
        return os.fstat(self._descriptor).st_size

    def is_writer_alive(self, info: RingInfo) -> bool | None:
        """Whether the process that writes it, a ring, is there; None where that cannot be known."""
        if not info.locked:
            # A pid used again by another process is not the writer.
            return start_ticks(info.pid) == info.pid_start_ticks
        if _inode(self._descriptor) in _locked:
            return True
        try:
            # (start, length) of 0, 0 is all of it.
            answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            return None
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
