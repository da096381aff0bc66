"""One rank's recording: handles everything unusual at a boundary, and the work between two steps.

In a steady step the log alone writes (see `moments`): no system call, no lasting allocation. The log calls this module
when the doorbell has rung, during a capture, if the last gradient is watched, for device time that it does not record
itself, and for misuse, such as a step within a step or in another thread.
"""

from __future__ import annotations

import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from numbers import Integral
from threading import get_ident
from time import monotonic_ns
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from sftriage.errors import RingError, SchemaError
from sftriage.log import warn
from sftriage.model.windows import OTHER, StageSchema
from sftriage.trainer import layout, moments
from sftriage.trainer.executor import Answering, CaptureExecutor
from sftriage.trainer.interpreter import InterpreterTime
from sftriage.trainer.layout import RingFile, bounded_text
from sftriage.trainer.moments import NEVER, Form, Log

if TYPE_CHECKING:
    from sftriage.trainer.gradients import GradientWatch

IN_FLIGHT = 64
"""Steps whose events may be in flight: a host that runs further ahead of its GPU skips device times."""

MAX_MARKS = 1 << 14
"""Maximum boundaries of a step with device time: each holds an event of the driver's."""

READ_A_STEP = 4
"""Maximum steps read at the end of one step, so that no step pays for many."""

START_STEPS = 64
"""Steps in which CUDA may still be initialised, and the compiler imported."""

_NS_PER_MS = 1e6


class Recording:
    """Records one rank's steps as they happen. None of its methods raises into training.

    It drives, and closes, its ``hook``, which carries out captures at step boundaries, and, if set, ``answering``, the
    ``watch`` for the last gradient and the ``device`` time. ``step`` is the context manager of the next step,
    ``stages`` has those of the stages by name; once ``off``, it records nothing.
    """

    def __init__(
        self, ring: RingFile, hook: CaptureExecutor, answering: Answering | None = None, *, device_time: bool = True
    ) -> None:
        self.info = ring.info  # grows with stages that are declared later
        self.off = False
        self._ring = ring
        self._answering = answering
        self._hook = hook
        self.form = form = moments.FORM
        # (tests replace the clock; otherwise the form reads the machine's)
        clock = None if isinstance(monotonic_ns, BuiltinFunctionType) else monotonic_ns
        self.log = log = form.log(ring.descriptor, ring.log_words, self.info.started_mono_ns, self, clock)
        self.step = form.step(log)
        self.stages = {name: form.stage(log, number) for number, name in enumerate(self.info.schema.stages[:-1], 1)}
        self.stages[OTHER] = form.stage(log, layout.OTHER_STAGE)
        self._capturing = False
        self._rings_handled = NEVER  # the doorbell's count when the executor last handled it
        self._device_time = device_time
        self._misuse = 0
        # Steps that still check whether CUDA and the compiler are in use; later steps do not pay for that.
        self._start_steps_left, self._cuda_in_use = START_STEPS, False
        # The open stages, outermost first, followed only while listening.
        self._open: list[int] = []
        self._listening = False
        self._warned: set[str] = set()
        self.watch: GradientWatch | None = None
        self.device: Any = None
        self._driven: DeviceTime | None = None  # the same, if this recording drives it
        self._interpreter = InterpreterTime(log)
        _recordings.add(self)

    def begin(self, number: int | None) -> None:
        """Start a step on this thread; publish a step that is still open here as incomplete."""
        if self.off:
            return
        try:
            log = self.log
            if log.owner:
                if get_ident() != log.owner:
                    self.misused("a step was begun in one thread while another thread's step was open")
                    return
                self.misused("a step was begun while one was open; the open one is recorded as incomplete")
                self._end(layout.LEFT)
            number = log.number + 1 if number is None else self._checked(number)
            if log.doorbell != log.seen:
                self._consult(number)
            begun_ns = log.begin(number)
            if self._capturing:
                log.put(layout.CAPTURING, 1)
            if self._driven is not None:
                self._driven.begin(number, begun_ns)
        except Exception as error:
            self.fail(error)

    def end(self, incomplete: bool) -> None:
        """End the step of this thread and publish it. Without an open step here, count misuse."""
        if self.off:
            return
        try:
            if get_ident() != self.log.owner:
                self.misused("a step was ended that is not open in this thread")
            else:
                self._end(layout.LEFT if incomplete else layout.END)
        except Exception as error:
            self.fail(error)

    def note(self, kind: object, work: object) -> None:
        """Note kind and work of the step open in this thread; None leaves the earlier value."""
        if self.off:
            return
        try:
            if get_ident() != self.log.owner:
                self.misused("a kind or work was set outside a step, or in another thread than the step's")
                return
            words: tuple[tuple[int, int], ...] = ()
            if kind is not None:
                words = layout.kind_words(kind) if isinstance(kind, str) else ()
                if not words:
                    self.misused(f"a step's kind must be printable text of at most {layout.MAX_KIND_BYTES} bytes", kind)
            # Not operator.index(): it would accept a CUDA tensor, after a wait for the device.
            if isinstance(work, Integral) and 0 <= int(work) <= layout.MAX_VALUE:
                words = (*words, (layout.WORK, int(work)))
            elif work is not None:
                self.misused("a step's work must be a whole number from 0", work)
            for code, value in words:
                self.log.put(code, value)
            if words:
                self.log.note(layout.NOTED)
        except Exception as error:
            self.fail(error)

    def stray(self, code: int) -> None:
        """Count misuse: a stage outside a step, or in another thread than the step's."""
        if code & 1:
            self.misused("a stage was left that is not open in this thread's step")
        else:
            self.misused("a stage was entered outside a step, or in another thread than the step's")

    def device_failed(self, why: str) -> None:
        """Record no more device times; the host's times go on."""
        self.log.set_live(layout.ON_DEVICE, layout.UNTIMED)
        warn("no more device times: %s", why)

    def declare(self, stage: object, sync: bool) -> None:
        """Add a stage, the last before ``other``; a stage that exists stays unchanged."""
        if self.off or stage in self.stages:
            return
        try:
            if not isinstance(stage, str):
                raise SchemaError("a stage's name must be a string")
            schema = self.info.schema
            grown = StageSchema((*schema.stages[:-1], stage, OTHER), (*schema.sync, stage) if sync else schema.sync)
            self._ring.add(self.log, stage=stage, sync=sync)
            self.info = replace(self.info, schema=grown)
            self.stages[stage] = self.form.stage(self.log, len(grown.stages) - 1)
        except (SchemaError, RingError) as error:
            self.misused(f"cannot declare a stage: {error}", stage)
        except Exception as error:
            self.fail(error)

    def join(self, cohort: object) -> None:
        """Set the rank's cohort, for earlier steps too."""
        if self.off:
            return
        try:
            if not isinstance(cohort, str) or bounded_text(cohort) != cohort:
                self.misused("a cohort must be short printable text", cohort)
            elif cohort != self.info.cohort:
                self._ring.add(self.log, cohort=cohort)
                self.info = replace(self.info, cohort=cohort)
        except RingError as error:
            self.misused(f"cannot declare a cohort: {error}", cohort)
        except Exception as error:
            self.fail(error)

    def set_watch(self, watch: GradientWatch | None) -> None:
        self.watch = watch
        self._attend()

    def misused(self, problem: str, *example: object) -> None:
        """Count a wrong call, and warn of each problem once with its first ``example``."""
        if self.off:
            return
        self._misuse += 1
        with suppress(ValueError):  # (closed meanwhile, in another thread)
            self.log.set_live(layout.MISUSE, self._misuse)
        self.warn_once(problem, f"%s{': %r' * len(example)} (further ones are only counted)", problem, *example)

    def warn_once(self, problem: str, message: str = "%s", *arguments: object) -> None:
        """Warn of each problem once; without a message, the problem is the message."""
        if problem not in self._warned:
            self._warned.add(problem)
            warn(message, *(arguments or (problem,)))

    def fail(self, error: Exception) -> None:
        """Turn the recording off for good: training goes on whatever fails here."""
        if not self.off:
            warn("the recorder turned itself off: %r", error)
            self.close(wait=False)

    def close(self, wait: bool = True) -> None:
        """Stop recording; published steps stay readable. A second call does nothing.

        With ``wait``, training is over, and a capture may take its time to finish.
        """
        if self.off:
            return
        if os.getpid() != self.info.pid:
            # A finalizer in a forked child, perhaps before our own hook of that fork.
            self.abandon()
            return
        self.off = True
        self._interpreter.close()
        self.log.owner = 0
        try:
            # The hook first: it may still write a result while the ring is open.
            try:
                if self.watch is not None:
                    self.watch.close()
                if self.device is not None:
                    self.device.close(self.log)
                if self._answering is not None:
                    self._answering.close()
                self._hook.close(wait)
            finally:
                self.log.set_live(layout.CLOSED, 1)
                self.log.close()
                self._ring.close()
        except Exception as error:
            warn("the recorder could not close: %r", error)

    def abandon(self) -> None:
        """Become inert in a forked child, without touching the files, which are its parent's."""
        if self.off:
            return
        self.off = True
        self._interpreter.close()
        self._hook.abandon()
        if self._answering is not None:
            self._answering.abandon()
        self.log.close()
        self._ring.close()

    def _checked(self, number: int) -> int:
        try:
            if 0 <= operator.index(number) <= layout.MAX_VALUE:
                return operator.index(number)
        except TypeError:
            pass
        self.misused("a step's number must be a whole number from 0", number)
        return self.log.number + 1

    def _consult(self, number: int) -> None:
        # Read both before the hook checks: a later ring counts for the next step, and a busy hook takes no request.
        rings, busy = self.log.doorbell, self._hook.busy
        if rings != self._rings_handled:
            self._capturing = self._hook.before_step(number)
            self._rings_handled = NEVER if busy or self._hook.busy else rings
        if self._start_steps_left:
            self._start_steps_left -= 1
            if not self._cuda_in_use:
                self._time_device()
            if self._interpreter.follow_compiler() and self._cuda_in_use:
                self._start_steps_left = 0
        attentive = self._start_steps_left or self._driven is not None
        self.log.seen = NEVER if attentive else self._rings_handled
        self._attend()

    def _time_device(self) -> None:
        # (imports nothing, and calls no driver; another thread may be importing torch)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        self._cuda_in_use = getattr(cuda, "is_initialized", bool)()
        if self._cuda_in_use:
            self.log.set_live(layout.ON_DEVICE, layout.TIMED if self._device_time else layout.UNTIMED)
            if self._device_time:
                self.device = in_c(self.form)
                if self.device is None:
                    self.device = self._driven = DeviceTime(self.log, self.device_failed)

    def _attend(self) -> None:
        """Make the log call back at the end of each step and at each boundary, if needed."""
        listening = self._driven is not None or (self._capturing and self._hook.annotating)
        if listening and not self._listening:
            self._open.clear()
        self._listening = listening
        self.log.listener = self._follow if listening else None
        if self.device is not None and self._driven is None:
            self.device.listener = self.log.listener
            self.log.listener = self.device  # (the log in C passes its boundaries to it)
        self.log.ends_slowly = self._capturing or self._driven is not None or self.watch is not None

    def _follow(self, code: int) -> None:
        """Pass on the stages that are open now: one was entered or left."""
        try:
            at = code & ~1
            if at == code:
                self._open.append(at)
            elif at in self._open:
                while self._open.pop() != at:
                    pass
            if self._capturing and self._hook.annotating:
                self._hook.follow([self._name(entering) for entering in self._open])
            if self._driven is not None:
                self._driven.mark(self._open[-1] >> 1 if self._open else layout.OTHER_STAGE)
        except Exception as error:
            self.fail(error)

    def _name(self, entering: int) -> str:
        number = entering >> 1
        return OTHER if number == layout.OTHER_STAGE else self.info.schema.stages[number - 1]

    def _end(self, code: int) -> None:
        log, watch, driven = self.log, self.watch, self._driven
        ready = {} if watch is None else watch.collect(code == layout.LEFT)
        for ready_ns in ready.values():
            log.put(layout.READY, max(0, ready_ns - self.info.started_mono_ns))
        if self.device is not None:
            self.device.note(self._capturing, tuple(ready))
        if driven is not None:
            driven.end(code == layout.LEFT)
        log.end(code)
        self._open.clear()
        if watch is not None and watch.due:
            watch.settle()
        if driven is not None:
            driven.settle()
        if self._capturing:
            self._capturing = False
            self._hook.after_step()
            self._attend()


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

        Raises:
            Exception: as CUDA does; the step's own times go on.
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


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


def step_now() -> int:
    """The number of the open or last step of this process; -1 if it records none."""
    return max((recording.log.number for recording in _recordings if not recording.off), default=-1)


def step_owner() -> int:
    """The ident of the thread whose step is open; 0 if none is."""
    return next((owner for recording in list(_recordings) if (owner := recording.log.owner)), 0)


def _abandon_all() -> None:
    for recording in list(_recordings):
        recording.abandon()


# Data loader workers are forked from the trainer: their copy of the monitor must not write into its ring. A check of
# the pid at every step would be a system call.
os.register_at_fork(after_in_child=_abandon_all)
