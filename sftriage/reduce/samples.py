"""Sampled Python stacks of a capture (`trainer.sampler`): reads their file, and finds where a stage spent its time.

Places are functions of the program, also in DataLoader workers. Axes: N samples of the training thread, W samples of a
worker.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from sftriage.errors import InputError
from sftriage.traces.jsonstream import UNDECODABLE
from sftriage.traces.manifest import CONTROL, CauseCode
from sftriage.trainer.stacks import USED, is_own, program_package

MAX_FILE_BYTES = 256 * 2**20

OURS = re.compile(r"/sftriage/trainer/(?!seams/)")
"""Files of sftriage that record and capture steps, and call nothing of the program."""

_INLINE = re.compile(r"\.<locals>\.<(genexpr|listcomp|setcomp|dictcomp)>$")
"""The part of a name that marks a function within a line of another, which readers of that line do not see."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A function in a stack, at a line with its ``source`` ("": unknown); ``main``: of the program's own package."""

    function: str
    file: str
    line: int
    source: str = ""
    main: bool = False

    @property
    def own(self) -> bool:
        return self.main or is_own(self.file)


Whole = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Stack = tuple[Annotated[int, Meta(ge=0)], ...]
"""Indices of frames, the outermost first."""


class ThreadSamples(Struct, frozen=True):
    """One thread at each sample.

    Attributes:
        stacks_N: its stack; empty if the thread did not exist.
        run_ns_N, waited_ns_N: its total times of running, and of waiting for a core, by then; -1: unknown.
        waits_in_N: the kernel function in which it waited, "" if unknown; empty if never read.
        collected_ns, minor_faults, major_faults, system_ns: the counters of the training thread, or of its process, by
            then (`trainer.stacks.USED`).
    """

    name: str = ""
    stacks_N: tuple[Stack, ...] = ()
    run_ns_N: tuple[Whole, ...] = msgspec.field(name="run_ns", default=())
    waited_ns_N: tuple[Whole, ...] = msgspec.field(name="waited_ns", default=())
    waits_in_N: tuple[Annotated[str, Meta(max_length=100)], ...] = msgspec.field(name="waits_in", default=())
    collected_ns: tuple[Whole, ...] = ()
    minor_faults: tuple[Whole, ...] = ()
    major_faults: tuple[Whole, ...] = ()
    system_ns: tuple[Whole, ...] = ()

    @property
    def used_N(self) -> dict[str, tuple[int, ...]]:
        return {name: column for name in USED if (column := getattr(self, name))}


class WorkerSamples(Struct, frozen=True):
    """A worker of the rank's DataLoader, which sampled itself: its rows (W) have times of their own.

    ``number`` is its index in the loader. The first of ``threads`` makes the batches; the rest is as in `StackSamples`.
    """

    number: Whole = msgspec.field(name="worker")
    pid: Whole
    period_s: Annotated[float, Meta(gt=0, lt=3600)]
    time_ns_W: tuple[Whole, ...] = msgspec.field(name="time_ns")
    threads: Annotated[tuple[ThreadSamples, ...], Meta(min_length=1)]
    sampler: ThreadSamples

    @property
    def period_ns(self) -> int:
        return round(self.period_s * 1e9)


@dataclass(frozen=True, slots=True)
class StackSamples:
    """Samples of all threads of a rank, by time.

    Attributes:
        period_ns: the time from one sample to the next, unless the sampler is held up.
        time_ns_N: the times of the samples, on the host's monotonic clock.
        step_N, stage_N: the step and stage of the training thread, since ``since_ns_N``.
        sampler: the sampling thread, without its stack.
        not_sampled: why workers other than ``workers`` have no samples.
    """

    frames: tuple[Frame, ...]
    period_ns: int
    time_ns_N: tuple[int, ...]
    step_N: tuple[int, ...]
    stage_N: tuple[str, ...]
    since_ns_N: tuple[int, ...]
    training: ThreadSamples
    others: tuple[ThreadSamples, ...]
    sampler: ThreadSamples
    workers: tuple[WorkerSamples, ...] = ()
    not_sampled: tuple[str, ...] = ()

    def own_frame(self, stack: Sequence[int]) -> Frame:
        """The innermost function of the program itself in a stack."""
        return self.frames[stack[own_at(self.frames, stack)]]


def own_at(frames: Sequence[Frame], stack: Sequence[int]) -> int:
    """The index in a stack of the innermost function of the program itself, or else of the innermost one."""
    return next((at for at in range(len(stack) - 1, -1, -1) if frames[stack[at]].own), len(stack) - 1)


def weights(
    samples: StackSamples, stage: str | None, steps: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """The samples of a stage and of some steps (None: all): the index of each, and its weight in nanoseconds.

    The weight is the time since the previous sample, or since the stage began.
    """
    for at, time_ns in enumerate(samples.time_ns_N):
        if stage in (None, samples.stage_N[at]) and (steps is None or samples.step_N[at] in steps):
            before_ns = samples.time_ns_N[at - 1] if at else time_ns - samples.period_ns
            # (without a stage, all time between two samples counts)
            since_ns = before_ns if stage is None else samples.since_ns_N[at]
            yield at, max(0, time_ns - max(before_ns, since_ns))


def meanwhile(samples: StackSamples, worker: WorkerSamples) -> StackSamples:
    """A worker's samples as of a rank, in the steps and stages of the training thread at that time."""
    n = bisect_right(worker.time_ns_W, max(samples.time_ns_N, default=-1))
    at = [bisect_left(samples.time_ns_N, time_ns) for time_ns in worker.time_ns_W[:n]]
    training, *others, sampler = (
        ThreadSamples(thread.name, thread.stacks_N[:n], thread.run_ns_N[:n], thread.waited_ns_N[:n])
        for thread in (*worker.threads, worker.sampler)
    )
    return StackSamples(
        frames=samples.frames,
        period_ns=worker.period_ns,
        time_ns_N=worker.time_ns_W[:n],
        step_N=tuple(samples.step_N[index] for index in at),
        stage_N=tuple(samples.stage_N[index] for index in at),
        since_ns_N=tuple(samples.since_ns_N[index] for index in at),
        training=training,
        others=tuple(others),
        sampler=sampler,
    )


def collapsed(samples: StackSamples) -> Iterator[str]:
    """The samples as Brendan Gregg's collapsed stacks, in microseconds, for flamegraph.pl, inferno and speedscope."""
    by_stack: dict[tuple[str, str, tuple[int, ...]], int] = {}
    workers = ((f"worker {worker.number} ", meanwhile(samples, worker)) for worker in samples.workers)
    for process, sampled in (("", samples), *workers):
        for at, weight_ns in weights(sampled, None):
            for thread in (sampled.training, *sampled.others):
                if stack := thread.stacks_N[at]:
                    key = f"{process}{thread.name}", sampled.stage_N[at], stack
                    by_stack[key] = by_stack.get(key, 0) + weight_ns
    names = [_plain(f"{frame.function} ({PurePath(frame.file).name}:{frame.line})") for frame in samples.frames]
    for (thread_name, stage, stack), ns in by_stack.items():
        if us := round(ns / 1000):
            yield f"{_plain(thread_name)};{_plain(stage)};{';'.join(names[number] for number in stack)} {us}"


def _plain(name: str) -> str:
    return name.replace(";", ":") or "(none)"


def read_samples(path: Path) -> StackSamples:
    """The samples in a file; raises InputError if it has none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    return samples_in(data, str(path))


def samples_in(data: bytes, source: str) -> StackSamples:
    """The samples in the bytes of a file named ``source``; raises InputError if they are invalid, or too many."""
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{source}: over {MAX_FILE_BYTES} bytes of stacks")
    try:
        return msgspec.json.decode(data, type=_Document).samples()
    except (*UNDECODABLE, ValueError) as error:
        raise InputError(f"{source}: not sampled stacks: {_clean(str(error))}") from None


class _Frame(Struct):
    name: str
    file: str
    line: Whole


class _Shared(Struct):
    frames: tuple[_Frame, ...]


class _Profile(Struct):
    name: str
    samples: tuple[Stack, ...]


class _NotSampled(Struct):
    problem: str


class _Columns(Struct):
    schema_version: Literal[1]
    period_s: Annotated[float, Meta(gt=0, lt=3600)]
    time_ns: tuple[Whole, ...]
    step: tuple[Whole, ...]
    stage: tuple[str, ...]
    since_ns: tuple[Whole, ...]
    threads: Annotated[tuple[ThreadSamples, ...], Meta(min_length=1)]
    sampler: ThreadSamples
    source: tuple[str, ...]
    workers: tuple[WorkerSamples, ...] = ()
    not_sampled: tuple[_NotSampled, ...] = ()


class _Document(Struct):
    shared: _Shared
    profiles: Annotated[tuple[_Profile, ...], Meta(min_length=1)]
    sftriage: _Columns

    def samples(self) -> StackSamples:
        """The samples; raises ValueError if the parts of the document do not match."""
        columns, n_frames = self.sftriage, len(self.shared.frames)
        processes: tuple[_Columns | WorkerSamples, ...] = (columns, *columns.workers)
        if sum(len(process.threads) for process in processes) != len(self.profiles):
            raise ValueError("threads of other profiles")
        if len(columns.source) != n_frames:
            raise ValueError("lines of source for other frames")
        if any(number >= n_frames for profile in self.profiles for stack in profile.samples for number in stack):
            raise ValueError("a stack names a frame that is not there")
        # (share equal stacks: most occur many times)
        stacks: dict[Stack, Stack] = {}
        named = (
            (_clean(profile.name), tuple(stacks.setdefault(stack, stack) for stack in profile.samples))
            for profile in self.profiles
        )
        (training, *others), *theirs = (
            tuple(
                msgspec.structs.replace(thread, name=name, stacks_N=stacks_N)
                for thread, (name, stacks_N) in zip(process.threads, islice(named, len(process.threads)), strict=True)
            )
            for process in processes
        )
        workers = tuple(
            msgspec.structs.replace(worker, threads=threads)
            for worker, threads in zip(columns.workers, theirs, strict=True)
        )
        fit = _fit(columns.time_ns, (training, *others), columns.sampler, columns.step, columns.stage, columns.since_ns)
        if not (fit and all(_fit(worker.time_ns_W, worker.threads, worker.sampler) for worker in workers)):
            raise ValueError("columns of unequal lengths")
        return StackSamples(
            frames=tuple(self._frames()),
            period_ns=round(columns.period_s * 1e9),
            time_ns_N=columns.time_ns,
            step_N=columns.step,
            stage_N=columns.stage,
            since_ns_N=columns.since_ns,
            training=training,
            others=tuple(others),
            sampler=columns.sampler,
            workers=workers,
            not_sampled=tuple(_clean(worker.problem) for worker in columns.not_sampled),
        )

    def _frames(self) -> Iterator[Frame]:
        stack = next((sample for sample in self.profiles[0].samples if sample), ())
        package = program_package(self.shared.frames[number].file for number in stack)
        for frame, line in zip(self.shared.frames, self.sftriage.source, strict=True):
            main = package is not None and frame.file.startswith(package)
            yield Frame(_clean(_INLINE.sub("", frame.name)), _clean(frame.file), frame.line, _clean(line), main=main)


def _fit(
    time_ns: Sequence[int], threads: Sequence[ThreadSamples], sampler: ThreadSamples, *more: Sequence[object]
) -> bool:
    """Whether all columns are of one length."""
    each = (column for thread in threads for column in (thread.stacks_N, thread.run_ns_N, thread.waited_ns_N))
    read = (column for thread in threads for column in (thread.waits_in_N, *thread.used_N.values()) if column)
    return len(set(map(len, (time_ns, sampler.run_ns_N, sampler.waited_ns_N, *more, *each, *read)))) == 1


def _clean(text: str) -> str:
    return CONTROL.sub("?", text)[:300]


_IDLE = re.compile(r"/(threading|queue|selectors|asyncio/[^/]*)\.py$")
"""Where an idle thread waits for work."""


LATE_PERIODS = 4
"""If the sampler is this many periods late without waiting for a core, a thread that ran then held the interpreter; if
no thread ran, the whole process was stopped."""

BUSY_FRACTION = 0.6
"""A thread that ran, or was ready to run, for this fraction of the time keeps others from the interpreter."""


@dataclass(slots=True, eq=False)
class Spot:
    """A function of the program itself, with its samples in a stage.

    Attributes:
        frame: the function, at its most frequent line; ``line_fraction`` is that line's part of the time.
        within: the most frequent stack below it, outermost first: the library functions that it calls.
        samples: the number of samples there, in ``steps``.
        weight_ns: their time; for ``known_ns`` of it, the system reports what the thread did.
        spent_ns: that time by state: ``run``; ``waited``, for a core; ``stopped``: the whole process was stopped;
            ``gil``: another thread kept even the sampler from the interpreter; ``beside``: another thread was busy,
            while this one was in none of these states, nor in a wait that the kernel names.
        used: the counters of the thread, or of its process, during that time, by name (`trainer.stacks.USED`).
        others_ns: how long each other thread was busy.
        meanwhile: samples of other threads in the program, by thread and place.
        waits_in: how long the thread waited in each kernel function.
    """

    sampled: StackSamples
    samples: int = 0
    steps: set[int] = field(default_factory=set)
    weight_ns: int = 0
    known_ns: int = 0
    spent_ns: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    others_ns: Counter[int] = field(default_factory=Counter)
    meanwhile: Counter[tuple[str, Frame]] = field(default_factory=Counter)
    waits_in: Counter[str] = field(default_factory=Counter)
    _stacks_ns: Counter[tuple[int, ...]] = field(default_factory=Counter)
    frame: Frame = field(init=False)
    within: tuple[Frame, ...] = field(init=False)
    line_fraction: float = field(init=False)

    def fraction(self, *states: str) -> float:
        """The fraction of the time in states of ``spent_ns``, or ``collected`` (garbage); 0 if unknown."""
        if states == ("collected",):
            return min(1.0, self.used["collected_ns"] / self.weight_ns) if self.weight_ns else 0.0
        return min(1.0, sum(self.spent_ns[state] for state in states) / self.known_ns) if self.known_ns else 0.0

    @property
    def place(self) -> tuple[str, str]:
        return self.frame.function, self.frame.file

    def add(self, at: int, weight_ns: int) -> None:
        samples = self.sampled
        self.samples += 1
        self.steps.add(samples.step_N[at])
        self.weight_ns += weight_ns
        self._stacks_ns[samples.training.stacks_N[at]] += weight_ns
        for thread in samples.others:
            stack = thread.stacks_N[at]
            if stack and not _IDLE.search(samples.frames[stack[-1]].file) and samples.own_frame(stack).own:
                self.meanwhile[thread.name, samples.own_frame(stack)] += 1
        if samples.training.waits_in_N:
            self.waits_in[samples.training.waits_in_N[at]] += weight_ns
        # (a sampler that was held up may have only one sample, and the stage may have begun before it)
        if at and 2 * weight_ns >= samples.time_ns_N[at] - samples.time_ns_N[at - 1]:
            self._add_times(at)
            self.used.update({name: used_N[at] - used_N[at - 1] for name, used_N in samples.training.used_N.items()})

    def _add_times(self, at: int) -> None:
        samples = self.sampled
        since_ns = samples.time_ns_N[at] - samples.time_ns_N[at - 1]
        run_ns, waited_ns = _ran(samples.training, at)
        if run_ns is None or waited_ns is None:
            return
        self.known_ns += since_ns
        self.spent_ns.update(run=run_ns, waited=waited_ns)
        # (a thread that waits for a core may hold the interpreter)
        busy_ns = [sum(part or 0 for part in _ran(thread, at)) for thread in samples.others]
        self.others_ns.update(dict(enumerate(busy_ns)))
        own_ns, others_ns, waits_in_N = run_ns + waited_ns, max(busy_ns, default=0), samples.training.waits_in_N
        if not waits_in_N or not waits_in_N[at]:
            self.spent_ns["beside"] += min(max(0, since_ns - own_ns), others_ns)
        late_ns = since_ns - samples.period_ns - (_ran(samples.sampler, at)[1] or 0)
        if since_ns > LATE_PERIODS * samples.period_ns and late_ns > 0:
            self.spent_ns["stopped"] += max(0, late_ns - max(own_ns, others_ns))
            self.spent_ns["gil"] += max(0, min(late_ns, others_ns) - run_ns) if others_ns > own_ns else 0

    def settle(self) -> None:
        """Set the most frequent line and the most frequent stack below it, once all samples are added."""
        frames, lines = self.sampled.frames, Counter[int]()
        for stack, weight_ns in self._stacks_ns.items():
            lines[stack[own_at(frames, stack)]] += weight_ns
        number = max(lines, key=lambda line: lines[line])
        nested = (below for below in self._stacks_ns if below[own_at(frames, below)] == number)
        stack = max(nested, key=lambda below: self._stacks_ns[below])
        self.frame, self.within = frames[number], tuple(frames[frame] for frame in stack[own_at(frames, stack) + 1 :])
        self.line_fraction = lines[number] / self.weight_ns if self.weight_ns else 0.0


def _ran(thread: ThreadSamples, at: int) -> tuple[int | None, int | None]:
    run, waited = thread.run_ns_N[at - 1 : at + 1], thread.waited_ns_N[at - 1 : at + 1]
    return (None, None) if min(run) < 0 or min(waited) < 0 else (run[1] - run[0], waited[1] - waited[0])


def spots(samples: StackSamples, stage: str | None, steps: Collection[int] | None = None) -> list[Spot]:
    """Where a stage was spent in some steps (None: all), by function of the program, longest first.

    A stack counts for its innermost function outside libraries, or else for its innermost function.
    """
    found: dict[tuple[str, str], Spot] = {}
    for at, weight_ns in weights(samples, stage, steps):
        stack = samples.training.stacks_N[at]
        below = stack[own_at(samples.frames, stack) + 1 :] if stack else ()
        # (skip samples in our own functions)
        if stack and not any(OURS.search(samples.frames[frame_number].file) for frame_number in below):
            frame = samples.own_frame(stack)
            found.setdefault((frame.function, frame.file), Spot(samples)).add(at, weight_ns)
    for spot in found.values():
        spot.settle()
    return sorted(found.values(), key=lambda spot: (-spot.weight_ns, spot.frame.file, spot.frame.line))


SINGLE_LINE_FRACTION = 0.8
"""A line with this fraction of a function's time shows what the function does."""

RUNS_FRACTION = 0.6
"""A thread that runs, or is ready to run, for this fraction of the time works; any other waits for something."""

# By the functions that the program had called, as ``FILE FUNCTION``; the first match counts.
_CALLED: Mapping[CauseCode, str] = {
    "recompilation": r"torch/_(dynamo|inductor)/",
    # (Python 3.10 does not name the class of a method)
    "dataloader_workers": r" _MultiProcessingDataLoaderIter\.|/dataloader\.py _(try_)?get_data$",
    "checkpoint": r"torch/(serialization\.py (_?save|_legacy_save)|distributed/checkpoint/)",
    "collective": r"torch/distributed/distributed_c10d\.py",
    "subprocess": r"/subprocess\.py ",
    "output": r"/logging/__init__\.py |/(tqdm|rich|loguru)/",
    "database": r"/(sqlite3|sqlalchemy|psycopg2?|pymysql|pymongo|redis|asyncpg)/",
    "network": r"/(socket|ssl)\.py |/(http|urllib|urllib3|requests|aiohttp|botocore|fsspec)/",
    "lock": r"/(threading|queue)\.py |/multiprocessing/(synchronize|queues|connection)\.py ",
}
# By the source line of the innermost function, which may call code without Python frames.
_BY_SOURCE: Mapping[CauseCode, str] = {
    "sleep": r"\bsleep\(",
    "garbage_collection": r"\bgc\.collect\(",
    "output": r"\bprint\(|\bstd(out|err)\.(write|flush)\(",
    "database": r"\.(commit|execute\w*|fetch(one|many|all))\(",
    "network": r"\b(recv\w*|sendall|urlopen|getresponse|connect)\(",
    "subprocess": r"\bos\.(system|wait\w*|posix_spawn\w*|fork)\(",
    "disk": r"\b(open|read\w*|pread\w*|write\w*|f(data)?sync|os\.sync|fromfile|tofile|(np|torch)\.load|memmap)\(",
    "lock": r"(?i)\b(acquire|join|flock|lockf)\(|^with\b.*(\b|_)(r?lock|mutex|semaphore|condition)\b",
    "checkpoint": r"\b(torch|dcp|checkpoint\w*)\.save\(",
}
# By the kernel function in which it waited.
_BY_KERNEL: Mapping[CauseCode, str] = {
    "sleep": r"nanosleep",
    "subprocess": r"^(do|kernel)_wait(4|id)?$",
    "output": r"pipe_write|tty_write",
    "lock": r"flock|setlk|(posix|locks)_lock|pipe_read|eventfd_read|semtimedop|msgrcv|^unix_",
    "network": r"^(sk|skb|tcp|udp|inet|inet6|nfs|rpc)_|^wait_woken$",
    "disk": r"io_schedule|folio|wait_on_(page|buffer)|jbd2|^blk|^bio|submit_bio|rq_qos|^(ext4|xfs|btrfs|fuse)_|"
    r"balance_dirty|writeback|^wb_|sync_(inodes|filesystems)|iomap",
}

WORKS: frozenset[CauseCode] = frozenset(
    {"garbage_collection", "recompilation", "checkpoint", "disk", "subprocess", "output", "database"}
)
"""Causes that fit a running thread; the others do not."""


def code_of(spot: Spot) -> CauseCode:
    """What a place does, by its calls and by whether the thread ran."""
    runs = spot.fraction("run", "waited") >= RUNS_FRACTION
    waits_in = next((name for name, ns in spot.waits_in.most_common(1) if 2 * ns >= spot.weight_ns), "")
    innermost = spot.within[-1] if spot.within else spot.frame
    called = "\n".join(f"{frame.file} {frame.function}" for frame in spot.within)
    signs = ((_CALLED, called), (_BY_KERNEL, "" if runs else waits_in), (_BY_SOURCE, innermost.source))
    fits = (code for table, text in signs for code, pattern in table.items() if re.search(pattern, text, re.M))
    found = next((code for code in fits if not runs or code in WORKS), None)
    if found is not None or runs:
        return found or "python"
    if not spot.known_ns:
        return "unknown"
    return "gil" if max(spot.others_ns.values(), default=-1) >= BUSY_FRACTION * spot.known_ns else "blocked"


_CLEAR_BY_CODE: frozenset[CauseCode] = frozenset({"dataloader_workers", "checkpoint", "collective", "recompilation"})
"""Activities of a library, whose function names add nothing."""


def how(code: CauseCode, spot: Spot) -> str:
    """How a place does it: the library function that it calls, and the thread for which it waits."""
    called = "" if code in _CLEAR_BY_CODE else called_by(spot)
    if code == "python":
        calls = _calls(spot.frame.source) if spot.line_fraction >= SINGLE_LINE_FRACTION else []
        return f" in {called}" if called else "" if calls else " in Python"
    shown = f"{called.rpartition('.')[2]}(" in spot.frame.source
    text = f" ({called})" if called and not shown else ""
    if code == "lock":
        for (name, frame), times in spot.meanwhile.most_common(1):
            if 2 * times >= spot.samples:
                text += f", while thread {name!r} is in {place(frame)}"
    return text


def called_by(spot: Spot) -> str:
    """What a place calls: the first public library function below it, or else the only call in its only line; or ""."""
    public = (frame for frame in spot.within if not re.search(r"<|(^|\.)_", frame.function))
    first = next(public, None)
    calls = _calls(spot.frame.source)
    if first is not None:
        name = first.function.rpartition(".")[2]
        matching = (call for call in calls if re.fullmatch(rf"[\w.]*\b{re.escape(name)}", call))
        return next(matching, f"{_module(first.file)}.{first.function}")
    if spot.within or spot.line_fraction < SINGLE_LINE_FRACTION:
        return ""
    return calls[0] if len(calls) == 1 and re.fullmatch(r"[\w.]{1,100}", calls[0]) else ""


def _calls(source: str) -> list[str]:
    try:
        parsed = ast.parse(f"{source} pass" if source.endswith(":") else source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ["?" for _ in re.finditer(r"\w\(", source)]
    return [ast.unparse(node.func) for node in ast.walk(parsed) if isinstance(node, ast.Call)]


def _module(file: str) -> str:
    path = re.sub(r"^.*/((site|dist)-packages|lib/python\d[^/]*)/", "", file)
    return re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".").strip("<>").removeprefix("frozen ")


def place(frame: Frame) -> str:
    """A line of the program: function, file, number and source."""
    # (without a trailing comment)
    line = frame.source.partition("  # ")[0]
    source = f": {line}" if line else ""
    return f"{frame.function[:100]} ({PurePath(frame.file).name}:{frame.line}{source})"
