"""Writes moments, each a time and a code, into a rank's ring. `recording` calls it; the reader does the arithmetic.

Two forms write the same bytes (see `layout`) behind the same types: ``_moments`` in C, and the plain one below for
machines without the binary. `FORM` is the form in use. In C a steady step touches one page of the log and the header's,
and makes no system call.

The clock is CLOCK_MONOTONIC: all processes of a host share it, and reading it takes no system call.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import ModuleType, TracebackType
from typing import Any

from sftriage.errors import without_our_frames
from sftriage.trainer import layout
from sftriage.trainer.layout import BLOCK_WORDS, CODE_AT, WORD_BYTES

_LIVE, _LOG = layout.LIVE_AT // WORD_BYTES, layout.LOG_AT // WORD_BYTES
_ZEROS = memoryview(bytes((BLOCK_WORDS - 1) * WORD_BYTES)).cast("Q")

_CLOSED = (AttributeError, ValueError)
"""What a closed log raises: another thread may close it between two operations."""

NEVER = -1
"""No doorbell has this count, so the next step calls the recording."""

FORM_ENV = "SFTRIAGE_RECORDER"
"""``python`` selects the form in Python even if the form in C is there."""


class Log:
    """The mapped log of one rank, of ``log_words`` words, in a file that has its header.

    As a context manager it is the next step. Its times are since ``base_ns``. In unusual cases it calls ``begin``,
    ``end`` and ``stray`` of the ``recording``, which raise nothing into training. Tests pass a ``clock``.

    Attributes:
        owner: the thread whose step is open, or 0.
        number: the number of the open or last step; -1 before the first.
        published: steps that have ended.
        seen: the doorbell at the last call of ``recording.begin``, or `NEVER`.
        ends_slowly: whether the recording ends the steps.
        listener: called with the code of each stage boundary after it was noted; or None.
    """

    def __init__(
        self, descriptor: int, log_words: int, base_ns: int, recording: Any, clock: Callable[[], int] | None = None
    ) -> None:
        # Map every page now, so that no step pays for being the first to touch one.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(descriptor, layout.LOG_AT + log_words * WORD_BYTES, flags)
        self._words = memoryview(self._map).cast("Q")
        # The next word, counted from the first ever written, and the end of its block.
        self._next, self._opened, self._log_words = 0, 0, log_words
        self._recording, self.clock, self._base_ns = recording, clock or monotonic_ns, base_ns
        self.owner = self.published = 0
        self.number = self.seen = NEVER
        self.ends_slowly = False
        self.listener: Callable[[int], object] | None = None

    def __enter__(self) -> None:
        with suppress(*_CLOSED):
            if self.owner or self.doorbell != self.seen:
                self._recording.begin(None)
            else:
                self.begin()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(*_CLOSED):
            if self._map.closed:
                return
            if self.ends_slowly or get_ident() != self.owner:
                self._recording.end(kind is not None)
            else:
                self.end(layout.END if kind is None else layout.LEFT)

    @property
    def doorbell(self) -> int:
        """The ring's doorbell, which changes when the mailbox has something new."""
        return self._words[_LIVE + layout.DOORBELL]

    def begin(self, number: int | None = None, /) -> int:
        """Begin a step of the calling thread; returns when, in nanoseconds since the log began."""
        # (first: a signal's handler may take a step of its own in here)
        owner = get_ident()
        number = self.number + 1 if number is None else number
        self.put(layout.NUMBER, number)
        begun_ns = self.note(layout.BEGIN)
        self.number, self.owner = number, owner
        return begun_ns

    def end(self, code: int, /) -> None:
        """End the step with END or LEFT, and publish it."""
        self.note(code)
        self.owner = 0
        self.published += 1

    def note(self, code: int, /) -> int:
        """Note a moment now; returns when."""
        now_ns = self.clock() - self._base_ns
        self.put(code, now_ns)
        return now_ns

    def put(self, code: int, value: int, /) -> None:
        # This calls nothing: a signal's handler writes its words before this one or after it.
        if self._next == self._opened:
            first = _LOG + self._opened % self._log_words
            self._opened += BLOCK_WORDS
            # Claim before overwriting.
            self._words[_LIVE + layout.CLAIMED] = self._opened
            self._words[first + 1 : first + BLOCK_WORDS] = _ZEROS
            self._words[first] = (layout.BLOCK << CODE_AT) + self.published
            self._words[_LIVE + layout.OPENED] = self._opened
            self._next += 1
        self._words[_LOG + self._next % self._log_words] = (code << CODE_AT) + value
        self._next += 1

    def boundary(self, code: int) -> None:
        with suppress(*_CLOSED):
            if get_ident() == self.owner:
                self.note(code)
                if self.listener is not None:
                    self.listener(code)
            elif not self._map.closed:
                self._recording.stray(code)

    def set_live(self, word: int, value: int, /) -> None:
        self._words[_LIVE + word] = value

    def close(self) -> None:
        """Unmap the file; what was written stays. A second call does nothing."""
        self.owner, self.listener, self._recording = 0, None, None
        self._words.release()
        self._map.close()


class Stage:
    """One stage of a log, as a context manager. It counts how often it was entered and left."""

    def __init__(self, log: Log, number: int) -> None:
        self._log, self._entering = log, 2 * number
        self.entered = self.left = 0

    def __enter__(self) -> None:
        self.entered += 1
        self._log.boundary(self._entering)

    def __exit__(self, kind: object, error: object, trace: TracebackType | None) -> None:
        if trace is not None:
            without_our_frames(trace)
        self.left += 1
        self._log.boundary(self._entering + 1)


class Ready:
    """A hook on parameters that notes when each gradient was ready, in a visit to this stage.

    On CUDA a thread of autograd calls it while the step's thread is inside ``backward()``, so it only adds to the
    ``notes``: (visit, time, id of the parameter), or an exception. Signal handlers mostly run at its beginning; when
    the stage is left, its frame is removed from the exceptions that they raise.
    """

    def __init__(self, stage: Any, recording: Any, order: Any, notes: list[Any]) -> None:
        self._stage, self._recording, self._order, self._notes = stage, recording, order, notes

    def __call__(self, parameter: object) -> None:
        try:
            stage, recording, order = self._stage, self._recording, self._order
            entered = stage.entered
            if entered == stage.left or recording.off or not recording.log.owner:
                return
            self._notes.append((entered, recording.log.clock(), id(parameter)))
            # (a parameter that is not known to come last leaves the step without the moment if it does)
            if recording.device is not None and (order.learning or id(parameter) in order.finals):
                recording.device.gradient(entered)
        except Exception as error:
            self._notes.append(error)


@dataclass(frozen=True, slots=True)
class Form:
    """The types of one of the two forms; ``calls`` has the ``step`` and ``stage`` that a monitor inherits.

    Only in C: ``seam`` makes the wrappers and hooks that `sftriage.trainer.seams` uses after the first steps, and
    ``device`` the device time that the log records by itself.
    """

    name: str
    log: Callable[..., Log]
    stage: Callable[[Any, int], Stage]
    step: Callable[[Any], AbstractContextManager[None]]
    ready: Callable[..., Callable[[object], None]] = Ready
    calls: type = object
    seam: Callable[..., Any] | None = None
    device: Callable[..., Any] | None = None


PYTHON = Form("Python", Log, Stage, lambda log: log)


def carried_binary(directory: Path) -> Path:
    """The form in C for this machine's architecture, in a folder that is carried from machine to machine."""
    return directory / f"_moments.{os.uname().machine}.abi3.so"


def _binary() -> ModuleType:
    name = "sftriage.trainer._moments"
    carried = carried_binary(Path(__file__).parent)
    if not carried.exists():
        return import_module(name)
    spec = spec_from_file_location(name, carried)
    assert spec is not None, "its suffix is that of an extension"
    assert spec.loader is not None, "its suffix is that of an extension"
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return sys.modules.setdefault(name, made)


def _chosen() -> tuple[Form, str]:
    if os.environ.get(FORM_ENV) == "python":
        return PYTHON, f"{FORM_ENV} selects it"
    try:
        c = _binary()
        return Form("C", c.Log, c.Span, c.Span, c.Ready, c.Calls, c.Seam, c.Device), ""
    except (ImportError, AttributeError) as error:  # missing, or built from another version
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return PYTHON, "this Python is free-threaded: the form in C needs the stable ABI, which it lacks"
        return PYTHON, f"the form in C is missing: {error}"


FORM, WHY_NOT_C = _chosen()
