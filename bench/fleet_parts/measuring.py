"""What a process takes, when lines appear in a journal, and how figures grow with the size of a job."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sftriage.events import Event
from sftriage.runs.journal import event_of

LOOK_S = 0.01


@dataclass(frozen=True)
class Use:
    """What a process has taken so far."""

    cpu_s: float
    peak_bytes: int
    open_files: int

    @classmethod
    def of(cls, pid: int) -> Use:
        """That of a process.

        Raises:
            FileNotFoundError: it has gone.
        """
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        # (in KiB)
        peak_bytes = int(status["VmHWM"].split()[0]) * 1024
        n_open = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return cls(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), peak_bytes, n_open)


@dataclass(frozen=True)
class Line:
    """One line of a journal: what it says, how long it is, and when it was there."""

    event: Event
    size_bytes: int
    at_s: float


class Follower:
    """Follows a journal by a thread; the file need not be there yet.

    Attributes:
        lines: so far.
    """

    def __init__(self, path: Path, told: Callable[[Line], None] = lambda line: None) -> None:
        self.lines: list[Line] = []
        self._path, self._told = path, told
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        at, rest = 0, b""
        while not self._stopping.wait(LOOK_S):
            with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
                file.seek(at)
                new = file.read()
                at += len(new)
                now_s = time.time()
                *whole, rest = (rest + new).split(b"\n")
                for line in whole:
                    event = event_of(line)
                    if event is not None:
                        self.lines.append(Line(event, len(line), now_s))
                        self._told(self.lines[-1])


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest of the values that so many are not above; None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


def exponent(sizes: tuple[float, float], values: tuple[float | None, float | None]) -> float | None:
    """By which power of the size a figure grows from one size to another."""
    before, after = values
    if not before or not after or before <= 0.0 or after <= 0.0:
        return None
    return math.log(after / before) / math.log(sizes[1] / sizes[0])
