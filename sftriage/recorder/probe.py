"""One step recorded before a capture and thrown away, to know what a step takes (`sizing`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from sftriage.errors import CaptureError
from sftriage.recorder.session import TorchSession
from sftriage.recorder.sizing import Measured

_BLANKS = 2
"""Traces without any step, made first: one pays for what only the first in a process costs, one is measured."""


class Probe:
    """A step's own short session of the profiler. Every call is made on the training thread.

    Args:
        session: makes a session, with the capture's options.
        spool: the directory in which its trace is written for a moment.
        capture_id: the capture it is made for.

    Attributes:
        took_s: seconds that the training thread spent on it so far.
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
            self._fixed_s = blank.held_up_s
        self._started(number)
        self.took_s += monotonic() - began_s

    def finish(self) -> Measured:
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
        return Measured(1, size_bytes, session.held_up_s, self._fixed_s)

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
        """The size of a trace, which is written and removed again."""
        path = self._spool / f"{self._capture_id}.probe"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            session.export(str(path))
            size_bytes = path.stat().st_size
        except OSError as error:
            raise CaptureError(f"the spool directory {self._spool} cannot be written: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)
        if not size_bytes:
            raise CaptureError("the trace was not written whole; the disk may be full")
        return size_bytes
