"""Python stacks of the trainer, sampled by a thread of its own while a capture records, and at no other time.

``sys._current_frames`` needs no privileges and works where ptrace is forbidden. A sample costs the interpreter some
microseconds a thread; where the training thread is busy in Python there are at most about 200 a second, whatever is
asked for, for it lets go of the interpreter only every 5 ms. With each sample goes what the system says of the
threads: how long each has run, and how long it has waited for a core.

Written is a file of speedscope's format, with what places each sample in its step and stage beside it under
``sftriage``: columns of one length, a row a time at which all threads were sampled.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

SAMPLE_STACKS = "sample_stacks"
"""The option of a capture that asks for this. torch's own ``with_stack`` traces every call instead."""

SCHEMA_VERSION = 1
NAME = "stacks.speedscope.json"
"""What the file is called among a capture's artefacts."""

SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"

PERIOD_S = 0.005
MAX_SAMPLES = 50_000
"""Of all threads together; with so many it ends by itself."""
MOST_OF_ONE = 40
"""A look at all threads takes at most one in so many parts of the time."""
MAX_DEPTH = 128
MAX_SOURCE = 200

Frame = tuple[int, int]
"""A code object's id, and the instruction it stands at."""
At = tuple[int, str, int]
Times = tuple[int, int]
"""How long a thread has run, and how long it has waited for a core (ns); -1 where nobody knows."""


class _Row(NamedTuple):
    """One look at all threads: the training thread's step and stage, and of each thread its stack and its times."""

    time_ns: int
    at: At
    stacks: dict[int, int]
    times_ns: dict[int, Times]


class StackSampler:
    """Samples every thread of this process from `start` to `stop`, both called on the training thread.

    Args:
        at: the step and the stage that the training thread is in, and since when (nanoseconds, monotonic clock).
        period_s: seconds from one sample to the next, or more.
    """

    def __init__(self, at: Callable[[], At], period_s: float = PERIOD_S) -> None:
        self._at, self._period_s = at, period_s
        self._training = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sftriage-samples", daemon=True)
        # Kept, so that no other code object can take the id of one that was met.
        self._codes: dict[int, CodeType] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._rows: list[_Row] = []
        self._n_samples = 0
        self._names: dict[int, str] = {}
        self._schedstats: dict[int, Schedstat] = {}
        self._began_ns = 0
        self._problem = ""

    def start(self) -> None:
        """Begin to sample. Does not raise: where no thread can be had, there are no stacks."""
        self._began_ns = monotonic_ns()
        try:
            self._thread.start()
        except RuntimeError as error:
            self._problem = str(error)

    def stop(self) -> None:
        """Sample no more. The thread ends by itself, at once; nobody waits for it here."""
        self._ended.set()

    def _run(self) -> None:
        wait_s = self._period_s
        try:
            while not self._ended.wait(wait_s) and self._n_samples < MAX_SAMPLES:
                began_ns = thread_time_ns()
                self._take()
                # Of many threads with deep stacks less often: meanwhile the training thread has no interpreter. (Not by
                # the clock: it may have been without it itself.)
                wait_s = max(self._period_s, MOST_OF_ONE * (thread_time_ns() - began_ns) * 1e-9)
        except Exception as error:
            self._problem = repr(error)
        finally:
            for schedstat in self._schedstats.values():
                schedstat.close()

    def _take(self) -> None:
        at, now_ns, own = self._at(), monotonic_ns(), threading.get_ident()
        stacks = {thread: self._stack(frame) for thread, frame in sys._current_frames().items() if thread != own}
        times_ns = {thread: self._schedstat(thread).times_ns() for thread in (*stacks, own)}
        self._rows.append(_Row(now_ns, at, stacks, times_ns))
        self._n_samples += len(stacks)

    def _schedstat(self, thread: int) -> Schedstat:
        found = self._schedstats.get(thread)
        if found is None:
            known = next((one for one in threading.enumerate() if one.ident == thread), None)
            self._names[thread] = known.name if known is not None else f"thread {thread}"
            found = self._schedstats[thread] = Schedstat(None if known is None else known.native_id)
        return found

    def _stack(self, frame: FrameType | None) -> int:
        """The number of a stack. Frames are let go of at once: they hold the program's variables."""
        found: list[int] = []
        while frame is not None and len(found) < 2 * MAX_DEPTH:
            code = frame.f_code
            self._codes[id(code)] = code
            found += (id(code), frame.f_lasti)
            frame = frame.f_back
        return self._stacks.setdefault(tuple(found), len(self._stacks))

    def keep(self, path: Path, max_bytes: int) -> str:
        """Write what was sampled, once it has stopped, on another thread than the training one. Does not raise.

        Returns:
            Why there is no such file, in words; "" where it is whole.
        """
        try:
            if self._thread.ident is not None:
                self._thread.join()
            if self._problem:
                return f"no stacks: {self._problem}"
            data = json.dumps(self._document(path.name), separators=(",", ":")).encode()
            if len(data) > max_bytes:
                return f"no stacks: they would have had {len(data)} bytes, and {max(0, max_bytes)} were left"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except Exception as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"no stacks: {error}"
        return ""

    def _document(self, title: str) -> dict[str, Any]:
        frames, rows, own = _Frames(self._codes), self._rows, self._thread.ident or 0
        stacks = [frames.numbers(stack) for stack in self._stacks]
        # The training thread's profile is the first.
        threads = dict.fromkeys((self._training, *(thread for row in rows for thread in row.stacks)))
        return {
            "$schema": SPEEDSCOPE,
            "exporter": "sftriage",
            "name": title,
            "activeProfileIndex": 0,
            "shared": {"frames": frames.described()},
            "profiles": [self._profile(thread, stacks) for thread in threads],
            "sftriage": {
                "schema_version": SCHEMA_VERSION,
                "period_s": self._period_s,
                "time_ns": [row.time_ns for row in rows],
                "step": [row.at[0] for row in rows],
                "stage": [row.at[1] for row in rows],
                "since_ns": [row.at[2] for row in rows],
                "threads": [_thread_columns(rows, thread) for thread in threads],
                "sampler": _thread_columns(rows, own),
                "source": frames.source(),
            },
        }

    def _profile(self, thread: int, stacks: Sequence[Sequence[int]]) -> dict[str, Any]:
        times_ns = [self._began_ns, *(row.time_ns for row in self._rows)]
        # Where it was not there yet, or not any more, its stack is empty.
        its = [stacks[row.stacks[thread]] if thread in row.stacks else [] for row in self._rows]
        return {
            "type": "sampled",
            "name": self._names.get(thread, "the training thread"),
            "unit": "nanoseconds",
            "startValue": 0,
            "endValue": times_ns[-1] - self._began_ns,
            "samples": its,
            "weights": [after - before for before, after in pairwise(times_ns)],
        }


def _thread_columns(rows: Sequence[_Row], thread: int) -> dict[str, list[int]]:
    times_ns = [row.times_ns.get(thread, (-1, -1)) for row in rows]
    return {"run_ns": [run_ns for run_ns, _ in times_ns], "waited_ns": [waited_ns for _, waited_ns in times_ns]}


class _Frames:
    """Frames as speedscope has them: function, file and line; numbered as they come."""

    def __init__(self, codes: Mapping[int, CodeType]) -> None:
        self._codes = codes
        self._lines: dict[int, dict[int, int]] = {}
        self._number: dict[tuple[str, str, int], int] = {}
        self._of: dict[Frame, int] = {}

    def numbers(self, stack: Sequence[int]) -> list[int]:
        """The frames of a stack, the outermost first."""
        return [self._one((code, at)) for code, at in zip(stack[-2::-2], stack[::-2], strict=True)]

    def _one(self, frame: Frame) -> int:
        number = self._of.get(frame)
        if number is None:
            code = self._codes[frame[0]]
            key = getattr(code, "co_qualname", code.co_name), code.co_filename, self._line(*frame)
            number = self._of[frame] = self._number.setdefault(key, len(self._number))
        return number

    def _line(self, code: int, at: int) -> int:
        lines = self._lines.get(code)
        if lines is None:
            lines = self._lines[code] = {
                offset: line
                for start, end, line in self._codes[code].co_lines()
                if line is not None
                for offset in range(start, end, 2)
            }
        return lines.get(at, self._codes[code].co_firstlineno)

    def described(self) -> list[dict[str, Any]]:
        """Every frame, in the order of its number."""
        return [{"name": name, "file": file, "line": line} for name, file, line in self._number]

    def source(self) -> list[str]:
        """Of every frame the line of source, "" where that is not to be had."""
        known = set(linecache.cache)
        try:
            return [linecache.getline(file, line).strip()[:MAX_SOURCE] for _, file, line in self._number]
        finally:
            # What was not the job's own is not left in its memory.
            for file in set(linecache.cache) - known:
                linecache.cache.pop(file, None)


class Schedstat:
    """How long a thread of this process has run, and has waited for a core."""

    def __init__(self, native_id: int | None) -> None:
        self._descriptor = -1
        if native_id is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def times_ns(self) -> Times:
        """See `Times`."""
        if self._descriptor < 0:
            return -1, -1
        try:
            run, waited, _ = os.pread(self._descriptor, 96, 0).split()
            return int(run), int(waited)
        except (OSError, ValueError):
            return -1, -1

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
