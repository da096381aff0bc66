"""How many steps a capture may have: known of one recorded beforehand (`Probe`), or of the capture before.

As many as fit into its bytes, and leave a trace whose stop and export do not hold the rank up for too long.

A trace cannot be cut to size afterwards, and one that is too large costs the trainer its memory and the job its time
before anybody sees that. A step looks much like the next, and so does what it leaves in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest
from sftriage.profiling.session import STACK_OPTIONS, TorchSession
from sftriage.profiling.spool import create

PROBED_STEPS = 10
"""A capture of more steps than these has one recorded beforehand, unless it is known already what a step takes. With
options, which multiply what a step leaves, any capture of more than one step has."""

MAX_STALL_S = 2.0
"""How long the stop and the export of a capture may be expected to hold its rank up, and with it its group.

Torch reads every event that it recorded when it stops, and again when it writes the trace, and keeps the GIL for both:
20 to 60 us and 1.3 kB an operator. A longer capture is cut short to this.
"""

_ROOM_FRACTION = 0.9
"""Of the bytes allowed, what is planned with: no step is quite like another."""

_GROWTH = 1.5
"""A step in a larger trace holds the rank up for so much longer than in the one it was measured in.

Measured with 400 operators a step: 11 to 19 ms for one alone, 14 for one of ten, 23 of a hundred, 25 of two hundred.
"""

_BLANKS = 2
"""Traces without any step, made first: one pays for what only the first in a process costs, one is measured."""

Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class TraceCost:
    """What some steps took: bytes of their trace, and seconds that its stop and export held the rank up.

    ``fixed_s`` are those of a trace without any step, as far as they are known.
    """

    steps: int
    size_bytes: int
    stall_s: float
    fixed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How many steps a capture may have, and why not more; "" where it may have all that were requested."""

    steps: int
    why: str = ""


class StepSizes:
    """What a step takes, by the profiler's options; the last time counts."""

    def __init__(self) -> None:
        self._measured: dict[Options, TraceCost] = {}

    def note(self, options: Mapping[str, object], measured: TraceCost) -> None:
        """Some steps have been recorded with these options. What is fixed stays as it was measured."""
        before = self._measured.get(_key(options))
        if measured.steps > 0 and measured.size_bytes > 0:
            fixed_s = measured.fixed_s or (before.fixed_s if before else 0.0)
            self._measured[_key(options)] = replace(measured, fixed_s=fixed_s)

    def wants_probe(self, request: CaptureRequest) -> bool:
        """Whether a step has to be recorded before a capture, to know what it takes."""
        key = _key(request.options)
        return request.steps > (1 if key else PROBED_STEPS) and key not in self._measured

    def limit(self, request: CaptureRequest) -> StepLimit:
        """How many steps a capture may have.

        Raises:
            CaptureError: not even one fits into its bytes.
        """
        measured = self._measured.get(_key(request.options))
        if measured is None:
            return StepLimit(request.steps)
        step_bytes = measured.size_bytes / measured.steps
        if step_bytes > request.max_bytes:
            raise CaptureError(
                f"one step alone makes a trace of {step_bytes:.0f} bytes; {request.max_bytes} are allowed"
            )
        fit = max(1, int(_ROOM_FRACTION * request.max_bytes / step_bytes))
        limits = (
            StepLimit(request.steps),
            StepLimit(fit, f"more would not fit into {request.max_bytes} bytes"),
            StepLimit(_in_time(measured, request.steps), f"more would hold the rank up for over {MAX_STALL_S:g} s"),
        )
        return min(limits, key=lambda limit: limit.steps)


class Probe:
    """One step recorded before a capture and thrown away, to know what a step takes.

    ``session`` makes a session with the capture's options; the trace is in ``spool`` for a moment. ``took_s`` is what
    the training thread has spent on it so far.
    """

    def __init__(self, session: Callable[[], TorchSession], spool: Path, capture_id: str) -> None:
        self._make = session
        self._session: TorchSession | None = None
        self._spool = spool
        self._capture_id = capture_id
        self._fixed_s = 0.0
        self.took_s = 0.0

    def start(self, number: int) -> None:
        """Record from this step on."""
        began_s = monotonic()
        for _ in range(_BLANKS):
            blank = self._started(number)
            blank.stop()
            self._trace_bytes(blank)
            self._fixed_s = blank.stall_s
        self._started(number)
        self.took_s += monotonic() - began_s

    def finish(self) -> TraceCost:
        """Stop after the one step.

        Raises:
            CaptureError: nothing could be written.
        """
        began_s = monotonic()
        session = self._session
        assert session is not None, "a probe is started before it is finished"
        session.stop()
        size_bytes = self._trace_bytes(session)
        self.took_s += monotonic() - began_s
        return TraceCost(1, size_bytes, session.stall_s, self._fixed_s)

    def stop(self) -> None:
        """Stop the profiler, wherever it is."""
        if self._session is not None:
            self._session.stop()

    def _started(self, number: int) -> TorchSession:
        # Kept before anything is done with it: whatever fails, `stop` finds it.
        self._session = session = self._make()
        session.prepare()
        session.start(self._capture_id, number, {})
        return session

    def _trace_bytes(self, session: TorchSession) -> int:
        path = self._spool / f"{self._capture_id}.probe"
        create(path)
        try:
            session.export(str(path))
            size_bytes = path.stat().st_size
        finally:
            path.unlink(missing_ok=True)
        if not size_bytes:
            raise CaptureError("the trace was not written whole; the disk may be full")
        return size_bytes


def _in_time(measured: TraceCost, wanted: int) -> int:
    """As many of the wanted steps as are expected to hold the rank up for `MAX_STALL_S` at most; at least one."""
    step_s = (measured.stall_s - measured.fixed_s) / measured.steps
    if step_s <= 0.0:
        return wanted
    steps = (MAX_STALL_S - measured.fixed_s) / step_s
    if steps > measured.steps:
        steps = max(measured.steps, steps / _GROWTH)
    return max(1, min(wanted, int(steps)))


def _key(options: Mapping[str, object]) -> Options:
    return tuple(sorted((name, value) for name, value in options.items() if value and name not in STACK_OPTIONS))
