"""A disk that may be full, read-only or out of reach, or that hangs: nobody waits long for it, and what it lacks waits.

What is to be done on it is done in order, by a thread of its own. What the disk refuses is tried again until it is
taken, or counted as lost where more waits than is to be held in memory, or the run ends.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count
from pathlib import Path

from sftriage.events import DiskFailed, DiskRecovered

log = logging.getLogger("sftriage")

PATIENCE_S = 5.0
"""From when on a disk hangs: nobody waits for it any more."""
RETRY_S = 0.5
MAX_BYTES = 64 << 20
"""What may wait in memory: records of a hundred thousand steps of a small job, or of a few thousand of a large one."""
_FOR_GOOD = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG}
"""What is said of names, and not of the disk."""
_TASK_BYTES = 512
"""What one thing that waits takes, beside what it is to write."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What something to be written counts as should it be late or lost: so many of a kind, and of which steps."""

    kind: str = ""
    number: int = 1
    size_bytes: int = 0
    steps: tuple[int, int] | None = None


UNCOUNTED = Counted()
REMOVED = "it has been removed"


Do = Callable[..., None]
"""Has something done on a disk, as `Disk.do` does."""


def at_once(act: Callable[[], object], *_: object, **__: object) -> None:
    """Have something done here and now, and hear of what goes wrong."""
    act()


def refusal(error: BaseException | None) -> str | None:
    """What the disk says, if that is what is behind an error, and it may say something else later."""
    while error is not None:
        if isinstance(error, OSError):
            return None if error.errno in _FOR_GOOD else error.strerror or str(error)
        error = error.__cause__
    return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Which directory it is; None where there is none of that name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@dataclass(slots=True, eq=False)
class _Task:
    number: int
    act: Callable[[], object]
    counted: Counted
    patience_s: float
    last: bool = False
    done: bool = False

    @property
    def turn(self) -> tuple[bool, int]:
        return self.last, self.number

    @property
    def size_bytes(self) -> int:
        return self.counted.size_bytes + _TASK_BYTES


class Disk:
    """Does what is to be done on one disk. `news` tells when it begins to fail, and when that is over.

    Args:
        max_bytes: how much may wait in memory.
        clock: the time, in seconds since the epoch.
        root: the directory that all of it lies in. Once that has been removed, nothing is done any more: what would be
            written into files that are still open would be nowhere.
    """

    def __init__(
        self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time, root: Path | None = None
    ) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._root, self._root_was = root, None if root is None else _identity(root)
        self._changed = threading.Condition()
        self._lanes: dict[str, deque[_Task]] = {}
        self._numbers, self._waiting_bytes = count(), 0
        # The first task of each lane, by when its turn is, but for that under way, and those that were refused.
        self._ready: list[tuple[tuple[bool, int], str]] = []
        # Lanes whose first task was refused, until when they are left alone; the task under way, and since when.
        self._refused: set[str] = set()
        self._again_s = 0.0
        self._under_way: tuple[_Task, float] | None = None
        self._thread: threading.Thread | None = None
        self._ending = False
        self._failed: DiskFailed | None = None
        self._late, self._lost = Counter[str](), Counter[str]()
        self._lost_steps: tuple[int, int] | None = None
        self._news: deque[DiskFailed | DiskRecovered] = deque()
        self._held_back: list[Callable[[], None]] = []

    @property
    def well(self) -> bool:
        """Whether it takes what it is given, as far as is known."""
        return self._failed is None

    @property
    def hangs(self) -> bool:
        """Whether nobody waits any longer for what it is doing."""
        return self._left_s() <= 0.0

    @property
    def lanes(self) -> int:
        """In how many lanes something is still to be done."""
        return len(self._lanes)

    def news(self) -> Iterator[DiskFailed | DiskRecovered]:
        """What has become of the disk since the last call."""
        while self._news:
            yield self._news.popleft()

    def do(
        self,
        act: Callable[[], object],
        lane: str,
        counted: Counted = UNCOUNTED,
        *,
        latest: bool = False,
        waits: bool = True,
        patience_s: float = PATIENCE_S,
        last: bool = False,
    ) -> None:
        """Have something done, after all else of its lane. What goes wrong is no error of who asks.

        Args:
            act: what. An OSError, also as the cause of another error, means that the disk refuses it for now, and it is
                tried again from its beginning; any other error is logged.
            lane: what has to be done in order, such as what goes into one file.
            counted: what it counts as.
            latest: it takes the place of what waits in the lane.
            waits: return once it is done, or the disk refuses it or hangs.
            patience_s: how long it may take before the disk hangs.
            last: whatever else is to be done, in other lanes, is done before it.
        """
        with self._changed:
            task = self._put(_Task(next(self._numbers), act, counted, patience_s, last), lane, latest=latest)
            if task is None or not self._works() or not waits or threading.current_thread() is self._thread:
                return
            while not (task.done or lane in self._refused or self._ending or self._gave_up()):
                self._changed.wait(0.05 if self._under_way is None else self._left_s())

    def holds_back(self, ask: Callable[[], None]) -> None:
        """Somebody asks for many things at once, now and then; ``ask`` has what is held back asked for now."""
        self._held_back.append(ask)

    def ask_all(self) -> None:
        """Have all asked for that is held back."""
        for ask in self._held_back:
            ask()

    def settle(self) -> None:
        """Wait until what was to be done so far is done, no longer than the disk answers."""
        self.ask_all()
        self.do(lambda: None, "settle", latest=True, last=True)

    def drain(self, grace_s: float) -> None:
        """Wait until all is done that waits, for no longer than that."""
        self.ask_all()
        with self._changed:
            self._changed.wait_for(lambda: not (self._lanes and self._thread), grace_s)

    def close(self) -> None:
        """Do nothing more: what waits is lost, and what comes later is nobody's."""
        with self._changed:
            self._ending = True
            for task in chain.from_iterable(self._lanes.values()):
                self._lose(task.counted, "it was too slow at the end")
            self._lanes.clear()
            self._changed.notify_all()
            if self._failed is not None:
                self._recovered(over=False)

    def _put(self, task: _Task, lane: str, *, latest: bool) -> _Task | None:
        """Have a task wait for its turn; None where there is no room for it."""
        waiting = self._lanes.get(lane)
        if latest and waiting and (self._under_way is None or self._under_way[0] is not waiting[-1]):
            waiting[-1].act = task.act
            return waiting[-1]
        if self._ending:
            return None
        if self._waiting_bytes + task.size_bytes > self._max_bytes:
            self._lose(task.counted, "it is too slow")
            return None
        if lane not in self._lanes:
            self._lanes[lane] = deque()
            heappush(self._ready, (task.turn, lane))
        self._lanes[lane].append(task)
        self._waiting_bytes += task.size_bytes
        self._changed.notify_all()
        return task

    def _works(self) -> bool:
        """Whether there is a thread to do it; what waits does so until one can be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="sftriage-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._fails(str(error))
                return False
            self._thread = thread
        return True

    def _left_s(self) -> float:
        """How long the task under way may still take."""
        if (under_way := self._under_way) is None:
            return float("inf")
        task, began_s = under_way
        return max(0.0, began_s + task.patience_s - time.monotonic())

    def _gave_up(self) -> bool:
        """Note that it hangs, if it does."""
        if not self.hangs or self._under_way is None:
            return False
        self._fails("it does not answer", time.monotonic() - self._under_way[1])
        return True

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            lane, task = turn
            error = None
            try:
                self._check_root()
                task.act()
            except Exception as problem:
                error = problem
                try:
                    # (removed while something was done in it)
                    self._check_root()
                except OSError as gone:
                    error = gone
            self._tried(lane, task, error)

    def _check_root(self) -> None:
        if self._root is not None and self._root_was is not None and _identity(self._root) != self._root_was:
            raise OSError(errno.ENODEV, REMOVED)

    def _next(self) -> tuple[str, _Task] | None:
        """What is done next: what waits longest, but for what was refused just now. None at the end."""
        with self._changed:
            while not self._ending:
                now_s = time.monotonic()
                if now_s >= self._again_s:
                    for lane in self._refused:
                        heappush(self._ready, (self._lanes[lane][0].turn, lane))
                    self._refused.clear()
                if self._ready:
                    _, lane = heappop(self._ready)
                    self._under_way = (self._lanes[lane][0], now_s)
                    return lane, self._lanes[lane][0]
                self._changed.wait(self._again_s - now_s if self._refused else None)
            return None

    def _tried(self, lane: str, task: _Task, error: Exception | None) -> None:
        said = refusal(error)
        if error is not None and said is None:
            log.error("%s: %s", type(error).__name__, error)
            log.debug("%s failed", lane, exc_info=error)
        with self._changed:
            self._under_way = None
            if said is not None and not self._ending:
                self._refused.add(lane)
                self._again_s = time.monotonic() + RETRY_S
                self._fails(said)
            elif lane in self._lanes:
                self._taken(lane, task)
            self._changed.notify_all()

    def _taken(self, lane: str, task: _Task) -> None:
        task.done = True
        self._lanes[lane].popleft()
        if self._lanes[lane]:
            heappush(self._ready, (self._lanes[lane][0].turn, lane))
        else:
            del self._lanes[lane]
        self._waiting_bytes -= task.size_bytes
        if self._failed is not None:
            self._late[task.counted.kind] += task.counted.number
            if not self._lanes:
                self._recovered(over=True)

    def _fails(self, problem: str, ago_s: float = 0.0) -> None:
        if self._failed is None:
            self._failed = DiskFailed(self._clock() - ago_s, problem)
            self._news.append(self._failed)

    def _lose(self, counted: Counted, problem: str) -> None:
        self._fails(problem)
        self._lost[counted.kind] += counted.number
        if counted.steps is not None:
            first, last = self._lost_steps or counted.steps
            self._lost_steps = min(first, counted.steps[0]), max(last, counted.steps[1])

    def _recovered(self, *, over: bool) -> None:
        assert self._failed is not None
        late, lost = ({kind: n for kind, n in one.items() if kind and n} for one in (self._late, self._lost))
        told = DiskRecovered(
            time_s=self._clock(),
            since_s=self._failed.time_s,
            problem=self._failed.problem,
            over=over,
            late=late,
            lost=lost,
            lost_steps=self._lost_steps,
        )
        self._news.append(told)
        self._failed, self._lost_steps = None, None
        self._late.clear()
        self._lost.clear()
