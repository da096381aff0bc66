"""Turns of the triage loop that fail: counted, on record, and shown as "triage is off" for as long as they do."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sftriage.runs.liveness import FAILING, note_problem
from sftriage.traces.disk import Do, at_once

log = logging.getLogger("sftriage")

MAX_LOG_BYTES = 64 << 10
"""The file of tracebacks takes no more than this."""


class Failures:
    """What fails, and whether it works again. A part that fails does not end the loop: the next turn tries again.

    Args:
        path: gets the traceback of each failure that differs from those before, up to `MAX_LOG_BYTES`.
        rings: where pages and `sftriage watch` find that triage is off.
        do: writes the file.

    Attributes:
        count: failures so far.
    """

    def __init__(self, path: Path, rings: Path, do: Do = at_once) -> None:
        self._path, self._rings, self._do = path, rings, do
        self.count = self._size_bytes = 0
        self._failing: dict[str, str] = {}
        self._known: set[tuple[str, str]] = set()
        self._off = False

    def run(self, part: str, act: Callable[[], object]) -> None:
        """Do a part of a turn; an exception is a failure of it. Where it returns False it had nothing to do."""
        try:
            done = act()
        except Exception as error:
            self._fails(part, error)
        else:
            if done is not False and self._failing.pop(part, None) is not None and not self._failing:
                note_problem(self._rings / FAILING, None)
                if self._off:
                    log.error("triage works again")
                self._off = False

    def _fails(self, part: str, error: Exception) -> None:
        reason = f"{part} failed: {type(error).__name__}: {error}"
        self.count += 1
        self._failing[part] = reason
        note_problem(self._rings / FAILING, reason)
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = part, f"{type(error).__name__} {place.filename}:{place.lineno}"
        if kind in self._known:
            return
        self._known.add(kind)
        self._off = True
        log.error("triage is off: %s (traceback in %s); retrying", reason, self._path)
        text = f"{reason}\n{''.join(traceback.format_exception(error))}\n".encode("utf-8", "replace")
        if self._size_bytes + len(text) <= MAX_LOG_BYTES:
            self._size_bytes += len(text)
            self._do(partial(self._append, text), "failures", waits=False)

    def _append(self, text: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(text)

    def report(self) -> None:
        """Log how many there were, if any."""
        if self.count:
            log.error("triage failed %d times in this run; the tracebacks are in %s", self.count, self._path)
