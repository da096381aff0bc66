"""Processes: liveness, locks that end with their holder, programs with a deadline, and supervised children."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from sftriage.base.files import PRIVATE, regular
from sftriage.base.loops import Backoff, start_thread
from sftriage.errors import CaptureError, SftriageError, UsageError

log = logging.getLogger("sftriage")

MAX_OUTPUT_BYTES = 1 << 20
MOMENT_S = 0.15
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl
QUICK_S, MOST_QUICK, AGAIN_S = 10.0, 3, 0.2
"""A child that ends before ``QUICK_S``, ``MOST_QUICK`` times in a row, is not restarted."""
STUCK_S = 5.0
"""Seconds between two checks for a child that is stuck."""
LET_GO = signal.SIGRTMAX - 2
"""Signals a controller that its parent has died; no launcher or scheduler sends this signal."""
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, LET_GO}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Identifies one boot of a host."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinct from a later process with the same pid."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, start_ticks(pid) or 0)

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started (clock ticks since boot); None if it does not run, as a zombie does not."""
    state, *fields = _stat(pid)
    return None if state in (b"", b"Z", b"X") else int(fields[18])


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if there is no such process."""
    _, *fields = _stat(pid)
    return int(fields[0]) if fields else None


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/<pid>/stat`` from the state on; an empty state if the process is gone."""
    return stat_fields(content_of(Path(f"/proc/{pid}/stat"))) or [b""]


def stat_fields(stat: bytes) -> list[bytes]:
    """The fields of a process's or thread's ``stat`` from the state on."""
    # The name is in parentheses and may hold anything, parentheses too: the fields count from the last one.
    return stat.rpartition(b")")[2].split()


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait_s: float | None = 0.0) -> Iterator[BinaryIO]:
    """Lock a file, created if missing, until the block ends or the process dies. ``wait_s`` None waits forever.

    Raises BlockingIOError if another process holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, PRIVATE), "r+b") as file, locked_file(file.fileno(), shared, wait_s):
        yield file


@contextlib.contextmanager
def locked_file(descriptor: int, shared: bool = False, wait_s: float | None = None) -> Iterator[None]:
    """Lock an open file until the block ends; see `locked`."""
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until_s = time.monotonic() + (wait_s or 0.0)
    while True:
        try:
            fcntl.flock(descriptor, mode | (0 if wait_s is None else fcntl.LOCK_NB))
            break
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.02)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file. Trying shares the lock for a moment."""
    try:
        with regular(path, UsageError) as file, locked_file(file.fileno(), shared=True, wait_s=0.0):
            return False
    except (UsageError, OSError) as error:
        return isinstance(error, BlockingIOError)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended, and the start of its standard output and error."""

    status: int
    output: str

    def problem(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit status {self.status}")[:300]


class BoundedProgram:
    """One run of a program, in its own session, so that its children can be killed with it.

    Its output goes to an unnamed file, which never blocks the program and leaves nothing behind. ``output`` is its
    start, once the program has ended or was killed. Raises CaptureError if it cannot be started.
    """

    output = ""

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self._name = os.path.basename(os.fspath(command[0]))  # noqa: PTH119  # a name, not a path
        self._deadline_s, self._max_output_bytes = deadline_s, max_output_bytes
        self._end_s = time.monotonic() + deadline_s
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _ended
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._file.close()
            raise CaptureError(f"{self._name} cannot be started: {error.strerror}") from error

    def poll(self) -> Finished | None:
        """How it ended; None while it runs.

        Raises CaptureError if it timed out and was killed.
        """
        status = self._process.poll()
        if status is not None:
            self._ended()
            return Finished(status, self.output)
        if time.monotonic() >= self._end_s:
            self.kill()
            raise CaptureError(f"{self._name} hung: no answer within {self._deadline_s:g} s, and it was killed")
        return None

    def wait(self) -> Generator[None, None, Finished]:
        """Wait a moment, which is enough for most programs, then turn by turn: ``yield from program.wait()``.

        The program is killed if the generator is closed. Raises CaptureError as `poll` does.
        """
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(MOMENT_S)
            while (finished := self.poll()) is None:
                yield
        finally:
            self.kill()
        return finished

    def kill(self) -> None:
        """End the program and its children. Does nothing once it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._ended()

    @property
    def hangs(self) -> bool:
        """Whether it was killed and still exists: it waits in a driver, which signals do not interrupt."""
        return self._file.closed and self._process.poll() is None

    def _ended(self) -> None:
        if not self._file.closed:
            self._file.seek(0)
            self.output = self._file.read(self._max_output_bytes).decode("utf-8", "replace")
            self._file.close()


def run_bounded(command: Sequence[str | os.PathLike[str]], deadline_s: float) -> Finished:
    """Run a program to its end, blocking; raises CaptureError if it cannot be started, or timed out."""
    program = BoundedProgram(command, deadline_s)
    while (finished := program.poll()) is None:
        time.sleep(_POLL_S)
    return finished


class Supervised:
    """A child that is restarted if it ends early, and that ends with `close` or with this process.

    Args:
        name: its display name.
        start: starts it; called with True for a restart. May raise an OSError.
        is_due: whether to restart it, by its exit status.
        end_s: how long it may take to end.
        where: where to find out why it has ended.
        is_stuck: whether to restart it although it runs.

    Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[bool], subprocess.Popen[bytes]],
        is_due: Callable[[int], bool] = lambda _: True,
        end_s: float = 10.0,
        where: str = "its log",
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name, self._start, self._is_due, self._end_s, self._where = name, start, is_due, end_s, where
        self._is_stuck = is_stuck
        self._process = start(False)
        self._closing, self._over = threading.Event(), threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended, even if it will be restarted."""
        return self._process.poll() is not None

    def keep(self) -> None:
        """From now on, restart it if it ends by itself."""
        # (to the kernel, the parent ends with this thread)
        self._keeper = start_thread(f"keeps-{self._name}", self._keep)

    def terminate(self, signum: int = signal.SIGTERM) -> None:
        self._process.send_signal(signum)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended for good.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if self._keeper is not None and not self._over.wait(timeout_s):
            raise subprocess.TimeoutExpired(self._name, timeout_s or 0.0)
        self._process.wait(timeout_s)

    def close(self) -> None:
        self._closing.set()
        end(self._process, self._end_s)
        while self._keeper is not None and self._keeper.is_alive():
            # (it may have just been restarted)
            end(self._process, self._end_s)
            self._keeper.join(AGAIN_S)

    def _keep(self) -> None:
        quick, began_s = 0, time.monotonic()
        checked_s = began_s
        while not self._closing.wait(AGAIN_S):
            status = self._process.poll()
            if status is None:
                if time.monotonic() > checked_s + STUCK_S:
                    checked_s = time.monotonic()
                    if self._is_stuck():
                        self._process.terminate()
                continue
            if not self._is_due(status):
                break
            quick = quick + 1 if time.monotonic() < began_s + QUICK_S else 0
            if quick >= MOST_QUICK:
                log.error("the %s keeps ending; see %s", self._name, self._where)
                break
            began_s = time.monotonic()
            try:
                self._process = self._start(True)
            except OSError as error:
                log.error("the %s has ended and cannot be restarted: %s", self._name, error)
                break
        self._over.set()
        self._closing.wait()
        self._process.wait()


class Forks:
    """Children that run functions of this process, by name; one that ends by itself is restarted, after a pause.

    This process should have no threads: they do not exist in its children. `turn` does what is due. A child that is not
    wanted any more may take ``end_s`` to end.
    """

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self._wanted: Mapping[str, Callable[[], object]] = {}
        self._children: dict[str, tuple[int, float]] = {}
        self._due: dict[str, tuple[float, Backoff]] = {}
        self._ending: dict[int, float] = {}

    @property
    def running(self) -> set[str]:
        return set(self._children)

    def want(self, wanted: Mapping[str, Callable[[], object]]) -> None:
        self._wanted = wanted

    def turn(self) -> None:
        now_s = time.monotonic()
        for name, (pid, began_s) in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(name, status, now_s - began_s)
            elif name not in self._wanted and pid not in self._ending:
                os.kill(pid, signal.SIGTERM)
                self._ending[pid] = now_s + self._end_s
            elif now_s > self._ending.get(pid, now_s):
                os.kill(pid, signal.SIGKILL)
        for name in self._wanted.keys() - self._children.keys():
            if now_s >= self._due.get(name, (0.0,))[0]:
                self._children[name] = _forked(name, self._wanted[name]), now_s

    def _ended(self, name: str, status: int, lasted_s: float) -> None:
        self._ending.pop(self._children.pop(name)[0], None)
        if name not in self._wanted:
            self._due.pop(name, None)
            return
        backoff = self._due.get(name, (0.0, Backoff(1.0, 60.0)))[1]
        if lasted_s > QUICK_S:
            backoff.reset()
        pause_s = backoff.next_s()
        self._due[name] = time.monotonic() + pause_s, backoff
        how = os.waitstatus_to_exitcode(status)
        why = f"exit status {how}" if how >= 0 else signal.Signals(-how).name
        log.error("%s has ended (%s); it starts again in %.0f s", name, why, pause_s)

    def close(self) -> None:
        """End those that are not wanted, then the others."""
        for wanted in (self._wanted, {}):
            self._wanted = dict(wanted)
            while self.running - self._wanted.keys():
                self.turn()
                time.sleep(_POLL_S)


def _forked(name: str, function: Callable[[], object]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() == parent:
            function()
            status = 0
    except SftriageError as error:
        log.error("%s: %s", name, error)
    except BaseException:
        log.exception("%s has failed", name)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def was_killed(status: int) -> bool:
    """Whether a process was ended by a signal other than a request to end."""
    return status < 0 and -status not in _ENDING


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End a child of ours, by force if necessary."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_child(
    command: Sequence[str], output: IO[bytes] | None = None, signum: int = signal.SIGTERM
) -> subprocess.Popen[bytes]:
    """Start a child in its own session; it gets a signal when this thread ends.

    Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signum),
    )


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """In a child: get a signal when the thread that started it ends, for whatever reason."""
    _PRCTL(_PR_SET_PDEATHSIG, signum)


CGROUPS = Path("/sys/fs/cgroup")


def files_of_thread(process: Path, pid: int) -> Iterator[tuple[str, Path]]:
    """The files on a process and its main thread, by kind; the first one exists as long as the process."""
    for kind in ("stat", "schedstat", "status", "io"):
        yield kind, process / "task" / str(pid) / kind
    yield "snmp", process / "net" / "snmp"


def files_of_cgroup(process: Path) -> Iterator[tuple[str, Path]]:
    """The files on the cgroup of a process, or else on its host, by kind."""
    folders = list(cgroups(process))
    for name in ("cpu.stat.local", "cpu.stat"):
        # (the former includes the limits of the parent cgroups)
        limits = [folder / name for folder in folders if b"throttled_" in content_of(folder / name)]
        if limits:
            yield "cpu.stat", limits[0]
            break
    for resource in ("memory", "io"):
        paths = (folder / f"{resource}.pressure" for folder in folders)
        host = Path(f"/proc/pressure/{resource}")
        yield f"{resource}.pressure", next((path for path in paths if path.exists()), host)


def cgroups(
    process: Path, mounted: Path = CGROUPS, controller: str = "cpu", files: Collection[str] = ("cpu.stat",)
) -> Iterator[Path]:
    """The folders of the cgroups of a process that may have one of the ``files`` of a controller.

    In a container, the path of a process may lead out of the caller's namespace (``/../``), or be the host's. It is
    then read in that process's own view, in which its cgroup is the root.
    """
    for line in content_of(process / "cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = (controllers, controller, "cpu,cpuacct") if controllers else ("", "unified")
        own = process / "root" / mounted.relative_to("/")
        folders = [] if path.startswith("/..") else [mounted / name / path.lstrip("/") for name in names]
        for folder in (*folders, *(own / name for name in names)):
            if any((folder / file).exists() for file in files):
                yield folder
                break


def content_of(path: Path) -> bytes:
    """What a file contains; nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@dataclass(slots=True)
class MemoryCgroups:
    """Whether the kernel has killed a process of our cgroup for lack of memory since this object was made.

    ``folders`` are that cgroup, and those around it, whose limits it may have exceeded.
    """

    folders: tuple[Path, ...] = field(default_factory=lambda: tuple(memory_cgroups()))
    _before: dict[Path, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._before = {folder: _kills(folder) for folder in self.folders}

    def killed(self) -> bool:
        return any(_kills(folder)[0] > self._before[folder][0] for folder in self.folders[:1])

    def limit_bytes(self) -> int | None:
        """The limit of the innermost cgroup that has reached its own; None if none has."""
        for folder, before in self._before.items():
            limit = content_of(folder / "memory.max") or content_of(folder / "memory.limit_in_bytes")
            if limit.strip().isdigit() and _kills(folder)[1] > before[1] and int(limit) < 1 << 60:
                return int(limit)
        return None


def memory_cgroups(process: Path = Path("/proc/self"), mounted: Path = CGROUPS) -> Iterator[Path]:
    """The folder of a process's memory cgroup, and of those around it, innermost first."""
    files = ("memory.events", "memory.oom_control")
    for folder in cgroups(process, mounted, "memory", files):
        yield from (each for each in (folder, *folder.parents) if any((each / file).exists() for file in files))


def _kills(folder: Path) -> tuple[int, int]:
    """How many processes were killed there, and how often its own limit was the reason."""
    text = content_of(folder / "memory.events") or content_of(folder / "memory.oom_control")
    counts = dict(line.split() for line in text.decode("ascii", "replace").splitlines() if len(line.split()) == 2)
    kills = int(counts.get("oom_kill", 0))
    return kills, int(counts.get("oom", kills))
