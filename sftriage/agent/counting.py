"""Reads the counters of the ranks (`sftriage.model.windows`) from outside; `RankRings` calls it.

It reads the main thread of the process that writes the ring, which is nearly always the training thread. If it is not,
that thread does not run during steps, and its counters are ignored. A counter that cannot be read is unknown, never
zero.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import monotonic_ns

import numpy as np

from sftriage.base.process import content_of, files_of_cgroup, files_of_thread, start_ticks, stat_fields
from sftriage.errors import RingError
from sftriage.model.windows import COUNTERS, OF_INTERPRETER, PLACE
from sftriage.traces.disk import Counted, Do, at_once, refusal
from sftriage.trainer.executor import COUNTERS_SOCKET, COUNTERS_TOKEN, MAX_FILES, STACK_REQUESTS
from sftriage.trainer.layout import COLLECTED, LIVE_AT, MAX_COUNT, WORD_BYTES, RingInfo
from sftriage.windows.decoding import UNKNOWN, StepArrays
from sftriage.windows.logs import MAX_APART_NS, none_taken, of_ranks_laid_over
from sftriage.windows.steplog import CountersLog, KeptSteps

MAX_HIDDEN = 20
"""After as many reads, a trainer that has not sent its files will not do so: it is stopped, or has another sftriage."""
_ANSWER_S = 0.2

KEPT_READINGS = 8
"""How many readings to remember: steps that have just ended began after the last few."""

SECOND_NS = 1_000_000_000
SLOWLY_NS = 5 * SECOND_NS
"""How often to read counters that matter less, or take longer to read. Files that are read slowly are not kept open."""

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

_DELAYS = Path("/proc/sys/kernel/task_delayacct")
_MAX_BYTES = 16384
_INTERPRETER = struct.Struct("=2q")
_SWITCHES = b"voluntary_ctxt_switches:"

Report = Callable[[str], None]
Reading = tuple[int, ...]
"""The time, and the counters in the order of `COUNTERS`."""
Parse = Callable[[bytes], Sequence[int]]


class Source:
    """A file with some counters, by its kind (`KINDS`). It stays open unless it is read slowly.

    ``descriptor``: it is open already, as a trainer has sent it.
    """

    def __init__(self, kind: str, path: Path | None = None, descriptor: int = -1) -> None:
        self.kind = kind
        names, self._parse, self.every_ns = KINDS[kind]
        self._path, self._descriptor = path, descriptor
        self.places = [PLACE[name] for name in names]
        self.due_ns = 0

    def open(self) -> None:
        if self._path is not None and self.every_ns != SLOWLY_NS:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def values(self) -> Sequence[int]:
        """Its counters now; all `UNKNOWN` if it does not have all of them."""
        return parsed(self._parse, self.content(), len(self.places))

    def content(self) -> bytes:
        if self._descriptor >= 0:
            return os.pread(self._descriptor, _MAX_BYTES, 0)
        return b"" if self._path is None else content_of(self._path)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def stat(delays: bool, content: bytes) -> Sequence[int]:
    """A thread's ``stat``: its faults, its time in the kernel, its time waiting for disks, and whether it is stopped.

    ``delays``: this kernel counts the time waiting for disks. If it does not, it writes zeros.
    """
    fields = stat_fields(content)
    minor, major, system, blocked = (int(fields[at]) for at in (7, 9, 12, 39))
    return minor, major, system * TICK_NS, blocked * TICK_NS if delays else UNKNOWN, fields[0] == b"T"


def schedstat(content: bytes) -> Sequence[int]:
    """A thread's ``schedstat``: nanoseconds run and queued.

    A kernel that is built or configured not to count writes zeros, even for a thread that has run: these are unknown.
    """
    run_ns, queued_ns, timeslices = map(int, content.split())
    return (run_ns, queued_ns) if timeslices else ()


@lru_cache(1)
def _counts_delays() -> bool:
    # (kernels before 5.14 always count them)
    return content_of(_DELAYS).strip() != b"0"


def _stat(content: bytes) -> Sequence[int]:
    return stat(_counts_delays(), content)


def switches(content: bytes) -> Sequence[int]:
    """A thread's ``status``: its involuntary and voluntary switches, from the last lines: its name may be anything."""
    woken, preempted = (int(part.split()[0]) for part in content.split(_SWITCHES)[-2:])
    return preempted, woken


def transfers(content: bytes) -> Sequence[int]:
    """A thread's ``io``: bytes read from disks, and written."""
    values = dict(line.split(b": ") for line in content.splitlines())
    return int(values[b"read_bytes"]), int(values[b"write_bytes"])


def throttled(content: bytes) -> Sequence[int]:
    """A cgroup's ``cpu.stat`` or ``cpu.stat.local``, of either version: nanoseconds throttled by its CPU limit."""
    values = dict(line.split() for line in content.splitlines())
    new = values.get(b"throttled_usec")
    return (int(values[b"throttled_time"]) if new is None else int(new) * 1000,)


def pressure(content: bytes) -> Sequence[int]:
    """A file of pressure stall information: nanoseconds that some task waited."""
    return (int(content.partition(b"some ")[2].partition(b"total=")[2].split()[0]) * 1000,)


def retransmissions(content: bytes) -> Sequence[int]:
    """A network namespace's ``snmp``: retransmitted TCP segments."""
    names, values = (line.split() for line in content.splitlines() if line.startswith(b"Tcp:"))
    return (int(values[names.index(b"RetransSegs")]),)


def interpreter(content: bytes) -> Sequence[int]:
    """A rank's ring: nanoseconds that its trainer collected garbage and compiled."""
    return _INTERPRETER.unpack_from(content, LIVE_AT + COLLECTED * WORD_BYTES)


KINDS: Mapping[str, tuple[Sequence[str], Parse, int]] = {
    "stat": (("minor_faults", "major_faults", "system_s", "disk_s", "stopped_s"), _stat, 0),
    "schedstat": (("run_s", "queued_s"), schedstat, 0),
    "status": (("preempted", "woken"), switches, SECOND_NS),
    "io": (("read_bytes", "written_bytes"), transfers, SLOWLY_NS),
    "snmp": (("retransmitted",), retransmissions, SLOWLY_NS),
    "cpu.stat": (("throttled_s",), throttled, 0),
    "ring": (OF_INTERPRETER, interpreter, 0),
    "memory.pressure": (("memory_s",), pressure, SECOND_NS),
    "io.pressure": (("io_s",), pressure, SECOND_NS),
}
"""By kind of file: its counters, how they are parsed, and how often."""


def parsed(parse: Parse, content: bytes, n_values: int) -> Sequence[int]:
    """The values in a file; all `UNKNOWN` unless it has exactly ``n_values`` valid ones."""
    try:
        found = parse(content)
    except (ValueError, IndexError, KeyError, struct.error):
        found = ()
    fits = len(found) == n_values and min(found) >= UNKNOWN and max(found) < MAX_COUNT
    return found if fits else (UNKNOWN,) * n_values


class Descriptors:
    """The counters' files of a rank that this process cannot see, as its trainer sends them; see `trainer.executor`.

    Raises:
        OSError: the trainer does not listen for requests.
    """

    def __init__(self, rings: Path, info: RingInfo) -> None:
        requests = rings / info.file_name(STACK_REQUESTS)
        about = requests.stat()
        self._path = rings / info.file_name(COUNTERS_SOCKET)
        self._path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        try:
            place = os.open(rings, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # (the path of a socket has 107 bytes at most)
                self._listening.bind(f"/proc/self/fd/{place}/{self._path.name}")
            finally:
                os.close(place)
            # Whoever may use the trainer's pipe may use the socket.
            os.chown(self._path, -1, about.st_gid)
            self._path.chmod(about.st_mode & 0o777)
            self._listening.listen(1)
            self._listening.setblocking(False)
            with os.fdopen(os.open(requests, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb", buffering=0) as pipe:
                pipe.write(COUNTERS_TOKEN + b"\n")
        except BaseException:
            self.close()
            raise

    def received(self) -> list[Source]:
        """The files that the trainer has sent; OSError if it has not yet, or has sent others."""
        channel, _ = self._listening.accept()
        with channel:
            channel.settimeout(_ANSWER_S)
            text, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        kinds = text.decode("ascii", "replace").split()
        if len(kinds) != len(descriptors) or not KINDS.keys() >= set(kinds):
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(f"the trainer has sent {len(descriptors)} files as {kinds}")
        return [Source(kind, descriptor=descriptor) for kind, descriptor in zip(kinds, descriptors, strict=True)]

    def close(self) -> None:
        self._listening.close()
        self._path.unlink(missing_ok=True)


class RankCounters:
    """The counters of one rank. The files of its thread stay open, so they never show another process's counters.

    ``hidden`` counts reads that could not find the process, until the first that does: it may have ended, or run in
    another PID namespace. From the second one on, its trainer gets a request for them. A rank that is ``over`` is not
    read again.
    """

    def __init__(self, info: RingInfo, rings: Path | None = None) -> None:
        self._info, self._rings, self._open = info, rings, list[Source]()
        self._descriptors: Descriptors | None = None
        self._last: Reading = (0, *(UNKNOWN for _ in COUNTERS))
        self._cgroup, self._checked_ns = b"", 0
        self.readings_TK = none_taken(KEPT_READINGS)
        self.log: CountersLog | None = None
        self.hidden, self.over = 0, False

    def read(self) -> Reading:
        """Read the counters; raises OSError if the process has ended or cannot be found from here."""
        if not self._open:
            self._begin()
        before, now_ns = self._last, monotonic_ns()
        found = [now_ns, *before[1:]]
        for at, source in enumerate(self._open):
            if now_ns < source.due_ns:
                continue
            source.due_ns = now_ns + source.every_ns
            try:
                values = source.values()
            except OSError:
                if at == 0:
                    raise
                values = (UNKNOWN,) * len(source.places)
            for place, value in zip(source.places, values, strict=True):
                found[1 + place] = value
        at = 1 + PLACE["stopped_s"]
        if found[at] != UNKNOWN:
            # The file shows the present state; a sample counts for the time since the previous one.
            since_ns = min(now_ns - before[0], MAX_APART_NS) if before[0] else 0
            found[at] = max(0, before[at]) + found[at] * since_ns
        if now_ns - self._checked_ns >= SLOWLY_NS and self._descriptors is None:
            self._checked_ns = now_ns
            self._follow(found)
        self._last = tuple(found)
        return self._last

    def stat(self) -> bytes:
        """The ``stat`` of its main thread; empty if it is not open. Raises OSError if the process has ended."""
        return next((source.content() for source in self._open if source.kind == "stat"), b"")

    def _begin(self) -> None:
        if self._descriptors is None:
            try:
                self._begin_by_pid()
            except OSError:
                self.hidden += 1
                if self.hidden < 2 or self._rings is None:
                    raise
                self._descriptors = Descriptors(self._rings, self._info)
        if self._descriptors is not None:
            self.hidden += 1
            self._open += self._descriptors.received()
            self._descriptors.close()
            self._add_ring()
        self.hidden = 0

    def _begin_by_pid(self) -> None:
        pid, process = self._info.pid, Path(f"/proc/{self._info.pid}")
        try:
            self._add(files_of_thread(process, pid))
            # Check only once they are open: before that, the pid could become another process's.
            if start_ticks(pid) != self._info.pid_start_ticks:
                raise ProcessLookupError(f"process {pid} is not the recording one")
        except BaseException:
            self.close()
            raise
        self._add_ring()
        self._n_of_thread = len(self._open)

    def _add_ring(self) -> None:
        if self._rings is not None:
            self._add([("ring", self._rings / self._info.file_name("ring"))])

    def _follow(self, found: list[int]) -> None:
        """Open the files of the process's current cgroup; the counters of a new cgroup start as unknown."""
        cgroup = content_of(Path(f"/proc/{self._info.pid}/cgroup"))
        if cgroup == self._cgroup:
            return
        self._cgroup = cgroup
        for source in self._open[self._n_of_thread :]:
            source.close()
            for place in source.places:
                found[1 + place] = UNKNOWN
        del self._open[self._n_of_thread :]
        self._add(files_of_cgroup(Path(f"/proc/{self._info.pid}")))

    def _add(self, files: Iterable[tuple[str, Path]]) -> None:
        for kind, path in files:
            source = Source(kind, path)
            try:
                source.open()
            except OSError:
                if not self._open:
                    raise
            else:
                self._open.append(source)

    def close(self) -> None:
        for source in self._open:
            source.close()
        self._open.clear()
        if self._descriptors is not None:
            self._descriptors.close()


class Counting:
    """Reads the counters of each rank that has new steps, logs them, and adds what they counted to the steps.

    ``report`` gets problems, which may repeat. ``kept`` limits the logs (by default, they keep everything); ``do``
    runs the writes. ``rings`` is where the ranks' rings are.
    """

    def __init__(
        self, rings: Path, steps: Path, report: Report, kept: KeptSteps | None = None, do: Do = at_once
    ) -> None:
        self._rings, self._steps, self._report, self._kept, self._do = rings, steps, report, kept, do
        self._ranks: dict[tuple[int, int], RankCounters] = {}

    def read(self, info: RingInfo) -> None:
        """Read the counters of a rank, after its new steps have been read."""
        counters = self._ranks.get((info.attempt, info.rank))
        if counters is None:
            counters = self._ranks[info.attempt, info.rank] = RankCounters(info, self._rings)
        if counters.over:
            return
        try:
            reading = counters.read()
        except OSError:
            # A process that has ended publishes no steps; one that still does is in another PID namespace.
            if counters.hidden > MAX_HIDDEN:
                self._report("cannot see the trainers' threads in /proc, so ranks' waits for a CPU are unknown")
            if not 0 < counters.hidden <= MAX_HIDDEN:
                self._leave(counters)
            return
        if reading[1 + PLACE["queued_s"]] == UNKNOWN:
            self._report("the kernel does not count run-queue time, so ranks' waits for a CPU are unknown")
        self._do(partial(self._write, counters, info, reading), _queue(info), Counted("readings"), waits=False)
        counters.readings_TK[:-1] = counters.readings_TK[1:]
        counters.readings_TK[-1] = reading

    def stat(self, info: RingInfo) -> bytes:
        """The ``stat`` of a rank's main thread, also of one that is hidden; see `RankCounters.stat`."""
        counters = self._ranks.get((info.attempt, info.rank))
        return b"" if counters is None else counters.stat()

    def laid_over(self, attempt: int, steps: StepArrays) -> StepArrays:
        """New steps of ranks with what the kernel counted during each, as far as known; `read` each rank first.

        Takes all ranks at once: a call for one rank would take as long.
        """
        if not len(steps):
            return steps
        ranks = np.unique(steps.rank_B)
        readings_RTK = np.stack([self._ranks[attempt, rank].readings_TK for rank in ranks.tolist()])
        return of_ranks_laid_over(readings_RTK, np.searchsorted(ranks, steps.rank_B), steps)

    def close(self) -> None:
        for counters in self._ranks.values():
            self._leave(counters)
        self._ranks.clear()

    def _write(self, counters: RankCounters, info: RingInfo, reading: Reading) -> None:
        try:
            if counters.log is None:
                limits = None if self._kept is None else self._kept.whole(info.world_size)
                counters.log = CountersLog(self._steps, info, limits)
            counters.log.add(reading)
        except RingError as error:
            if refusal(error) is not None:
                raise
            self._report(f"{error}; kernel counters of its rank are judged but not always kept")

    def _leave(self, counters: RankCounters) -> None:
        counters.over = True
        counters.close()
        if counters.log is not None:
            # (after queued writes)
            self._do(counters.log.close, _queue(counters.log.info), waits=False)


def _queue(info: RingInfo) -> str:
    return f"counters of {info.rank}.{info.attempt}"
