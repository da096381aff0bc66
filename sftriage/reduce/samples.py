"""Sampled Python stacks of a capture (`sampling.sampler`): the file that they are in, and their tree of functions.

In the tree a function is the same wherever in it the sampler found it; the lines at which it stood itself are leaves
below it. So a function takes what its leaves take. Axes: N samples of the training thread.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from sftriage.errors import InputError
from sftriage.traces.jsonstream import UNDECODABLE
from sftriage.traces.manifest import CONTROL
from sftriage.trainer.stacks import USED

MAX_FILE_BYTES = 256 * 2**20

_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib/python\d[^/]*/|/sftriage/(trainer|integrations)/")
"""Files that are not the program's own: the interpreter's, installed packages, and what records and captures steps."""
OURS = re.compile(r"/sftriage/trainer/(?!seams/)")
"""Files of what records and captures the steps, and calls nothing of the program's."""

_PACKAGE = re.compile(r"^.*/(?:site|dist)-packages/[^/]+/")
_INLINE = re.compile(r"\.<locals>\.<(genexpr|listcomp|setcomp|dictcomp)>$")
"""What a function is called that stands in a line of another one, to whoever reads that line."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A function of a stack, at a line with its ``source`` ("": unknown); ``main``: of the program's own package."""

    function: str
    file: str
    line: int
    source: str = ""
    main: bool = False

    @property
    def own(self) -> bool:
        return self.main or _LIBRARY.search(self.file) is None


@dataclass(frozen=True, slots=True)
class ThreadSamples:
    """One thread at each sample.

    Attributes:
        stacks_N: its stack, as numbers of frames, the outermost first; empty where the thread was not there.
        run_ns_N, waited_ns_N: how long it had run, and waited for a core, by then; -1 where unknown.
        waits_in_N: the function of the kernel that it waited in, "" where unknown; empty where never read.
        used_N: what was counted of it, or of its process, by then, by name (`sampling.stacks.USED`).
    """

    name: str
    stacks_N: tuple[tuple[int, ...], ...]
    run_ns_N: tuple[int, ...]
    waited_ns_N: tuple[int, ...]
    waits_in_N: tuple[str, ...] = ()
    used_N: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSamples:
    """A worker of the rank's DataLoader, which has sampled itself: its rows (W) have times of their own.

    ``number`` is its place in the loader. The first of ``threads`` makes the batches; the rest is as in `StackSamples`.
    """

    number: int
    pid: int
    period_ns: int
    time_ns_W: tuple[int, ...]
    threads: tuple[ThreadSamples, ...]
    sampler: ThreadSamples


@dataclass(frozen=True, slots=True)
class StackSamples:
    """Samples of all threads of a rank, in the order of time.

    Attributes:
        period_ns: the time from one sample to the next, unless something keeps the sampler.
        time_ns_N: when each was taken, on the host's monotonic clock.
        step_N, stage_N: where the training thread was, since ``since_ns_N``.
        sampler: the thread that samples, without its stack.
        not_sampled: why workers beside ``workers`` have no samples.
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
    """Where in a stack the innermost function of the program itself is, or else the innermost one."""
    return next((at for at in range(len(stack) - 1, -1, -1) if frames[stack[at]].own), len(stack) - 1)


def weights(
    samples: StackSamples, stage: str | None, steps: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """The samples of a stage and of some steps (None: all): which of the N, and what it stands for, in nanoseconds.

    That is the time since the one before, or since the stage began.
    """
    for at, time_ns in enumerate(samples.time_ns_N):
        if stage in (None, samples.stage_N[at]) and (steps is None or samples.step_N[at] in steps):
            before_ns = samples.time_ns_N[at - 1] if at else time_ns - samples.period_ns
            # (of all stages, whatever was between two samples)
            since_ns = before_ns if stage is None else samples.since_ns_N[at]
            yield at, max(0, time_ns - max(before_ns, since_ns))


def meanwhile(samples: StackSamples, worker: WorkerSamples) -> StackSamples:
    """A worker's samples as if it were a rank, in the steps and stages that the training thread was in meanwhile."""
    at = [bisect_left(samples.time_ns_N, time_ns) for time_ns in worker.time_ns_W]
    rows = [row for row in range(len(at)) if at[row] < len(samples.time_ns_N)]
    threads = [
        ThreadSamples(
            one.name,
            tuple(one.stacks_N[row] for row in rows) if one.stacks_N else (),
            tuple(one.run_ns_N[row] for row in rows),
            tuple(one.waited_ns_N[row] for row in rows),
        )
        for one in (*worker.threads, worker.sampler)
    ]
    return StackSamples(
        frames=samples.frames,
        period_ns=worker.period_ns,
        time_ns_N=tuple(worker.time_ns_W[row] for row in rows),
        step_N=tuple(samples.step_N[at[row]] for row in rows),
        stage_N=tuple(samples.stage_N[at[row]] for row in rows),
        since_ns_N=tuple(samples.since_ns_N[at[row]] for row in rows),
        training=threads[0],
        others=tuple(threads[1:-1]),
        sampler=threads[-1],
    )


def read_samples(path: Path) -> StackSamples:
    """The samples in a file; raises InputError where there are none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    return samples_in(data, str(path))


def samples_in(data: bytes, source: str) -> StackSamples:
    """The samples in a file's bytes, which ``source`` names; raises InputError where there are none, or too many."""
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{source}: over {MAX_FILE_BYTES} bytes of stacks")
    try:
        document = msgspec.json.decode(data, type=_Document)
        document.check()
    except (*UNDECODABLE, ValueError) as error:
        raise InputError(f"{source}: not sampled stacks: {_clean(str(error))}") from None
    return document.samples()


Whole = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


class _Frame(Struct):
    name: str
    file: str
    line: Whole


class _Shared(Struct):
    frames: tuple[_Frame, ...]


class _Profile(Struct):
    name: str
    samples: tuple[tuple[Annotated[int, Meta(ge=0)], ...], ...]


class _Thread(Struct):
    run_ns: tuple[Whole, ...]
    waited_ns: tuple[Whole, ...]
    # (of the training thread alone)
    waits_in: tuple[Annotated[str, Meta(max_length=100)], ...] = ()
    collected_ns: tuple[Whole, ...] = ()
    minor_faults: tuple[Whole, ...] = ()
    major_faults: tuple[Whole, ...] = ()
    system_ns: tuple[Whole, ...] = ()

    @property
    def used(self) -> dict[str, tuple[int, ...]]:
        return {name: column for name in USED if (column := getattr(self, name))}


class _Rows(Struct, kw_only=True):
    period_s: Annotated[float, Meta(gt=0, lt=3600)]
    time_ns: tuple[Whole, ...]
    threads: Annotated[tuple[_Thread, ...], Meta(min_length=1)]
    sampler: _Thread

    def lengths(self) -> set[int]:
        times = (one for thread in (*self.threads, self.sampler) for one in (thread.run_ns, thread.waited_ns))
        more = (column for thread in self.threads for column in (thread.waits_in, *thread.used.values()) if column)
        return {len(self.time_ns), *map(len, times), *map(len, more)}

    def sampled(self, profiles: Sequence[_Profile]) -> tuple[ThreadSamples, ...]:
        # (most are met again and again)
        stacks: dict[tuple[int, ...], tuple[int, ...]] = {}
        return tuple(
            ThreadSamples(
                _clean(profile.name),
                tuple(stacks.setdefault(stack, stack) for stack in profile.samples),
                *(thread.run_ns, thread.waited_ns, thread.waits_in, thread.used),
            )
            for profile, thread in zip(profiles, self.threads, strict=True)
        )

    @property
    def period_ns(self) -> int:
        return int(self.period_s * 1e9)

    @property
    def sampling(self) -> ThreadSamples:
        return ThreadSamples("", (), self.sampler.run_ns, self.sampler.waited_ns)


class _Worker(_Rows, kw_only=True):
    worker: Whole
    pid: Whole


class _NotSampled(Struct):
    problem: str


class _Columns(_Rows, kw_only=True):
    schema_version: Literal[1]
    step: tuple[Whole, ...]
    stage: tuple[str, ...]
    since_ns: tuple[Whole, ...]
    source: tuple[str, ...]
    workers: tuple[_Worker, ...] = ()
    not_sampled: tuple[_NotSampled, ...] = ()


class _Document(Struct):
    shared: _Shared
    profiles: Annotated[tuple[_Profile, ...], Meta(min_length=1)]
    sftriage: _Columns

    def check(self) -> None:
        columns, n_frames = self.sftriage, len(self.shared.frames)
        if sum(len(one.threads) for one in (columns, *columns.workers)) != len(self.profiles):
            raise ValueError("threads of other profiles")
        lengths = {len(column) for column in (columns.step, columns.stage, columns.since_ns)}
        for rows, profiles in self._processes():
            if len(lengths | rows.lengths() | {len(one.samples) for one in profiles}) > 1:
                raise ValueError("columns of unequal lengths")
            lengths = set()
        if len(columns.source) != n_frames:
            raise ValueError("lines of source for other frames")
        if any(number >= n_frames for one in self.profiles for stack in one.samples for number in stack):
            raise ValueError("a stack names a frame that is not there")

    def _processes(self) -> Iterator[tuple[_Rows, Sequence[_Profile]]]:
        at = 0
        for rows in (self.sftriage, *self.sftriage.workers):
            yield rows, self.profiles[at : at + len(rows.threads)]
            at += len(rows.threads)

    def _package(self) -> str:
        """The folder of the package that the program is of, where that is installed; "" where it is not.

        It is where the training thread began: below what runs a module (``python -m``), or a script in ``bin``.
        """
        stack = next((one for one in self.profiles[0].samples if one), ())
        files = (self.shared.frames[number].file for number in stack)
        first = next((file for file in files if not re.search(r"^<|runpy\.py$|/bin/[^/]+$", file)), "")
        found = _PACKAGE.match(first)
        return found[0] if found else ""

    def samples(self) -> StackSamples:
        columns = self.sftriage
        package = self._package()
        frames = zip(self.shared.frames, columns.source, strict=True)
        (training, *others), *theirs = (rows.sampled(profiles) for rows, profiles in self._processes())
        return StackSamples(
            frames=tuple(
                Frame(
                    _clean(_INLINE.sub("", one.name)),
                    _clean(one.file),
                    one.line,
                    _clean(line),
                    main=package != "" and one.file.startswith(package),
                )
                for one, line in frames
            ),
            period_ns=columns.period_ns,
            time_ns_N=columns.time_ns,
            step_N=columns.step,
            stage_N=columns.stage,
            since_ns_N=columns.since_ns,
            training=training,
            others=tuple(others),
            sampler=columns.sampling,
            workers=tuple(
                WorkerSamples(one.worker, one.pid, one.period_ns, one.time_ns, threads, one.sampling)
                for one, threads in zip(columns.workers, theirs, strict=True)
            ),
            not_sampled=tuple(_clean(one.problem) for one in columns.not_sampled),
        )


def _clean(text: str) -> str:
    return CONTROL.sub("?", text)[:300]


MAX_DEPTH = 128
"""Functions of a stack that are kept apart; what is deeper counts for the last of them."""

MAX_STACKS = 1000
"""Different stacks of one side that are kept apart; of more, the least are put together."""


OTHERS = Frame("(other stacks)", "", 0)

Kind = Literal["root", "function", "line"]


@dataclass(frozen=True, slots=True)
class Folded:
    """What a thread did in a stage: what each stack stands for in all ``steps``, and the number of samples."""

    stacks_ns: Sequence[tuple[tuple[Frame, ...], int]]
    samples: int
    steps: int

    @property
    def weight_ns(self) -> int:
        return sum(ns for _, ns in self.stacks_ns)


@dataclass(frozen=True, slots=True)
class Flame:
    """A function where it was called, or a line at which it stood itself; the root is the stage.

    ``path`` is unique in a tree, and the same in every tree. ``frame`` is at the line where it was met the most.
    ``took_s`` is a step's, with all that it called; ``beside_s`` the same of what it is compared with. ``children`` are
    the longest first.
    """

    kind: Kind
    path: str
    frame: Frame
    took_s: float
    beside_s: float
    children: tuple[Flame, ...] = ()

    @property
    def more_s(self) -> float:
        return self.took_s - self.beside_s

    def seconds(self, side: int) -> float:
        """What it took on the suspect (0), or beside (1)."""
        return self.beside_s if side else self.took_s

    def walk(self) -> Iterator[Flame]:
        """It, and all that is below it, each before what is below."""
        waiting = [self]
        while waiting:
            one = waiting.pop()
            yield one
            waiting += reversed(one.children)


def fold(
    samples: StackSamples, thread: ThreadSamples, stage: str | None, steps: Collection[int] | None = None
) -> Folded:
    """What one of the threads did while the training thread was in a stage, or in all, in some steps, or in all."""
    by_stack: dict[tuple[int, ...], int] = {}
    taken = 0
    for at, weight_ns in weights(samples, stage, steps):
        if stack := thread.stacks_N[at]:
            taken += 1
            by_stack[stack] = by_stack.get(stack, 0) + weight_ns
    # (a step may have no sample, where the sampler was kept from it)
    numbers = range(min(samples.step_N, default=0), max(samples.step_N, default=0) + 1)
    met = len(numbers) if steps is None else sum(number in steps for number in numbers)
    by_size = sorted(by_stack.items(), key=lambda one: -one[1])
    stacks_ns = [
        (tuple(samples.frames[number] for number in stack[:MAX_DEPTH]), ns) for stack, ns in by_size[:MAX_STACKS]
    ]
    if left := by_size[MAX_STACKS:]:
        stacks_ns.append(((OTHERS,), sum(ns for _, ns in left)))
    return Folded(tuple(stacks_ns), taken, met)


def flames(*sides: tuple[Folded, float | None]) -> Flame:
    """The tree of what a stage was spent on, a step: on the suspect, and on what it is compared with.

    Each side has its samples, and the measured seconds of the stage a step (None: unknown), which they are parts of.
    """
    root = _Node()
    for side, (folded, measured_s) in enumerate(sides):
        weight_ns = folded.weight_ns
        a_step = 1e-9 / max(1, folded.steps) if measured_s is None or not weight_ns else measured_s / weight_ns
        for stack, ns in folded.stacks_ns:
            root.add(stack, side, ns * a_step)
        # (short, it may have been missed by every sample)
        root.seconds[side] = weight_ns * a_step if measured_s is None else measured_s
    return root.flame("root", "all", Frame("", "", 0))


@dataclass(slots=True)
class _Node:
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    # By line: hashing a frame takes as long as all the rest.
    lines: dict[int, tuple[float, Frame]] = field(default_factory=dict)
    functions: dict[tuple[str, str], _Node] = field(default_factory=dict)
    stood: dict[Frame, list[float]] = field(default_factory=dict)

    def add(self, stack: Sequence[Frame], side: int, seconds: float) -> None:
        node = self
        for frame in stack:
            node = node.functions.setdefault((frame.function, frame.file), _Node())
            node.seconds[side] += seconds
            met = node.lines.get(frame.line)
            node.lines[frame.line] = (seconds, frame) if met is None else (met[0] + seconds, met[1])
        if stack:
            node.stood.setdefault(stack[-1], [0.0, 0.0])[side] += seconds

    def flame(self, kind: Kind, path: str, frame: Frame) -> Flame:
        below = [
            *(one.flame("function", _below(path, "in", *key), one.most()) for key, one in self.functions.items()),
            *(
                Flame("line", _below(path, "at", str(at.line), at.source), at, took_s, beside_s)
                for at, (took_s, beside_s) in self.stood.items()
            ),
        ]
        below.sort(key=lambda one: (-max(one.took_s, one.beside_s), one.path))
        return Flame(kind, path, frame, self.seconds[0], self.seconds[1], tuple(below))

    def most(self) -> Frame:
        return max(self.lines.values(), key=lambda met: (met[0], -met[1].line))[1]


def _below(path: str, *names: str) -> str:
    return hashlib.blake2b("\0".join((path, *names)).encode(errors="surrogatepass"), digest_size=5).hexdigest()


def collapsed(samples: StackSamples) -> Iterator[str]:
    """The samples as Brendan Gregg's collapsed stacks, in microseconds, for flamegraph.pl, inferno and speedscope."""
    by_stack: dict[tuple[str, str, tuple[int, ...]], int] = {}
    workers = ((f"worker {one.number} ", meanwhile(samples, one)) for one in samples.workers)
    for process, sampled in (("", samples), *workers):
        for at, weight_ns in weights(sampled, None):
            for thread in (sampled.training, *sampled.others):
                if stack := thread.stacks_N[at]:
                    key = f"{process}{thread.name}", sampled.stage_N[at], stack
                    by_stack[key] = by_stack.get(key, 0) + weight_ns
    names = [_plain(f"{one.function} ({PurePath(one.file).name}:{one.line})") for one in samples.frames]
    for (thread_name, stage, stack), ns in by_stack.items():
        if us := round(ns / 1000):
            yield f"{_plain(thread_name)};{_plain(stage)};{';'.join(names[number] for number in stack)} {us}"


def _plain(name: str) -> str:
    return name.replace(";", ":") or "(none)"
