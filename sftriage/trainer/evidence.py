"""What a rank knows of the hang that it is in: its collectives, process groups, threads and DataLoader workers.

The thread that answers requests (`executor.Answering`) calls `answer` while the main thread waits, in any state.
Nothing here imports torch, reads files outside ``/proc``, or runs code of the program. Each part may fail or block on
its own: the others still come, and ``problem`` says what is missing.

Collectives are those of torch's flight recorders, one for NCCL and one for the rest. Each records the latest 2,000
calls of all groups together by default, with the Python frames of the calling thread. ``collective_seq_id`` counts a
group's calls from 1. A group that is destroyed and created anew has the same name, counts from 1 again, and has a
higher ``pg_id``. Gloo does not record point-to-point calls; NCCL does, and they are no part of a group's run of calls.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from sftriage.base.loops import start_thread
from sftriage.model.hangs import Call, GroupCalls, ThreadEvidence, WorkerEvidence
from sftriage.trainer.kernel import state_of
from sftriage.trainer.sampler import WORKERS, children
from sftriage.trainer.stacks import is_own
from sftriage.trainer.waits import line_of, loader_workers, package_of_main, plain, threads_of_this_process

MAX_ANSWER_BYTES, MAX_TOKEN_BYTES = 512 << 10, 256
PATIENCE_S = 3.0
"""How long all parts together may take."""
MAX_CALL_FRAMES = 3
MAX_RUN, MIN_RUN = 4096, 64
"""Calls of one group at most; and how many are left of each where an answer would be too long."""
MAX_RANGES, MAX_WORKERS = 256, 64
LAST_CALLS, MAX_LAST_BYTES, LAST_S = 16, 32 << 10, 1.0
"""What a rank notes of its calls as an exchange fails."""

_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
"""Functions of torch.distributed that call collectives of sizes, then of bytes."""


@dataclass(slots=True)
class Found:
    """The parts of a `RankEvidence` that came so far."""

    threads: tuple[ThreadEvidence, ...] = ()
    calls: tuple[Call, ...] = ()
    groups: tuple[GroupCalls, ...] = ()
    timeout_s: float | None = None
    workers: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def document(self, run: int) -> dict[str, Any]:
        """As JSON, with the latest ``run`` calls of each group."""
        groups, used = [], dict[int, int]()
        for group in self.groups:
            dropped = max(0, len(group.calls) - run)
            first = group.first + dropped
            calls = tuple(-1 if at < 0 else used.setdefault(at, len(used)) for at in group.calls[dropped:])
            pending = tuple(number for number in group.pending if number >= first)
            groups.append(plain(replace(group, first=first, calls=calls, pending=pending)) | {"calls": calls})
        return {
            "calls": [plain(self.calls[at]) for at in used],
            "groups": groups,
            "threads": [plain(thread) for thread in self.threads],
            "workers": self.workers,
            "timeout_s": self.timeout_s,
            "problem": "; ".join(self.problems),
        }


def answer(detail: bool) -> dict[str, Any]:
    """This rank's evidence, ready for JSON: at most `MAX_ANSWER_BYTES`, within `PATIENCE_S`."""
    found = Found()
    try:
        collecting = start_thread("evidence", collect, found, detail)
        collecting.join(PATIENCE_S)
    except RuntimeError:  # (the system allows no more threads, or the interpreter is about to end)
        collect(found, detail)
    return bounded(replace(found, problems=[*found.problems, *(f"{part} took too long" for part in list(_under_way))]))


def bounded(found: Found) -> dict[str, Any]:
    """The oldest calls are left out first, then threads other than the main one, then the workers."""
    run = MAX_RUN
    while True:
        document = found.document(run)
        n_bytes = len(json.dumps(document, separators=(",", ":")))
        if n_bytes <= MAX_ANSWER_BYTES - MAX_TOKEN_BYTES:
            return document
        if run > MIN_RUN:
            run //= 2
        elif len(found.threads) > 1:
            found = replace(found, threads=found.threads[: len(found.threads) // 2])
        elif found.workers:
            found = replace(found, workers=[])
        else:
            found = Found(problems=[*found.problems[:1], f"its evidence has {n_bytes} bytes"])


def last_calls(package: str | None) -> dict[str, Any]:
    """The latest calls in each group, ready for JSON: at most `MAX_LAST_BYTES`, within `LAST_S`.

    ``package`` is the program's own, as by `program_package`.
    """
    found, run = Found(), LAST_CALLS

    def collect_calls() -> None:
        with suppress(Exception):
            _add_calls(found, package)

    start_thread("calls", collect_calls).join(LAST_S)
    while len(json.dumps(document := found.document(run))) > MAX_LAST_BYTES and run:
        run //= 2
    return {name: document[name] for name in ("calls", "groups")}


_under_way: dict[str, None] = {}
"""Parts that are being collected: one that blocks forever is not tried again."""


def collect(found: Found, detail: bool) -> None:
    """Collect all parts, one after another. Does not raise."""
    parts: dict[str, Callable[[], None]] = {
        "threads": lambda: _add_threads(found, detail),
        "the flight recorder": lambda: _add_calls(found, package_of_main()),
        "workers": lambda: _add_workers(found, detail),
    }
    for name, part in parts.items():
        if name not in _under_way:
            _under_way[name] = None
            try:
                part()
            except Exception as error:
                found.problems.append(f"{name}: {error!r}")
            finally:
                del _under_way[name]


def _add_threads(found: Found, detail: bool) -> None:
    found.threads = threads_of_this_process(detail)


def _add_calls(found: Found, package: str | None) -> None:
    groups = _groups()
    entries, problem = _entries()
    found.calls, found.groups, found.timeout_s = calls_of(entries, groups, package)
    # (a group counts its calls also where no recorder has them)
    if groups and not entries and (problem or any(group.n_calls for group in groups.values())):
        found.problems.append(problem or "torch's flight recorder has no calls of this backend")
    peer = next((peer for entry in reversed(entries) if (peer := _peer_of(entry, groups)) is not None), None)
    if peer is not None and found.threads and found.threads[0].wait.peer is None:
        main = found.threads[0]
        found.threads = (replace(main, wait=replace(main.wait, peer=peer)), *found.threads[1:])


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that exists: its ranks in the order of the group, and its backends."""

    name: str
    description: str
    ranks: tuple[int, ...]
    backends: frozenset[str]
    n_calls: int = 0

    def name_for(self, backend: str) -> str:
        """Its name where each of several backends counts its own calls."""
        return f"{self.name}/{backend}" if len(self.backends) > 1 and backend == "gloo" else self.name


def _groups() -> dict[str, Group]:
    """The process groups by name."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    found: dict[str, Group] = {}
    for process_group, name in list(getattr(world, "pg_names", {}).items()):
        of_group = dict(getattr(world, "pg_group_ranks", {}).get(process_group, {}))
        config = str(getattr(world, "pg_backend_config", {}).get(process_group, ""))
        n_calls = 0
        with suppress(Exception):
            n_calls = int(process_group._get_sequence_number_for_group())
        found[name] = Group(
            name,
            str(getattr(process_group, "group_desc", "")),
            tuple(sorted(of_group, key=lambda rank: of_group[rank])),
            frozenset(part.rpartition(":")[2] for part in config.split(",") if part),
            n_calls,
        )
    return found


class _Absent(ModuleType):
    """In place of ``torch._inductor`` while it is not imported.

    A recorder that translates frames looks for it, and torch would import it for that, for a second. Other threads that
    use it meanwhile do import it.
    """

    def __init__(self) -> None:
        super().__init__("torch._inductor")
        self.ident = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if threading.get_ident() == self.ident:
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _nothing_imported() -> Iterator[None]:
    names = vars(sys.modules["torch"])
    absent = names.setdefault("_inductor", _Absent())
    try:
        yield
    finally:
        if isinstance(absent, _Absent) and names.get("_inductor") is absent:
            del names["_inductor"]


def _entries() -> tuple[list[dict[str, Any]], str]:
    """All entries of the flight recorders, oldest first in each; and why there are none."""
    core = sys.modules.get("torch._C._distributed_c10d")
    dumps = [dump for name in _RECORDERS if (dump := getattr(core, name, None)) is not None]
    found: list[dict[str, Any]] = []
    for dump in dumps:
        with _nothing_imported():
            try:
                data = dump(True, True, False)
            except TypeError:  # (of an older torch)
                data = dump()
        entries = pickle.loads(data)
        found += entries.get("entries", ()) if isinstance(entries, dict) else ()
    if not dumps:
        return [], "this torch has no flight recorder"
    size = next((size for name in _SIZES if (size := os.environ.get(name))), "")
    return found, "torch's flight recorder is off: its buffer is of size 0" if size == "0" else ""


def calls_of(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Group], package: str | None
) -> tuple[tuple[Call, ...], tuple[GroupCalls, ...], float | None]:
    """The distinct calls, the runs of each group, and the shortest timeout of a pending call in seconds.

    ``entries`` are those of flight recorders, ``groups`` the process groups by name.
    """
    latest, last_id = dict[tuple[str, str, str], list[Mapping[str, Any]]](), dict[tuple[str, str, str], int]()
    for entry in entries:
        if "process_group" not in entry or entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        key, group_id = (name, description, _backend_of(entry)), entry.get("pg_id", 0)
        if group_id > last_id.get(key, -1):  # (created anew)
            last_id[key], latest[key] = group_id, []
        if group_id == last_id[key]:
            latest[key].append(entry)
    numbers, runs = dict[Call, int](), list[GroupCalls]()
    timeouts_s: list[float] = []
    for (name, description, backend), of_group in latest.items():
        pending = [entry for entry in of_group if _is_pending(entry)]
        if groups and name not in groups and not pending:
            continue
        timeouts_s += [entry["timeout_ms"] / 1e3 for entry in pending if entry.get("timeout_ms")]
        known = groups.get(name)
        shown = name if known is None else known.name_for(backend)
        members = None if known is None else ranges(known.ranks)
        runs.append(_run(GroupCalls(shown, description, members, 1, ()), of_group, numbers, package))
    shown_names = {run.name for run in runs}
    for group in groups.values():
        if group.name not in shown_names:
            runs.append(GroupCalls(group.name, group.description, ranges(group.ranks), group.n_calls + 1, ()))
    return tuple(numbers), tuple(runs), min(timeouts_s, default=None)


def _run(
    group: GroupCalls, entries: Iterable[Mapping[str, Any]], numbers: dict[Call, int], package: str | None
) -> GroupCalls:
    by_number, pending = dict[int, int](), set[int]()
    for entry in entries:
        number = entry["collective_seq_id"]
        # (calls that torch coalesces share a number: the first is kept)
        if number not in by_number:
            by_number[number] = numbers.setdefault(_call_of(entry, package), len(numbers))
        if _is_pending(entry):
            pending.add(number)
    last = max(by_number)
    first = min(number for number in by_number if number > last - MAX_RUN)
    calls = tuple(by_number.get(number, -1) for number in range(first, last + 1))
    return replace(group, first=first, calls=calls, pending=tuple(sorted(pending)))


def _call_of(entry: Mapping[str, Any], package: str | None) -> Call:
    frames, function = [], ""
    for frame in entry.get("frames", ()):
        if is_own(frame["filename"], package):
            frames.append(line_of(frame["name"], frame["filename"], frame["line"], package))
            if len(frames) == MAX_CALL_FRAMES:
                break
        elif not frames and frame["name"] in _OBJECTS:
            function = frame["name"]
    sizes = tuple(tuple(size) for size in entry.get("input_sizes", ()))
    return Call(_op_of(entry), sizes, tuple(entry.get("input_dtypes", ())), tuple(frames), function)


def _backend_of(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


def _op_of(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])


def _is_pending(entry: Mapping[str, Any]) -> bool:
    # (Gloo's state is always "scheduled")
    return not entry.get("retired") and entry.get("state") != "completed"


def _peer_of(entry: Mapping[str, Any], groups: Mapping[str, Group]) -> int | None:
    """The rank of a pending point-to-point call: NCCL names it ``recv 1<-0``, by the numbers in the group."""
    if not (entry.get("is_p2p") and _is_pending(entry)):
        return None
    arrow = "<-" if "<-" in _op_of(entry) else "->"
    number = _op_of(entry).rpartition(arrow)[2]
    group = groups.get(entry.get("process_group", ("", ""))[0])
    return group.ranks[int(number)] if group and number.isdecimal() and int(number) < len(group.ranks) else None


def ranges(ranks: Iterable[int]) -> tuple[tuple[int, int, int], ...] | None:
    """Ranks as ranges: first, last and step; None if that takes too many."""
    found: list[tuple[int, int, int]] = []
    for rank in sorted(ranks):
        first, last, step = found[-1] if found else (0, 0, 0)
        if found and (first == last or rank - last == step):
            found[-1] = first, rank, rank - last
        else:
            found.append((rank, rank, 1))
    return tuple(found) if 0 < len(found) <= MAX_RANGES else None


def _add_workers(found: Found, detail: bool) -> None:
    waits = loader_workers()
    # (another child, or the worker of another loader, explains nothing)
    known = [child for child in children() if not waits or child[0] in waits][:MAX_WORKERS]
    # (one that is stopped or dead would only cost time)
    able = any(state_of(f"/proc/{pid}")[0] not in ("T", "t", "Z", "") for pid, _, _ in known)
    answers = WORKERS.threads(detail) if able and (waits or detail) else {}
    for pid, method, status in known:
        state, wchan = state_of(f"/proc/{pid}")
        ended = _exit_status(pid) if status is None else status
        problem = ""
        if pid not in answers and (waits or detail):
            problem = _why_silent(state, method) if ended is None else "it has ended"
        worker = WorkerEvidence(pid, state, wchan, problem=problem, exit_status=ended)
        found.workers.append(plain(worker) | ({"threads": answers[pid]} if pid in answers else {}))


def _why_silent(state: str, method: str | None) -> str:
    if state in ("T", "t"):
        return "it is stopped"
    if method != "fork":
        return f"it was not forked, but started by {method}"
    return "it did not answer in time, or began before the recorder"


def _exit_status(pid: int) -> int | None:
    """How a child has ended, negative for a signal; None while it lives. Leaves it to its parent to reap."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
