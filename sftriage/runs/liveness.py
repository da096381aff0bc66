"""Whether a run's trainers, their launcher, and its watcher are alive.

Commands, views and the controller use it. Trainers and launcher are known by files beside the rings, the watcher by the
run's lock. A lock is not tried while its holder is known: a process that tries it holds it for a moment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from sftriage.base.files import Note
from sftriage.base.process import Process, is_locked, locked, parent_of
from sftriage.errors import RingError, UsageError
from sftriage.runs.directory import RunDirectory, RunInfo, read_info
from sftriage.trainer.layout import RingInfo, find_rings
from sftriage.windows.log_files import find_logs
from sftriage.windows.logs import LogReader
from sftriage.windows.rings import Ring

_LAUNCHER, DISK, FAILING, UNHEARD = "launcher", "disk", "failing", "unheard"

State = Literal["unknown", "watched", "taken_over", "unwatched", "left"]

CHECK_S = 2.0
"""Seconds between checks, as each queries many processes and files."""


def note_launcher(rings: Path, pid: int) -> None:
    """Note which process started the trainers, for processes that have not started it."""
    with contextlib.suppress(OSError):
        Note(rings / _LAUNCHER, Process).save(Process.of(pid))


def launcher_of(rings: Path) -> int | None:
    """The process that started the trainers, while it is alive."""
    return noted_process(rings / _LAUNCHER)


def noted_process(path: Path) -> int | None:
    """The noted process, while it is alive. A later process with the same pid does not count."""
    process = Note(path, Process).get()
    return process.pid if process is not None and process.alive else None


@dataclass(frozen=True, slots=True)
class _Problem:
    process: Process
    text: str


def note_problem(path: Path, problem: str | None) -> None:
    """Note a full disk at `DISK`, failing triage at `FAILING`, silent hosts at `UNHEARD`; None: there is no problem."""
    with contextlib.suppress(OSError):
        if problem is None:
            path.unlink(missing_ok=True)
        else:
            Note(path, _Problem).save(_Problem(Process.of(os.getpid()), " ".join(problem.split())))


def noted_problem(path: Path) -> str:
    """The noted problem; "" if there is none, or if the process that noted it has ended."""
    noted = Note(path, _Problem).get()
    return noted.text if noted is not None and noted.process.alive else ""


def trainers_alive(rings: Path) -> bool:
    """Whether any trainer that writes to one of the rings is alive."""
    return next(_written(rings), None) is not None


def trainers_left(rings: Path) -> bool:
    """Whether all trainers have signed off, as they do when they end by themselves."""
    newest = {path.name.partition(".")[0]: path for path in find_rings(rings)}
    try:
        for path in newest.values():
            with Ring(path) as ring:
                if not ring.status().closed:
                    return False
    except RingError:
        return False
    return bool(newest)


def running_ranks(run: RunDirectory) -> list[RingInfo]:
    """The ranks of a run's newest attempt that run on this host.

    Raises:
        UsageError: there are none.
    """
    ranks = list(_written(Path(read_info(run).rings)))
    if not ranks:
        raise UsageError(f"no rank of {run.path} is running on this host: GPUs can be queried only while the job runs")
    attempt = max(info.attempt for info in ranks)
    return sorted((info for info in ranks if info.attempt == attempt), key=lambda info: info.rank)


def _written(rings: Path) -> Iterator[RingInfo]:
    for path in find_rings(rings):
        with contextlib.suppress(RingError), Ring(path) as ring:
            if ring.writer_alive:
                yield ring.info


@dataclass(frozen=True, slots=True)
class Watcher:
    """The watcher of a run whose rings exist, with its ``pid`` if known.

    The run is ``watched`` by its starter, ``taken_over`` by another process, ``unwatched`` while its trainers run,
    ``left`` by all of them, or ``unknown`` if no lock was ever held.
    """

    state: State = "unknown"
    pid: int | None = None


@dataclass(slots=True)
class WatcherLook:
    """Checks periodically which process watches a run."""

    run: RunDirectory
    _at_s: float = float("-inf")
    _found: Watcher = field(default_factory=Watcher)

    def at(self, now_s: float, rings: Path) -> Watcher:
        if not 0.0 <= now_s - self._at_s < CHECK_S:
            self._at_s, self._found = now_s, watcher_of(self.run, rings)
        return self._found


def watcher_of(run: RunDirectory, rings: Path) -> Watcher:
    """The watcher of a run whose rings exist."""
    if not run.lock.is_file():
        return Watcher()
    text = run.lock.read_bytes()
    if text.isdigit() and _holds(pid := int(text), run.lock):
        launcher = launcher_of(rings)
        parent = None if launcher is None else parent_of(launcher)
        return Watcher("watched" if parent in (None, pid) else "taken_over", pid)
    if is_locked(run.lock):
        # The process is in another container, say.
        return Watcher("watched")
    return Watcher("unwatched" if trainers_alive(rings) else "left")


@contextlib.contextmanager
def holding(run: RunDirectory, wait_s: float = 0.0) -> Iterator[None]:
    """Lock a run. The kernel releases the lock when the process dies, for whatever reason.

    Raises:
        UsageError: another process holds it, for longer than ``wait_s``.
    """
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(locked(run.lock, wait_s=wait_s))
        except BlockingIOError:
            pid = run.lock.read_text(encoding="ascii")
            raise UsageError(f"{run.path} is already being watched by process {pid or 'unknown'}") from None
        # (a full disk does not prevent locking)
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
        yield


def is_watched(watcher: Watcher) -> bool:
    """Whether a process watches the run, here or in another container."""
    return watcher.state in ("watched", "taken_over")


def is_unwatched(info: RunInfo, watcher: Watcher, *, rings_there: bool) -> bool:
    """Whether no process watches the run, although it has not recorded its end.

    Its rings may be gone: they are in memory, and other runs remove those of a killed run.
    """
    if is_watched(watcher):
        return False
    if rings_there:
        return watcher.state == "unwatched" or (watcher.state == "left" and not info.ended_at)
    return info.ended_at == ""


def _holds(pid: int, lock: Path) -> bool:
    """Whether a process has the lock open, and so holds it: a process that does not get it closes it."""
    try:
        wanted = lock.stat()
        return any(os.path.samestat(wanted, entry.stat()) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class RankCoverage:
    """How many of an attempt's ranks have recorded steps, and the first few that have not."""

    ranks: int = 0
    world_size: int = 0
    missing: tuple[int, ...] = ()

    @property
    def lacking(self) -> int:
        return max(0, self.world_size - self.ranks)


@dataclass(slots=True)
class TelemetryLook:
    """Reads which ranks have step logs, again whenever a file appears."""

    directory: Path
    _known: tuple[int, int | None] | None = None
    _found: RankCoverage = field(default_factory=RankCoverage)
    _hosts: dict[tuple[int, int], str] = field(default_factory=dict)

    def hosts(self, attempt: int, ranks: Collection[int]) -> dict[int, str]:
        """The hosts of some ranks of an attempt, as far as their logs name them."""
        for rank in ranks:
            if (attempt, rank) not in self._hosts:
                newest = max(self.directory.glob(f"rank-{rank}.{attempt}.*steps"), default=None)
                with contextlib.suppress(RingError, OSError):
                    if newest is not None:
                        self._hosts[attempt, rank] = LogReader(newest).info.host
        return {rank: self._hosts[attempt, rank] for rank in ranks if (attempt, rank) in self._hosts}

    def at(self, attempt: int | None) -> RankCoverage:
        try:
            state = (self.directory.stat().st_mtime_ns, attempt)
            if state != self._known:
                self._found = telemetry_of(self.directory, attempt)
                # (a log whose header is not written yet is read again)
                self._known = state if self._found.world_size else None
        except OSError:
            return RankCoverage()
        return self._found


def telemetry_of(directory: Path, attempt: int | None) -> RankCoverage:
    """The ranks of one attempt (None: the newest) by the names of their logs; the header of one has the world size.

    Raises:
        OSError: the directory cannot be read.
    """
    attempts: dict[int, set[int]] = {}
    logs = {(log.attempt, log.rank): log for log in find_logs(directory)}
    for of_attempt, rank in logs:
        attempts.setdefault(of_attempt, set()).add(rank)
    attempt = max(attempts, default=0) if attempt is None else attempt
    ranks = attempts.get(attempt, set())
    for rank in sorted(ranks):
        with contextlib.suppress(RingError):
            world_size = LogReader(logs[attempt, rank].newest).info.world_size
            absent = (rank for rank in range(world_size) if rank not in ranks)
            return RankCoverage(len(ranks), world_size, tuple(islice(absent, MAX_NAMED)))
    return RankCoverage(len(ranks))
