"""Captures from outside that an agent began which is no more: ended, and nothing of them is kept."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from sftriage.capture.executor import Course, InTurns
from sftriage.capture.nsys import NsysCapture
from sftriage.capture.nsys_dialect import session_of
from sftriage.decisions import CaptureRequest
from sftriage.errors import CaptureError, RingError

ENDED = "sftriage ended during it"
"""How the reason of such a capture begins."""


class AbandonedStacks(InTurns):
    """Stacks that were being taken: the program that takes them ends by itself, and writes nothing."""

    needs_trainer = False

    def __init__(self, request: CaptureRequest, spool: Path) -> None:
        super().__init__(request)
        self._spool = spool

    def close(self) -> None:
        """Remove what is left."""
        for leftover in self._spool.glob(f"*{self.request.capture_id}.*"):
            leftover.unlink(missing_ok=True)

    def _course(self) -> Course:
        yield
        raise CaptureError(f"{ENDED}: stacks are taken from outside")


class AbandonedNsys(NsysCapture):
    """nsys is stopped where it still collects, its programs are ended, and the trainer is told that nobody waits."""

    needs_trainer = False

    def _course(self) -> Course:
        report_comes = self._report_comes()
        with contextlib.suppress(RingError, OSError):
            self._mailbox.cancel(self.request.capture_id)
        for pid in _working_on(self._made):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._place.armed is not None:
            if report_comes:
                # The trainer closes its range now. What comes of it must not pass for the next capture's report.
                yield from self._report_of(self._place.armed)
            self._drop_reports(self._place.armed)
        elif self._note.exists():
            sessions = yield from self._sessions()
            try:
                session = session_of(sessions, self._place.prefix, self.request.rank)
            except CaptureError:
                # It ended with its trainer.
                self._note.unlink(missing_ok=True)
            else:
                yield from self._stop_left(session)
        raise CaptureError(f"{ENDED}: nsys works from outside, and what it had is not kept")

    def _report_comes(self) -> bool:
        """Whether the trainer has opened its range, and nobody has taken the report that will come of it."""
        if any(self._place.tmp.glob(f"{self.request.capture_id}.*")) or self._report.exists():
            return False
        try:
            answer = self._answer()
            return self._mailbox.progress().state == "recording" or (answer is not None and answer.state == "stored")
        except RingError:
            return False


def _working_on(made: Path) -> list[int]:
    """Processes that make something of a capture's report: the agent that started them was to end them."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = cmdline.read_bytes().split(b"\0")
            if any(word.startswith(os.fsencode(made) + b".") for word in words):
                found.append(int(cmdline.parent.name))
    return found
