"""The threads of this process as evidence of a hang: where each is in Python, and what it waits for.

A trainer and its DataLoader workers call it from a thread of their own while their main thread hangs.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import CoroutineType, FrameType
from typing import Any

from sftriage.model.hangs import SourceLine, ThreadEvidence, Wait
from sftriage.trainer.kernel import CpuTime, cpu_time, process_name, wait_of
from sftriage.trainer.locks import LockWait, attribute, holder_of, local, lock_of
from sftriage.trainer.stacks import is_own, program_package

LOOK_S = 0.05
"""Seconds in which the threads' CPU time is measured."""
BUSY_FRACTION = 0.5
"""A thread that used this much of a core computes: what the kernel says of it is its wait for the interpreter."""
MAX_FRAMES, MAX_ALL_FRAMES, OWN_FRAMES = 24, 64, 6
"""Frames of a thread, and in detail; of more, the innermost ones and this number of the program's own."""
MAX_THREADS, MAX_WALKED, MAX_SOURCE = 128, 256, 200

OURS = "sftriage-"
"""How the names of sftriage's own threads begin (`start_thread`)."""
_PEERS = {
    **dict.fromkeys(("recv", "irecv", "broadcast", "broadcast_object_list", "scatter"), "src"),
    **dict.fromkeys(("send", "isend", "reduce", "gather", "gather_object"), "dst"),
}
_PEERS_FILE = "/torch/distributed/distributed_c10d.py"
_LOADER_FILE = "/torch/utils/data/dataloader.py"


def line_of(function: str, file: str, line: int, package: str | None) -> SourceLine:
    """A line, with its source if the program has it in memory: no file is read."""
    cached = linecache.cache.get(file, ())
    lines = cached[2] if len(cached) == 4 else ()
    source = lines[line - 1].strip()[:MAX_SOURCE] if 0 < line <= len(lines) else ""
    return SourceLine(function, file, line, source, is_own(file, package))


def training_thread() -> int:
    """The ident of the thread whose step is open; between steps, and in a worker, the main one's."""
    recording: Any = sys.modules.get("sftriage.trainer.recording")
    owner = 0 if recording is None else recording.step_owner()
    return owner if owner in sys._current_frames() else threading.main_thread().ident or 0


def package_of_main() -> str | None:
    """See `program_package`."""
    frame = sys._current_frames().get(training_thread())
    return program_package(inner.f_code.co_filename for inner in reversed(_walked(frame)))


def loader_workers() -> frozenset[int]:
    """The pids of the workers of the DataLoader in which the training thread waits; none if it waits in none."""
    for frame in _walked(sys._current_frames().get(training_thread())):
        if frame.f_code.co_filename.endswith(_LOADER_FILE):
            workers = attribute(local(frame, "self"), "_workers")
            popens = [attribute(worker, "_popen") for worker in workers] if isinstance(workers, list) else []
            return frozenset(pid for popen in popens if type(pid := attribute(popen, "pid")) is int)
    return frozenset()


def plain(record: object) -> Any:
    """A record of `sftriage.model.hangs` as JSON, without what is as by default."""
    if is_dataclass(record):
        pairs = ((about, getattr(record, about.name)) for about in fields(record))
        return {about.name: plain(value) for about, value in pairs if value != about.default}
    return [plain(item) for item in record] if isinstance(record, tuple) else record


@dataclass(frozen=True, slots=True)
class _Threads:
    """All threads at one moment, by ident, and what was measured of them before."""

    frames: Mapping[int, Sequence[FrameType]]
    names: Mapping[int, str]
    native_ids: Mapping[int, int]
    before: Mapping[int, CpuTime | None]
    main: int
    package: str | None

    def evidence(self, ident: int, detail: bool) -> ThreadEvidence:
        frames = self.frames[ident]
        lock = lock_of(frames)
        wait = self._waiting(ident, lock)
        peer = next((peer for frame in frames if (peer := _peer_of(frame)) is not None), None)
        return ThreadEvidence(
            self.names[ident], ident == self.main, self._lines(frames, detail), replace(wait, peer=peer)
        )

    def holder(self, ident: int) -> int | None:
        """The thread that holds the lock that a thread waits for."""
        lock = lock_of(self.frames[ident])
        found = None if lock is None else holder_of(lock.awaited, self.frames)
        return None if found is None else found.ident

    def _waiting(self, ident: int, lock: LockWait | None) -> Wait:
        native_id = self.native_ids.get(ident)
        if native_id is None:
            return self._on(ident, lock, Wait())
        now, before = cpu_time(native_id), self.before.get(ident)
        used = now.fraction_since(before) if now is not None and before is not None else None
        if used is not None and used >= BUSY_FRACTION:
            return Wait("R", cpu_fraction=used)
        kernel = wait_of(native_id)
        held_by = kernel.held_by
        if awaited := kernel.awaited_pid or _child_of(self.frames[ident]):
            held_by = process_name(awaited)
        found = Wait(kernel.state, kernel.syscall, kernel.wchan, kernel.path, held_by=held_by, cpu_fraction=used)
        return self._on(ident, lock, found)

    def _on(self, ident: int, lock: LockWait | None, wait: Wait) -> Wait:
        if lock is None:
            return wait
        wait = replace(wait, lock=lock.name, is_queue=type(lock.awaited).__name__ == "SimpleQueue")
        holder = holder_of(lock.awaited, self.frames)
        if holder is None:
            return wait
        frames = self.frames[holder.ident]
        if holder.frame is not None and holder.ident == ident:
            # (a thread that waits for itself: where it took the lock)
            frames = frames[list(frames).index(holder.frame) :]
        lines = [self._line(frame) for frame in frames]
        place = next((line for line in lines if line.own), lines[0])
        return replace(wait, held_by=f"thread {self.names[holder.ident]}", held_at=place)

    def _line(self, frame: FrameType) -> SourceLine:
        code = frame.f_code
        return line_of(code.co_name, code.co_filename, frame.f_lineno or 0, self.package)

    def _lines(self, frames: Sequence[FrameType], detail: bool) -> tuple[SourceLine, ...]:
        lines, n_lines = tuple(map(self._line, frames)), MAX_ALL_FRAMES if detail else MAX_FRAMES
        if len(lines) <= n_lines:
            return lines
        inner, outer = lines[: n_lines - OWN_FRAMES], lines[n_lines - OWN_FRAMES :]
        return (*inner, *[line for line in outer if line.own][:OWN_FRAMES])


def threads_of_this_process(detail: bool) -> tuple[ThreadEvidence, ...]:
    """The main thread, those that hold the locks that keep it, and in detail all others.

    Takes `LOOK_S`, and neither waits nor runs anything of the program.
    """
    running = _running()
    native_ids = {ident: native_id for ident, (_, native_id) in running.items() if native_id is not None}
    measured = list(native_ids)[:MAX_THREADS]
    before = {ident: cpu_time(native_ids[ident]) for ident in measured}
    time.sleep(LOOK_S)
    main = training_thread()
    frames = {ident: _walked(frame) for ident, frame in sys._current_frames().items()}
    frames = {main: frames.pop(main, []), **frames}
    names = {ident: running.get(ident, (f"thread {ident}", None))[0] for ident in frames}
    frames = {ident: of for ident, of in frames.items() if ident == main or not names[ident].startswith(OURS)}
    package = program_package(frame.f_code.co_filename for frame in reversed(frames[main]))
    threads = _Threads(frames, names, native_ids, before, main, package)
    chosen = dict.fromkeys((*_held_up(threads), *(frames if detail else ())))
    return tuple(threads.evidence(ident, detail) for ident in list(chosen)[:MAX_THREADS])


def _held_up(threads: _Threads) -> list[int]:
    """The main thread, the one that holds the lock that it waits for, the one that holds that one's, and so on."""
    chosen, ident = list[int](), threads.main
    while ident not in chosen:
        chosen.append(ident)
        holder = threads.holder(ident)
        if holder is None:
            break
        ident = holder
    return chosen


def _running() -> dict[int, tuple[str, int | None]]:
    """Names and kernel's ids of Python's threads by ident, without the lock that `threading.enumerate` takes."""
    active: Mapping[int, threading.Thread] = dict(getattr(threading, "_active", {}))
    main = threading.main_thread()
    # (for the main thread of a forked process, threading has the id from before the fork)
    return {
        ident: (thread.name, os.getpid() if thread is main else thread.native_id) for ident, thread in active.items()
    }


def _walked(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < MAX_WALKED:
        found.append(frame)
        frame = frame.f_back
    return [*_suspended(found), *found]


def _suspended(frames: Sequence[FrameType]) -> list[FrameType]:
    """The frames, innermost first, of the coroutine that an idle event loop runs until it is complete."""
    if not (len(frames) > 1 and frames[1].f_code.co_name == "_run_once"):
        return []
    loops = (frame for frame in frames if frame.f_code.co_name == "run_until_complete")
    task: Any = next((local(frame, "future") for frame in loops), None)
    is_task = type(task) is getattr(sys.modules.get("asyncio"), "Task", None)
    found, coroutine = list[FrameType](), task.get_coro() if is_task else None
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None and len(found) < MAX_WALKED:
        found.append(coroutine.cr_frame)
        coroutine = coroutine.cr_await
    return found[::-1]


def _peer_of(frame: FrameType) -> int | None:
    """The rank that a frame of torch.distributed receives from or sends to, or the root of its collective."""
    code = frame.f_code
    name = _PEERS.get(code.co_name)
    if name is None or not code.co_filename.endswith(_PEERS_FILE):
        return None
    peer = local(frame, name)
    return peer if type(peer) is int else None


def _child_of(frames: Iterable[FrameType]) -> int:
    """The child process whose end a thread waits for in Python's ``subprocess``; 0 if none."""
    for frame in frames:
        code = frame.f_code
        if code.co_filename.endswith("/subprocess.py") and code.co_name in ("wait", "_wait", "communicate"):
            pid = attribute(local(frame, "self"), "pid")
            return pid if type(pid) is int else 0
    return 0
