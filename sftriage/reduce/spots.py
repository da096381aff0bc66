"""Where a stage's time was spent, function by function of the program, by the sampled stacks, and what is done there.

Axes: N samples of the training thread.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from sftriage.reduce.samples import OURS, Frame, StackSamples, ThreadSamples, own_at
from sftriage.traces.findings import CauseCode

_IDLE = re.compile(r"/(threading|queue|selectors|asyncio/[^/]*)\.py$")
"""Where a thread stands that waits to be given something to do."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A function of the program itself, and the part of a stage's samples that it stands for.

    Attributes:
        frame: the function, at its most frequent line; ``line_fraction`` is that line's part of the time.
        within: the most frequent stack below it, outermost first: the libraries' functions that it calls.
        samples: number of samples there, in so many ``steps``.
        weight_ns: the time that they stand for.
        run_fraction: part of the time that the thread ran; ``waited_fraction``: waited for a core;
            ``stopped_fraction``: the whole process stood still; ``gil_fraction``: another thread kept even the sampler
            from the interpreter;
            ``beside_fraction``: none of this, nor a wait for something that the kernel names, while another thread was
                busy. None where the system does not say.
        beside: the number of another thread that was busy most of the time; None where none was.
        meanwhile: where another thread of the program was most of the time, and its name; None where all were idle.
        waits_in: the function of the kernel in which it waited most of that time, or "".
        used: what was counted meanwhile of the thread, or of its process, by name (`sampling.stacks.USED`).
    """

    frame: Frame
    within: tuple[Frame, ...]
    samples: int
    steps: int
    weight_ns: int
    run_fraction: float | None
    waited_fraction: float | None
    stopped_fraction: float | None
    gil_fraction: float | None
    beside_fraction: float | None
    beside: int | None
    line_fraction: float
    meanwhile: tuple[str, Frame] | None
    waits_in: str
    used: Mapping[str, int] = field(default_factory=dict)

    @property
    def collected_fraction(self) -> float:
        """Of that time, what the thread collected garbage."""
        return min(1.0, self.used.get("collected_ns", 0) / self.weight_ns) if self.weight_ns else 0.0


LATE_PERIODS = 4
"""A sampler late by so many periods, though it waited for no core, was kept from the interpreter by whoever ran
meanwhile; where nobody did, it was stopped with all else."""

BUSY_FRACTION = 0.6
"""Another thread that ran, or was ready to, for as much of the time keeps the training thread from the interpreter."""


@dataclass(slots=True)
class _Spent:
    samples: int = 0
    steps: set[int] = field(default_factory=set)
    weight_ns: int = 0
    seen_ns: int = 0
    run_ns: int = 0
    waited_ns: int = 0
    stopped_ns: int = 0
    gil_ns: int = 0
    beside_ns: int = 0
    used: Counter[str] = field(default_factory=Counter)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    others_ns: dict[int, int] = field(default_factory=dict)
    meanwhile: Counter[tuple[str, Frame]] = field(default_factory=Counter)
    waits_in: Counter[str] = field(default_factory=Counter)

    def add_others(self, samples: StackSamples, at: int) -> None:
        for thread in samples.others:
            stack = thread.stacks_N[at]
            if stack and not _IDLE.search(samples.frames[stack[-1]].file) and samples.own_frame(stack).own:
                self.meanwhile[thread.name, samples.own_frame(stack)] += 1

    def add_times(self, samples: StackSamples, at: int) -> None:
        since_ns = samples.time_ns_N[at] - samples.time_ns_N[at - 1]
        run_ns, waited_ns = _ran(samples.training, at)
        if run_ns is None or waited_ns is None:
            return
        self.seen_ns += since_ns
        self.run_ns += run_ns
        self.waited_ns += waited_ns
        # (a thread that waits for a core may hold the interpreter meanwhile)
        busy_ns = [sum(one or 0 for one in _ran(thread, at)) for thread in samples.others]
        for number, its_ns in enumerate(busy_ns):
            self.others_ns[number] = self.others_ns.get(number, 0) + its_ns
        waits_in_N = samples.training.waits_in_N
        if not waits_in_N or not waits_in_N[at]:
            self.beside_ns += min(max(0, since_ns - run_ns - waited_ns), max(busy_ns, default=0))
        late_ns = since_ns - samples.period_ns - (_ran(samples.sampler, at)[1] or 0)
        if since_ns > LATE_PERIODS * samples.period_ns and late_ns > 0:
            own_ns, others_ns = run_ns + waited_ns, max(busy_ns, default=0)
            self.stopped_ns += max(0, late_ns - max(own_ns, others_ns))
            self.gil_ns += max(0, min(late_ns, others_ns) - run_ns) if others_ns > own_ns else 0


def _ran(thread: ThreadSamples, at: int) -> tuple[int | None, int | None]:
    run, waited = thread.run_ns_N[at - 1 : at + 1], thread.waited_ns_N[at - 1 : at + 1]
    return (None, None) if min(run) < 0 or min(waited) < 0 else (run[1] - run[0], waited[1] - waited[0])


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


def spots(samples: StackSamples, stage: str | None, steps: Collection[int] | None = None) -> list[Spot]:
    """Where a stage was spent in some steps (None: all), by function of the program, longest first.

    Of a stack, the innermost function that is not a library's counts; where all are, the innermost.
    """
    spent: dict[tuple[str, str], _Spent] = {}
    for at, weight_ns in weights(samples, stage, steps):
        stack = samples.training.stacks_N[at]
        below = stack[own_at(samples.frames, stack) + 1 :] if stack else ()
        # (what was sampled in our own functions says nothing of the program)
        if not stack or any(OURS.search(samples.frames[one].file) for one in below):
            continue
        frame = samples.own_frame(stack)
        one = spent.setdefault((frame.function, frame.file), _Spent())
        one.samples += 1
        one.steps.add(samples.step_N[at])
        one.weight_ns += weight_ns
        one.stacks[stack] = one.stacks.get(stack, 0) + weight_ns
        one.add_others(samples, at)
        if samples.training.waits_in_N:
            one.waits_in[samples.training.waits_in_N[at]] += weight_ns
        # What keeps the sampler from the interpreter may be met but once, and the stage began meanwhile.
        if at and 2 * weight_ns >= samples.time_ns_N[at] - samples.time_ns_N[at - 1]:
            one.add_times(samples, at)
            one.used.update({name: its_N[at] - its_N[at - 1] for name, its_N in samples.training.used_N.items()})
    found = [_spot(samples.frames, one) for one in spent.values()]
    return sorted(found, key=lambda one: (-one.weight_ns, one.frame.file, one.frame.line))


def _spot(frames: Sequence[Frame], spent: _Spent) -> Spot:
    lines: dict[int, int] = {}
    for stack, weight_ns in spent.stacks.items():
        number = stack[own_at(frames, stack)]
        lines[number] = lines.get(number, 0) + weight_ns
    number = max(lines, key=lambda one: lines[one])
    those = {stack: weight_ns for stack, weight_ns in spent.stacks.items() if stack[own_at(frames, stack)] == number}
    stack = max(those, key=lambda one: those[one])
    seen_ns = spent.seen_ns
    times_ns = spent.run_ns, spent.waited_ns, spent.stopped_ns, spent.gil_ns, spent.beside_ns
    run, waited, stopped, gil, beside = ((min(1.0, one / seen_ns) if seen_ns else None) for one in times_ns)
    busiest = max(spent.others_ns, key=lambda one: spent.others_ns[one], default=None)
    if busiest is not None and spent.others_ns[busiest] < BUSY_FRACTION * seen_ns:
        busiest = None
    most = spent.meanwhile.most_common(1)
    return Spot(
        frame=frames[number],
        within=tuple(frames[one] for one in stack[own_at(frames, stack) + 1 :]),
        samples=spent.samples,
        steps=len(spent.steps),
        weight_ns=spent.weight_ns,
        run_fraction=run,
        waited_fraction=waited,
        stopped_fraction=stopped,
        gil_fraction=gil,
        beside_fraction=beside,
        beside=busiest,
        line_fraction=lines[number] / spent.weight_ns if spent.weight_ns else 0.0,
        meanwhile=next((where for where, times in most if 2 * times >= spent.samples), None),
        waits_in=next((one for one, its_ns in spent.waits_in.most_common(1) if 2 * its_ns >= spent.weight_ns), ""),
        used=spent.used,
    )


ONE_LINE_FRACTION = 0.8
"""Of a function's time, what is of one line for that line to say what it does."""

RUNS_FRACTION = 0.6
"""A thread that runs, or could if it had a core, for as much of the time works; any other waits for something."""

_CALLED: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("recompilation", re.compile(r"torch/_(dynamo|inductor)/")),
    # (Python 3.10 does not say whose method it is)
    ("dataloader_workers", re.compile(r" _MultiProcessingDataLoaderIter\.|/dataloader\.py _(try_)?get_data$")),
    ("checkpoint", re.compile(r"torch/(serialization\.py (_?save|_legacy_save)|distributed/checkpoint/)")),
    ("collective", re.compile(r"torch/distributed/distributed_c10d\.py")),
    ("subprocess", re.compile(r"/subprocess\.py ")),
    ("output", re.compile(r"/logging/__init__\.py |/(tqdm|rich|loguru)/")),
    ("database", re.compile(r"/(sqlite3|sqlalchemy|psycopg2?|pymysql|pymongo|redis|asyncpg)/")),
    ("network", re.compile(r"/(socket|ssl)\.py |/(http|urllib|urllib3|requests|aiohttp|botocore|fsspec)/")),
    ("lock", re.compile(r"/(threading|queue)\.py |/multiprocessing/(synchronize|queues|connection)\.py ")),
)
"""By what the program had called, as ``FILE FUNCTION``: of several the first."""

_BY_SOURCE: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("sleep", re.compile(r"\bsleep\(")),
    ("garbage_collection", re.compile(r"\bgc\.collect\(")),
    ("output", re.compile(r"\bprint\(|\bstd(out|err)\.(write|flush)\(")),
    ("database", re.compile(r"\.(commit|execute\w*|fetch(one|many|all))\(")),
    ("network", re.compile(r"\b(recv\w*|sendall|urlopen|getresponse|connect)\(")),
    ("subprocess", re.compile(r"\bos\.(system|wait\w*|posix_spawn\w*|fork)\(")),
    (
        "disk",
        re.compile(
            r"\b(open|read\w*|pread\w*|write\w*|f(data)?sync|os\.sync|fromfile|tofile|(np|torch)\.load|memmap)\("
        ),
    ),
    ("lock", re.compile(r"\b(acquire|join|flock|lockf)\(|^with\b.*(\b|_)(r?lock|mutex|semaphore|condition)\b", re.I)),
    ("checkpoint", re.compile(r"\b(torch|dcp|checkpoint\w*)\.save\(")),
)
"""By the line at which the innermost function stood, which calls what has no Python of its own."""

_BY_KERNEL: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("sleep", re.compile(r"nanosleep")),
    ("subprocess", re.compile(r"^(do|kernel)_wait(4|id)?$")),
    ("output", re.compile(r"pipe_write|tty_write")),
    ("lock", re.compile(r"flock|setlk|(posix|locks)_lock|pipe_read|eventfd_read|semtimedop|msgrcv|^unix_")),
    ("network", re.compile(r"^(sk|skb|tcp|udp|inet|inet6|nfs|rpc)_|^wait_woken$")),
    (
        "disk",
        re.compile(
            r"io_schedule|folio|wait_on_(page|buffer)|jbd2|^blk|^bio|submit_bio|rq_qos|^(ext4|xfs|btrfs|fuse)_|"
            r"balance_dirty|writeback|^wb_|sync_(inodes|filesystems)|iomap"
        ),
    ),
)
"""By the function of the kernel in which it waited."""

WORKS: frozenset[CauseCode] = frozenset(
    {"garbage_collection", "recompilation", "checkpoint", "disk", "subprocess", "output", "database"}
)
"""What a thread may well run for; of a thread that runs the others are not the cause."""


def code_of(spot: Spot) -> CauseCode:
    """What is done at a place, by what had been called there and by whether the thread ran."""
    runs = spot.run_fraction is not None and spot.run_fraction + (spot.waited_fraction or 0.0) >= RUNS_FRACTION
    innermost = spot.within[-1] if spot.within else spot.frame
    called = [f"{one.file} {one.function}" for one in spot.within]
    fits: Sequence[CauseCode] = (
        *(code for code, pattern in _CALLED if any(pattern.search(one) for one in called)),
        *(code for code, pattern in _BY_KERNEL if spot.waits_in and pattern.search(spot.waits_in) and not runs),
        *(code for code, pattern in _BY_SOURCE if pattern.search(innermost.source)),
    )
    found = next((code for code in fits if not runs or code in WORKS), None)
    if found is not None or runs:
        return found or "python"
    # (where the system does not say whether it ran, nobody knows)
    if spot.run_fraction is None:
        return "unknown"
    return "blocked" if spot.beside is None else "gil"


_CLEAR_BY_CODE: frozenset[CauseCode] = frozenset({"dataloader_workers", "checkpoint", "collective", "recompilation"})
"""What a library does by functions of its own, whose names say no more."""


def how(code: CauseCode, spot: Spot) -> str:
    """By what a place does it: the library's function that it calls, and for whom it waits meanwhile."""
    called = "" if code in _CLEAR_BY_CODE else called_by(spot)
    if code == "python":
        calls = _calls(spot.frame.source) if spot.line_fraction >= ONE_LINE_FRACTION else []
        return f" in {called}" if called else "" if calls else " in Python"
    shown = f"{called.rpartition('.')[2]}(" in spot.frame.source
    said = f" ({called})" if called and not shown else ""
    if code == "lock" and spot.meanwhile is not None:
        name, frame = spot.meanwhile
        said += f", while thread {name!r} is in {place(frame)}"
    return said


def called_by(spot: Spot) -> str:
    """What a place calls, as a program would name it: the first public library function below it; or "".

    Where what it calls has no Python of its own, it is the only call in its only line.
    """
    public = (one for one in spot.within if not re.search(r"<|(^|\.)_", one.function))
    first = next(public, None)
    calls = _calls(spot.frame.source)
    if first is not None:
        name = first.function.rpartition(".")[2]
        its = (one for one in calls if re.fullmatch(rf"[\w.]*\b{re.escape(name)}", one))
        return next(its, f"{_module(first.file)}.{first.function}")
    if spot.within or spot.line_fraction < ONE_LINE_FRACTION:
        return ""
    return calls[0] if len(calls) == 1 and re.fullmatch(r"[\w.]{1,100}", calls[0]) else ""


def _calls(source: str) -> list[str]:
    try:
        parsed = ast.parse(f"{source} pass" if source.endswith(":") else source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ["?" for _ in re.finditer(r"\w\(", source)]
    return [ast.unparse(one.func) for one in ast.walk(parsed) if isinstance(one, ast.Call)]


def _module(file: str) -> str:
    path = re.sub(r"^.*/((site|dist)-packages|lib/python\d[^/]*)/", "", file)
    return re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".").strip("<>").removeprefix("frozen ")


def place(frame: Frame) -> str:
    """A line of the program: function, file, number and source."""
    # (what a comment behind it says is no part of what is done there)
    line = frame.source.partition("  # ")[0]
    source = f": {line}" if line else ""
    return f"{frame.function[:100]} ({PurePath(frame.file).name}:{frame.line}{source})"
