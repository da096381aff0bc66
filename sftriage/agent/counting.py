"""Reads from outside what the kernel counts of the ranks (`sftriage.model.windows`). Nothing runs in the trainers.

The training thread is taken to be the main one of the process that writes the ring, which is nearly always so. Where it
is not, it shows by a main thread that does not run while steps are taken, and nothing is said of it. What cannot be
read is unknown, and never zero.
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
"""Readings that are remembered: steps that have just ended began after the last few."""

SECOND_NS = 1_000_000_000
SLOWLY_NS = 5 * SECOND_NS
"""How often is read what decides less than the rest, or takes longer to read. What is read slowly is not kept open."""

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

CGROUPS = Path("/sys/fs/cgroup")
_DELAYS = Path("/proc/sys/kernel/task_delayacct")
_MAX_BYTES = 16384
_SWITCHES = b"voluntary_ctxt_switches:"

Say = Callable[[str], None]
Reading = tuple[int, ...]
"""When, and the counters in the order of `COUNTERS`."""
Parse = Callable[[bytes], Sequence[int]]


class Source:
    """A file, the counters in it, and what finds them there; anything but as many numbers is that it does not say.

    It stays open unless it is read slowly.
    """

    def __init__(self, path: Path, names: Sequence[str], parse: Parse, every_ns: int = 0) -> None:
        self._path, self._parse, self.every_ns = path, parse, every_ns
        self.places = [PLACE[name] for name in names]
        self.due_ns = 0
        self._descriptor = -1

    def open(self) -> None:
        if self.every_ns != SLOWLY_NS:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def values(self) -> Sequence[int]:
        """What it says now, `UNKNOWN` for each counter where it does not."""
        slow = self._descriptor < 0
        content = _content(self._path) if slow else os.pread(self._descriptor, _MAX_BYTES, 0)
        return said(self._parse, content, len(self.places))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def stat(delays: bool, content: bytes) -> Sequence[int]:
    """A thread's ``stat``: its faults, its time in the kernel, that of waiting for disks; 1 where it is stopped now.

    ``delays``: this kernel counts what waits for disks take; where it does not, it writes zeros.
    """
    fields = content.rpartition(b")")[2].split()
    minor, major, system, blocked = (int(fields[at]) for at in (7, 9, 12, 39))
    return minor, major, system * TICK_NS, blocked * TICK_NS if delays else UNKNOWN, fields[0] == b"T"


def schedstat(content: bytes) -> Sequence[int]:
    """A thread's ``schedstat``: nanoseconds run and queued.

    A kernel that is built, or told, not to count shows zeros, also of a thread that has run, and those are no answer.
    """
    run_ns, queued_ns, timeslices = map(int, content.split())
    return (run_ns, queued_ns) if timeslices else ()


def switches(content: bytes) -> Sequence[int]:
    """A thread's ``status``: its involuntary switches, and the others, in the last lines: a name may be anything."""
    woken, preempted = (int(part.split()[0]) for part in content.split(_SWITCHES)[-2:])
    return preempted, woken


def transfers(content: bytes) -> Sequence[int]:
    """A thread's ``io``: bytes read from disks, and written."""
    values = dict(line.split(b": ") for line in content.splitlines())
    return int(values[b"read_bytes"]), int(values[b"write_bytes"])


def throttled(content: bytes) -> Sequence[int]:
    """A cgroup's ``cpu.stat`` or ``cpu.stat.local``, of either version: nanoseconds that its limit kept it waiting."""
    values = dict(line.split() for line in content.splitlines())
    new = values.get(b"throttled_usec")
    return (int(values[b"throttled_time"]) if new is None else int(new) * 1000,)


def pressure(content: bytes) -> Sequence[int]:
    """A file of pressure stall information: nanoseconds that some task waited."""
    return (int(content.partition(b"some ")[2].partition(b"total=")[2].split()[0]) * 1000,)


def retransmissions(content: bytes) -> Sequence[int]:
    """A network namespace's ``snmp``: TCP segments that were sent again."""
    names, values = (line.split() for line in content.splitlines() if line.startswith(b"Tcp:"))
    return (int(values[names.index(b"RetransSegs")]),)


def _of_thread(pid: int) -> Iterator[Source]:
    """The files that tell of a process and its main thread; the first one is there as long as it is."""
    thread = Path(f"/proc/{pid}/task/{pid}")
    # (it cannot be switched off in kernels before 5.14, and is counted there)
    delays = not _DELAYS.exists() or _DELAYS.read_bytes().strip() != b"0"
    of_stat = "minor_faults", "major_faults", "system_s", "disk_s", "stopped_s"
    yield Source(thread / "stat", of_stat, partial(stat, delays))
    yield Source(thread / "schedstat", ("run_s", "queued_s"), schedstat)
    yield Source(thread / "status", ("preempted", "woken"), switches, SECOND_NS)
    yield Source(thread / "io", ("read_bytes", "written_bytes"), transfers, SLOWLY_NS)
    yield Source(Path(f"/proc/{pid}/net/snmp"), ("retransmitted",), retransmissions, SLOWLY_NS)


def _of_cgroup(pid: int) -> Iterator[Source]:
    """The files that tell of the cgroup of a process, or else of its host."""
    folders = list(cgroups(Path(f"/proc/{pid}")))
    for name in ("cpu.stat.local", "cpu.stat"):
        # (the former counts the limits of the cgroups above it too)
        limits = [folder / name for folder in folders if b"throttled_" in _content(folder / name)]
        if limits:
            yield Source(limits[0], ("throttled_s",), throttled)
            break
    for resource, counter in (("memory", "memory_s"), ("io", "io_s")):
        its = (folder / f"{resource}.pressure" for folder in folders)
        host = Path(f"/proc/pressure/{resource}")
        yield Source(next((path for path in its if path.exists()), host), (counter,), pressure, SECOND_NS)


def cgroups(process: Path, mounted: Path = CGROUPS) -> Iterator[Path]:
    """The folders of the cgroups of a process that may count its CPU time, where there are any.

    Of a process in another namespace of cgroups the path leads out of the agent's own (``/../``): there its own view of
    them is asked, in which its cgroup is the top.
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


def said(parse: Parse, content: bytes, n_values: int) -> Sequence[int]:
    """So many values of what a file says, each -1 where it says nothing of the sort."""
    try:
        found = parse(content)
    except (ValueError, IndexError, KeyError):
        found = ()
    fits = len(found) == n_values and min(found) >= UNKNOWN and max(found) < MAX_COUNT
    return found if fits else (UNKNOWN,) * n_values


class RankCounters:
    """The counters of one rank. The files of its thread stay open: what they say is never another process's.

    ``hidden`` counts reads that could not find the process, until the first that does. A rank that is ``over`` is not
    read again.
    """

    def __init__(self, info: RingInfo) -> None:
        self._info, self._open = info, list[Source]()
        self._last: Reading = (0, *(UNKNOWN for _ in COUNTERS))
        self._cgroup, self._looked_ns = b"", 0
        self.readings_TK = none_taken(KEPT_READINGS)
        self.log: CountersLog | None = None
        self.hidden, self.over = 0, False

    def read(self) -> Reading:
        """What has been counted by now; raises OSError where the process has ended or cannot be found from here."""
        if not self._open:
            self._begin()
        before, now_ns = self._last, monotonic_ns()
        found = [now_ns, *before[1:]]
        for at, one in enumerate(self._open):
            if now_ns < one.due_ns:
                continue
            one.due_ns = now_ns + one.every_ns
            try:
                values = one.values()
            except OSError:
                if at == 0:
                    raise
                values = (UNKNOWN,) * len(one.places)
            for place, value in zip(one.places, values, strict=True):
                found[1 + place] = value
        at = 1 + PLACE["stopped_s"]
        if found[at] != UNKNOWN:
            # It says whether it is so now; a sample stands for the time since the one before.
            since_ns = min(now_ns - before[0], MAX_APART_NS) if before[0] else 0
            found[at] = max(0, before[at]) + found[at] * since_ns
        if now_ns - self._looked_ns >= SLOWLY_NS:
            self._looked_ns = now_ns
            self._follow(found)
        self._last = tuple(found)
        return self._last

    def _begin(self) -> None:
        pid = self._info.pid
        try:
            self._take_up(_of_thread(pid))
            # Once they are open: until then the pid could have become another process's.
            if start_ticks(pid) != self._info.pid_start_ticks:
                raise ProcessLookupError(f"process {pid} is not the recording one")
        except BaseException:
            self.hidden += 1
            self.close()
            raise
        self.hidden, self._n_of_thread = 0, len(self._open)

    def _follow(self, found: list[int]) -> None:
        """Take up the files of the cgroup that the process is in by now; of another one nothing is known yet."""
        cgroup = _content(Path(f"/proc/{self._info.pid}/cgroup"))
        if cgroup == self._cgroup:
            return
        self._cgroup = cgroup
        for one in self._open[self._n_of_thread :]:
            one.close()
            for place in one.places:
                found[1 + place] = UNKNOWN
        del self._open[self._n_of_thread :]
        self._take_up(_of_cgroup(self._info.pid))

    def _take_up(self, sources: Iterable[Source]) -> None:
        for source in sources:
            try:
                source.open()
            except OSError:
                if not self._open:
                    raise
            else:
                self._open.append(source)

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open.clear()


class Counting:
    """Takes a reading of each rank whose steps have come, keeps it, and lays what passed over the steps.

    What is wrong is told to ``say``, and may be told again. ``kept``: how much is kept of them; by default all. ``do``
    is who writes.
    """

    def __init__(self, steps: Path, say: Say, kept: KeptSteps | None = None, do: Do = at_once) -> None:
        self._steps, self._say, self._kept, self._do = steps, say, kept, do
        self._ranks: dict[tuple[int, int], RankCounters] = {}

    def look(self, info: RingInfo) -> None:
        """Take a reading of a rank, after its new steps have been read."""
        one = self._ranks.get((info.attempt, info.rank))
        if one is None:
            one = self._ranks[info.attempt, info.rank] = RankCounters(info)
        if one.over:
            return
        try:
            reading = one.read()
        except OSError:
            # A process that has ended publishes no more steps; one that goes on is in another namespace of processes.
            if one.hidden > 1:
                self._say("cannot see the trainers' threads in /proc: whether a rank waited for a CPU is not known")
            if one.hidden != 1:
                self._leave(one)
            return
        if reading[1 + PLACE["queued_s"]] == UNKNOWN:
            self._say("the kernel does not count run-queue time: whether a rank waited for a CPU is not known")
        self._do(partial(self._write, one, info, reading), _queue(info), Counted("readings"), waits=False)
        one.readings_TK[:-1] = one.readings_TK[1:]
        one.readings_TK[-1] = reading

    def laid_over(self, attempt: int, steps: StepArrays) -> StepArrays:
        """New steps of ranks, each of which was looked at after that, with what was counted of each where it is known.

        All of them at once: those of one rank would take as long.
        """
        if not len(steps):
            return steps
        ranks = np.unique(steps.rank_B)
        readings_RTK = np.stack([self._ranks[attempt, rank].readings_TK for rank in ranks.tolist()])
        return of_ranks_laid_over(readings_RTK, np.searchsorted(ranks, steps.rank_B), steps)

    def close(self) -> None:
        for one in self._ranks.values():
            self._leave(one)
        self._ranks.clear()

    def _write(self, one: RankCounters, info: RingInfo, reading: Reading) -> None:
        try:
            if one.log is None:
                limits = None if self._kept is None else self._kept.whole(info.world_size)
                one.log = CountersLog(self._steps, info, limits)
            one.log.add(reading)
        except RingError as error:
            if refusal(error) is not None:
                raise
            self._say(f"{error}; kernel counters of its rank are judged but not always kept")

    def _leave(self, one: RankCounters) -> None:
        one.over = True
        one.close()
        if one.log is not None:
            # (after what waits to be written)
            self._do(one.log.close, _queue(one.log.info), waits=False)


def _queue(info: RingInfo) -> str:
    return f"counters of {info.rank}.{info.attempt}"
