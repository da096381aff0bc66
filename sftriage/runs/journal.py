"""The journal of a run: one line of JSON per event, in the order of events.

The controller appends; views and commands read. A partial line, left by a crash or a full disk, is removed before the
next write. A journal that reaches its maximum size is replaced by one without older windows that led to no capture.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from sftriage.base.files import write_atomically
from sftriage.errors import InputError
from sftriage.model.events import Event, EvidenceGathered, JournalCompacted, WindowJudged, decode, encode
from sftriage.policy.state import Losses
from sftriage.traces.disk import Counted, Do, at_once

_TAIL_BYTES = 1 << 16
MAX_BYTES = 64 << 20
"""A journal of this size loses the windows of its older half that led to no capture."""
RESERVE_BYTES = 16 << 10
"""Disk space kept for a last event about a disk that stays full."""


class Journal:
    """Appends events to ``decisions.jsonl``, as whole lines only. A write by ``do`` is on disk before it returns.

    By default `append` writes itself, and raises OSError if the event is not on disk. At ``max_bytes`` the file is
    replaced by a shorter one.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, do: Do = at_once, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._do = path, do
        self._max_bytes = self._compacts_at = max_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._reserve = path.with_name(".reserve")
        with contextlib.suppress(OSError), self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        # Where a partial line begins.
        self._torn_at = self._after_whole_lines()

    def append(self, event: Event) -> None:
        line = encode(event) + b"\n"
        self._do(partial(self._write, line), "journal", counted(event, len(line)))

    def keep(self, path: Path, text: str) -> None:
        """Replace a small file's text atomically."""
        self._do(partial(write_atomically, path, text), path.name, latest=True)

    def events(self) -> Iterator[Event]:
        return read_journal(self._path)

    def append_from_reserve(self, event: Event) -> None:
        """Append an event in the reserved disk space, if the disk accepts any write."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)
            self._write(encode(event) + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        # Cut now, and not where the write failed: a full disk may refuse to truncate as well.
        if self._torn_at is not None:
            os.ftruncate(self._descriptor, self._torn_at)
        self._torn_at = os.fstat(self._descriptor).st_size
        while line:
            line = line[os.write(self._descriptor, line) :]
        # (a quota or a file server may refuse only now)
        os.fsync(self._descriptor)
        self._torn_at = None
        if (size_bytes := os.fstat(self._descriptor).st_size) >= self._compacts_at:
            # (if the disk refuses, try again when there is more to gain)
            self._compacts_at = size_bytes + self._max_bytes // 8
            with contextlib.suppress(OSError):
                self._compact(size_bytes)

    def _compact(self, size_bytes: int) -> None:
        """Replace the file by one with its newer half and the older events that readers need."""
        kept_from = size_bytes // 2
        with self._path.open("rb") as file:
            file.seek(kept_from)
            kept_from += len(file.readline())
            file.seek(0)
            older, header = compacted(file, kept_from, self._max_bytes // 4)
            inode = os.fstat(file.fileno()).st_ino
            header = msgspec.structs.replace(header, inode=inode, kept_from=kept_from, older_bytes=len(older))
            partial = self._path.with_name(f".{self._path.name}.partial")
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(partial, flags, 0o600)
            try:
                with os.fdopen(os.dup(descriptor), "wb") as copy:
                    copy.write(encode(header) + b"\n" + older)
                    file.seek(kept_from)
                    shutil.copyfileobj(file, copy)
                os.fsync(descriptor)
                partial.replace(self._path)
            except BaseException:
                os.close(descriptor)
                raise
        os.close(self._descriptor)
        self._descriptor, self._compacts_at = descriptor, self._max_bytes

    def _after_whole_lines(self) -> int | None:
        """Where the last line begins, if it is partial. A line that lacks only its newline gets it."""
        size_bytes = os.fstat(self._descriptor).st_size
        tail = b""
        while b"\n" not in tail and len(tail) < size_bytes:
            start = max(0, size_bytes - len(tail) - _TAIL_BYTES)
            tail = os.pread(self._descriptor, size_bytes - len(tail) - start, start) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return None
        try:
            decode(last)
        except (ValueError, RecursionError):
            return size_bytes - len(last)
        os.write(self._descriptor, b"\n")
        return None


def compacted(lines: BinaryIO, end: int, max_bytes: int) -> tuple[bytes, JournalCompacted]:
    """The newest ``max_bytes`` of the lines before ``end`` that readers need, and the header that counts the others.

    Needed are windows that led to a capture or stalled, the last one of each attempt, and rare events.
    """
    kept: deque[tuple[int, bytes, bool]] = deque()
    last: dict[int, tuple[int, bytes, bool]] = {}
    losses, dropped, dropped_step, size_bytes = Losses(), 0, -1, 0
    while lines.tell() < end:
        at, line = lines.tell(), lines.readline()
        try:
            event = decode(line)
        except (ValueError, RecursionError):
            continue
        match event:
            case JournalCompacted():
                losses, dropped, dropped_step = Losses.of_values(event.losses), event.dropped, event.dropped_step
                continue
            case WindowJudged():
                losses = losses.after(event.verdict)
                if not event.decision.requests and event.verdict.label != "stalled":
                    dropped, dropped_step = dropped + 1, max(dropped_step, event.verdict.last_step)
                    last[event.verdict.attempt] = at, line, True
                    continue
            case EvidenceGathered():
                continue
        kept.append((at, line, isinstance(event, WindowJudged)))
        size_bytes += len(line)
        while size_bytes > max_bytes:
            _, gone, was_window = kept.popleft()
            size_bytes, dropped = size_bytes - len(gone), dropped + was_window
    header = JournalCompacted(
        inode=0,
        kept_from=0,
        older_bytes=0,
        dropped=dropped - len(last),
        dropped_step=dropped_step,
        losses=losses.values(),
    )
    return b"".join(line for _, line, _ in sorted([*kept, *last.values()])), header


def counted(event: Event, size_bytes: int) -> Counted:
    """How an event counts if it is written late or lost."""
    if isinstance(event, WindowJudged) and event.verdict.label != "stalled":
        return Counted("windows", size_bytes=size_bytes, steps=(event.verdict.first_step, event.verdict.last_step))
    return Counted("other records", size_bytes=size_bytes)


def read_journal(path: Path, damaged: list[bytes] | None = None) -> Iterator[Event]:
    """The journal's events in order. Lines without one are skipped and added to ``damaged``, if given.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    event = decode(line)
                except (ValueError, RecursionError):
                    if damaged is not None:
                        damaged.append(line)
                    continue
                if event is not None:
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


class Appended:
    """Follows a journal, which need not exist yet, and passes each whole line to ``take`` once.

    ``restart`` is called if the file shrank or was replaced, and is read from its beginning. ``skip``: skip the
    existing lines.
    """

    def __init__(
        self, path: Path, take: Callable[[bytes], object], restart: Callable[[], object], *, skip: bool = False
    ) -> None:
        self._path, self._take, self._restart = path, take, restart
        self._inode = self._at = 0
        if skip:
            with contextlib.suppress(OSError):
                about = path.stat()
                self._inode, self._at = about.st_ino, about.st_size

    def follow(self) -> bool:
        """Read appended lines; return whether there were any. Lines that cannot be read now are read the next time."""
        before = self._at
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._at:
                    position = self._place_in(file)
                    self._inode, self._at, before = about.st_ino, position or 0, position or 0
                    if position is None:
                        self._restart()
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at += len(line)
                    self._take(line)
        except OSError:
            return False
        return self._at != before

    def _place_in(self, file: BinaryIO) -> int | None:
        """Where to continue in a journal that replaced the one read so far; None if this is another journal."""
        first = file.readline()
        try:
            event = decode(first)
        except (ValueError, RecursionError):
            return None
        if not isinstance(event, JournalCompacted) or event.inode != self._inode or self._at < event.kept_from:
            return None
        return len(first) + event.older_bytes + self._at - event.kept_from
