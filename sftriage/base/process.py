"""Whether a process is alive, and locks that the kernel releases when their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sftriage.base.files import PRIVATE, regular
from sftriage.errors import UsageError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Tells one start of a host's kernel from all others."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, which no later one with its pid passes for."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, start_ticks(pid) or 0)

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started (clock ticks since boot); None if it does not run, as a zombie does not."""
    state, *fields = _stat(pid)
    return None if state in (b"", b"Z", b"X") else int(fields[18])


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if there is no such process."""
    _, *fields = _stat(pid)
    return int(fields[0]) if fields else None


def _stat(pid: int) -> list[bytes]:
    """The state of a process, its parent, and what follows in ``/proc/<pid>/stat``; an empty state if it is gone."""
    try:
        # The name is in parentheses and may hold anything, parentheses too: the fields count from the last one.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return [b""]


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait_s: float | None = 0.0) -> Iterator[BinaryIO]:
    """Lock a file, made where it is missing, until the block ends or the process dies. ``wait_s`` None waits for ever.

    Raises:
        BlockingIOError: another process holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, PRIVATE), "r+b") as file, locked_file(file.fileno(), shared, wait_s):
        yield file


@contextlib.contextmanager
def locked_file(descriptor: int, shared: bool = False, wait_s: float | None = None) -> Iterator[None]:
    """Lock an open file until the block ends; see `locked`."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until_s = time.monotonic() + (wait_s or 0.0)
    while True:
        try:
            fcntl.flock(descriptor, how | (0 if wait_s is None else fcntl.LOCK_NB))
            break
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.02)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file. To try is to share it for a moment."""
    try:
        with regular(path, UsageError) as file, locked_file(file.fileno(), shared=True, wait_s=0.0):
            return False
    except (UsageError, OSError) as error:
        return isinstance(error, BlockingIOError)
