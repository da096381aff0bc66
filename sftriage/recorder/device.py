"""Device time: how long the GPU was at each stage of a step, beside the host's time, which on CUDA sees only launches.

At each stage boundary an event is put into the stream; the GPU notes the time when it gets there. Some steps later,
when the last event of a step has been reached, the differences are read and published. Nothing here ever waits for the
device: an event is asked whether it is there (``query``), and a step that nobody came round to in time goes without.

The vectors go into a ring of their own, ``rank-<rank>.<attempt>.device``: of the ring's layout (see `layout`), with its
own magic and its own sequence numbers. The job's step number is what ties a vector to the host's: a step whose device
time is not known is not in it. There, ``durations_ns`` and ``outside_ns`` are times on the stream, ``between_ns`` is
what passed on it since the last step's end (0 where that is not known), ``start_ns`` is the host's start of the step.

What is seen is the stream that is current when the step begins, and what other streams make it wait for: NCCL's, where
DDP's own stream has to wait for the last bucket.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any
from zlib import crc32

from sftriage.errors import RingError
from sftriage.recorder.layout import (
    BETWEEN,
    CAPTURING,
    DURATIONS,
    FLAGS,
    READY,
    SEQ,
    START,
    STEP,
    UNKNOWN,
    RingInfo,
    outside_words,
    split_outside,
)
from sftriage.recorder.log import warn
from sftriage.recorder.ring import RingWriter

IN_FLIGHT = 16
"""Steps whose events may be on their way: a host that runs further ahead of its GPU leaves steps out."""

MARKS = 32
"""Boundaries in a step at first; doubled when a step has more (gradient accumulation), up to `MAX_MARKS`."""

MAX_MARKS = 512

READ_A_STEP = 4
"""Steps that are read at the end of one, so that no step pays for many."""

CUDA_START_STEPS = 64
"""Steps in which CUDA may still be initialised."""

_END = -1
_NS_PER_MS = 1e6


def cuda_in_use() -> bool:
    """Whether the trainer has initialised CUDA. Nothing is imported, and the driver is not asked."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # (torch may be half imported, in another thread)
    asked = getattr(cuda, "is_initialized", None)
    return asked is not None and bool(asked())


class _StepEvents:
    """The events of one step, used again and again. ``stages[i]`` is the word of the stage that runs from mark i on."""

    __slots__ = ("count", "events", "flags", "seq", "stages", "start_ns", "step")

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.stages = array("q")
        self.count = self.seq = self.step = self.start_ns = self.flags = 0

    def grow(self, cuda: Any, marks: int, stream: Any) -> None:
        """Have room for so many marks. The driver makes an event when it is first recorded: here, not in a step."""
        while len(self.events) < marks:
            event = cuda.Event(enable_timing=True)
            event.record(stream)
            self.events.append(event)
            self.stages.append(_END)


class DeviceTime:
    """Records device time for one recording, from when CUDA is in use. None of its methods raises.

    Its ring, of so many slots, lies in the directory of the host's.
    """

    def __init__(self, info: RingInfo, directory: Path, slots: int) -> None:
        self._info, self._directory, self._slots = info, directory, slots
        self._other = DURATIONS + len(info.schema.stages) - 1
        self._outside = outside_words(info.schema)
        self._words = array("q", bytes(info.slot_bytes))
        self._words[READY] = UNKNOWN
        self._slot = memoryview(self._words)
        self._blank = array("q", self._slot[DURATIONS:-1])
        self._cuda_steps_left = CUDA_START_STEPS
        # ``torch.cuda``, once the trainer has initialised it.
        self._cuda: Any = None
        self._ring: RingWriter | None = None
        self._steps: list[_StepEvents] = []
        self._marks = 0
        # Of the steps that have ended: how many, and how many of those have been read.
        self._ended = self._read = 0
        self._open: _StepEvents | None = None
        self._stream: Any = None
        self._short = False
        self.off = False

    def begin(self, number: int, now_ns: int) -> None:
        """A step begins on this thread."""
        if self.off:
            return
        try:
            if self._cuda is None and not self._start():
                return
            cuda = self._cuda
            # One fewer than there are: the time between two steps is read from the end of the one before.
            if cuda is None or self._ended - self._read >= len(self._steps) - 1:
                return
            self._stream = cuda.current_stream()
            opened = self._steps[self._ended % len(self._steps)]
            opened.count, opened.step, opened.start_ns = 0, number, now_ns
            self._open = opened
            self.mark(self._other)
        except Exception as error:
            self._fail(error)

    def mark(self, at: int) -> None:
        """From here on the step is in the stage of this word."""
        opened = self._open
        if opened is None:
            return
        try:
            # A captured event has no time, and asking for it would spoil the graph.
            if self._cuda is None or self._cuda.is_current_stream_capturing():
                self._open = None
                return
            count = opened.count
            if count >= self._marks:
                self._open, self._short = None, True
                return
            opened.events[count].record(self._stream)
            opened.stages[count] = at
            opened.count = count + 1
        except Exception as error:
            self._fail(error)

    def end(self, seq: int, capturing: bool, incomplete: bool) -> None:
        """The step ends; ``seq`` counts the host's steps."""
        self.mark(_END)
        opened, self._open = self._open, None
        if opened is not None and not incomplete:
            opened.seq, opened.flags = seq, CAPTURING if capturing else 0
            self._ended += 1

    def settle(self) -> None:
        """Between two steps: publish those that the device is through with."""
        if self.off or self._ring is None:
            return
        try:
            for _ in range(READ_A_STEP):
                if not self._publish_next():
                    break
            if self._short:
                self._short = False
                self._grow()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Publish what the device is through with by now, and say good-bye. A second call does nothing."""
        if self.off:
            return
        self.off, self._open = True, None
        try:
            while self._ring is not None and self._publish_next():
                pass
        except Exception as error:
            warn("the last steps' device times are not known: %r", error)
        self._close_ring()

    def abandon(self) -> None:
        """Become inert in a forked child: the ring and the device are its parent's."""
        if not self.off:
            self.off, self._open = True, None
            if self._ring is not None:
                self._ring.abandon()

    def _start(self) -> bool:
        """Begin to record, if CUDA is in use by now: the one moment at which anything is allocated."""
        if not cuda_in_use():
            self._cuda_steps_left -= 1
            if not self._cuda_steps_left:
                self.off = True
                warn("no device time: CUDA is not in use after %d steps", CUDA_START_STEPS)
            return False
        cuda = sys.modules["torch"].cuda
        if cuda.is_current_stream_capturing():
            return False
        # The rank and attempt are this process's already: what is there under that name was left by a dead one.
        self._ring = RingWriter(self._directory, self._info, self._slots, kind="device")
        self._cuda, self._stream = cuda, cuda.current_stream()
        self._steps = [_StepEvents() for _ in range(IN_FLIGHT)]
        self._grow()
        return True

    def _grow(self) -> None:
        """Room for more marks a step; steps under way keep theirs."""
        cuda = self._cuda
        marks = min(max(MARKS, 2 * self._marks), MAX_MARKS)
        if cuda is None or cuda.is_current_stream_capturing():
            return
        if marks == self._marks:
            raise RingError(f"a step went from stage to stage more than {MAX_MARKS} times")
        for one in self._steps:
            one.grow(cuda, marks, self._stream)
        self._marks = marks

    def _publish_next(self) -> bool:
        """Publish the oldest step, if the device is through with it."""
        if self._read == self._ended or self._ring is None:
            return False
        step = self._steps[self._read % len(self._steps)]
        # The events of a step are of one stream, and reached in their order.
        if not step.events[step.count - 1].query():
            return False
        self._fill(step)
        self._read += 1
        words = self._words
        words[SEQ] += 1
        words[-1] = crc32(self._slot[:-1])
        self._ring.publish(words)
        return True

    def _fill(self, step: _StepEvents) -> None:
        words, events, stages = self._words, step.events, step.stages
        self._slot[DURATIONS:-1] = self._blank
        words[STEP], words[START], words[FLAGS] = step.step, step.start_ns, step.flags
        words[BETWEEN] = self._between(step)
        first, passed_ns = events[0], 0
        for mark in range(1, step.count):
            # Each from the first event, so that the parts sum to the whole whatever a difference is rounded to.
            at_ns = max(passed_ns, round(first.elapsed_time(events[mark]) * _NS_PER_MS))
            stage = stages[mark - 1]
            words[stage] += at_ns - passed_ns
            passed_ns = at_ns
            if stage in self._outside and stages[mark] != stage:
                words[self._outside[stage]] = words[self._other]
        if len(self._outside) > 1:
            split_outside(words, self._outside)

    def _between(self, step: _StepEvents) -> int:
        """What passed on the stream since the end of the step before, or 0 if that one was not recorded."""
        before = self._steps[(self._read - 1) % len(self._steps)]
        if not self._read or before.seq + 1 != step.seq:
            return 0
        passed_ms: float = before.events[before.count - 1].elapsed_time(step.events[0])
        return max(0, round(passed_ms * _NS_PER_MS))

    def _fail(self, error: Exception) -> None:
        """Go without device time from now on: the host's times go on."""
        self.off, self._open = True, None
        warn("no device time any more: %r", error)
        self._close_ring()

    def _close_ring(self) -> None:
        try:
            if self._ring is not None:
                self._ring.close()
        except Exception as error:
            warn("the ring of device times could not be closed: %r", error)
