"""Python stacks of the trainer, sampled by a thread of its own while a capture records, and at no other time.

``sys._current_frames`` needs no privileges and works where ptrace is forbidden. A sample costs the interpreter some
microseconds a thread; a training thread that is busy in Python lets go of the interpreter every 5 ms, so that there are
at most about 200 samples a second. Each has the times that its threads have run and waited for a core (`stacks`). The
DataLoader's workers sample themselves meanwhile (`workers`); `speedscope` writes all of it as one file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from sftriage.base import files
from sftriage.base.loops import start_thread
from sftriage.errors import CaptureError
from sftriage.model.captures import SAMPLES_PER_SECOND
from sftriage.sampling.speedscope import written
from sftriage.sampling.stacks import At, Stacks
from sftriage.sampling.workers import WORKERS

NAME = "stacks.speedscope.json"
FOLDED_NAME = "stacks.folded"
"""What the file is called among a capture's artefacts."""

PERIOD_S = 0.005


def period_of(options: Mapping[str, int]) -> float:
    """Seconds from one sample to the next, as a capture's options have it.

    Raises:
        CaptureError: it is out of bounds.
    """
    wanted = options.get(SAMPLES_PER_SECOND, round(1 / PERIOD_S))
    if not 1 <= wanted <= 1000:
        raise CaptureError(f"{SAMPLES_PER_SECOND} {wanted}: 1 to 1000")
    return 1 / wanted


class StackSampler:
    """Samples every thread of this process from `start` to `stop`, both called on the training thread.

    Args:
        at: the step and the stage that the training thread is in, and since when (nanoseconds, monotonic clock).
        period_s: seconds from one sample to the next, or more.
    """

    def __init__(self, at: Callable[[], At], period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._stacks = Stacks(period_s, threading.get_ident(), at)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0
        self._problem = ""

    def __len__(self) -> int:
        return len(self._stacks)

    def start(self) -> None:
        """Begin to sample. Does not raise: where no thread can be had, there are no stacks."""
        try:
            self._thread = start_thread("samples", self._run)
        except RuntimeError as error:
            self._problem = str(error)
        self._asked = WORKERS.begin(self._period_s)

    def stop(self) -> None:
        """Sample no more. The thread ends by itself, at once."""
        self._ended.set()
        WORKERS.end(self._asked)

    def _run(self) -> None:
        try:
            self._stacks.run(self._ended.wait)
        except Exception as error:
            self._problem = repr(error)

    def keep(self, path: Path, max_bytes: int) -> str:
        """Write what was sampled, once it has stopped, on another thread than the training one. Does not raise.

        Returns:
            Why there is no such file, in words; "" where it is whole.
        """
        try:
            if self._thread is not None:
                self._thread.join()
            if self._problem:
                return f"no stacks: {self._problem}"
            workers = WORKERS.collect(self._asked)
            own, at = self._stacks.samples(), self._stacks.at()
            pieces = [piece.encode() for piece in written(path.name, own, at, workers)]
            size_bytes = sum(map(len, pieces))
            if size_bytes > max_bytes:
                return f"no stacks: they would have had {size_bytes} bytes, and {max(0, max_bytes)} were left"
            with os.fdopen(files.create(path), "wb") as file:
                file.writelines(pieces)
        except Exception as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"no stacks: {error}"
        return ""
