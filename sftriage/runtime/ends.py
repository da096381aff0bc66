"""Collects how the ranks of a job on this host ended: their own notes, rings, cgroup, and the kernel's log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from sftriage.base.loops import Loop
from sftriage.base.process import content_of, start_ticks
from sftriage.errors import RingError
from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.events import JobBroken, Place
from sftriage.model.hangs import Call, GroupCalls
from sftriage.runtime.launcher import Launcher
from sftriage.trainer.ends import append_end, ends_file
from sftriage.trainer.layout import find_rings
from sftriage.verdict.departures import broken_in, with_memory
from sftriage.windows.rings import Ring

MAX_BYTES = 1 << 18
"""Of a rank's notes."""
POLL_S = 0.25
"""How often to look for new ranks."""
_KILLED = re.compile(rb"Killed process (\d+)")
_KERNEL_LOG, _CGROUPS = Path("/dev/kmsg"), Path("/sys/fs/cgroup")


class JobEnds:
    """The ends of the ranks on this host, of a job whose rings are in a directory; made before the job starts.

    A thread notes when ranks end whose parent reports nothing, such as a shell or mpirun.
    """

    def __init__(self, rings: Path) -> None:
        self._rings = rings
        self._memory, self._kernel_log = MemoryCgroups(), KernelLog()
        self._poll, self._descriptors = select.poll(), dict[int, int]()
        self._known: set[Path] = set()
        self._loop = Loop("ends", self._note_ends, 0.0, failing="cannot note when ranks end")
        self._loop.start()

    def of_host(self, launcher: Launcher | None = None) -> HostEnds:
        """How the ranks have ended; call it once, when the job has ended."""
        status = None if launcher is None else launcher.exit_status
        killed, limit_bytes, by_cgroup = self._kernel_log.killed(), self._memory.limit_bytes(), self._memory.killed()
        ranks, world_size = [], 1
        for end, of_world in ends_in(self._rings):
            if launcher is not None and end.pid == launcher.pid and end.status is None:
                end = replace(end, status=status)
            ranks.append(with_memory(end, killed, limit_bytes, by_cgroup=by_cgroup))
            world_size = max(world_size, of_world)
        signalled_s = None if launcher is None else launcher.signalled_s
        return HostEnds(tuple(ranks), world_size, status, signalled_s, time.time() - time.monotonic())

    def broken(self, launcher: Launcher | None = None) -> list[JobBroken]:
        """Which rank went first, by attempts that ended early, of a job on this host alone."""
        return broken_in([self.of_host(launcher)], time.time())

    def close(self) -> None:
        if self._loop.stop(2 * POLL_S):
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()
        self._kernel_log.close()

    def _note_ends(self) -> None:
        """Note ranks that have ended since the last turn. Of those that end in two turns, the order is certain."""
        for path in {*self._rings.glob("rank-ends.*")} - self._known:
            pid, ticks = int(path.suffix[1:]), _notes_of(path).get("ticks")
            if ticks is None:
                continue
            self._known.add(path)
            # (in another container, that pid belongs to another process)
            with contextlib.suppress(OSError, AttributeError):
                if start_ticks(pid) == ticks:
                    descriptor = os.pidfd_open(pid)
                    self._descriptors[descriptor] = pid
                    self._poll.register(descriptor, select.POLLIN)
        ended, time_s = self._poll.poll(POLL_S * 1e3), time.time()
        for descriptor, _ in ended:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            append_end(ends_file(self._rings, self._descriptors.pop(descriptor)), {"gone": True}, time_s)


def ends_in(rings: Path) -> Iterable[tuple[RankEnd, int]]:
    """How the ranks ended whose files are in a directory, with the size of their world."""
    found: dict[tuple[int, int], tuple[RankEnd, int]] = {}
    for path in find_rings(rings):
        with contextlib.suppress(OSError, RingError), Ring(path) as ring:
            info = ring.info
            step, stage = ring.ended_in()
            notes = _notes_of(ends_file(rings, info.pid))
            stage = notes.get("stage") or stage
            end = _with_notes(
                RankEnd(
                    info.rank,
                    info.pid,
                    info.host,
                    step=step,
                    stage=stage,
                    sync=stage in info.schema.sync,
                    alive=bool(ring.writer_alive),
                    attempt=info.attempt,
                ),
                notes,
            )
            found[info.rank, info.attempt] = end, info.world_size
    for path in sorted(rings.glob("rank-ends.*")):
        # A rank that has recorded nothing yet.
        notes = _notes_of(path)
        about = notes.get("rank"), notes.get("attempt")
        if all(isinstance(number, int) for number in about) and about not in found:
            known = RankEnd(notes["rank"], int(path.suffix[1:]), stage=notes.get("stage") or None)
            end = _with_notes(replace(known, attempt=notes["attempt"]), notes)
            found[end.rank, end.attempt] = end, int(notes.get("world_size", 1))
    return [found[about] for about in sorted(found)]


def _notes_of(path: Path) -> dict[str, Any]:
    """The notes of a rank (see `sftriage.trainer.ends`) in one; ``noticed_s`` is when its end was noticed first."""
    notes: dict[str, Any] = {}
    for line in content_of(path)[:MAX_BYTES].splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            note = json.loads(line)
            if "worker" in note:
                notes.setdefault("workers", {})[int(note["worker"])] = int(note["status"])
                continue
            if not {"error", "status", "gone"}.isdisjoint(note):
                notes.setdefault("noticed_s", float(note["time_s"]))
            notes |= note
    return notes


def _with_notes(end: RankEnd, notes: Mapping[str, Any]) -> RankEnd:
    place = notes.get("place")
    calls: tuple[Call, ...] = ()
    groups: tuple[GroupCalls, ...] = ()
    with contextlib.suppress(ValueError):
        calls = msgspec.convert(notes.get("calls", ()), tuple[Call, ...])
        groups = msgspec.convert(notes.get("groups", ()), tuple[GroupCalls, ...])
    return replace(
        end,
        time_s=notes.get("noticed_s"),
        status=notes.get("status"),
        sent="sent" in notes,
        error=notes.get("error", ""),
        message=notes.get("message", ""),
        chain=tuple(notes.get("chain", ())),
        place=None if place is None else Place(*place),
        workers=notes.get("workers", {}),
        calls=calls,
        groups=groups,
    )


@dataclass(slots=True)
class MemoryCgroups:
    """Whether the kernel has killed a process of our cgroup since then for lack of memory.

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


def memory_cgroups(process: Path = Path("/proc/self"), mounted: Path = _CGROUPS) -> Iterable[Path]:
    """The folder of a process's memory cgroup, and of those around it, innermost first."""
    for line in content_of(process / "cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        # (in a container, the path may be the host's)
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents) if folder.exists() else (top,):
            if each.is_relative_to(top) and any(
                (each / name).exists() for name in ("memory.events", "memory.oom_control")
            ):
                yield each


def _kills(folder: Path) -> tuple[int, int]:
    """How many processes were killed there, and how often its own limit was the reason."""
    text = content_of(folder / "memory.events") or content_of(folder / "memory.oom_control")
    counts = dict(line.split() for line in text.decode("ascii", "replace").splitlines() if len(line.split()) == 2)
    kills = int(counts.get("oom_kill", 0))
    return kills, int(counts.get("oom", kills))


class KernelLog:
    """The kernel's messages from now on, as far as they may be read."""

    def __init__(self, path: Path = _KERNEL_LOG) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def killed(self) -> frozenset[int]:
        """The processes that were killed for lack of memory."""
        found: set[int] = set()
        while self._descriptor >= 0:
            try:
                record = os.read(self._descriptor, 8192)
            except BrokenPipeError:  # (messages were overwritten before they were read)
                continue
            except OSError:
                break
            if not record:
                break
            found |= {int(pid) for pid in _KILLED.findall(record)}
        return frozenset(found)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
