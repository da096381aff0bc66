"""Device time: how long the GPU was at each stage of a step. On CUDA the host's time shows only launches.

At each stage boundary an event goes into the stream; the GPU notes the time when it gets there. Some steps later, when
a step's last event was reached, the differences go into the log, between two steps. Nothing here waits for the device:
a step that was not read in time has no device time.

It times the stream that is current when the step begins, and what other streams, such as NCCL's, make it wait for. The
last gradient's event is in the stream that computes the gradient.

A log in C does all of this itself (``_device.c``), with the driver's functions. For a log in Python, and where the
driver is not CUDA's, the recording drives `DeviceTime`, which uses torch's.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from sftriage.log import warn
from sftriage.trainer import layout
from sftriage.trainer.moments import Form, Log

IN_FLIGHT = 64
"""Steps whose events may be on their way: a host that runs further ahead of its GPU leaves steps out."""

MAX_MARKS = 1 << 14
"""Boundaries of a step beyond which its device time is not recorded: each holds an event of the driver's."""

READ_A_STEP = 4
"""Steps that are read at the end of one, so that no step pays for many."""

CUDA_START_STEPS = 64
"""Steps in which CUDA may still be initialised."""

_NS_PER_MS = 1e6


def cuda_in_use() -> bool:
    """Whether the trainer has initialised CUDA. Imports nothing, and makes no call of the driver."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # (torch may be half imported, in another thread)
    is_initialized = getattr(cuda, "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


_FUNCTIONS = (
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventDestroy_v2",
)


def driver() -> tuple[int, ...]:
    """Addresses of the functions that ``_device.c`` calls, in its order, in the driver that torch has loaded.

    Raises:
        OSError: the driver is not CUDA's.
        AttributeError: it lacks one of them.
    """
    import ctypes  # (not in a job that has no GPU)

    library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS)


def in_c(form: Form) -> Any:
    """Device time that a log in C records by itself (``gradient``, ``note``, ``close``); None without CUDA's driver."""
    if form.device is None:
        return None
    torch = sys.modules["torch"]
    try:
        return form.device(driver(), torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream)
    except Exception:
        return None


class _Step:
    """One step and its events; ``seq`` counts all steps of the log.

    ``stages[i]`` runs from event i on. ``ready`` has the event of each visit's newest gradient, and ``visits`` names
    those for which that gradient is known to be the last.
    """

    __slots__ = ("capturing", "events", "number", "ready", "seq", "stages", "start_ns", "visits")

    def __init__(self, number: int, seq: int, start_ns: int) -> None:
        self.number, self.seq, self.start_ns = number, seq, start_ns
        self.events: list[Any] = []
        self.stages: list[int] = []
        self.ready: dict[int, Any] = {}
        self.visits: tuple[int, ...] = ()
        self.capturing = False

    def reached(self) -> bool:
        return bool(self.events[-1].query()) and all(self.ready[visit].query() for visit in self.visits)


class DeviceTime:
    """Records device time for one log, from when CUDA is in use. None of its methods raises."""

    def __init__(self, log: Log, failed: Callable[[str], None]) -> None:
        self._log, self._failed = log, failed
        self._cuda: Any = sys.modules["torch"].cuda
        self._stream: Any = None
        self._open: _Step | None = None
        self._steps: deque[_Step] = deque()  # ended, and not read yet
        self._before: _Step | None = None  # the last one that was read
        # Spare events: making one takes the driver's time. An event belongs to the device that it was first recorded
        # on, which for a gradient may be another one.
        self._spare: list[Any] = []
        self._spare_ready: list[Any] = []
        self._watches = True
        self.off = False

    def begin(self, number: int, start_ns: int) -> None:
        """A step begins on this thread; ``start_ns`` is since the log began."""
        if self.off or len(self._steps) >= IN_FLIGHT - 1:
            return
        try:
            self._stream = self._cuda.current_stream()
            self._open = _Step(number, self._log.published + 1, start_ns)
            self.mark(layout.OTHER_STAGE)
        except Exception as error:
            self._fail(error)

    def mark(self, stage: int) -> None:
        """From here on the step is in the stage of this number."""
        opened = self._open
        if opened is None:
            return
        try:
            # A captured event has no time, and asking for it would spoil the graph.
            if self._cuda.is_current_stream_capturing():
                self._open = None
                self._free(opened)
                return
            if len(opened.events) == MAX_MARKS:
                raise ValueError(f"a step went from stage to stage {MAX_MARKS} times")
            event = self._spare.pop() if self._spare else self._cuda.Event(enable_timing=True)
            event.record(self._stream)
            opened.events.append(event)
            opened.stages.append(stage)
        except Exception as error:
            self._fail(error)

    def gradient(self, visit: int) -> None:
        """Another gradient of a visit to the split sync stage has been launched, in whatever thread this is.

        Raises:
            Exception: whatever CUDA does; the step's own times go on.
        """
        opened = self._open
        if opened is None or not self._watches or self._cuda.is_current_stream_capturing():
            return
        event = opened.ready.get(visit)
        if event is None:
            try:
                event = self._spare_ready.pop()
            except IndexError:  # (perhaps because another thread was quicker)
                event = self._cuda.Event(enable_timing=True)
            opened.ready[visit] = event
        event.record(self._cuda.current_stream())

    def note(self, capturing: bool, visits: Collection[int]) -> None:
        """Say of the step that ends whether it was captured, and of which visits the last gradient is known."""
        opened = self._open
        if opened is not None:
            opened.capturing = capturing
            opened.visits = tuple(visit for visit in visits if visit in opened.ready)

    def end(self, incomplete: bool) -> None:
        self.mark(layout.OTHER_STAGE)
        opened, self._open = self._open, None
        if opened is not None and incomplete:
            self._free(opened)
        elif opened is not None:
            self._steps.append(opened)

    def settle(self) -> None:
        """Between two steps: write those that the device has finished."""
        try:
            if not self.off:
                self._write(READ_A_STEP)
        except Exception as error:
            self._fail(error)

    def close(self, log: Log) -> None:
        """Write what the device has finished by now. A second call does nothing."""
        if self.off:
            return
        self.off, self._open = True, None
        try:
            self._write(IN_FLIGHT)
        except Exception as error:
            warn("the last steps' device times are not known: %r", error)

    def _free(self, step: _Step) -> None:
        self._spare += step.events
        self._spare_ready += step.ready.values()

    def _write(self, most: int) -> None:
        while most and self._steps and self._steps[0].reached():
            most -= 1
            step, before = self._steps.popleft(), self._before
            self._write_one(step, before)
            # Kept: the time to the beginning of the next step needs its end.
            self._before = step
            if before is not None:
                self._free(before)

    def _write_one(self, step: _Step, before: _Step | None) -> None:
        put = self._log.put
        # All before anything is written: a step is there as a whole, or not at all.
        ready_ns, between_ns = self._ready_ns(step), 0
        if before is not None and before.seq + 1 == step.seq:
            between_ns = _elapsed_ns(before.events[-1], step.events[0])
        put(layout.DEVICE_STEP, step.seq)
        put(layout.DEVICE_NUMBER, step.number)
        put(layout.DEVICE_START, step.start_ns)
        put(layout.DEVICE_FLAGS, int(step.capturing))
        put(layout.DEVICE_BETWEEN, between_ns)
        for after_ns in ready_ns:
            put(layout.DEVICE_READY, after_ns)
        # Each from the first event, so that the parts sum to the whole whatever a difference is rounded to.
        first, passed_ns, last = step.events[0], 0, len(step.events) - 1
        for mark, event in enumerate(step.events):
            if mark:
                passed_ns = max(passed_ns, round(first.elapsed_time(event) * _NS_PER_MS))
            put(layout.DEVICE_END if mark == last else layout.ON_STREAM + step.stages[mark], passed_ns)

    def _ready_ns(self, step: _Step) -> list[int]:
        try:
            return [_elapsed_ns(step.events[0], step.ready[visit]) for visit in step.visits]
        except Exception as error:
            # Of a model that is spread over several devices: their clocks are not one.
            self._watches = False
            warn("the last gradient's moment is not known on the device: %r", error)
            return []

    def _fail(self, error: Exception) -> None:
        self.off, self._open = True, None
        self._failed(repr(error))


def _elapsed_ns(start: Any, end: Any) -> int:
    passed_ms: float = start.elapsed_time(end)
    return max(0, round(passed_ms * _NS_PER_MS))
