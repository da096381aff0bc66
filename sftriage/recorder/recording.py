"""The recorder's clockwork: which stage the training thread is in, and since when.

A recording is always in exactly one stage; outside the named ones it is in ``other``. Every switch adds what has passed
to the stage that is left, so that a step's stages sum to the step exactly, by construction. Stages may nest: time is
*self* time, the outer stage's clock stands while an inner one runs.

What a steady step costs is what this module does, so its hot paths (`contexts.Stage`, `Recording.begin` and
`Recording.end`) make no system call, allocate nothing that lasts, and test one word, ``gate``, for everything that is
not as usual: no step open, another thread, a forked child, a recorder that is closed, a capture that wants annotations.

The clock is ``time.monotonic_ns``: CLOCK_MONOTONIC on Linux (as ``perf_counter_ns`` is there), one for all processes of
a host, and read without a system call.
"""

from __future__ import annotations

import operator
import os
import weakref
from array import array
from numbers import Integral
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING
from zlib import crc32

from sftriage.errors import RingError
from sftriage.recorder.device import CUDA_START_STEPS, DeviceTime, cuda_in_use
from sftriage.recorder.layout import (
    BETWEEN,
    CAPTURING,
    DURATIONS,
    FLAGS,
    INCOMPLETE,
    KIND,
    KIND_REST,
    MAX_COUNT,
    MAX_KIND_BYTES,
    READY,
    SEQ,
    START,
    STEP,
    UNKNOWN,
    WORK,
    kind_words,
    outside_words,
    split_outside,
)
from sftriage.recorder.log import warn
from sftriage.recorder.profiling import CaptureExecutor
from sftriage.recorder.ring import (
    CURRENT_STAGE,
    CURRENT_STEP,
    MISUSE,
    NO_STAGE,
    ON_DEVICE,
    SINCE,
    SPECIAL_STEP,
    STEP_SINCE,
    RingWriter,
)

if TYPE_CHECKING:
    from sftriage.recorder.gradients import GradientWatch

_NEVER = -1
"""No doorbell rings so often: the executor is asked at the next step in any case."""

_CACHED_KINDS = 64
"""Encoded kinds that are remembered. A job has a handful; one that makes them up goes without."""


class Recording:
    """One rank's steps as they happen. What its methods raise, its context managers turn into `fail`.

    It drives, and closes, its ``hook``, which carries out captures at step boundaries, and, where they are set, its
    ``watch`` for the last gradient and its ``device``, which records device time.
    """

    __slots__ = (
        "__weakref__",
        "_blank",
        "_body",
        "_cuda_steps_left",
        "_doorbell",
        "_ended",
        "_flags",
        "_hook",
        "_kinds",
        "_ring",
        "_rings_handled",
        "_rings_seen",
        "_seen",
        "_slot",
        "_tail",
        "device",
        "gate",
        "info",
        "live",
        "off",
        "other",
        "outside",
        "owner",
        "since",
        "stack",
        "watch",
        "words",
    )

    def __init__(self, ring: RingWriter, hook: CaptureExecutor) -> None:
        self.info = ring.info
        self._ring = ring
        self._hook = hook
        self._doorbell = hook.doorbell
        self.live = ring.live
        self.words = array("q", bytes(ring.info.slot_bytes))
        self.words[STEP] = -1
        self.words[READY] = UNKNOWN
        self._slot = memoryview(self.words)
        self._body = self._slot[:-1]
        # All that a new step starts without: kind, work, ready moment, durations and outside times.
        self._tail = self._slot[KIND:-1]
        self._blank = array("q", self._tail)
        self.other = DURATIONS + len(ring.info.schema.stages) - 1
        self.outside = outside_words(ring.info.schema)
        # The words of the open stages, outermost first; the last one is running.
        self.stack = [self.other]
        self.since = 0
        self.gate = 0
        self.owner = 0
        self.off = False
        self._flags = 0
        self._ended = 0
        # Rings of the doorbell that the executor has handled; while `_rings_seen` is not the doorbell, `begin` asks it.
        self._rings_handled = self._rings_seen = _NEVER
        # Steps at whose beginning it is still to be seen whether CUDA is in use; no later step pays for the question.
        self._cuda_steps_left = CUDA_START_STEPS
        self._seen: set[str] = set()
        self._kinds: dict[str, tuple[int, int]] = {}
        self.watch: GradientWatch | None = None
        self.device: DeviceTime | None = None
        _recordings.add(self)

    def begin(self, number: int | None) -> None:
        """Start a step on this thread; one that is still open here is published as incomplete."""
        if self.off:
            return
        me = get_ident()
        if self.owner:
            if me != self.owner:
                self.misused("a step was begun in one thread while another thread's step was open")
                return
            self.misused("a step was begun while one was open; the open one is recorded as incomplete")
            self._publish(INCOMPLETE)
        words = self.words
        number = words[STEP] + 1 if number is None else self._checked(number)
        if self._doorbell[0] != self._rings_seen:
            self._consult(number)
        now = monotonic_ns()
        words[STEP] = number
        words[START] = now
        words[BETWEEN] = now - self._ended if self._ended else 0
        self.since = now
        live = self.live
        live[CURRENT_STEP] = number
        live[STEP_SINCE] = now
        live[SINCE] = now
        live[CURRENT_STAGE] = self.other - DURATIONS
        self.owner = me
        self.gate = 0 if self._flags and self._hook.annotating else me
        if self.device is not None:
            self.device.begin(number, now)

    def end(self, incomplete: bool) -> None:
        """End the step of this thread and publish it. Without one open here: ignored, and counted as misuse."""
        if self.off:
            return
        if get_ident() != self.owner:
            self.misused("a step was ended that is not open in this thread")
            return
        self._publish(INCOMPLETE if incomplete else 0)

    def note(self, kind: object, work: object) -> None:
        """Say of the step open in this thread what sort it is, and how much; None leaves what was said before."""
        if self.off:
            return
        if get_ident() != self.owner:
            self.misused("a kind or work was given outside a step, or in another thread than the step's")
            return
        words = self.words
        if kind is not None:
            try:
                words[KIND], words[KIND_REST] = self._encoded(kind)
                self.live[SPECIAL_STEP] = words[STEP] if words[KIND] else -1
            except (TypeError, RingError):
                self.misused(f"a step's kind has to be printable text of at most {MAX_KIND_BYTES} bytes", kind)
        if work is not None:
            # Not by operator.index(): a CUDA tensor would answer, after a wait for the device.
            if isinstance(work, Integral) and 0 <= int(work) < MAX_COUNT:
                words[WORK] = int(work)
            else:
                self.misused("a step's work has to be a whole number from 0 on", work)

    def enter_slowly(self, at: int) -> None:
        """`Stage.__enter__` where the gate is shut.

        Outside a step, or in another thread than the step's, a stage is ignored and counted as misuse: outside a step
        its time is part of the next step's ``between_ns``.
        """
        if self.off:
            return
        if get_ident() != self.owner:
            self.misused("a stage was entered outside a step, or in another thread than the step's")
            return
        self._charge()
        self.stack.append(at)
        self._switched()

    def leave_slowly(self, at: int) -> None:
        """`Stage.__exit__` where the gate is shut or another stage is running.

        A stage that is not open is ignored and counted as misuse. One that is open further out closes the stages that
        were entered after it too, and that counts as misuse as well.
        """
        if self.off:
            return
        if get_ident() != self.owner or at not in self.stack[1:]:
            self.misused("a stage was left that is not open in this thread's step")
            return
        if self.stack[-1] != at:
            self.misused("a stage was left before the stages entered after it")
        self._charge()
        left = 0
        while left != at:
            left = self.stack.pop()
            if left in self.outside and left not in self.stack:
                self.words[self.outside[left]] = self.words[self.other]
        self._switched()

    def misused(self, what: str, example: object = None) -> None:
        """Count a call that makes no sense, and warn of each sort once, showing the first ``example`` of it."""
        if self.off:
            return
        self.live[MISUSE] += 1
        if example is None:
            self.say_once(what, "%s (more of this sort is only counted)", what)
        else:
            self.say_once(what, "%s: %r (more of this sort is only counted)", what, example)

    def say_once(self, what: str, message: str = "%s", *arguments: object) -> None:
        """Warn of each ``what`` once, in its own words where there is no message."""
        if what not in self._seen:
            self._seen.add(what)
            warn(message, *(arguments or (what,)))

    def fail(self, error: Exception) -> None:
        """Turn the recording off for good: whatever is wrong here, training goes on."""
        if not self.off:
            warn("the recorder has turned itself off: %r", error)
            self.close(wait=False)

    def close(self, wait: bool = True) -> None:
        """Stop recording; what was published stays readable. A second call does nothing.

        With ``wait``, training is over, so that a capture may take its time to be finished.
        """
        if self.off:
            return
        self.off = True
        self.gate = self.owner = 0
        try:
            # The hook first: as long as the ring is open, whoever waits for a result knows that one may come.
            try:
                if self.watch is not None:
                    self.watch.close()
                if self.device is not None:
                    self.device.close()
                self._hook.close(wait)
            finally:
                self._ring.close()
        except Exception as error:
            warn("the recorder could not close: %r", error)

    def abandon(self) -> None:
        """Become inert without touching the files: this is a forked child, and they are its parent's."""
        if self.off:
            return
        self.off = True
        self.gate = self.owner = 0
        self._hook.abandon()
        if self.device is not None:
            self.device.abandon()
        self._ring.abandon()

    def _checked(self, number: int) -> int:
        """A step number as given, or the next one if it is no such thing."""
        try:
            if 0 <= operator.index(number) < MAX_COUNT:
                return operator.index(number)
        except TypeError:
            pass
        self.misused("a step's number has to be a whole number from 0 on", number)
        return self.words[STEP] + 1

    def _encoded(self, kind: object) -> tuple[int, int]:
        """`kind_words`, remembered. Raises TypeError for what is no text."""
        if not isinstance(kind, str):
            raise TypeError
        found = self._kinds.get(kind)
        if found is None:
            found = kind_words(kind)
            if len(self._kinds) < _CACHED_KINDS:
                self._kinds[kind] = found
        return found

    def _consult(self, number: int) -> None:
        # Both before the hook looks: what rings meanwhile is seen at the next step, and a hook that was busy
        # did not listen, though it may be done by now.
        rings, busy = self._doorbell[0], self._hook.busy
        if rings != self._rings_handled:
            self._flags = CAPTURING if self._hook.before_step(number) else 0
            self._rings_handled = _NEVER if busy or self._hook.busy else rings
        if self._cuda_steps_left:
            used = cuda_in_use()
            self.live[ON_DEVICE] = int(used)
            self._cuda_steps_left = 0 if used else self._cuda_steps_left - 1
        self._rings_seen = _NEVER if self._cuda_steps_left else self._rings_handled

    def _charge(self) -> None:
        now = monotonic_ns()
        self.words[self.stack[-1]] += now - self.since
        self.since = now

    def _switched(self) -> None:
        self.live[SINCE] = self.since
        self.live[CURRENT_STAGE] = self.stack[-1] - DURATIONS
        if self._hook.annotating:
            self._hook.follow([self.info.schema.stages[at - DURATIONS] for at in self.stack[1:]])

    def _publish(self, incomplete: int) -> None:
        now = monotonic_ns()
        words = self.words
        words[self.stack[-1]] += now - self.since
        self.gate = self.owner = 0
        self._ended = now
        device = self.device
        if device is not None:
            device.end(words[SEQ], self._flags > 0, incomplete > 0)
        if len(self.stack) > 1:
            del self.stack[1:]
        if len(self.outside) > 1:
            split_outside(words, self.outside)
        watch = self.watch
        if watch is not None:
            words[READY] = watch.collect(incomplete > 0)
        words[FLAGS] = self._flags | incomplete
        words[SEQ] += 1
        words[-1] = crc32(self._body)
        self._ring.publish(words)
        live = self.live
        live[SINCE] = now
        live[CURRENT_STAGE] = NO_STAGE
        self._tail[:] = self._blank
        if watch is not None and watch.due:
            watch.settle()
        if device is not None:
            device.settle()
        if self._flags:
            self._flags = 0
            if self._hook.stepping:
                self._hook.after_step()


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


def _abandon_all() -> None:
    for recording in list(_recordings):
        recording.abandon()


# Data loader workers are forked from the trainer: their copy of the monitor must not write into its ring. Asking for
# the pid at every step would do too, but that is a system call.
os.register_at_fork(after_in_child=_abandon_all)
