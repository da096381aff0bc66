"""Collects how the ranks of a job on this host ended: their own notes, rings, cgroup, and the kernel's log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sftriage.base.process import content_of
from sftriage.errors import RingError
from sftriage.model.events import JobBroken, Place
from sftriage.runtime.launcher import Launcher
from sftriage.trainer.ends import ends_file
from sftriage.trainer.layout import find_rings
from sftriage.verdict.departures import JobEnd, RankEnd, broken_by
from sftriage.windows.rings import Ring

MAX_BYTES = 1 << 18
"""Of a rank's notes."""
_KILLED = re.compile(rb"Killed process (\d+)")
_KERNEL_LOG, _CGROUPS = Path("/dev/kmsg"), Path("/sys/fs/cgroup")


class JobEnds:
    """The ends of the ranks of a job whose rings are in a directory; made before the job starts."""

    def __init__(self, rings: Path) -> None:
        self._rings = rings
        self._memory, self._kernel_log = MemoryCgroups(), KernelLog()

    def broken(self, launcher: Launcher | None = None) -> list[JobBroken]:
        """Which rank went first, by attempts that ended early; call it once, when the job has ended."""
        status = None if launcher is None else launcher.exit_status
        attempts: defaultdict[int, list[RankEnd]] = defaultdict(list)
        world_size = 1
        for end, attempt, of_world in ends_in(self._rings):
            if launcher is not None and end.pid == launcher.pid and end.status is None:
                end = replace(end, status=status)
            attempts[attempt].append(end)
            world_size = max(world_size, of_world)
        about = JobEnd(
            world_size=world_size,
            signalled_s=None if launcher is None else launcher.signalled_s,
            out_of_memory=self._memory.killed(),
            limit_bytes=self._memory.limit_bytes(),
            killed=self._kernel_log.killed(),
        )
        found = []
        for attempt, ends in sorted(attempts.items()):
            restarted = attempt != max(attempts)
            job = replace(about, attempt=attempt, restarted=restarted, succeeded=not restarted and status == 0)
            found.append(broken_by(sorted(ends, key=lambda end: end.rank), job, time.time()))
        return [event for event in found if event is not None]

    def close(self) -> None:
        self._kernel_log.close()


def ends_in(rings: Path) -> Iterable[tuple[RankEnd, int, int]]:
    """How the ranks ended whose files are in a directory, with their attempts and the size of their world."""
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
                ),
                notes,
            )
            found[info.rank, info.attempt] = end, info.world_size
    for path in sorted(rings.glob("rank-ends.*")):
        # A rank that has recorded nothing yet.
        notes = _notes_of(path)
        about = notes.get("rank"), notes.get("attempt")
        if all(isinstance(number, int) for number in about) and about not in found:
            end = _with_notes(RankEnd(notes["rank"], int(path.suffix[1:]), stage=notes.get("stage") or None), notes)
            found[notes["rank"], notes["attempt"]] = end, int(notes.get("world_size", 1))
    return [(end, attempt, world_size) for (_, attempt), (end, world_size) in sorted(found.items())]


def _notes_of(path: Path) -> dict[str, Any]:
    """The notes of a rank (see `sftriage.trainer.ends`) in one; ``noticed_s`` is when its end was noticed first."""
    notes: dict[str, Any] = {}
    for line in content_of(path)[:MAX_BYTES].splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            note = json.loads(line)
            if "worker" in note:
                notes.setdefault("workers", {})[int(note["worker"])] = int(note["status"])
                continue
            if "error" in note or "status" in note:
                notes.setdefault("noticed_s", float(note["time_s"]))
            notes |= note
    return notes


def _with_notes(end: RankEnd, notes: Mapping[str, Any]) -> RankEnd:
    place = notes.get("place")
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
