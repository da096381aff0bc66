"""One rank's recording: handles everything unusual at a boundary, and the work between two steps.

In a steady step the log alone writes (see `moments`): no system call, no lasting allocation. The log calls this module
when the doorbell has rung, during a capture, if the last gradient is watched, for device time that it does not record
itself, and for misuse, such as a step within a step or in another thread.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import weakref
from collections.abc import Mapping
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
from sftriage.trainer.device import DeviceTime, in_c
from sftriage.trainer.executor import Answering, CaptureExecutor
from sftriage.trainer.layout import RingFile, bounded_text
from sftriage.trainer.moments import NEVER, Log

if TYPE_CHECKING:
    from sftriage.trainer.gradients import GradientWatch

START_STEPS = 64
"""Steps in which CUDA may still be initialised, and the compiler imported."""


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


_COMPILER = "torch._dynamo.callback"


class InterpreterTime:
    """The time that Python's garbage collector and torch's compiler take from training, as totals in the ring.

    Both call back when they begin and end, so this costs nothing while neither works. The agent reads the totals with
    the kernel's counters (`sftriage.agent.counting`).
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._total_ns = {layout.COLLECTED: 0, layout.COMPILED: 0}
        self._began_ns = {layout.COLLECTED: 0, layout.COMPILED: 0}
        self._compiler: Any = None
        gc.callbacks.append(self._collects)

    def follow_compiler(self) -> bool:
        """Follow the compiler too, if the job has imported it; whether it is followed now."""
        if self._compiler is None:
            # (an import may be under way in another thread)
            handler = getattr(sys.modules.get(_COMPILER), "callback_handler", None)
            if handler is not None:
                handler.register_start_callback(self._compilation_begins)
                handler.register_end_callback(self._compilation_ends)
                self._compiler = handler
        return self._compiler is not None

    def close(self) -> None:
        """Stop counting. A second call does nothing."""
        with suppress(ValueError):
            gc.callbacks.remove(self._collects)
        if self._compiler is not None:
            # (torch._dynamo.reset() has removed them)
            with suppress(ValueError):
                self._compiler.remove_start_callback(self._compilation_begins)
                self._compiler.remove_end_callback(self._compilation_ends)

    def _collects(self, phase: str, info: Mapping[str, int]) -> None:
        # (collections of the youngest objects are frequent, and take hardly longer than counting them would)
        if info["generation"]:
            self._switch(layout.COLLECTED, phase == "start")

    def _compilation_begins(self, *_: object) -> None:
        self._switch(layout.COMPILED, True)

    def _compilation_ends(self, *_: object) -> None:
        self._switch(layout.COMPILED, False)

    def _switch(self, word: int, begins: bool) -> None:
        if begins:
            self._began_ns[word] = monotonic_ns()
        elif self._began_ns[word]:
            self._total_ns[word] += monotonic_ns() - self._began_ns[word]
            self._began_ns[word] = 0
            with suppress(ValueError):  # (the log was closed meanwhile)
                self._log.set_live(word, self._total_ns[word])


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
