"""Device time: how long the GPU was at each stage of a step, beside the host's time, which on CUDA sees only launches.

At each stage boundary an event is put into the stream; the GPU notes the time when it gets there. Some steps later,
when the last event of a step has been reached, the differences are read and put into the log, between two steps.
Nothing here ever waits for the device: an event is asked whether it is there (``query``), and a step that nobody came
round to in time goes without. What it writes carries the job's number of the step, which ties it to the host's.

What is seen is the stream that is current when the step begins, and what other streams make it wait for: NCCL's, where
DDP's own stream has to wait for the last bucket. The moment of the last gradient, where that is watched, is an event in
the stream that the gradient is computed in.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

from sftriage.recorder import layout
from sftriage.recorder.log import warn
from sftriage.recorder.moments import Log

IN_FLIGHT = 16
"""Steps whose events may be on their way: a host that runs further ahead of its GPU leaves steps out."""

MARKS = 32
"""Boundaries in a step at first; doubled when a step has more (gradient accumulation)."""

MAX_MARKS = 1 << 14
"""Boundaries of a step beyond which its device time is not recorded: each holds an event of the driver's."""

READ_A_STEP = 4
"""Steps that are read at the end of one, so that no step pays for many."""

CUDA_START_STEPS = 64
"""Steps in which CUDA may still be initialised."""

_NS_PER_MS = 1e6


def cuda_in_use() -> bool:
    """Whether the trainer has initialised CUDA. Nothing is imported, and the driver is not asked."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # (torch may be half imported, in another thread)
    asked = getattr(cuda, "is_initialized", None)
    return asked is not None and bool(asked())


class _StepEvents:
    """The events of one step, used again and again. ``stages[i]`` is the number of the stage that runs from mark i on.

    ``seq`` counts the steps of the log, whether their device times are known or not. ``ready`` has for each visit to
    the split sync stage the event of its newest gradient, and ``visits`` those of which that is known to be the last.
    """

    __slots__ = ("capturing", "count", "events", "number", "ready", "seq", "spare", "stages", "start_ns", "visits")

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.stages = array("q")
        self.ready: dict[int, Any] = {}
        self.spare: list[Any] = []
        self.visits: tuple[int, ...] = ()
        self.count = self.seq = self.number = self.start_ns = 0
        self.capturing = False

    def reuse(self, number: int, seq: int, start_ns: int) -> None:
        """Be the events of another step."""
        self.count, self.number, self.seq, self.start_ns = 0, number, seq, start_ns
        if self.ready:
            self.spare.extend(self.ready.values())
            self.ready, self.visits = {}, ()

    def reached(self) -> bool:
        """Whether the device is through with the step: those of one stream are reached in their order."""
        return bool(self.events[self.count - 1].query()) and all(self.ready[visit].query() for visit in self.visits)

    def grow(self, cuda: Any, marks: int, stream: Any) -> None:
        """Have room for so many marks. The driver makes an event when it is first recorded: here, not in a step."""
        while len(self.events) < marks:
            event = cuda.Event(enable_timing=True)
            event.record(stream)
            self.events.append(event)
            self.stages.append(layout.OTHER_STAGE)


class DeviceTime:
    """Records device time for one log, from when CUDA is in use. None of its methods raises."""

    def __init__(self, log: Log) -> None:
        self._log = log
        # ``torch.cuda``, once the trainer has initialised it.
        self._cuda: Any = None
        self._steps: list[_StepEvents] = []
        self._marks = 0
        # Of the steps that have ended: how many, and how many of those have been read.
        self._ended = self._read = 0
        self._open: _StepEvents | None = None
        self._stream: Any = None
        self._short = False
        self._watches = True
        self.off = False

    def begin(self, number: int, start_ns: int) -> None:
        """A step begins on this thread; ``start_ns`` is since the log began."""
        if self.off:
            return
        try:
            cuda = self._cuda
            if cuda is None:
                cuda = self._start()
            # One fewer than there are: the time between two steps is read from the end of the one before.
            if cuda is None or self._ended - self._read >= len(self._steps) - 1:
                return
            self._stream = cuda.current_stream()
            opened = self._steps[self._ended % len(self._steps)]
            opened.reuse(number, self._log.published + 1, start_ns)
            self._open = opened
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
                return
            count = opened.count
            if count >= self._marks:
                self._open, self._short = None, True
                return
            opened.events[count].record(self._stream)
            opened.stages[count] = stage
            opened.count = count + 1
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
            event = opened.spare.pop() if opened.spare else self._cuda.Event(enable_timing=True)
            opened.ready[visit] = event
        event.record(self._cuda.current_stream())

    def end(self, capturing: bool, incomplete: bool) -> _StepEvents | None:
        """The step ends. Its events, if its times will be known."""
        self.mark(layout.OTHER_STAGE)
        opened, self._open = self._open, None
        if opened is None or incomplete:
            return None
        opened.capturing = capturing
        self._ended += 1
        return opened

    def settle(self) -> None:
        """Between two steps: write down those that the device is through with."""
        if self.off or self._cuda is None:
            return
        try:
            for _ in range(READ_A_STEP):
                if not self._write_next():
                    break
            if self._short:
                self._short = False
                self._grow()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Write down what the device is through with by now. A second call does nothing."""
        if self.off:
            return
        self.off, self._open = True, None
        try:
            while self._write_next():
                pass
        except Exception as error:
            warn("the last steps' device times are not known: %r", error)

    def _start(self) -> Any:
        """Begin to record: the one moment at which anything is allocated. None as long as a graph is captured."""
        cuda = sys.modules["torch"].cuda
        if cuda.is_current_stream_capturing():
            return None
        self._cuda, self._stream = cuda, cuda.current_stream()
        self._steps = [_StepEvents() for _ in range(IN_FLIGHT)]
        self._grow()
        return cuda

    def _grow(self) -> None:
        """Room for more marks a step; steps under way keep theirs."""
        marks = max(MARKS, 2 * self._marks)
        if self._cuda.is_current_stream_capturing():
            return
        if marks > MAX_MARKS:
            self._fail(ValueError(f"a step went from stage to stage more than {self._marks} times"))
            return
        for one in self._steps:
            one.grow(self._cuda, marks, self._stream)
        self._marks = marks

    def _write_next(self) -> bool:
        """Write down the oldest step, if the device is through with it."""
        if self._read == self._ended:
            return False
        step = self._steps[self._read % len(self._steps)]
        if not step.reached():
            return False
        put, events = self._log.put, step.events
        between_ns, ready_ns = self._between_ns(step), self._ready_ns(step)
        # Each from the first event, so that the parts sum to the whole whatever a difference is rounded to.
        first, passed_ns = events[0], 0
        put(layout.DEVICE_STEP, step.seq)
        put(layout.DEVICE_NUMBER, step.number)
        put(layout.DEVICE_START, step.start_ns)
        put(layout.DEVICE_FLAGS, int(step.capturing))
        put(layout.DEVICE_BETWEEN, between_ns)
        for after_ns in ready_ns:
            put(layout.DEVICE_READY, after_ns)
        for mark in range(step.count):
            if mark:
                passed_ns = max(passed_ns, round(first.elapsed_time(events[mark]) * _NS_PER_MS))
            last = mark == step.count - 1
            put(layout.DEVICE_END if last else layout.ON_STREAM + step.stages[mark], passed_ns)
        self._read += 1
        return True

    def _ready_ns(self, step: _StepEvents) -> list[int]:
        """When the device had the last gradient of each visit, since the step began."""
        try:
            passed_ms = [step.events[0].elapsed_time(step.ready[visit]) for visit in step.visits]
        except Exception as error:
            # Of a model that is spread over several devices: their clocks are not one.
            self._watches = False
            warn("the last gradient's moment is not known on the device: %r", error)
            return []
        return [max(0, round(one * _NS_PER_MS)) for one in passed_ms]

    def _between_ns(self, step: _StepEvents) -> int:
        """What passed on the stream since the end of the step before, or 0 if that one was not recorded."""
        before = self._steps[(self._read - 1) % len(self._steps)]
        if not self._read or before.seq + 1 != step.seq:
            return 0
        passed_ms: float = before.events[before.count - 1].elapsed_time(step.events[0])
        return max(0, round(passed_ms * _NS_PER_MS))

    def _fail(self, error: Exception) -> None:
        """Go without device time from now on: the host's times go on."""
        self.off, self._open = True, None
        self._log.set_live(layout.ON_DEVICE, layout.UNTIMED)
        warn("no device time any more: %r", error)
