"""Runs writes to a run directory, in order, on a disk thread: no caller waits long for a full or hanging disk.

A write that the disk refuses waits in memory and is retried until it succeeds, the memory is full, or the run ends. A
disk that does not answer within `PATIENCE_S` counts as full. Triage, the agent and the journal write through it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sftriage.base.loops import start_thread
from sftriage.model.events import DiskFailed, DiskRecovered

log = logging.getLogger("sftriage")

PATIENCE_S = 5.0
RETRY_S = 0.5
MAX_BYTES = 64 << 20  # in memory: a hundred thousand steps of a small job, or a few thousand of a large job
_TASK_BYTES = 512  # overhead of one task, beside what it writes
FULL_BYTES, FULL_FRACTION = 1 << 20, 0.01  # a disk with less room than both counts as full
_ABOUT_NAMES = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG)
}
"""Errors about a name, and not about the disk: a retry does not help."""


@dataclass(frozen=True, slots=True)
class Counted:
    """How to count a write that is late or lost: a ``number`` of a ``kind``, of some ``steps`` (both inclusive)."""

    kind: str = ""
    number: int = 1
    size_bytes: int = 0
    steps: tuple[int, int] | None = None


UNCOUNTED = Counted()
REMOVED = "it has been removed"

Do = Callable[..., None]  # runs a write, as `Disk.do` does


def at_once(act: Callable[[], object], *_: object, **__: object) -> None:
    """Run a write at once, in the caller's thread; raises its errors."""
    act()


def refusal(error: BaseException | None) -> str | None:
    """The disk's own error, if the disk caused this one and a retry may help; else None."""
    while error is not None:
        if isinstance(error, OSError):
            return None if error.errno in _ABOUT_NAMES else error.strerror or str(error)
        error = error.__cause__
    return None


def check_room(path: Path) -> None:
    """Raise OSError if the disk of a directory is full; it writes nothing."""
    found = os.statvfs(path)
    if found.f_bavail * found.f_frsize < min(FULL_BYTES, FULL_FRACTION * found.f_blocks * found.f_frsize):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _identity(path: Path | None) -> tuple[int, int] | None:
    try:
        found = None if path is None else path.stat()
    except FileNotFoundError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


@dataclass(slots=True, eq=False)
class _Task:
    act: Callable[[], object]
    counted: Counted
    patience_s: float
    last: bool
    done: bool = False

    @property
    def size_bytes(self) -> int:
        return self.counted.size_bytes + _TASK_BYTES


class Disk:
    """Runs writes to one disk. `news` reports when it begins to fail, and when that is over.

    Args:
        max_bytes: limit of waiting writes in memory.
        clock: returns the time, in seconds since the epoch.
        root: the directory of all the files. Once it has been removed, writes are refused.
    """

    def __init__(
        self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time, root: Path | None = None
    ) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._root, self._root_was = root, _identity(root)
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Task]] = {}
        self._waiting_bytes = 0
        # Queues whose first task is due, those whose first task has time, and those refused until `_again_s`.
        self._ready, self._ready_last = deque[str](), deque[str]()
        self._refused: set[str] = set()
        self._again_s = 0.0
        self._current: tuple[_Task, float] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed: DiskFailed | None = None
        self._late, self._lost = Counter[str](), Counter[str]()
        self._lost_steps: tuple[int, int] | None = None
        self._news: deque[DiskFailed | DiskRecovered] = deque()
        self._held_back: list[Callable[[], None]] = []

    @property
    def well(self) -> bool:
        """Whether no write has failed or been late since the disk last recovered."""
        return self._failed is None

    @property
    def hangs(self) -> bool:
        """Whether the write in progress has taken longer than its patience."""
        return self._left_s() <= 0.0

    @property
    def queues(self) -> int:
        return len(self._queues)

    def news(self) -> Iterator[DiskFailed | DiskRecovered]:
        """The failures and recoveries since the last call."""
        while self._news:
            yield self._news.popleft()

    def do(
        self,
        act: Callable[[], object],
        queue: str,
        counted: Counted = UNCOUNTED,
        *,
        latest: bool = False,
        waits: bool = True,
        patience_s: float = PATIENCE_S,
        last: bool = False,
    ) -> None:
        """Add a write to a queue. Raises nothing.

        Args:
            act: the write. An OSError, also as the cause of another error, means that the disk refuses it for now: it
                is retried from its beginning. Any other error is logged.
            queue: the name of writes that must run in order, such as those to one file.
            counted: how to count it if it is late or lost.
            latest: replace the last waiting write of the queue.
            waits: return only once it is done, or the disk refuses it or does not answer.
            patience_s: how long it may take before the disk counts as full.
            last: run it after the writes of all other queues.
        """
        with self._changed:
            task = self._put(_Task(act, counted, patience_s, last), queue, latest=latest)
            if task is None or not self._started() or not waits or threading.current_thread() is self._thread:
                return
            while not (task.done or queue in self._refused or self._closed or self.hangs):
                self._changed.wait(min(self._left_s(), 0.05 if self._current is None else PATIENCE_S))
            if self.hangs:
                self._fail("it does not answer")

    def holds_back(self, flush: Callable[[], None]) -> None:
        """Register a caller that collects writes before it queues them; ``flush`` queues them now."""
        self._held_back.append(flush)

    def flush_all(self) -> None:
        for flush in self._held_back:
            flush()

    def settle(self) -> None:
        """Wait until all queued writes are done, as long as the disk answers."""
        self.flush_all()
        self.do(lambda: None, "settle", latest=True, last=True)

    def drain(self, grace_s: float) -> None:
        """Wait until the queues are empty, for at most ``grace_s``."""
        self.flush_all()
        with self._changed:
            self._changed.wait_for(lambda: not (self._queues and self._thread), grace_s)

    def close(self) -> None:
        """Stop: queued writes are lost, and later ones are ignored."""
        with self._changed:
            self._closed = True
            for tasks in self._queues.values():
                for task in tasks:
                    self._lose(task.counted, "it was too slow at the end")
            self._queues.clear()
            self._changed.notify_all()
            if self._failed is not None:
                self._recover(over=False)

    def _put(self, task: _Task, queue: str, *, latest: bool) -> _Task | None:
        queued = self._queues.get(queue)
        if latest and queued and (self._current is None or self._current[0] is not queued[-1]):
            queued[-1].act = task.act
            return queued[-1]
        if self._closed:
            return None
        if self._waiting_bytes + task.size_bytes > self._max_bytes:
            self._lose(task.counted, "it is too slow")
            return None
        self._queues.setdefault(queue, deque()).append(task)
        if not queued:
            self._line_up(queue)
        self._waiting_bytes += task.size_bytes
        self._changed.notify_all()
        return task

    def _line_up(self, queue: str) -> None:
        (self._ready_last if self._queues[queue][0].last else self._ready).append(queue)

    def _started(self) -> bool:
        if self._thread is None:
            try:
                self._thread = start_thread("disk", self._work)
            except RuntimeError as error:
                self._fail(str(error))
                return False
        return True

    def _left_s(self) -> float:
        if (current := self._current) is None:
            return float("inf")
        return max(0.0, current[1] + current[0].patience_s - time.monotonic())

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            queue, task = turn
            error = None
            try:
                self._check_root()
                task.act()
            except Exception as problem:
                error = problem
                try:
                    # (the directory may have been removed during the write)
                    self._check_root()
                except OSError as gone:
                    error = gone
            self._finish(queue, task, error)

    def _check_root(self) -> None:
        if self._root_was is not None and _identity(self._root) != self._root_was:
            raise OSError(errno.ENODEV, REMOVED)

    def _next(self) -> tuple[str, _Task] | None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                if now_s >= self._again_s:
                    for queue in self._refused:
                        self._line_up(queue)
                    self._refused.clear()
                if due := self._ready or self._ready_last:
                    queue = due.popleft()
                    self._current = (self._queues[queue][0], now_s)
                    return queue, self._queues[queue][0]
                self._changed.wait(self._again_s - now_s if self._refused else None)
            return None

    def _finish(self, queue: str, task: _Task, error: Exception | None) -> None:
        refused = refusal(error)
        if error is not None and refused is None:
            log.error("%s: %s", type(error).__name__, error)
            log.debug("%s failed", queue, exc_info=error)
        with self._changed:
            self._current = None
            if self._closed:
                pass
            elif refused is not None:
                self._refused.add(queue)
                self._again_s = time.monotonic() + RETRY_S
                self._fail(refused)
            else:
                task.done = True
                self._queues[queue].popleft()
                self._waiting_bytes -= task.size_bytes
                if self._queues[queue]:
                    self._line_up(queue)
                else:
                    del self._queues[queue]
                if self._failed is not None:
                    self._late[task.counted.kind] += task.counted.number
                    if not self._queues:
                        self._recover(over=True)
            self._changed.notify_all()

    def _fail(self, problem: str) -> None:
        if self._failed is None:
            self._failed = DiskFailed(self._clock(), problem)
            self._news.append(self._failed)

    def _lose(self, counted: Counted, problem: str) -> None:
        self._fail(problem)
        self._lost[counted.kind] += counted.number
        if counted.steps is not None:
            first, last = self._lost_steps or counted.steps
            self._lost_steps = min(first, counted.steps[0]), max(last, counted.steps[1])

    def _recover(self, *, over: bool) -> None:
        failed, self._failed = self._failed, None
        assert failed is not None
        late, lost = ({kind: n for kind, n in counts.items() if kind and n} for counts in (self._late, self._lost))
        self._news.append(
            DiskRecovered(self._clock(), failed.time_s, failed.problem, over, late, lost, lost_steps=self._lost_steps)
        )
        self._lost_steps = None
        self._late.clear()
        self._lost.clear()
