"""Device time: the GPU's time in each stage of a step, by events of the driver."""

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
"""Steps whose events may be in flight: a host that runs further ahead of its GPU skips device times."""

MAX_MARKS = 1 << 14
"""Maximum boundaries of a step with device time: each holds an event of the driver's."""

READ_A_STEP = 4
"""Maximum steps read at the end of one step, so that no step pays for many."""

_NS_PER_MS = 1e6


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

    Raises OSError if the driver is not CUDA's, and AttributeError if it lacks one of them.
    """
    import ctypes  # (not in a job that has no GPU)

    library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS)


def in_c(form: Form) -> Any:
    """Device time that the log in C records by itself (``gradient``, ``note``, ``close``); None without CUDA."""
    if form.device is None:
        return None
    torch = sys.modules["torch"]
    try:
        return form.device(driver(), torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream)
    except Exception:
        return None


class _Step:
    """One step and its events; ``seq`` counts all steps of the log.

    ``stages[i]`` runs from event i on. ``ready`` has the event of each visit's newest gradient; in the ``visits`` that
    gradient is known to be the last.
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
    """Device time: the GPU's time in each stage of a step. On CUDA the host's time shows only launches.

    At each stage boundary an event goes into the stream; the GPU notes the time when it gets there. Some steps later,
    once the GPU has reached a step's last event, the differences go into the log, between two steps. Nothing here waits
    for the device: a step that was not read in time has no device time. None of its methods raises.

    It times the stream that is current when the step begins, with its waits for other streams, such as NCCL's. The last
    gradient's event is in the stream that computes the gradient.

    The log in C does all of this itself (``_device.c``), with the driver's functions. This class uses torch's, for a
    log in Python, and for a driver that is not CUDA's.
    """

    def __init__(self, log: Log, failed: Callable[[str], None]) -> None:
        self._log, self._failed = log, failed
        self._cuda: Any = sys.modules["torch"].cuda
        self._stream: Any = None
        self._open: _Step | None = None
        self._steps: deque[_Step] = deque()  # ended, and not read yet
        self._before: _Step | None = None  # the last step that was read
        # Spare events: the driver takes time to make one. An event belongs to the device that it was first recorded on,
        # which for a gradient may be another device.
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
        """Enter the stage of this number."""
        opened = self._open
        if opened is None:
            return
        try:
            # An event in a captured graph has no time, and a query would spoil the graph.
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
        """Another gradient of a visit to the split sync stage has been launched, in any thread.

        Raises Exception as CUDA does; the step's own times go on.
        """
        opened = self._open
        if opened is None or not self._watches or self._cuda.is_current_stream_capturing():
            return
        event = opened.ready.get(visit)
        if event is None:
            try:
                event = self._spare_ready.pop()
            except IndexError:  # (another thread may take the last one)
                event = self._cuda.Event(enable_timing=True)
            opened.ready[visit] = event
        event.record(self._cuda.current_stream())

    def note(self, capturing: bool, visits: Collection[int]) -> None:
        """Note of the ending step whether it was captured, and the visits whose last gradient is known."""
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
        """Write the steps that the device has finished, between two steps."""
        try:
            if not self.off:
                self._write(READ_A_STEP)
        except Exception as error:
            self._fail(error)

    def close(self, log: Log) -> None:
        """Write the steps that the device has finished by now. A second call does nothing."""
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
            self._write_step(step, before)
            # Kept, because the time to the beginning of the next step needs its end.
            self._before = step
            if before is not None:
                self._free(before)

    def _write_step(self, step: _Step, before: _Step | None) -> None:
        put = self._log.put
        # Compute all before anything is written: a step is there as a whole, or not at all.
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
        # Each from the first event, so that rounded parts sum to the whole.
        first, passed_ns, last = step.events[0], 0, len(step.events) - 1
        for mark, event in enumerate(step.events):
            if mark:
                passed_ns = max(passed_ns, round(first.elapsed_time(event) * _NS_PER_MS))
            put(layout.DEVICE_END if mark == last else layout.ON_STREAM + step.stages[mark], passed_ns)

    def _ready_ns(self, step: _Step) -> list[int]:
        try:
            return [_elapsed_ns(step.events[0], step.ready[visit]) for visit in step.visits]
        except Exception as error:
            # The model is spread over several devices, whose clocks differ.
            self._watches = False
            warn("the last gradient's moment is not known on the device: %r", error)
            return []

    def _fail(self, error: Exception) -> None:
        self.off, self._open = True, None
        self._failed(repr(error))


def _elapsed_ns(start: Any, end: Any) -> int:
    passed_ms: float = start.elapsed_time(end)
    return max(0, round(passed_ms * _NS_PER_MS))
