"""Writing moments: when, and which. What a boundary costs is what this module does; whoever reads does the arithmetic.

Two forms write the same bytes (see `layout`) behind the same three types: ``_moments`` in C, and a dearer one below,
where that could not be built or loaded. `FORM` says which is in use. A steady step touches one page of the log and the
header's, and makes no system call: what a boundary costs is mostly what it has to bring into the caches.

The clock is CLOCK_MONOTONIC: one for all processes of a host, and read without a system call.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from struct import calcsize
from threading import get_ident
from time import monotonic_ns
from types import ModuleType, TracebackType
from typing import Any, Literal, Protocol

from sftriage.errors import without_our_frames
from sftriage.recorder.layout import (
    ADDITIONS_AT,
    BEGIN,
    BLOCK,
    BLOCK_WORDS,
    CLAIMED,
    CODE_AT,
    DOORBELL,
    END,
    LEFT,
    LIVE_AT,
    LOG_AT,
    NUMBER,
    OPENED,
    WORD_BYTES,
)

_WORD: Literal["L", "Q"] = "L" if calcsize("L") == WORD_BYTES else "Q"
"""The machine's own word, where it has 64 bits: Python stores it with less code than one of a certain width."""
_ZEROS = memoryview(bytes((BLOCK_WORDS - 1) * WORD_BYTES)).cast(_WORD)
_NOWHERE = memoryview(bytearray()).cast(_WORD)

NEVER = -1
"""No doorbell rings so often: the recording is asked at the next step in any case."""

FORM_ENV = "SFTRIAGE_RECORDER"
"""``python`` takes the form in Python though the one in C is there."""


class Owner(Protocol):
    """What a log asks whenever something is not as usual. Nothing that it does raises into training."""

    def begin(self, number: int | None) -> None:
        """A step begins while another one is open, or the doorbell has rung."""

    def end(self, incomplete: bool) -> None:
        """A step ends that is not open in this thread, or ``ends_slowly`` is set."""

    def stray(self, code: int) -> None:
        """A boundary outside the step of this thread."""

    def device_failed(self, why: str) -> None:
        """There is no device time any more: told by the form in C."""


class _Nobody:
    """Whom a log asks that is closed: its recording is free to go."""

    def begin(self, number: int | None) -> None:
        return

    def end(self, incomplete: bool) -> None:
        return

    def stray(self, code: int) -> None:
        return

    def device_failed(self, why: str) -> None:
        return


class Log:
    """The mapped log of one rank, in a file that has its header, with room for a log of so many words.

    It is its own next step, as a context manager: a step touches no other object. Times in it are since ``base_ns``.
    ``clock`` is another one than the machine's, for tests.

    Attributes:
        number: of the step that is open, or of the last one; -1 before the first.
        published: steps that have ended.
        seen: the doorbell as it was answered last, or `NEVER`.
        ends_slowly: whether the owner of the log is asked at the end of a step.
    """

    __slots__ = (
        "_all",
        "_beginning",
        "_ending",
        "_leaving",
        "_map",
        "_opened",
        "_words",
        "at",
        "base_ns",
        "block",
        "clock",
        "ends_slowly",
        "holder",
        "live",
        "number",
        "offset",
        "published",
        "recording",
        "seen",
        "told",
    )

    def __init__(
        self,
        descriptor: int,
        log_words: int,
        base_ns: int,
        recording: Owner,
        clock: Callable[[], int] | None = None,
    ) -> None:
        # Every page now: no step pays for one that it is the first to touch.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(descriptor, LOG_AT + log_words * WORD_BYTES, flags)
        self._all = memoryview(self._map).cast(_WORD)
        self.live = self._all[LIVE_AT // WORD_BYTES : ADDITIONS_AT // WORD_BYTES]
        self._words = self._all[LOG_AT // WORD_BYTES :]
        self.recording = recording
        self.clock = clock or monotonic_ns
        self.base_ns = base_ns
        self._beginning, self._ending, self._leaving = (base_ns - (code << CODE_AT) for code in (BEGIN, END, LEFT))
        # The block that is written just now, and how many words there are before its end, in all.
        self.block, self._opened = _NOWHERE, 0
        # A thread's ident less the offset is where in the block its next word goes: out of it for all threads but the
        # one that may write without asking, as a thread's own data lie there. Where something is not as usual the
        # offset is 0, and it is `at` that says where the next word goes.
        self.at = self.offset = self.holder = self.published = 0
        self.number = self.seen = NEVER
        self.ends_slowly = False
        self.told: Callable[[int], object] | None = None

    def __enter__(
        self, numbered: int = NUMBER << CODE_AT, doorbell: int = DOORBELL, get_ident: Callable[[], int] = get_ident
    ) -> None:
        clock = self.clock
        try:
            if not self.holder and self.live[doorbell] == self.seen:
                owner = get_ident()
                begun = clock() - self._beginning
                number, at, block = self.number + 1, self.at, self.block
                # The second word first: where it has no room, neither is written.
                block[at + 1] = begun
                block[at] = numbered + number
                self.at = at = at + 2
                self.number = number
                self.holder = owner
                self.offset = 0 if self.told else owner - at
                return
        except IndexError:
            pass
        self.recording.begin(None)

    def __exit__(self, kind: object, error: object, trace: object, get_ident: Callable[[], int] = get_ident) -> None:
        if not self.ends_slowly:
            clock = self.clock
            thread = get_ident()
            try:
                self.block[thread - self.offset] = clock() - (self._ending if kind is None else self._leaving)
                self.at = thread - self.offset + 1
                self.holder = self.offset = 0
                self.published += 1
                return
            except (IndexError, ValueError):  # it is not open, or not here, or there is no room
                pass
        self.recording.end(kind is not None)

    @property
    def listener(self) -> Callable[[int], object] | None:
        """Is called with the code of each boundary of a stage, once it is noted; or None."""
        return self.told

    @listener.setter
    def listener(self, listener: Callable[[int], object] | None) -> None:
        self._shut()
        self.told = listener
        self._let(self.holder)

    @property
    def owner(self) -> int:
        """The thread whose step is open, or 0."""
        return self.holder

    @owner.setter
    def owner(self, owner: int) -> None:
        self._shut()
        self._let(owner)

    def _shut(self) -> None:
        if self.offset:
            self.at, self.offset = self.holder - self.offset, 0

    def _let(self, owner: int) -> None:
        """The step is this thread's, which may write without asking where nobody listens; or 0."""
        self.holder = owner
        self.offset = owner - self.at if owner and self.told is None else 0

    @property
    def doorbell(self) -> int:
        """The ring's doorbell: it changes when there is something in the mailbox."""
        return self.live[DOORBELL]

    def begin(self, number: int, /) -> int:
        """Begin a step of this number, of the thread that calls; when that was, in nanoseconds since the log began."""
        self.put(NUMBER, number)
        begun_ns = self.clock() - self.base_ns
        self.put(BEGIN, begun_ns)
        self.number = number
        self.owner = get_ident()
        return begun_ns

    def end(self, code: int, /) -> None:
        """End the step with END or LEFT, and publish it."""
        self.note(code)
        self.owner = 0
        self.published += 1

    def note(self, code: int, /) -> None:
        """Note a moment, now."""
        self.put(code, self.clock() - self.base_ns)

    def put(self, code: int, value: int, /) -> None:
        """Put a code with its value."""
        self._shut()
        if self.at == len(self.block):
            first = self._opened % len(self._words)
            self._opened += BLOCK_WORDS
            # Claimed first, overwritten then.
            self.live[CLAIMED] = self._opened
            self.block = self._words[first : first + BLOCK_WORDS]
            self.block[1:] = _ZEROS
            self.block[0] = (BLOCK << CODE_AT) + self.published
            self.live[OPENED] = self._opened
            self.at = 1
        self.block[self.at] = (code << CODE_AT) + value
        self.at += 1
        self._let(self.holder)

    def boundary(self, code: int) -> None:
        """A stage is entered or left: what its context manager does where it cannot just store a word."""
        if self._map.closed:
            return
        if get_ident() != self.owner:
            self.recording.stray(code)
            return
        self.note(code)
        if self.told is not None:
            self.told(code)

    def set_live(self, word: int, value: int, /) -> None:
        """Store a live word."""
        self.live[word] = value

    def close(self) -> None:
        """Unmap the files; what was written stays. A second call does nothing."""
        if self._map.closed:
            return
        # Whoever still begins or ends a step asks, and is told nothing.
        self.holder, self.offset, self.ends_slowly, self.told = NEVER, 0, True, None
        self.recording = _Nobody()
        block, self.block = self.block, _NOWHERE
        for view in (block, self.live, self._words, self._all):
            if view is not _NOWHERE:
                view.release()
        self._map.close()


class Stage:
    """One stage, as a context manager. There is one for the life of its log: entering allocates nothing.

    Where caches are cold each line of memory costs, and so does each sort of operation: hence differences alone, and
    what else looks odd below.

    Attributes:
        entered, left: how often it was, if it is to `count` that.
    """

    __slots__ = ("_entering", "_leaving", "_log", "_number", "entered", "left")
    entered: int
    left: int

    def __init__(self, log: Log, number: int) -> None:
        self._log = log
        self._number = number
        self._entering, self._leaving = (log.base_ns - (2 * number + end << CODE_AT) for end in (0, 1))

    def __enter__(self, get_ident: Callable[[], int] = get_ident) -> None:
        log = self._log
        clock = log.clock
        thread = get_ident()
        try:
            # What is called is called before the block is looked at: a signal's handler may have written meanwhile.
            log.block[thread - log.offset] = clock() - self._entering
            log.offset = log.offset - 1
        except (IndexError, ValueError):  # this is not the step's thread, the block is full, or the log was closed
            log.boundary(2 * self._number)

    def __exit__(self, kind: object, error: object, trace: object, get_ident: Callable[[], int] = get_ident) -> None:
        log = self._log
        clock = log.clock
        thread = get_ident()
        try:
            log.block[thread - log.offset] = clock() - self._leaving
            log.offset = log.offset - 1
        except (IndexError, ValueError):
            log.boundary(2 * self._number + 1)


class CountedStage(Stage):
    """A stage that counts how often it is entered and left: apart, for most are never asked."""

    __slots__ = ()

    def __enter__(self) -> None:  # type: ignore[override]  # what there is a default is for speed
        self.entered += 1
        Stage.__enter__(self)

    def __exit__(self, kind: object, error: object, trace: TracebackType | None) -> None:  # type: ignore[override]
        if trace is not None:
            without_our_frames(trace)
        if self.left < self.entered:  # (it may have been entered before it counted)
            self.left += 1
        Stage.__exit__(self, kind, error, trace)


def count(stage: object) -> bool:
    """Have a stage count from now on; whether that is new: one of the form in C always does, an inert one never."""
    if type(stage) is not Stage:
        return False
    stage.entered = stage.left = 0
    stage.__class__ = CountedStage
    return True


def count_no_more(stage: Stage) -> None:
    """Have a stage count no more that was told to `count`."""
    stage.__class__ = Stage


class Ready:
    """A hook on parameters: it notes when each gradient was ready, in a visit to this stage.

    On CUDA it is called on autograd's device thread, while the step's own thread is inside ``backward()``, and nothing
    keeps a job from calling that in any thread: so it only leaves a note, and the log is never written from here. The
    interpreter runs signal handlers where Python's code begins, which in backward is mostly a hook's: one in C is never
    in the traceback of what they raise, and this one's frame is taken out where the stage is left.

    Args:
        stage: the stage, which counts.
        recording: has the ``device`` that is told, too, and is ``off`` once it is over.
        order: says whether all gradients may be last ones (``learning``), or which may (``finals``).
        notes: gets (visit, when, id of the parameter), or what was raised.
    """

    __slots__ = ("_notes", "_order", "_recording", "_stage")

    def __init__(self, stage: Any, recording: Any, order: Any, notes: list[Any]) -> None:
        self._stage, self._recording, self._order, self._notes = stage, recording, order, notes

    def __call__(self, parameter: object) -> None:
        """A gradient has been accumulated."""
        try:
            stage, recording, order = self._stage, self._recording, self._order
            entered = stage.entered
            if entered == stage.left or recording.off or not recording.log.owner:
                return
            self._notes.append((entered, recording.log.clock(), id(parameter)))
            # (one that is not known to come last would leave the step without the moment if it did)
            if recording.device is not None and (order.learning or id(parameter) in order.finals):
                recording.device.gradient(entered)
        except Exception as error:
            self._notes.append(error)


@dataclass(frozen=True, slots=True)
class Form:
    """One of the two forms: its types, by what they make; and the ``step`` and ``stage`` that a monitor inherits.

    ``seam`` makes what `sftriage.seams` puts around functions of torch once a job is in its stride, where there is
    something that does that with less than functions in Python do. ``device`` makes device time that the log records by
    itself: see `sftriage.recorder.device`.
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
    """Where the form in C lies for this machine's architecture, in a folder that is carried from machine to machine."""
    return directory / f"_moments.{os.uname().machine}.abi3.so"


def _binary() -> ModuleType:
    """The form in C: the one that was built here, or else the one that was carried here.

    Raises:
        ImportError: there is none that this Python can load.
    """
    name = "sftriage.recorder._moments"
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
    """The form to use, and why it is not the one in C; "" where it is."""
    if os.environ.get(FORM_ENV) == "python":
        return PYTHON, f"{FORM_ENV} asks for it"
    try:
        c = _binary()
        return Form("C", c.Log, c.Span, c.Span, c.Ready, c.Calls, c.Seam, c.Device), ""
    except (ImportError, AttributeError) as error:  # not there, or left over from another version
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return PYTHON, "this Python is free-threaded: the form in C is for the stable ABI, which it has not"
        return PYTHON, f"the form in C is not there: {error}"


FORM, WHY_NOT_C = _chosen()
