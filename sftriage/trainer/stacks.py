"""Samples the Python stacks of all threads of this process, and writes a file for https://www.speedscope.app.

`sampler` calls it, in the trainer and in DataLoader workers. Beside the profiles, under ``sftriage``, are columns with
a row for each sample of all threads: its step and stage, and each thread's running time and wait for a core.
"""

from __future__ import annotations

import contextlib
import gc
import json
import linecache
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from resource import RUSAGE_SELF, getrusage
from time import monotonic_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

MAX_SAMPLES = 50_000
"""Maximum samples of all threads together; sampling then ends by itself."""
TIME_SHARE = 40
"""Sampling takes at most one part in 40 of the time."""
MAX_DEPTH = 128

USED = ("collected_ns", "minor_faults", "major_faults", "system_ns")
"""Counters of the first thread or its process: time of garbage collection, page faults, time in the kernel."""

SCHEMA_VERSION = 1
FORMAT = "https://www.speedscope.app/file-format-schema.json"

MAX_SOURCE = 200

LIBRARY = r"^<|/(site|dist)-packages/|/lib/python\d[^/]*/|/sftriage/(trainer|integrations)/"
"""Files that are not the program's own: of the interpreter, installed packages, and sftriage itself."""

_RUNNER = r"^<|runpy\.py$|/bin/[^/]+$"
_PACKAGE = r"^.*/(?:site|dist)-packages/[^/]+/"


@lru_cache(4096)
def is_own(file: str, package: str | None = None) -> bool:
    """Whether a file is the program's own; ``package`` as by `program_package`."""
    return (package is not None and file.startswith(package)) or re.search(LIBRARY, file) is None


ProcessSamples = dict[str, Any]
"""A process's own samples, ready for JSON.

``frames`` are (function, file, line), with a line of ``source`` each; ``stacks`` numbers of frames, the outermost
first; ``time_ns`` has a row's time. Each of ``threads`` has by row the number of its ``stack`` (-1: it did not exist),
``run_ns`` and ``waited_ns``; the ``sampler`` has the same without stacks. The first thread also has ``waits_in``, and
columns for its counters (`USED`).
"""

At = tuple[int, str, int]
Times = tuple[int, int]
"""A thread's running time and its wait for a core (ns); -1 where unknown."""


def program_package(files: Iterable[str]) -> str | None:
    """The folder of an installed program, whose files are its own: the package in which the training thread began.

    ``files`` are those of its stack, the outermost first. The package is below the runner of a module (``python -m``),
    or a script in ``bin``.
    """
    first = next((file for file in files if not re.search(_RUNNER, file)), "")
    package = re.match(_PACKAGE, first)
    return None if package is None else package[0]


class _Row(NamedTuple):
    """One sample of all threads: the first thread's step and stage, and each thread's stack and times.

    ``waits_in`` is the kernel function that the first thread waits in, if known; ``used`` has the counters of `USED`.
    """

    time_ns: int
    at: At
    stacks: dict[int, int]
    times_ns: dict[int, Times]
    waits_in: str
    used: tuple[int, ...]


class Stacks:
    """Samples the stacks of all threads except its own.

    Args:
        period_s: least seconds from one sample to the next.
        first: the ident of the thread that comes first in the result.
        at: the step and stage that this thread is in, and since when (nanoseconds, monotonic clock).
        outermost: leave out the callers of this code.
    """

    def __init__(
        self, period_s: float, first: int, at: Callable[[], At] | None = None, outermost: CodeType | None = None
    ) -> None:
        self._period_s, self._first, self._at, self._outermost = period_s, first, at, outermost
        # (kept, so that no other code object can reuse the id)
        self._codes: dict[int, CodeType] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._rows: list[_Row] = []
        self._n_samples = 0
        self._names: dict[int, str] = {}
        self._schedstats: dict[int, _TaskFile] = {}
        self._wchan = _TaskFile(None, "wchan")
        self._own = 0
        self._collected_ns = self._collects_since_ns = 0
        self._began_ns = monotonic_ns()
        _taken.add(self)

    def run(self, ended: Callable[[float], object]) -> None:
        """Sample on this thread until `MAX_SAMPLES`, or until ``ended``, which waits the given seconds, is true."""
        wait_s, last_ns, self._own = self._period_s, 0, threading.get_ident()
        gc.callbacks.append(self._collects)
        try:
            while not ended(wait_s) and self._n_samples < MAX_SAMPLES:
                began_ns = thread_time_ns()
                self._take()
                took_ns = thread_time_ns() - began_ns
                # Less often if a sample takes long: it keeps the interpreter from the training thread. (By thread time:
                # this thread may have waited for the interpreter. By two samples: one may have collected garbage.)
                wait_s = max(self._period_s, TIME_SHARE * min(took_ns, last_ns) * 1e-9)
                last_ns = took_ns
        finally:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collects)
        with no_fork:
            for schedstat in self._schedstats.values():
                schedstat.close()
            self._wchan.close()

    def samples(self) -> ProcessSamples:
        """All samples, after `run`."""
        rows = self._rows
        stacks, frames = _framed(self._codes, self._stacks)
        first: dict[str, list[Any]] = {"waits_in": [row.waits_in for row in rows]}
        first |= {name: [row.used[place] for row in rows] for place, name in enumerate(USED)}
        threads = dict.fromkeys((self._first, *(thread for row in rows for thread in row.stacks)))
        return {
            "pid": os.getpid(),
            "began_ns": self._began_ns,
            "period_s": self._period_s,
            "frames": frames,
            "source": _source_of(frames),
            "stacks": stacks,
            "time_ns": [row.time_ns for row in rows],
            "threads": [
                {
                    "name": self._names.get(thread, "the training thread"),
                    "stack": [row.stacks.get(thread, -1) for row in rows],
                    **self._times(thread),
                    **(first if thread == self._first else {}),
                }
                for thread in threads
            ],
            "sampler": self._times(self._own),
        }

    def at(self) -> dict[str, list[object]]:
        """The step and the stage of each row, and since when, by column."""
        ats = [row.at for row in self._rows]
        return {name: [at[number] for at in ats] for number, name in enumerate(("step", "stage", "since_ns"))}

    def _take(self) -> None:
        at, now_ns = (0, "", 0) if self._at is None else self._at(), monotonic_ns()
        stacks = {thread: self._stack(frame) for thread, frame in sys._current_frames().items() if thread != self._own}
        times_ns = {thread: _times_ns(self._schedstat(thread)) for thread in (*stacks, self._own)}
        # (during a sample, a thread that runs Python waits for the interpreter: that is no finding)
        waits_in = self._wchan.read()
        waits_in = b"" if waits_in == b"0" or waits_in.startswith(b"futex") else waits_in
        self._rows.append(_Row(now_ns, at, stacks, times_ns, waits_in.decode("ascii", "replace"), self._used()))
        self._n_samples += len(stacks)

    def _used(self) -> tuple[int, ...]:
        used, since_ns = getrusage(RUSAGE_SELF), self._collects_since_ns
        collected_ns = self._collected_ns + (monotonic_ns() - since_ns if since_ns else 0)
        return collected_ns, used.ru_minflt, used.ru_majflt, int(used.ru_stime * 1e9)

    def _collects(self, phase: str, info: object) -> None:
        """Time garbage collection, which no frame shows: the interpreter begins or ends it on some thread."""
        if threading.get_ident() == self._first:
            if phase == "start":
                self._collects_since_ns = monotonic_ns()
            elif self._collects_since_ns:
                self._collected_ns += monotonic_ns() - self._collects_since_ns
                self._collects_since_ns = 0

    def _schedstat(self, thread: int) -> _TaskFile:
        found = self._schedstats.get(thread)
        if found is None:
            known = next((running for running in threading.enumerate() if running.ident == thread), None)
            self._names[thread] = known.name if known is not None else f"thread {thread}"
            # (for the main thread of a forked process, threading has the id from before the fork)
            native_id = os.getpid() if known is threading.main_thread() else getattr(known, "native_id", None)
            with no_fork:
                found = self._schedstats[thread] = _TaskFile(native_id, "schedstat")
                if thread == self._first:
                    self._wchan = _TaskFile(native_id, "wchan")
        return found

    def _stack(self, frame: FrameType | None) -> int:
        """The number of a stack. Keeps no frame: frames hold the program's variables."""
        found: list[int] = []
        while frame is not None and len(found) < 2 * MAX_DEPTH:
            code = frame.f_code
            # (a thread may release the interpreter in our callback after it has collected garbage)
            if code is not Stacks._collects.__code__:
                self._codes[id(code)] = code
                found += (id(code), frame.f_lasti)
            frame = None if code is self._outermost else frame.f_back
        return self._stacks.setdefault(tuple(found), len(self._stacks))

    def _times(self, thread: int) -> dict[str, list[int]]:
        times_ns = [row.times_ns.get(thread, (-1, -1)) for row in self._rows]
        return {"run_ns": [run_ns for run_ns, _ in times_ns], "waited_ns": [waited_ns for _, waited_ns in times_ns]}


def _framed(
    codes: Mapping[int, CodeType], stacks: Iterable[Sequence[int]]
) -> tuple[list[list[int]], list[tuple[str, str, int]]]:
    """Stacks as numbers of frames, the outermost first, and the frames: function, file, line.

    ``stacks`` alternate a code's id and its current instruction, from the innermost.
    """
    frames: dict[tuple[str, str, int], int] = {}

    @cache
    def lines_of(code_id: int) -> dict[int, int]:
        ranges = codes[code_id].co_lines()
        return {at: line for start, end, line in ranges if line is not None for at in range(start, end, 2)}

    @cache
    def number_of(code_id: int, at: int) -> int:
        code = codes[code_id]
        line = lines_of(code_id).get(at, code.co_firstlineno)
        key = getattr(code, "co_qualname", code.co_name), code.co_filename, line
        return frames.setdefault(key, len(frames))

    framed = [[number_of(*frame) for frame in zip(stack[-2::-2], stack[::-2], strict=True)] for stack in stacks]
    return framed, list(frames)


def _source_of(frames: Iterable[tuple[str, str, int]]) -> list[str]:
    """Every frame's line of source, or "". Leaves the job's line cache as it was."""
    known = set(linecache.cache)
    try:
        return [linecache.getline(file, line).strip()[:MAX_SOURCE] for _, file, line in frames]
    finally:
        for file in set(linecache.cache) - known:
            linecache.cache.pop(file, None)


class _TaskFile:
    """A file of a thread of this process in ``/proc``; empty if it cannot be read."""

    def __init__(self, native_id: int | None, name: str) -> None:
        self._descriptor = -1
        if native_id is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(f"/proc/self/task/{native_id}/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        try:
            return os.pread(self._descriptor, 96, 0) if self._descriptor >= 0 else b""
        except OSError:
            return b""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _times_ns(schedstat: _TaskFile) -> Times:
    try:
        run, waited, _ = schedstat.read().split()
        return int(run), int(waited)
    except ValueError:
        return -1, -1


def written(
    title: str, own: ProcessSamples, at: Mapping[str, Sequence[object]], workers: Sequence[ProcessSamples]
) -> Iterator[str]:
    """The file in pieces, so that the training thread gets the interpreter between them.

    ``own`` are the trainer's samples, with the training thread first; ``at`` has the step and stage of each of its
    rows, by column. A worker has samples, or a ``problem``: why there are none.
    """
    numbers: dict[tuple[str, str, int], int] = {}
    source: list[str] = []
    sampled = [worker for worker in workers if "problem" not in worker]
    profiles = []
    for process in (own, *sampled):
        renumbered = []
        for (function, file, line), text in zip(process["frames"], process["source"], strict=True):
            renumbered.append(numbers.setdefault((function, file, line), len(numbers)))
            source += [text] * (len(numbers) - len(source))
        stacks = [[renumbered[number] for number in stack] for stack in process["stacks"]]
        profiles += [(process, thread, stacks) for thread in process["threads"]]
    head = {"$schema": FORMAT, "exporter": "sftriage", "name": title, "activeProfileIndex": 0}
    yield _json(head)[:-1] + ',"profiles":['
    for at_first, (process, thread, stacks) in enumerate(profiles):
        yield ("," if at_first else "") + _json(_profile(process, thread, stacks, own["began_ns"]))
    frames = [{"name": function, "file": file, "line": line} for function, file, line in numbers]
    columns = {
        "schema_version": SCHEMA_VERSION,
        **_columns(own),
        **at,
        "source": source,
        "workers": [{name: worker[name] for name in ("worker", "of", "pid")} | _columns(worker) for worker in sampled],
        "not_sampled": [worker for worker in workers if "problem" in worker],
    }
    yield f'],"shared":{_json({"frames": frames})},"sftriage":{_json(columns)}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _columns(process: ProcessSamples) -> dict[str, Any]:
    times = [{name: thread[name] for name in thread if name not in ("name", "stack")} for thread in process["threads"]]
    return {name: process[name] for name in ("period_s", "time_ns", "sampler")} | {"threads": times}


def _profile(
    process: ProcessSamples, thread: Mapping[str, Any], stacks: Sequence[Sequence[int]], origin_ns: int
) -> ProcessSamples:
    times_ns = [process["began_ns"], *process["time_ns"]]
    name = thread["name"]
    if "worker" in process:
        name = f"DataLoader worker {process['worker']} (pid {process['pid']})" + (f": {name}" if name else "")
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": times_ns[0] - origin_ns,
        "endValue": times_ns[-1] - origin_ns,
        # Empty before the thread began, and after it ended.
        "samples": [stacks[number] if number >= 0 else [] for number in thread["stack"]],
        "weights": [after - before for before, after in pairwise(times_ns)],
    }


_taken: weakref.WeakSet[Stacks] = weakref.WeakSet()

no_fork = threading.RLock()
"""Held by a thread that forks, and while a file is opened or closed, as a child closes all open files. A module that
another thread is importing when a process forks cannot be imported in the child."""


def _in_child() -> None:
    for stacks in list(_taken):
        stacks.close()
    no_fork.release()


os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_in_child)
