"""Collects how the ranks of a job on this host ended: their own notes, rings, cgroup, and the kernel's log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sftriage.base.loops import Loop
from sftriage.base.process import MemoryCgroups, content_of, start_ticks
from sftriage.errors import RingError
from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.events import JobBroken, Place
from sftriage.model.hangs import Call, GroupCalls
from sftriage.runs.liveness import trainers_left
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
_KERNEL_LOG = Path("/dev/kmsg")


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
        """How the ranks have ended so far."""
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


def newest_attempt(rings: Path) -> int:
    """The newest attempt that has a ring; -1 if there is none."""
    return max((int(path.name.split(".")[1]) for path in find_rings(rings)), default=-1)


def left_in_order(rings: Path) -> bool:
    """Whether all ranks have signed off, and none with an exception, after which they may restart."""
    return trainers_left(rings) and not any(
        end.error for end, _ in ends_in(rings) if end.attempt == newest_attempt(rings)
    )


def _notes_of(path: Path) -> dict[str, Any]:
    """The notes of a rank (see `sftriage.trainer.ends`) in one; ``noticed_s`` is when its end was noticed first."""
    notes: dict[str, Any] = {}
    for line in content_of(path)[:MAX_BYTES].splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            note = json.loads(line)
            if "worker" in note:
                notes.setdefault("workers", {})[int(note["worker"])] = int(note["status"])
                notes |= {name: note[name] for name in note.keys() & {"killed_for_memory"}}
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
        out_of_memory="cgroup" if "killed_for_memory" in notes else "",
        limit_bytes=notes.get("killed_for_memory"),
        calls=calls,
        groups=groups,
    )


class KernelLog:
    """The kernel's messages from now on, as far as they may be read."""

    def __init__(self, path: Path = _KERNEL_LOG) -> None:
        self._descriptor, self._killed = -1, set[int]()
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def killed(self) -> frozenset[int]:
        """The processes that were killed for lack of memory."""
        while self._descriptor >= 0:
            try:
                record = os.read(self._descriptor, 8192)
            except BrokenPipeError:  # (messages were overwritten before they were read)
                continue
            except OSError:
                break
            if not record:
                break
            self._killed |= {int(pid) for pid in _KILLED.findall(record)}
        return frozenset(self._killed)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
