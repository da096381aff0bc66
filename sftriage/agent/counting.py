"""Reads the kernel's counters of the ranks (`sftriage.model.windows`) from outside; `RankRings` calls it.

It reads the main thread of the process that writes the ring, which is nearly always the training thread. If it is not,
that thread does not run during steps, and its counters are ignored. A counter that cannot be read is unknown, never
zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns

import numpy as np

from sftriage.base.process import start_ticks
from sftriage.errors import RingError
from sftriage.model.windows import COUNTERS, PLACE
from sftriage.traces.disk import Counted, Do, at_once, refusal
from sftriage.trainer.layout import MAX_COUNT, RingInfo
from sftriage.windows.decoding import UNKNOWN, StepArrays
from sftriage.windows.logs import MAX_APART_NS, none_taken, of_ranks_laid_over
from sftriage.windows.steplog import CountersLog, KeptSteps

KEPT_READINGS = 8
"""How many readings to remember: steps that have just ended began after the last few."""

SECOND_NS = 1_000_000_000
SLOWLY_NS = 5 * SECOND_NS
"""How often to read counters that matter less, or take longer to read. Files that are read slowly are not kept open."""

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

CGROUPS = Path("/sys/fs/cgroup")
_DELAYS = Path("/proc/sys/kernel/task_delayacct")
_MAX_BYTES = 16384
_SWITCHES = b"voluntary_ctxt_switches:"

Report = Callable[[str], None]
Reading = tuple[int, ...]
"""The time, and the counters in the order of `COUNTERS`."""
Parse = Callable[[bytes], Sequence[int]]


class Source:
    """A file with some counters, and its parser. It stays open unless it is read slowly."""

    def __init__(self, path: Path, names: Sequence[str], parse: Parse, every_ns: int = 0) -> None:
        self._path, self._parse, self.every_ns = path, parse, every_ns
        self.places = [PLACE[name] for name in names]
        self.due_ns = 0
        self._descriptor = -1

    def open(self) -> None:
        if self.every_ns != SLOWLY_NS:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def values(self) -> Sequence[int]:
        """Its counters now; all `UNKNOWN` if it does not have all of them."""
        slow = self._descriptor < 0
        content = _content(self._path) if slow else os.pread(self._descriptor, _MAX_BYTES, 0)
        return parsed(self._parse, content, len(self.places))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def stat(delays: bool, content: bytes) -> Sequence[int]:
    """A thread's ``stat``: its faults, its time in the kernel, its time waiting for disks, and whether it is stopped.

    ``delays``: this kernel counts the time waiting for disks. If it does not, it writes zeros.
    """
    fields = content.rpartition(b")")[2].split()
    minor, major, system, blocked = (int(fields[at]) for at in (7, 9, 12, 39))
    return minor, major, system * TICK_NS, blocked * TICK_NS if delays else UNKNOWN, fields[0] == b"T"


def schedstat(content: bytes) -> Sequence[int]:
    """A thread's ``schedstat``: nanoseconds run and queued.

    A kernel that is built or configured not to count writes zeros, even for a thread that has run: these are unknown.
    """
    run_ns, queued_ns, timeslices = map(int, content.split())
    return (run_ns, queued_ns) if timeslices else ()


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


def _of_thread(pid: int) -> Iterator[Source]:
    """The files on a process and its main thread; the first one exists as long as the process."""
    thread = Path(f"/proc/{pid}/task/{pid}")
    # (kernels before 5.14 always count them)
    delays = not _DELAYS.exists() or _DELAYS.read_bytes().strip() != b"0"
    of_stat = "minor_faults", "major_faults", "system_s", "disk_s", "stopped_s"
    yield Source(thread / "stat", of_stat, partial(stat, delays))
    yield Source(thread / "schedstat", ("run_s", "queued_s"), schedstat)
    yield Source(thread / "status", ("preempted", "woken"), switches, SECOND_NS)
    yield Source(thread / "io", ("read_bytes", "written_bytes"), transfers, SLOWLY_NS)
    yield Source(Path(f"/proc/{pid}/net/snmp"), ("retransmitted",), retransmissions, SLOWLY_NS)


def _of_cgroup(pid: int) -> Iterator[Source]:
    """The files on the cgroup of a process, or else on its host."""
    folders = list(cgroups(Path(f"/proc/{pid}")))
    for name in ("cpu.stat.local", "cpu.stat"):
        # (the former includes the limits of the parent cgroups)
        limits = [folder / name for folder in folders if b"throttled_" in _content(folder / name)]
        if limits:
            yield Source(limits[0], ("throttled_s",), throttled)
            break
    for resource, counter in (("memory", "memory_s"), ("io", "io_s")):
        paths = (folder / f"{resource}.pressure" for folder in folders)
        host = Path(f"/proc/pressure/{resource}")
        yield Source(next((path for path in paths if path.exists()), host), (counter,), pressure, SECOND_NS)


def cgroups(process: Path, mounted: Path = CGROUPS) -> Iterator[Path]:
    """The folders of the cgroups of a process that may count its CPU time.

    The path of a process in another cgroup namespace leads out of the agent's (``/../``). It is read in that process's
    own view, in which its cgroup is the root.
    """
    for line in _content(process / "cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        outside = path.startswith("/..")
        top = process / "root" / mounted.relative_to("/") if outside else mounted
        for name in (controllers, "cpu", "cpu,cpuacct") if controllers else ("", "unified"):
            folder = top / name / ("" if outside else path.lstrip("/"))
            if (folder / "cpu.stat").exists():
                yield folder
                break


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def parsed(parse: Parse, content: bytes, n_values: int) -> Sequence[int]:
    """The values in a file; all `UNKNOWN` unless it has exactly ``n_values`` valid ones."""
    try:
        found = parse(content)
    except (ValueError, IndexError, KeyError):
        found = ()
    fits = len(found) == n_values and min(found) >= UNKNOWN and max(found) < MAX_COUNT
    return found if fits else (UNKNOWN,) * n_values


class RankCounters:
    """The counters of one rank. The files of its thread stay open, so they never show another process's counters.

    ``hidden`` counts reads that could not find the process, until the first that does. A rank that is ``over`` is not
    read again.
    """

    def __init__(self, info: RingInfo) -> None:
        self._info, self._open = info, list[Source]()
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
        if now_ns - self._checked_ns >= SLOWLY_NS:
            self._checked_ns = now_ns
            self._follow(found)
        self._last = tuple(found)
        return self._last

    def _begin(self) -> None:
        pid = self._info.pid
        try:
            self._add(_of_thread(pid))
            # Check only once they are open: before that, the pid could become another process's.
            if start_ticks(pid) != self._info.pid_start_ticks:
                raise ProcessLookupError(f"process {pid} is not the recording one")
        except BaseException:
            self.hidden += 1
            self.close()
            raise
        self.hidden, self._n_of_thread = 0, len(self._open)

    def _follow(self, found: list[int]) -> None:
        """Open the files of the process's current cgroup; the counters of a new cgroup start as unknown."""
        cgroup = _content(Path(f"/proc/{self._info.pid}/cgroup"))
        if cgroup == self._cgroup:
            return
        self._cgroup = cgroup
        for source in self._open[self._n_of_thread :]:
            source.close()
            for place in source.places:
                found[1 + place] = UNKNOWN
        del self._open[self._n_of_thread :]
        self._add(_of_cgroup(self._info.pid))

    def _add(self, sources: Iterable[Source]) -> None:
        for source in sources:
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


class Counting:
    """Reads the counters of each rank that has new steps, logs them, and adds what they counted to the steps.

    ``report`` gets problems, which may repeat. ``kept`` limits the logs (by default, they keep everything); ``do``
    runs the writes.
    """

    def __init__(self, steps: Path, report: Report, kept: KeptSteps | None = None, do: Do = at_once) -> None:
        self._steps, self._report, self._kept, self._do = steps, report, kept, do
        self._ranks: dict[tuple[int, int], RankCounters] = {}

    def read(self, info: RingInfo) -> None:
        """Read the counters of a rank, after its new steps have been read."""
        counters = self._ranks.get((info.attempt, info.rank))
        if counters is None:
            counters = self._ranks[info.attempt, info.rank] = RankCounters(info)
        if counters.over:
            return
        try:
            reading = counters.read()
        except OSError:
            # A process that has ended publishes no steps; one that still does is in another PID namespace.
            if counters.hidden > 1:
                self._report("cannot see the trainers' threads in /proc, so ranks' waits for a CPU are unknown")
            if counters.hidden != 1:
                self._leave(counters)
            return
        if reading[1 + PLACE["queued_s"]] == UNKNOWN:
            self._report("the kernel does not count run-queue time, so ranks' waits for a CPU are unknown")
        self._do(partial(self._write, counters, info, reading), _queue(info), Counted("readings"), waits=False)
        counters.readings_TK[:-1] = counters.readings_TK[1:]
        counters.readings_TK[-1] = reading

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
