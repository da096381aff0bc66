"""What processes take, from /proc, and when lines appear in a journal."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sftriage.model.events import Event, decode
from tests.integration.processes import descendants

LOOK_S = 0.01


@dataclass(frozen=True)
class Use:
    cpu_s: float
    peak_bytes: int
    open_files: int

    @classmethod
    def of(cls, pid: int) -> Use:
        """That of a process.

        Raises:
            FileNotFoundError: it has ended.
        """
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        # (in KiB)
        peak_bytes = int(status["VmHWM"].split()[0]) * 1024
        n_open = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return cls(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), peak_bytes, n_open)


def run_ns(pid: int) -> int:
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total_ns += int(path.read_text().split()[0])
    return total_ns


def beside_ns(root: int, trainer: int) -> int:
    """Processor time of the root's descendants, without the root's own and the trainer's."""
    return sum(run_ns(pid) for pid in set(descendants(root)) - {trainer})


@dataclass(frozen=True)
class Line:
    """One line of a journal, and when it appeared."""

    event: Event
    at_s: float


class Follower:
    """Follows a journal in a thread; the file need not exist yet.

    Attributes:
        lines: so far.
    """

    def __init__(self, path: Path, each: Callable[[Line], None] = lambda line: None) -> None:
        self.lines: list[Line] = []
        self._path, self._each = path, each
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
                    event = decode(line)
                    if event is not None:
                        self.lines.append(Line(event, now_s))
                        self._each(self.lines[-1])
