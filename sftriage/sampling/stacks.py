"""Taking the Python stacks of all threads of this process, and how long each has run and has waited for a core.

A trainer takes its own on a thread of `sampling`, its DataLoader's workers theirs on a thread of `workers`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from time import monotonic_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

from sftriage.sampling.speedscope import Frames, ProcessSamples

MAX_SAMPLES = 50_000
"""Of all threads together; with so many it ends by itself."""
MOST_OF_ONE = 40
"""A look at all threads takes at most one in so many parts of the time."""
MAX_DEPTH = 128

USED = ("collected_ns", "minor_faults", "major_faults", "system_ns")
"""What is counted of the first thread, or of its process: the time in which it collected garbage; minor and major page
faults; time in the kernel."""

At = tuple[int, str, int]
Times = tuple[int, int]
"""How long a thread has run, and how long it has waited for a core (ns); -1 where that is unknown."""


class _Row(NamedTuple):
    """One look at all threads: the first one's step and stage, and of each thread its stack and its times.

    ``waits_in`` is the kernel's function that the first one waits in; "" where it does not, or that is unknown.
    ``used`` is what `USED` names, by then.
    """

    time_ns: int
    at: At
    stacks: dict[int, int]
    times_ns: dict[int, Times]
    waits_in: str
    used: tuple[int, ...]


class Stacks:
    """Stacks of all threads but the one that takes them.

    Args:
        period_s: seconds from one sample to the next, or more.
        first: the thread that comes first in the result, by its ident.
        at: the step and the stage that this thread is in, and since when (nanoseconds, monotonic clock).
        outermost: frames below this one are left out.
    """

    def __init__(
        self, period_s: float, first: int, at: Callable[[], At] | None = None, outermost: CodeType | None = None
    ) -> None:
        self._period_s, self._first, self._at, self._outermost = period_s, first, at, outermost
        # Kept, so that no other code object can take the id of one that was met.
        self._codes: dict[int, CodeType] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._rows: list[_Row] = []
        self._n_samples = 0
        self._names: dict[int, str] = {}
        self._schedstats: dict[int, Schedstat] = {}
        self._wchan = TaskFile(None, "wchan")
        self._own = 0
        self._collected_ns = self._collects_since_ns = 0
        self._began_ns = monotonic_ns()
        _taken.add(self)

    def __len__(self) -> int:
        return len(self._rows)

    def run(self, ended: Callable[[float], object]) -> None:
        """Take them on this thread, until ``ended``, which waits for so many seconds, says so, or there are enough."""
        wait_s, last_ns, self._own = self._period_s, 0, threading.get_ident()
        gc.callbacks.append(self._collects)
        try:
            while not ended(wait_s) and self._n_samples < MAX_SAMPLES:
                began_ns = thread_time_ns()
                self._take()
                took_ns = thread_time_ns() - began_ns
                # Of many threads with deep stacks less often: meanwhile the training thread has no interpreter. (Not by
                # the clock: it may have been without it itself. And not by one alone: the garbage that was collected in
                # it is the program's.)
                wait_s = max(self._period_s, MOST_OF_ONE * min(took_ns, last_ns) * 1e-9)
                last_ns = took_ns
        finally:
            self.close()

    def close(self) -> None:
        """Close what is read with each sample."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collects)
        with _forks.none:
            for schedstat in self._schedstats.values():
                schedstat.close()
            self._wchan.close()

    def samples(self) -> ProcessSamples:
        """All samples, once it has ended."""
        frames, rows = Frames(self._codes), self._rows
        stacks = [frames.numbers(stack) for stack in self._stacks]
        threads = dict.fromkeys((self._first, *(thread for row in rows for thread in row.stacks)))
        return {
            "pid": os.getpid(),
            "began_ns": self._began_ns,
            "period_s": self._period_s,
            "frames": frames.listed(),
            "source": frames.source(),
            "stacks": stacks,
            "time_ns": [row.time_ns for row in rows],
            "threads": [
                {
                    "name": self._names.get(thread, "the training thread"),
                    "stack": [row.stacks.get(thread, -1) for row in rows],
                    **self._times(thread),
                    **(_of_first(rows) if thread == self._first else {}),
                }
                for thread in threads
            ],
            "sampler": self._times(self._own),
        }

    def at(self) -> dict[str, list[object]]:
        """The step and the stage of each look, and since when, by column."""
        ats = [row.at for row in self._rows]
        return {name: [at[number] for at in ats] for number, name in enumerate(("step", "stage", "since_ns"))}

    def _take(self) -> None:
        at, now_ns = (0, "", 0) if self._at is None else self._at(), monotonic_ns()
        stacks = {thread: self._stack(frame) for thread, frame in sys._current_frames().items() if thread != self._own}
        times_ns = {thread: self._schedstat(thread).times_ns() for thread in (*stacks, self._own)}
        # (while a sample is taken, a thread that runs Python waits for the interpreter: that says nothing)
        waits_in = self._wchan.read()
        waits_in = b"" if waits_in == b"0" or waits_in.startswith(b"futex") else waits_in
        self._rows.append(_Row(now_ns, at, stacks, times_ns, waits_in.decode("ascii", "replace"), self._used()))
        self._n_samples += len(stacks)

    def _used(self) -> tuple[int, ...]:
        used, since_ns = getrusage(RUSAGE_SELF), self._collects_since_ns
        collected_ns = self._collected_ns + (monotonic_ns() - since_ns if since_ns else 0)
        return collected_ns, used.ru_minflt, used.ru_majflt, int(used.ru_stime * 1e9)

    def _collects(self, phase: str, info: object) -> None:
        """The interpreter begins or ends to collect garbage, on the thread that is out of luck: no frame shows that."""
        if threading.get_ident() == self._first:
            if phase == "start":
                self._collects_since_ns = monotonic_ns()
            elif self._collects_since_ns:
                self._collected_ns += monotonic_ns() - self._collects_since_ns
                self._collects_since_ns = 0

    def _schedstat(self, thread: int) -> Schedstat:
        found = self._schedstats.get(thread)
        if found is None:
            known = next((one for one in threading.enumerate() if one.ident == thread), None)
            self._names[thread] = known.name if known is not None else f"thread {thread}"
            # (of the main thread of a forked process, threading has the id that its thread had before)
            its_id = None if known is None else known.native_id
            native_id = os.getpid() if known is threading.main_thread() else its_id
            with _forks.none:
                found = self._schedstats[thread] = Schedstat(native_id)
                if thread == self._first:
                    self._wchan = TaskFile(native_id, "wchan")
        return found

    def _stack(self, frame: FrameType | None) -> int:
        """The number of a stack. Frames are let go of at once: they hold the program's variables."""
        found: list[int] = []
        while frame is not None and len(found) < 2 * MAX_DEPTH:
            code = frame.f_code
            # (a thread that has collected garbage lets go of the interpreter first where we note that)
            if code is not Stacks._collects.__code__:
                self._codes[id(code)] = code
                found += (id(code), frame.f_lasti)
            frame = None if code is self._outermost else frame.f_back
        return self._stacks.setdefault(tuple(found), len(self._stacks))

    def _times(self, thread: int) -> dict[str, list[int]]:
        times_ns = [row.times_ns.get(thread, (-1, -1)) for row in self._rows]
        return {"run_ns": [run_ns for run_ns, _ in times_ns], "waited_ns": [waited_ns for _, waited_ns in times_ns]}


def _of_first(rows: list[_Row]) -> dict[str, list[Any]]:
    used = {name: [row.used[place] for row in rows] for place, name in enumerate(USED)}
    return {"waits_in": [row.waits_in for row in rows], **used}


class TaskFile:
    """What the system says of a thread of this process, in a file of that name."""

    def __init__(self, native_id: int | None, name: str) -> None:
        self._descriptor = -1
        if native_id is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(f"/proc/self/task/{native_id}/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """What it says now; nothing where it does not."""
        try:
            return os.pread(self._descriptor, 96, 0) if self._descriptor >= 0 else b""
        except OSError:
            return b""

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Schedstat(TaskFile):
    """How long a thread of this process has run, and has waited for a core."""

    def __init__(self, native_id: int | None) -> None:
        super().__init__(native_id, "schedstat")

    def times_ns(self) -> Times:
        """See `Times`."""
        try:
            run, waited, _ = self.read().split()
            return int(run), int(waited)
        except ValueError:
            return -1, -1


FORK_WAITS_S = 1.0
"""For as long at most a fork waits until a file is open and known, or closed."""


class _Forks(threading.local):
    """Keeps forks from falling between the opening of a file and the note of it: their child could not close it.

    Attributes:
        none: held while there is to be none; of all threads.
        waited: this thread forks, and holds it.
    """

    none = threading.Lock()
    waited = False

    def before(self) -> None:
        self.waited = self.none.acquire(timeout=FORK_WAITS_S)

    def after_in_parent(self) -> None:
        if self.waited:
            self.waited = False
            self.none.release()

    def after_in_child(self) -> None:
        # Whoever held it is not here, and what the parent's sampler had open is the parent's.
        _Forks.none, self.waited = threading.Lock(), False
        for stacks in list(_taken):
            stacks.close()


_forks = _Forks()
_taken: weakref.WeakSet[Stacks] = weakref.WeakSet()

os.register_at_fork(before=_forks.before, after_in_parent=_forks.after_in_parent, after_in_child=_forks.after_in_child)
