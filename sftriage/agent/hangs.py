"""The evidence of a host's ranks in a job that hangs; `Agent` polls it.

Each rank gives its own account (`sftriage.agent.answers`). The kernel adds the states of its process and its children,
and py-spy the stacks of those that give none.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from sftriage.agent.answers import TrainerAccount, TrainerRequest
from sftriage.agent.reading import RankRings
from sftriage.agent.stacks import find_py_spy, reason_of, threads_of
from sftriage.base.bounds import bounded
from sftriage.base.process import BoundedProgram, content_of, stat_fields
from sftriage.errors import CaptureError
from sftriage.model.hangs import FACTS, INTERPRETER, RankEvidence, SourceLine, ThreadEvidence, Wait, WorkerEvidence
from sftriage.model.windows import RankStatus
from sftriage.trainer.executor import HANG_DETAIL_TOKEN, HANG_TOKEN
from sftriage.trainer.layout import RingInfo
from sftriage.trainer.stacks import is_own

ANSWER_S, SILENT_S, DUMP_S = 3.5, 1.0, 2.0
"""How long a rank may take to answer; after how long without an answer py-spy reads it; and how long that may take."""
MAX_DUMPS, MAX_DUMPS_AT_ONCE = 16, 4
MAX_WORKERS, MAX_THREADS, MAX_FRAMES, MAX_STATES = 32, 64, 64, 512
MAX_DUMP_BYTES, MAX_LINE = 4 << 20, 1 << 31
_ENDED, _STOPPED, _TRACED = "ZXx", "T", "t"
_UNANSWERED = "it gives no answer: native code may hold its interpreter"
_WHY = {
    **dict.fromkeys(_ENDED, "its process has ended"),
    _STOPPED: "its process is stopped",
    _TRACED: "a debugger holds its process",
    "D": "it gives no answer, and its main thread is in an uninterruptible sleep",
}


@dataclass(frozen=True, slots=True)
class KernelState:
    """A process or thread by the kernel; ``exit_status`` is of a zombie, as far as it may be read."""

    state: str = ""
    wchan: str = ""
    parent: int = 0
    start_ticks: int = 0
    exit_status: int | None = None

    @classmethod
    def of(cls, stat: bytes, wchan: bytes = b"") -> KernelState:
        """The state by the content of ``stat`` and ``wchan``; an empty one if the process is gone."""
        fields = stat_fields(stat)
        if len(fields) < 50:
            return GONE
        state, status = fields[0].decode("ascii", "replace"), int(fields[49])
        name = wchan.decode("ascii", "replace").strip()
        # (zero also means that it may not be read)
        ended = os.waitstatus_to_exitcode(status) if state in _ENDED and status else None
        return cls(state, "" if name == "0" else name, int(fields[1]), int(fields[19]), ended)

    @classmethod
    def at(cls, process: Path) -> KernelState:
        """The state of the process or thread of a directory in /proc."""
        return cls.of(content_of(process / "stat"), content_of(process / "wchan"))


GONE = KernelState()


def kernel_state(info: RingInfo, stat: Callable[[RingInfo], bytes]) -> tuple[KernelState, bool]:
    """The kernel's state of a rank, and whether its pid is valid here. ``stat`` reads it from another PID namespace."""
    found = KernelState.at(Path(f"/proc/{info.pid}"))
    if found.start_ticks == info.pid_start_ticks and found != GONE:
        return found, True
    try:
        return KernelState.of(stat(info)), False
    except OSError:
        return GONE, False


def children_of(pids: Collection[int]) -> dict[int, list[int]]:
    """The children of some processes, by parent; few kernels list them."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                parent = KernelState.of(content_of(Path(entry.path, "stat"))).parent
                if parent in pids:
                    found.setdefault(parent, []).append(int(entry.name))
    return found


def source_line(frame: Mapping[str, Any]) -> SourceLine:
    """A frame of a dump, with the function's name as Python itself has it."""
    file = str(frame.get("filename"))
    line = frame.get("line")
    line = line if isinstance(line, int) and 0 <= line < MAX_LINE else 0
    function = str(frame.get("name")).rpartition(".")[2]
    return SourceLine(function, file, line, own=is_own(file))


def thread_states(pid: int) -> dict[int, KernelState]:
    """The states of the threads of a process, by number."""
    try:
        tasks = [*islice(Path(f"/proc/{pid}/task").iterdir(), MAX_STATES)]
    except OSError:
        return {}
    return {int(task.name): KernelState.at(task) for task in tasks}


def threads_from(
    dumped: Sequence[Any], pid: int = 0, states: Mapping[int, KernelState] = MappingProxyType({})
) -> tuple[ThreadEvidence, ...]:
    """The threads of a dump in py-spy's form, of the process ``pid`` if that is known, with their ``states``."""
    found = []
    for thread in [thread for thread in dumped if isinstance(thread, dict)][:MAX_THREADS]:
        frames = [frame for frame in thread.get("frames") or () if isinstance(frame, dict)][:MAX_FRAMES]
        name, number = thread.get("thread_name"), thread.get("os_thread_id")
        kernel = states.get(number, GONE) if isinstance(number, int) else GONE
        found.append(
            ThreadEvidence(
                name=str(name or f"thread {number or thread.get('thread_id')}"),
                main=name == "MainThread" or (pid > 0 and number == pid),
                frames=tuple(map(source_line, frames)),
                wait=Wait(state=kernel.state, wchan=kernel.wchan),
            )
        )
    return bounded(tuple(found))


def interpreter_holder(dumped: Sequence[Any]) -> str:
    """The name of the thread that holds the interpreter, by py-spy; "" if none does."""
    holders = (thread for thread in dumped if isinstance(thread, dict) and thread.get("owns_gil") is True)
    return str(next((thread.get("thread_name") or "a thread" for thread in holders), ""))


def without_interpreter(threads: Sequence[ThreadEvidence], holder: str) -> tuple[ThreadEvidence, ...]:
    """Threads of a rank that does not answer; the main one waits for the interpreter if another one holds that."""
    frames = next((thread.frames for thread in threads if thread.name == holder and not thread.main), ())
    at = next((frame for frame in frames if frame.own), None)
    wait = Wait(lock=INTERPRETER, held_by=f"thread {holder}", held_at=at)
    return tuple(replace(thread, wait=wait) if thread.main and frames else thread for thread in threads)


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank while its evidence is gathered. ``pid`` is 0 if it means nothing here."""

    info: RingInfo
    detailed: bool
    kernel: KernelState
    pid: int
    request: TrainerRequest | None = None
    problem: str = ""
    account: TrainerAccount | None = None
    # By pid, of the process and of its children: the threads, or why there are none; and their states before.
    dumps: dict[int, list[Any] | str] = field(default_factory=dict)
    states: dict[int, Mapping[int, KernelState]] = field(default_factory=dict)
    children: Sequence[int] | None = None

    @property
    def awaited(self) -> bool:
        """Whether it may still answer."""
        return self.account is None and self.request is not None and self.kernel.state not in (*_ENDED, _STOPPED)

    def poll(self, rings: RankRings) -> None:
        """Take the kernel's state of the rank, and its answer if there is one."""
        # (py-spy interrupts system calls, which changes how they wait)
        if self.pid not in self.states:
            self.kernel, _ = kernel_state(self.info, rings.stat)
        if self.account is not None or self.request is None:
            return
        try:
            answer = self.request.answer()
        except CaptureError as error:
            self.request, self.problem = None, str(error)
            return
        if answer is not None and answer.rank_evidence is not None:
            self.account = answer.rank_evidence
        elif answer is not None:
            self.account = TrainerAccount(
                threads=threads_from(answer.threads), problem="its sftriage sends stacks alone"
            )

    def due(self) -> list[int]:
        """The processes of which py-spy would add the stacks: this one, or workers without any."""
        if not self.detailed or not self.pid:
            return []
        if self.account is not None:
            return [worker.pid for worker in self.account.workers if not worker.threads and self._has(worker.pid)]
        return [] if self.kernel.state in _ENDED else [self.pid, *(self.children or ())]

    def _has(self, pid: int) -> bool:
        return KernelState.at(Path(f"/proc/{pid}")).parent == self.pid

    def evidence(self, status: RankStatus) -> RankEvidence:
        """All that is known of the rank."""
        found = RankEvidence(
            rank=status.rank,
            host=status.host,
            pid=self.info.pid,
            step=status.step,
            stage=status.stage,
            in_stage_s=max(0.0, status.stage_age_ns / 1e9),
            alive=status.alive,
            closed=status.closed,
            state=self.kernel.state,
            wchan=self.kernel.wchan,
            exit_status=self.kernel.exit_status,
        )
        if self.account is not None:
            about = {name: getattr(self.account, name) for name in self.account.__struct_fields__}
            about["workers"] = tuple(self._completed(worker) for worker in self.account.workers)
            return replace(found, answered=True, **about)
        dumped = self.dumps.get(self.pid, "")
        threads = () if isinstance(dumped, str) else threads_from(dumped, self.pid, self.states[self.pid])
        if self.kernel.state not in (_STOPPED, _TRACED):
            threads = without_interpreter(threads, interpreter_holder(dumped))
        return replace(found, threads=threads, problem=self._why(status), workers=self._children())

    def _why(self, status: RankStatus) -> str:
        """Why it gives no account."""
        dumped = self.dumps.get(self.pid, "")
        if status.closed and self.request is None and status.alive is not False:
            why = "it has stopped recording"
        else:
            state = self.kernel.state or ("Z" if status.alive is False else "")
            why = _WHY.get(state, self.problem or _UNANSWERED)
        if isinstance(dumped, str):
            return f"{why}; {dumped}" if dumped else why
        holder = interpreter_holder(dumped)
        return (
            f"it gives no answer: its thread {holder} holds the interpreter" if holder and why == _UNANSWERED else why
        )

    def _children(self) -> tuple[WorkerEvidence, ...]:
        why = "its trainer does not answer"
        found = ((pid, KernelState.at(Path(f"/proc/{pid}"))) for pid in self.children or ())
        workers = (WorkerEvidence(pid, "", problem=why, exit_status=state.exit_status) for pid, state in found)
        return tuple(map(self._completed, workers))

    def _completed(self, worker: WorkerEvidence) -> WorkerEvidence:
        """A worker with what the kernel and py-spy add, where the trainer left it empty."""
        states = self.states.get(worker.pid, {})
        kernel = states.get(worker.pid) or (KernelState.at(Path(f"/proc/{worker.pid}")) if self.pid else GONE)
        if kernel != GONE and kernel.parent == self.pid:
            worker = replace(worker, state=worker.state or kernel.state, wchan=worker.wchan or kernel.wchan)
        dumped = self.dumps.get(worker.pid)
        if isinstance(dumped, list) and not worker.threads:
            worker = replace(worker, threads=threads_from(dumped, worker.pid, self.states[worker.pid]), problem="")
        return worker


class _Dumps:
    """Runs py-spy on some processes, a few at a time; ``take`` gets the threads of each, or why there are none."""

    def __init__(self) -> None:
        self._due = deque[tuple[_Rank, int]]()
        self._running: dict[int, tuple[_Rank, BoundedProgram]] = {}
        self._known: set[int] = set()

    @property
    def busy(self) -> bool:
        return bool(self._due or self._running)

    def add(self, ranks: Iterable[_Rank]) -> None:
        new = [(rank, pid) for rank in ranks for pid in rank.due() if pid not in self._known]
        new.sort(key=lambda each: each[1] != each[0].pid)
        del new[MAX_DUMPS - len(self._known) :]
        self._known.update(pid for _, pid in new)
        self._due += new

    def poll(self, end_s: float) -> None:
        for pid, (rank, program) in list(self._running.items()):
            try:
                finished = program.poll()
                if finished is None:
                    continue
                rank.dumps[pid] = threads_of(finished.output) if finished.status == 0 else reason_of(finished, pid)
            except CaptureError as error:
                rank.dumps[pid] = str(error)
            del self._running[pid]
        while self._due and len(self._running) < MAX_DUMPS_AT_ONCE:
            rank, pid = self._due.popleft()
            state, rank.states[pid] = KernelState.at(Path(f"/proc/{pid}")).state, thread_states(pid)
            # py-spy would wait for a process that cannot be stopped, or is already.
            extra = ["--nonblocking"] if state in (_STOPPED, _TRACED, "D") else []
            try:
                command: list[str | Path] = [find_py_spy(), "dump", "--json", "--pid", str(pid), *extra]
                deadline_s = max(0.1, min(DUMP_S, end_s - monotonic()))
                program = BoundedProgram(command, deadline_s, max_output_bytes=MAX_DUMP_BYTES)
            except CaptureError as error:
                rank.dumps[pid] = str(error)
            else:
                self._running[pid] = rank, program

    def close(self) -> None:
        for _, program in self._running.values():
            program.kill()


Gathered = Generator[None, None, tuple[RankEvidence, ...]]


def gathered(rings: RankRings, directory: Path, token: str, detail: Collection[int]) -> Gathered:
    """The evidence of the ranks of the newest generation, turn by turn, for `ANSWER_S` at most.

    For a token of `FACTS`, that is the facts of the ranks in ``detail``.
    """
    began_s = monotonic()
    end_s = began_s + ANSWER_S
    newest = max((info.attempt for info in rings.infos), default=0)
    infos = sorted((info for info in rings.infos if info.attempt == newest), key=attrgetter("rank"))
    infos = [info for info in infos if info.rank in detail or not token.startswith(FACTS)]
    ranks = [_requested(directory, info, rings, token, info.rank in detail) for info in infos]
    with contextlib.closing(_Dumps()) as dumps:
        silent = False
        while True:
            for rank in ranks:
                rank.poll(rings)
            awaited = [rank for rank in ranks if rank.awaited]
            silent = silent or monotonic() >= began_s + SILENT_S
            unanswered = [rank for rank in ranks if rank.account is None and (silent or not rank.awaited)]
            _find_children([rank for rank in unanswered if rank.children is None])
            dumps.add(rank for rank in ranks if rank.account is not None or rank in unanswered)
            dumps.poll(end_s)
            if not (awaited or dumps.busy) or monotonic() >= end_s:
                break
            yield
    job = rings.statuses()
    now = {status.rank: status for status in (() if job is None else job.ranks)}
    return tuple(rank.evidence(now[rank.info.rank]) for rank in ranks if rank.info.rank in now)


def _requested(directory: Path, info: RingInfo, rings: RankRings, token: str, detailed: bool) -> _Rank:
    line = f"{HANG_DETAIL_TOKEN if detailed else HANG_TOKEN} {token}"
    if token.startswith(FACTS):
        line, detailed = token, False
    kernel, visible = kernel_state(info, rings.stat)
    rank = _Rank(info, detailed, kernel, info.pid if visible else 0)
    try:
        rank.request = TrainerRequest(directory, info, line)
    except CaptureError as error:
        rank.problem = str(error)
    return rank


def _find_children(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.children = ()
    some = {rank.pid: rank for rank in ranks if rank.pid and rank.detailed}
    for pid, children in (children_of(some) if some else {}).items():
        some[pid].children = children[:MAX_WORKERS]


class HangSampler:
    """Gathers evidence for a loop that must not block, and keeps it until the next token."""

    def __init__(self, rings: RankRings, directory: Path) -> None:
        self._rings, self._directory = rings, directory
        self._subject: tuple[str, tuple[int, ...]] | None = None
        self._turns: Gathered | None = None
        self._found: tuple[RankEvidence, ...] | None = None

    def poll(self, token: str, detail: Sequence[int]) -> tuple[RankEvidence, ...] | None:
        """See `Agent.hang_evidence`."""
        if self._subject != (subject := (token, tuple(detail))):
            self.close()
            self._rings.refresh()
            self._subject, self._turns = subject, gathered(self._rings, self._directory, token, frozenset(detail))
        if self._turns is not None:
            try:
                next(self._turns)
            except StopIteration as ended:
                self._turns, self._found = None, ended.value
            except Exception:
                # (the next call returns an end)
                self._turns, self._found = None, ()
                raise
        return self._found

    def close(self) -> None:
        """End what is under way."""
        if self._turns is not None:
            self._turns.close()
        self._subject = self._turns = self._found = None
