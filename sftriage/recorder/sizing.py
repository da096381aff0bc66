"""How many steps of a trace fit into the bytes it may have: known of one step that is recorded beforehand.

A trace cannot be cut to size afterwards, and one that is too large costs the trainer its memory and the job its time
before anybody sees that. A step looks much like the next, and so does what it leaves in a trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sftriage.errors import CaptureError
from sftriage.records import CaptureRequest

PROBED_STEPS = 10
"""A capture of more steps than these has one recorded beforehand, unless it is known already what a step takes."""

_ROOM_FRACTION = 0.9
"""Of the bytes allowed, what is planned with: no step is quite like another."""

Options = tuple[tuple[str, object], ...]


class StepSizes:
    """What a step takes in a trace, in bytes, by the profiler's options; the last time counts."""

    def __init__(self) -> None:
        self._bytes: dict[Options, float] = {}

    def note(self, options: Mapping[str, object], size_bytes: int, steps: int) -> None:
        """A trace of so many steps has so many bytes."""
        if steps > 0 and size_bytes > 0:
            self._bytes[_key(options)] = size_bytes / steps

    def wants_probe(self, request: CaptureRequest) -> bool:
        """Whether a step has to be recorded before a capture, to know what it takes."""
        return request.steps > PROBED_STEPS and _key(request.options) not in self._bytes

    def fitting(self, request: CaptureRequest) -> int:
        """How many steps a capture may have.

        Raises:
            CaptureError: not even one fits.
        """
        step_bytes = self._bytes.get(_key(request.options))
        if step_bytes is None:
            return request.steps
        if step_bytes > request.max_bytes:
            raise CaptureError(
                f"one step alone makes a trace of {step_bytes:.0f} bytes; {request.max_bytes} are allowed"
            )
        return min(request.steps, max(1, int(_ROOM_FRACTION * request.max_bytes / step_bytes)))


def probed_bytes(export: Callable[[str], object], spool: Path, capture_id: str) -> int:
    """The size of a trace, which is written and removed again.

    Raises:
        CaptureError: nothing could be written.
    """
    path = spool / f"{capture_id}.probe"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        export(str(path))
        size_bytes = path.stat().st_size
    except OSError as error:
        raise CaptureError(f"the spool directory {spool} cannot be written: {error.strerror}") from error
    finally:
        path.unlink(missing_ok=True)
    if not size_bytes:
        raise CaptureError("the trace was not written whole; the disk may be full")
    return size_bytes


def _key(options: Mapping[str, object]) -> Options:
    return tuple(sorted((name, value) for name, value in options.items() if value))
