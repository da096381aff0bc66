"""The recorder's files: made whole, locked for as long as their writer lives, read by others, swept once it is dead.

Rings belong on tmpfs (``/dev/shm``): on a disk file system the kernel write-protects a page while it is written back,
so that the next store to it, a plain assignment in the training loop, waits for the disk.

Readers use ``pread`` and never map a file: a truncated map ends in SIGBUS, a read in a short answer.

A writer holds a POSIX record lock on its ring. Such a lock is visible from another PID namespace, forked children do
not inherit it, and it goes with the process. But it also goes when the process closes *any* descriptor of the file, so
that a reader in the writer's own process gives the lock back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

from sftriage.base.files import create, open_regular
from sftriage.base.process import Process
from sftriage.errors import RingError
from sftriage.trainer import layout, moments
from sftriage.trainer.layout import HEADER_BYTES, Header, RingInfo, decode_header, encode_header
from sftriage.trainer.moments import Log

if TYPE_CHECKING:
    from typing_extensions import Self

    from sftriage.trainer.recording import Recording

WORDS_A_STEP = 16
"""Words of the log for each step that the ring is to hold: one of five stages has 13."""

KEPT_RINGS = 8
"""Dead attempts whose rings are left: an agent that comes late may still want their last steps."""

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.ring")

STALE_PARTIAL_S = 60.0
"""Age from which a file that never got its name is one whose maker was killed."""

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
    """Lock a file until it is closed; False if the file system has no locks."""
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
        return os.fstat(self._descriptor).st_size

    def is_writer_alive(self, info: RingInfo) -> bool | None:
        """Whether the process that writes this ring is alive; None where that cannot be known."""
        if not info.locked:
            return Process(info.pid, info.pid_start_ticks).alive
        if _inode(self._descriptor) in _locked:
            return True
        try:
            answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            return None
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class RingFile:
    """The file of one rank's ring, whose `info` says whether it could be locked.

    Raises:
        FileExistsError: there is a ring for this rank and attempt already.
        OSError: the directory is missing or full, or may not be written.
    """

    def __init__(self, directory: Path, info: RingInfo, slots: int) -> None:
        self.form = moments.FORM
        self.path = directory / info.file_name("ring")
        # One block is always being overwritten.
        self.log_words = (-(-slots * WORDS_A_STEP // layout.BLOCK_WORDS) + 1) * layout.BLOCK_WORDS
        size_bytes = layout.LOG_AT + self.log_words * layout.WORD_BYTES
        self._written_bytes = 0

        def header(locked: bool) -> bytes:
            self.info = replace(info, locked=locked, writer=self.form.name)
            return encode_header(layout.RING_MAGIC, self.info, log_words=self.log_words)

        self.descriptor = create_whole(self.path, size_bytes, header, lock=True)

    def open_log(self, recording: Recording) -> Log:
        # (tests replace the clock; otherwise the form reads the machine's itself)
        clock = None if isinstance(monotonic_ns, BuiltinFunctionType) else monotonic_ns
        return self.form.log(self.descriptor, self.log_words, self.info.started_mono_ns, recording, clock)

    def add(self, log: Log, **addition: object) -> None:
        """Add a line to the additions.

        Raises:
            RingError: there is no room left.
            OSError: it could not be written.
        """
        line = json.dumps(addition, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        if self._written_bytes + len(line) > layout.ADDITIONS_BYTES:
            raise RingError(f"{self.path}: no room for more stages")
        os.pwrite(self.descriptor, line, layout.ADDITIONS_AT + self._written_bytes)
        self._written_bytes += len(line)
        log.set_live(layout.ADDITIONS, self._written_bytes)

    def close(self) -> None:
        """Let go of the file, and of its lock. A second call does nothing."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            close(descriptor)


def claim(directory: Path, info: RingInfo, slots: int) -> RingFile:
    """Create this rank's ring under the first free attempt from the host's newest on, and sweep older ones.

    Raises:
        RingError: a running monitor holds this rank.
        OSError: the directory is missing or full, or may not be written.
    """
    attempt = max(info.attempt, _newest(directory, info))
    while True:
        claimed = replace(info, attempt=attempt)
        try:
            ring = RingFile(directory, claimed, slots)
        except FileExistsError:
            if _writer(directory / claimed.file_name("ring"))[1]:
                raise RingError(f"another monitor holds rank {info.rank}") from None
            attempt += 1
        else:
            with contextlib.suppress(OSError):
                _sweep(directory, ring.info)
            return ring


def _newest(directory: Path, mine: RingInfo) -> int:
    """The attempt of other ranks' rings that is under way; when all of its writers have ended, the next one."""
    others = [(attempt, path) for rank, attempt, path in _numbered(directory) if rank != mine.rank]
    newest = max((attempt for attempt, _ in others), default=0)
    # (one that this very process has closed belongs to the attempt that goes on)
    writers = [_writer(path) for attempt, path in others if attempt == newest]
    return newest + (bool(writers) and all(pid != mine.pid and lives is False for pid, lives in writers))


def _writer(path: Path) -> tuple[int | None, bool | None]:
    """The pid of a ring's writer, and whether it still writes; None, None if the file is no ring."""
    try:
        with OpenFile(path, os.O_RDONLY) as ring:
            header, closed = ring.checked_header(layout.RING_MAGIC), b""
            if not header.info.locked:
                # A lock goes when the ring is closed; without one the process may well live on.
                closed = ring.read_at(layout.WORD_BYTES, layout.LIVE_AT + layout.CLOSED * layout.WORD_BYTES)
            return header.info.pid, bool(ring.is_writer_alive(header.info)) and not any(closed)
    except RingError:
        return None, None


def find_rings(directory: Path | str) -> tuple[Path, ...]:
    """The rings in a directory, by rank and then attempt. Other files are passed over."""
    return tuple(path for _, _, path in _numbered(directory))


def _numbered(directory: Path | str) -> list[tuple[int, int, Path]]:
    names = ((_NAME.fullmatch(path.name), path) for path in Path(directory).glob("rank-*.*.ring"))
    return sorted((int(name[1]), int(name[2]), path) for name, path in names if name)


def _sweep(directory: Path, mine: RingInfo) -> None:
    """Remove the files of dead attempts, except the last `KEPT_RINGS`, and stale partial files of this rank."""
    earlier = [(attempt, path) for _, attempt, path in _numbered(directory) if attempt < mine.attempt]
    dead = [(attempt, path) for attempt, path in earlier if _writer(path)[1] is False]
    kept = sorted({attempt for attempt, _ in dead})[-KEPT_RINGS:]
    for path in (path for attempt, path in dead if attempt not in kept):
        for kind in ("ring", "mailbox", "device", "asks", "stacks"):
            path.with_suffix(f".{kind}").unlink(missing_ok=True)
    for partial in directory.glob(f".rank-{mine.rank}.*.partial"):
        if time.time() - partial.stat().st_mtime > STALE_PARTIAL_S:
            partial.unlink(missing_ok=True)
