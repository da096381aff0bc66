"""Notes how a job's ranks and their DataLoader workers end, for `sftriage.runtime.ends`.

Only the parent of a process learns its exit status, and only the process itself its uncaught exception. So each rank
has a file beside its ring, named by its process, of JSON lines with a ``time_s`` since the epoch::

    {"rank": 2, "attempt": 0, "world_size": 4, "ticks": 7}   by itself, as it begins; when it was started
    {"error": TYPE, "message": TEXT, "chain": [TEXT, ...], "place": [FUNCTION, FILE, LINE] or null}   by itself
    {"stage": NAME}                                          by itself, with the exception
    {"calls": [...], "groups": [...]}                        by itself, where an exchange may have failed
    {"worker": PID, "status": -9}                            by itself, about a child made by multiprocessing
    {"sent": 15}                                             by its parent, such as torchrun, which sends it a signal
    {"status": 3}                                            by its parent
    {"killed_for_memory": LIMIT or null}                     by its parent: their container's cgroup counts such a kill
    {"gone": true}                                           by `sftriage.runtime.ends`, which is no parent

Statuses of signals are negative. Nothing else changes in these processes: what they print and return stays the same.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sftriage.base.process import MemoryCgroups

MAX_TEXT, MAX_CHAIN, MAX_WORKERS, MAX_SOURCE_BYTES = 1000, 4, 64, 1 << 18
"""Characters of a message, exceptions of a chain, children whose ends a rank notes, and the size of a parsed file."""
_ENDING = {signal.SIGTERM, signal.SIGINT}
_AT_SEAMS = {"dataloader.py:__next__": "data", "__init__.py:backward": "backward", "module.py:_call_impl": "forward"}
"""Functions of torch in which a stage runs that the seams detect, by the names of their files."""
STALE_S = 86400.0
"""How old the file of an ended rank may become where a directory of rings is used again."""


def ends_file(rings: Path, pid: int) -> Path:
    """The file about a rank's process."""
    return rings / f"rank-ends.{pid}"


def enrol(rings: Path, rank: int, attempt: int, world_size: int) -> None:
    """Begin the file about this process, which is a rank."""
    _watch(rings)
    from sftriage.base.files import create  # not above: not in every process that imports torch
    from sftriage.base.process import start_ticks

    path = ends_file(rings, os.getpid())
    with contextlib.suppress(OSError, ValueError):
        for old in rings.glob("rank-ends.*"):
            if time.time() - old.stat().st_mtime > STALE_S and start_ticks(int(old.suffix[1:])) is None:
                old.unlink()
    with contextlib.suppress(Exception):
        os.close(create(path))
    about = {"rank": rank, "attempt": attempt, "world_size": world_size}
    append_end(path, {**about, "ticks": start_ticks(os.getpid())})


def watch(rings: Path) -> None:
    """Note the ends of this process and its children, as far as they are ranks. It has imported torch.

    A launcher's variables may name its rank long before it records.
    """
    _watch(rings)
    process = sys.modules.get("multiprocessing.process")
    child = process is not None and (process.parent_process() or getattr(process.current_process(), "_inheriting", 0))
    numbers = [
        os.environ.get(*variable)
        for variable in (("RANK", ""), ("TORCHELASTIC_RESTART_COUNT", "0"), ("WORLD_SIZE", "1"))
    ]
    if not child and all(number.isdecimal() for number in numbers):
        enrol(rings, *map(int, numbers))


def _watch(rings: Path) -> None:
    global _rings
    if _rings is None:
        _hook_exceptions()
        for name, hook in (
            ("os", _hook_signals),
            ("subprocess", _hook_subprocesses),
            ("multiprocessing.process", _hook_multiprocessing),
            ("torch.multiprocessing.spawn", _hook_spawn),
        ):
            if (module := sys.modules.get(name)) is not None:
                with contextlib.suppress(Exception):
                    hook(module)
    _rings = rings


def _hook_exceptions() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _raised(error, trace)
        before(kind, error, trace)

    sys.excepthook = hook


def _count_kills() -> None:
    """Count kills for lack of memory from the first child on."""
    global _memory
    if _memory is None:
        from sftriage.base.process import MemoryCgroups  # not above: not in every process that imports torch

        _memory = MemoryCgroups()


def _hook_subprocesses(subprocess: Any) -> None:
    before, begin = subprocess.Popen._handle_exitstatus, subprocess.Popen._execute_child

    @wraps(begin)
    def execute(self: Any, *args: Any, **options: Any) -> Any:
        with contextlib.suppress(Exception):
            _count_kills()
        return begin(self, *args, **options)

    subprocess.Popen._execute_child = execute

    @wraps(before)
    def handle(self: Any, *args: Any, **options: Any) -> Any:
        result = before(self, *args, **options)
        _ended(self.pid, self.returncode)
        return result

    subprocess.Popen._handle_exitstatus = handle


def _hook_signals(module: Any) -> None:
    def sending(before: Callable[[int, int], None]) -> Callable[[int, int], None]:
        @wraps(before)
        def send(pid: int, signum: int, /) -> None:
            # (of a process group, its leader)
            with contextlib.suppress(TypeError, ValueError):
                if signum and pid > 0 and pid != os.getpid():
                    _note(pid, {"sent": int(signum)})
                    if signum in _ENDING:
                        _sent.add(pid)
            before(pid, signum)

        return send

    module.kill, module.killpg = sending(module.kill), sending(module.killpg)


def _hook_multiprocessing(process: Any) -> None:
    begin = process.BaseProcess.start
    hooked: set[Any] = set()

    @wraps(begin)
    def start(self: Any) -> Any:
        with contextlib.suppress(Exception):
            _count_kills()
        result = begin(self)
        with contextlib.suppress(AttributeError, StopIteration):
            # (its module is imported by the first start)
            owner: Any = next(kind for kind in type(self._popen).__mro__ if "poll" in vars(kind))
            if owner not in hooked:
                hooked.add(owner)
                owner.poll = polling(owner.poll)
        return result

    def polling(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def poll(self: Any, *args: Any, **options: Any) -> Any:
            known = self.returncode
            status = before(self, *args, **options)
            if known is None and status is not None:
                _ended(self.pid, status, worker=True)
            return status

        return poll

    process.BaseProcess.start = start


def _hook_spawn(spawn: Any) -> None:
    """A process of torch.multiprocessing.spawn hands its exception to its parent, and ends in order."""
    before = spawn._wrap

    @wraps(before)
    def wrap(function: Callable[..., Any], *about: Any) -> Any:
        @wraps(function)
        def called(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:
                _raised(error, error.__traceback__)
                raise

        return before(called, *about)

    spawn._wrap = wrap


def _raised(error: BaseException, trace: TracebackType | None) -> None:
    chain: list[str] = []
    with _outlasting(signal.SIGTERM):
        for _ in range(2):
            try:
                _note_exception(error, trace, chain)
                break
            except Exception as interrupting:
                # A handler of signals raised it here: DataLoader has one that reports dead workers.
                chain = [f"{type(interrupting).__name__}: {interrupting}"[:MAX_TEXT]]


@contextlib.contextmanager
def _outlasting(signum: int) -> Iterator[None]:
    """A signal that would end this process does so after the block: a launcher sends it as soon as a rank has ended."""
    came = False

    def note(_signum: int, _frame: object) -> None:
        nonlocal came
        came = True

    held = threading.current_thread() is threading.main_thread() and signal.getsignal(signum) is signal.SIG_DFL
    if held:
        signal.signal(signum, note)
    try:
        yield
    finally:
        if held:
            signal.signal(signum, signal.SIG_DFL)
            if came:
                os.kill(os.getpid(), signum)


def _note_exception(error: BaseException, trace: TracebackType | None, more: Sequence[str]) -> None:
    from sftriage.trainer.stacks import is_own, program_package  # (an exception of a process that may be no rank)

    chain = [*more]
    cause = error.__cause__ or error.__context__
    while cause is not None and len(chain) < MAX_CHAIN:
        chain.append(f"{type(cause).__name__}: {cause}"[:MAX_TEXT])
        cause = cause.__cause__ or cause.__context__
    lines = [(frame.f_code.co_name, frame.f_code.co_filename, line) for frame, line in walk_tb(trace)]
    text = str(error)
    # (the end of a worker's traceback has its own message)
    message = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    about = {"error": type(error).__name__, "message": message, "chain": chain}
    place = next((line for line in reversed(lines) if is_own(line[1])), None)
    if not _note(os.getpid(), {**about, "place": place}):
        return
    if stage := _stage_of(lines):
        _note(os.getpid(), {"stage": stage})
    if isinstance(error, RuntimeError) and "torch.distributed.distributed_c10d" in sys.modules:
        from sftriage.trainer.evidence import last_calls

        _note(os.getpid(), last_calls(program_package(file for _, file, _ in lines)))


def _stage_of(lines: Sequence[tuple[str, str, int]]) -> str:
    """The stage in which an exception was raised, by the blocks of stages around its lines; "" if unknown."""
    monitor = sys.modules.get("sftriage.trainer.monitor")
    from sftriage.trainer.stacks import is_own

    found = ""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for function, file, line in lines:
            if not is_own(file):
                at_seam = not getattr(monitor, "made_by_hand", True) and _AT_SEAMS.get(f"{Path(file).name}:{function}")
                found = at_seam or found
            elif Path(file).stat().st_size <= MAX_SOURCE_BYTES:
                found = _block_around(file, line) or found
    return found


def _block_around(file: str, line: int) -> str:
    found = ""
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.With) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            for call in (item.context_expr for item in node.items):
                name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
                if name == "stage" and isinstance(call, ast.Call) and call.args:
                    # (outer blocks come first)
                    found = str(getattr(call.args[0], "value", "")) or found
    return found


def _ended(pid: int, status: int | None, *, worker: bool = False) -> None:
    global _workers, _memory
    if status is None:
        return
    memory = {}
    if status == -signal.SIGKILL and _memory is not None and _memory.killed():
        memory, _memory = {"killed_for_memory": _memory.limit_bytes()}, type(_memory)()
    is_rank, was_sent = _note(pid, {"status": status, **memory}), pid in _sent
    _sent.discard(pid)
    if worker and status and not (is_rank or was_sent) and _workers < MAX_WORKERS:
        _workers += 1
        _note(os.getpid(), {"worker": pid, "status": status, **memory})


def _note(pid: int, line: dict[str, Any]) -> bool:
    """Append to the file of a rank; False for a process that is none."""
    return _rings is not None and append_end(ends_file(_rings, pid), line)


def append_end(path: Path, line: dict[str, Any], time_s: float | None = None) -> bool:
    """Append to the file of a rank, with the time, by default now; False if there is none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(descriptor, json.dumps({"time_s": time_s or time.time(), **line}).encode() + b"\n")
        finally:
            os.close(descriptor)
    except (OSError, TypeError, ValueError, AttributeError):
        # (this may also run while Python ends; what a handler of signals raises here is the program's)
        return False
    return True


_rings: Path | None = None
_memory: MemoryCgroups | None = None
_workers = 0
_sent: set[int] = set()
"""Processes that this one has ended."""
