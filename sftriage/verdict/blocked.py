"""Where a rank is that a collective lacks: what its main thread waits for. Pure: evidence of one rank in, record out.

Facts come first (the kernel's state, the system call, the name of a lock), then the frames between the program's own
line and the innermost, then the text of that line. What none of them shows is ``unknown``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from sftriage.model.hangs import (
    INTERPRETER,
    Blocked,
    BlockedCode,
    RankEvidence,
    SourceLine,
    ThreadEvidence,
    Wait,
    WorkerEvidence,
)

_NOTHING = Wait()
STOPPED_STATES, DEAD_STATES = frozenset("Tt"), frozenset("ZX")
BUSY_FRACTION = 0.5
"""A thread that uses this much of a core computes, as in `sftriage.trainer.waits`."""

COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_coalesced",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "broadcast_object_list",
        "reduce",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "barrier",
        "monitored_barrier",
        "init_process_group",
        "new_group",
        "new_subgroups",
        "init_device_mesh",
    ]
)
ROOTED = {**dict.fromkeys(("broadcast", "scatter"), "from"), **dict.fromkeys(("reduce", "gather"), "to")}
"""Collectives with a root, which all ranks must name alike: whether they are from it or to it."""
_TRANSFERS: dict[str, BlockedCode] = {
    **dict.fromkeys(("recv", "irecv", "recv_object_list"), "recv"),
    **dict.fromkeys(("send", "isend", "send_object_list"), "send"),
}
_DISTRIBUTED = "torch/distributed/"

_SYSCALLS: dict[str, BlockedCode] = {
    **dict.fromkeys(("flock", "fcntl"), "file_lock"),
    **dict.fromkeys(("wait4", "waitid", "waitpid"), "subprocess"),
    **dict.fromkeys(("fsync", "fdatasync", "sync_file_range", "syncfs"), "disk"),
    **dict.fromkeys(("recvfrom", "recvmsg", "connect", "sendto", "sendmsg", "accept", "accept4"), "socket"),
}
_SLEEPS = frozenset(("nanosleep", "clock_nanosleep"))
_FREEZERS, _FORKS = ("__refrigerator", "do_freezer_trap"), ("kernel_clone", "_do_fork", "do_fork")
"""Kernel functions in which a thread of a frozen cgroup sleeps, and one until its child of ``vfork`` runs a program."""

# Library frames by their path, the first that matches decides; the more telling come first.
_LIBRARIES: tuple[tuple[str, BlockedCode], ...] = (
    (r"(^|/)filelock/", "file_lock"),
    (r"(^|/)(queue|multiprocessing/queues)\.py$", "queue"),
    (r"<frozen importlib", "import"),
    (r"torch/serialization\.py$|torch/distributed/checkpoint/|(^|/)safetensors/", "checkpoint"),
    (r"torch/_dynamo/(?!eval_frame|external_utils)|torch/_inductor/(?!runtime/|utils|output_code)", "compile"),
    (r"(^|/)triton/(compiler|backends|runtime/(autotuner|build|cache|jit))", "compile"),
    (r"(^|/)(subprocess|multiprocessing/(process|popen_\w+))\.py$", "subprocess"),
    (r"(^|/)(socket|ssl|http/client|urllib/request)\.py$", "socket"),
    (r"(^|/)(urllib3|requests|boto3|botocore|httpx|httpcore|aiohttp)/", "socket"),
    (r"(^|/)multiprocessing/connection\.py$", "pipe"),
)
_LIBRARY_CODES = tuple((re.compile(pattern), code) for pattern, code in _LIBRARIES)
_WORKER_STATES = ("gone", "T", "t", "D")
"""States of a worker that explain why it delivers nothing, the most certain first."""
_LOADER = re.compile(r"torch/utils/data/dataloader\.py$")
_THREADING = re.compile(r"(^|/)(threading|multiprocessing/synchronize)\.py$")
_THREAD_FUNCTIONS: Mapping[str, BlockedCode] = {
    **dict.fromkeys(("acquire", "__enter__"), "lock"),
    **dict.fromkeys(("join", "_wait_for_tstate_lock", "_shutdown"), "thread"),
}
"""What the outermost function there waits for, if not for an event, a condition or a barrier."""

# Calls into C have no frame of their own: the text of the program's line says which.
_SOURCES: tuple[tuple[str, BlockedCode], ...] = (
    (r"\b(flock|lockf)\(", "file_lock"),
    (r"^with [\w.\[\]]+:\s*(pass)?\s*(#.*)?$", "lock"),
    (r"\.acquire\(", "lock"),
    (r"\bsleep\(", "sleep"),
    (r"\bos\.(waitpid|wait|wait4)\(", "subprocess"),
    (r"\.(recv|recv_into|recvfrom|accept|connect)\(", "socket"),
    (r"\bos\.f(data)?sync\(", "disk"),
)
_SOURCE_CODES = tuple((re.compile(pattern), code) for pattern, code in _SOURCES)
_LOCK_NAME = re.compile(r"^with ([\w.\[\]]+):|([\w.\[\]]+)\.acquire\(")


def blocked_of(rank: RankEvidence) -> Blocked:
    """Where the main thread of a rank is, and what it waits for."""
    thread = main_of(rank.threads)
    frames, wait = (thread.frames, thread.wait) if thread else ((), _NOTHING)
    place = own_line(frames)
    code, inside = _code(rank, frames, wait)
    worker = worker_of(rank.workers) if code == "worker" else None
    about, held_by = _about(code, rank, frames, wait), "" if code in ("thread", "subprocess") else wait.held_by
    if code == "lock" and not about and place and (found := _LOCK_NAME.search(place.source.strip())):
        about = found[1] or found[2]
    return Blocked(
        rank.rank,
        rank.host,
        code,
        place,
        _function(inside) if inside else "",
        (worker.problem if worker else "") or about,
        held_by,
        wait.held_at,
        wait.peer if code in ("recv", "send") else None,
        worker.pid if worker else None,
        _worker_state(worker) if worker else "",
        _worker_line(worker) if worker else None,
        rank.step,
        rank.stage,
        rank.exit_status,
        rank.pid,
    )


def main_of(threads: Sequence[ThreadEvidence]) -> ThreadEvidence | None:
    """The thread that trains."""
    return next((thread for thread in threads if thread.main), None)


def own_line(frames: Sequence[SourceLine]) -> SourceLine | None:
    """The program's innermost line."""
    return next((frame for frame in frames if frame.own), None)


def collective_of(frames: Sequence[SourceLine]) -> str:
    """The collective of torch.distributed that a thread is in, by its function; "" if it is in none."""
    found = [frame.function for frame in _below(frames) if _DISTRIBUTED in frame.file]
    return next((function for function in reversed(found) if function in COLLECTIVES), "")


def in_transfer(thread: ThreadEvidence | None) -> bool:
    """Whether a thread waits in torch.distributed itself, or in its pipelines, in whichever call."""
    below = _below(thread.frames) if thread and (thread.wait.cpu_fraction or 0.0) < BUSY_FRACTION else ()
    return any(_DISTRIBUTED + part in frame.file for frame in below for part in ("distributed_c10d", "pipelining/"))


def in_backward(frames: Sequence[SourceLine]) -> bool:
    """Whether a thread waits for autograd, whose hooks call collectives of DDP and FSDP in other threads' frames."""
    return any(frame.function == "_engine_run_backward" for frame in _below(frames))


def worker_of(workers: Sequence[WorkerEvidence]) -> WorkerEvidence | None:
    """The worker that hangs: a dead or stopped one, else the one that is in a line of the program."""

    def urgency(worker: WorkerEvidence) -> int:
        state = _worker_state(worker)
        if state in _WORKER_STATES:
            return _WORKER_STATES.index(state)
        return len(_WORKER_STATES) + (not _worker_line(worker))

    hung = min(workers, key=urgency, default=None)
    return hung if hung and (len(workers) == 1 or urgency(hung) <= len(_WORKER_STATES)) else None


def _worker_state(worker: WorkerEvidence) -> str:
    return "gone" if worker.exit_status is not None or worker.state in DEAD_STATES else worker.state


def _worker_line(worker: WorkerEvidence) -> SourceLine | None:
    """The program's line in the dataset; the frames around the worker's loop are those in which it was forked."""
    main = main_of(worker.threads)
    frames = main.frames if main else ()
    loop = next((at for at, frame in enumerate(frames) if frame.function == "_worker_loop"), len(frames))
    return own_line(frames[:loop])


def _below(frames: Sequence[SourceLine]) -> Sequence[SourceLine]:
    """The frames that the program's own innermost line has called, innermost first."""
    at = next((at for at, frame in enumerate(frames) if frame.own), len(frames))
    return frames[:at]


def _function(frame: SourceLine) -> str:
    return f"{frame.function} of {PurePath(frame.file).name}"


def _about(code: BlockedCode, rank: RankEvidence, frames: Sequence[SourceLine], wait: Wait) -> str:
    """What a block is about, in the words that its sentence needs; "" if unknown."""
    match code:
        case "lock" | "queue" | "event":
            return wait.lock
        case "thread":
            return wait.held_by or (f"the thread `{wait.lock}`" if wait.lock else "")
        case "subprocess":
            return wait.held_by
        case "collective":
            return collective_of(frames)
        case "stopped":
            if (wait.wchan or rank.wchan) in _FREEZERS:
                return "the freezer of its cgroup"
            return "a debugger" if "t" in (rank.state, wait.state) else ""
        case "pipe" if wait.path.startswith("standard "):
            return f"its {wait.path}"
        case "pipe" if "/" in wait.path:
            return f"the {'socket' if wait.path.startswith('unix:') else 'pipe'} {wait.path}"
        case "socket":
            return wait.path.removeprefix("socket:")
        case "file_lock" | "disk" | "checkpoint":
            return wait.path if wait.path.startswith("/") else ""
    return ""


Found = tuple[BlockedCode, SourceLine | None]


def _code(rank: RankEvidence, frames: tuple[SourceLine, ...], wait: Wait) -> Found:
    """The code, and the library's function that it follows from."""
    below = _below(frames)
    innermost = below[0] if below else None
    state, wchan = wait.state or rank.state, wait.wchan or rank.wchan
    if STOPPED_STATES & {rank.state, wait.state} or wchan in _FREEZERS:
        return "stopped", innermost
    if wait.lock == INTERPRETER:
        return "lock", innermost
    found = _of_frames(below)
    if state == "D" and not (found and found[0] == "checkpoint"):
        return ("subprocess" if wchan in _FORKS else "disk"), innermost
    fact = "pipe" if wait.path.startswith("unix:") else _SYSCALLS.get(wait.syscall) or _of_path(wait)
    if fact == "file_lock":
        return fact, innermost
    if wait.syscall in _SLEEPS and (not found or found[0] == "socket"):  # (between two tries)
        return "sleep", innermost
    if found and not (found[0] == "pipe" and fact == "socket"):
        # A library's own waits are known by its name: a checkpoint that syncs a file is a checkpoint.
        return found
    if fact:
        return fact, innermost
    computes = wait.cpu_fraction is not None and wait.cpu_fraction >= BUSY_FRACTION
    if computes or (not rank.answered and state == "R"):
        return ("python" if frames and frames[0].own else "native"), innermost
    if wait.lock:
        return ("queue" if wait.is_queue else "lock"), innermost
    if not below and frames and (known := _of_source(frames[0], wait)):
        return known, None
    return "unknown", innermost


def _of_path(wait: Wait) -> BlockedCode | None:
    """What a system call waits for that is about a file, by the path."""
    if not wait.path or wait.state == "R":
        return None
    # (a named pipe may have no other end yet)
    if wait.path.startswith(("pipe:", "standard ")) or "pipe" in wait.wchan or "partner" in wait.wchan:
        return "pipe"
    if not wait.path.startswith("/"):
        return "socket"
    return "disk" if "poll" not in wait.syscall and not wait.path.startswith("/dev/") else None


def _of_frames(below: Sequence[SourceLine]) -> Found | None:
    """What library frames show, from the program's line inwards for transfers and the loader, then by `_LIBRARIES`."""
    for frame in below:
        if _LOADER.search(frame.file) and frame.function in ("_try_get_data", "_get_data", "_shutdown_workers"):
            return "worker", frame
    for frame in reversed(below):
        if _DISTRIBUTED in frame.file:
            if transfer := _TRANSFERS.get(frame.function):
                return transfer, frame
            if frame.function in COLLECTIVES:
                return "collective", frame
    for pattern, code in _LIBRARY_CODES:
        for frame in below:
            if pattern.search(frame.file):
                return code, frame
    threading = [frame for frame in below if _THREADING.search(frame.file)]
    if not threading:
        return None
    outer = threading[-1]
    return _THREAD_FUNCTIONS.get(outer.function, "event"), outer


def _of_source(line: SourceLine, wait: Wait) -> BlockedCode | None:
    """What the program's line itself calls, where the facts do not contradict it."""
    text = line.source.strip()
    codes = [code for pattern, code in _SOURCE_CODES if pattern.search(text)]
    if wait.syscall == "futex":  # a lock; or it waits in C for another thread
        codes = [code for code in codes if code == "lock"]
    elif wait.syscall or wait.state == "R":
        codes = []
    return codes[0] if len(set(codes)) == 1 else None
