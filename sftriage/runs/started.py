"""The runs of this machine, as the page lists them: which is the newest, and which of them go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sftriage.errors import InputError
from sftriage.runs.directory import RunDirectory, RunInfo, read_info, started_runs
from sftriage.runs.liveness import State, watcher_of

MAX_LISTED = 50
"""So many of the newest runs are listed; an older one is shown where it is named."""

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run, and who watches it; ``left`` where it has ended."""

    directory: Path
    info: RunInfo
    state: State


@dataclass(frozen=True, slots=True)
class Followed:
    """The newest runs, the newest first; ``before`` was the newest until another began meanwhile."""

    runs: tuple[StartedRun, ...] = ()
    before: StartedRun | None = None

    @property
    def newest(self) -> StartedRun | None:
        """The newest run."""
        return self.runs[0] if self.runs else None


class StartedRuns:
    """Looks for runs, every so often. Its methods may be called from any thread.

    Args:
        find: the runs there are, newest first.
    """

    def __init__(self, find: Callable[[], Iterable[RunDirectory]] = started_runs) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._known: dict[tuple[Path, int], RunInfo] = {}
        self._found = Followed()
        self._due_s = float("-inf")

    def look(self) -> Followed:
        """The runs as they are now, or were a moment ago."""
        with self._lock:
            if time.monotonic() >= self._due_s:
                runs = tuple(run for one in islice(self._find(), MAX_LISTED) if (run := self._started(one)) is not None)
                last, newest = self._found.newest, runs[0] if runs else None
                switched = last is not None and newest is not None and last.directory != newest.directory
                self._found = Followed(runs, last if switched else self._found.before)
                self._due_s = time.monotonic() + LOOK_S
            return self._found

    def named(self, run_id: str) -> StartedRun | None:
        """The newest run of that name."""
        return next((run for run in self.look().runs if run.info.run_id == run_id), None)

    def _started(self, run: RunDirectory) -> StartedRun | None:
        try:
            about = run.path, run.info_file.stat().st_mtime_ns
            info = self._known.get(about) or self._known.setdefault(about, read_info(run))
        except (InputError, OSError):
            return None
        rings = Path(info.rings)
        return StartedRun(run.path, info, watcher_of(run, rings).state if rings.is_dir() else "left")
