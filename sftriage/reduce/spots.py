"""Where a stage's time was spent by the sampled stacks, by function of the program, and in DataLoader workers. Pure.

Axes: N samples of the training thread, W samples of all workers, one worker after the other.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from sftriage.model.captures import LeftOpen
from sftriage.reduce.samples import OURS, Frame, StackSamples, ThreadSamples, WorkerSamples, own_at, weights
from sftriage.traces.manifest import CauseCode

_IDLE = re.compile(r"/(threading|queue|selectors|asyncio/[^/]*)\.py$")
"""Where a thread stands that waits to be given something to do."""


LATE_PERIODS = 4
"""A sampler late by as many periods, though it waited for no core, was kept from the interpreter by a thread that ran
meanwhile; where none did, it was stopped with all else."""

BUSY_FRACTION = 0.6
"""Another thread that ran, or was ready to, for as much of the time keeps the training thread from the interpreter."""


@dataclass(slots=True, eq=False)
class Spot:
    """A function of the program itself, and the samples of a stage that it stands for.

    Attributes:
        frame: the function, at its most frequent line; ``line_fraction`` is that line's part of the time.
        within: the most frequent stack below it, outermost first: the libraries' functions that it calls.
        samples: number of samples there, in some ``steps``.
        weight_ns: the time that they stand for; for ``known_ns`` of it the system says what the thread did.
        spent_ns: of that, by name: ``run``; ``waited``, for a core; ``stopped``: the whole process stood still;
            ``gil``: another thread kept even the sampler from the interpreter; ``beside``: none of this, nor a wait for
            something that the kernel names, while another thread was busy.
        used: what was counted meanwhile of the thread, or of its process, by name (`sampling.stacks.USED`).
        others_ns: how long each other thread was busy.
        meanwhile: samples of other threads in the program, by thread and place.
        waits_in: how long the thread waited in which function of the kernel.
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

    def fraction(self, *what: str) -> float:
        """Part of the time, by names of ``spent_ns`` or ``collected`` (garbage); 0 where the system does not say."""
        if what == ("collected",):
            return min(1.0, self.used["collected_ns"] / self.weight_ns) if self.weight_ns else 0.0
        return min(1.0, sum(self.spent_ns[one] for one in what) / self.known_ns) if self.known_ns else 0.0

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
        # What keeps the sampler from the interpreter may be met but once, and the stage began meanwhile.
        if at and 2 * weight_ns >= samples.time_ns_N[at] - samples.time_ns_N[at - 1]:
            self._add_times(at)
            self.used.update({name: its_N[at] - its_N[at - 1] for name, its_N in samples.training.used_N.items()})

    def _add_times(self, at: int) -> None:
        samples = self.sampled
        since_ns = samples.time_ns_N[at] - samples.time_ns_N[at - 1]
        run_ns, waited_ns = _ran(samples.training, at)
        if run_ns is None or waited_ns is None:
            return
        self.known_ns += since_ns
        self.spent_ns.update(run=run_ns, waited=waited_ns)
        # (a thread that waits for a core may hold the interpreter meanwhile)
        busy_ns = [sum(one or 0 for one in _ran(thread, at)) for thread in samples.others]
        self.others_ns.update(dict(enumerate(busy_ns)))
        own_ns, others_ns, waits_in_N = run_ns + waited_ns, max(busy_ns, default=0), samples.training.waits_in_N
        if not waits_in_N or not waits_in_N[at]:
            self.spent_ns["beside"] += min(max(0, since_ns - own_ns), others_ns)
        late_ns = since_ns - samples.period_ns - (_ran(samples.sampler, at)[1] or 0)
        if since_ns > LATE_PERIODS * samples.period_ns and late_ns > 0:
            self.spent_ns["stopped"] += max(0, late_ns - max(own_ns, others_ns))
            self.spent_ns["gil"] += max(0, min(late_ns, others_ns) - run_ns) if others_ns > own_ns else 0

    def settle(self) -> None:
        """Say which line and which stack below it are the most frequent, once all samples are added."""
        frames, lines = self.sampled.frames, Counter[int]()
        for stack, weight_ns in self._stacks_ns.items():
            lines[stack[own_at(frames, stack)]] += weight_ns
        number = max(lines, key=lambda one: lines[one])
        those = (one for one in self._stacks_ns if one[own_at(frames, one)] == number)
        stack = max(those, key=lambda one: self._stacks_ns[one])
        self.frame, self.within = frames[number], tuple(frames[one] for one in stack[own_at(frames, stack) + 1 :])
        self.line_fraction = lines[number] / self.weight_ns if self.weight_ns else 0.0


def _ran(thread: ThreadSamples, at: int) -> tuple[int | None, int | None]:
    run, waited = thread.run_ns_N[at - 1 : at + 1], thread.waited_ns_N[at - 1 : at + 1]
    return (None, None) if min(run) < 0 or min(waited) < 0 else (run[1] - run[0], waited[1] - waited[0])


def spots(samples: StackSamples, stage: str | None, steps: Collection[int] | None = None) -> list[Spot]:
    """Where a stage was spent in some steps (None: all), by function of the program, longest first.

    Of a stack, the innermost function that is not a library's counts; where all are, the innermost.
    """
    found: dict[tuple[str, str], Spot] = {}
    for at, weight_ns in weights(samples, stage, steps):
        stack = samples.training.stacks_N[at]
        below = stack[own_at(samples.frames, stack) + 1 :] if stack else ()
        # (what was sampled in our own functions says nothing of the program)
        if stack and not any(OURS.search(samples.frames[one].file) for one in below):
            frame = samples.own_frame(stack)
            found.setdefault((frame.function, frame.file), Spot(samples)).add(at, weight_ns)
    for spot in found.values():
        spot.settle()
    return sorted(found.values(), key=lambda one: (-one.weight_ns, one.frame.file, one.frame.line))


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
    runs = spot.fraction("run", "waited") >= RUNS_FRACTION
    waits_in = next((one for one, its_ns in spot.waits_in.most_common(1) if 2 * its_ns >= spot.weight_ns), "")
    innermost = spot.within[-1] if spot.within else spot.frame
    called = [f"{one.file} {one.function}" for one in spot.within]
    fits: Sequence[CauseCode] = (
        *(code for code, pattern in _CALLED if any(pattern.search(one) for one in called)),
        *(code for code, pattern in _BY_KERNEL if waits_in and pattern.search(waits_in) and not runs),
        *(code for code, pattern in _BY_SOURCE if pattern.search(innermost.source)),
    )
    found = next((code for code in fits if not runs or code in WORKS), None)
    if found is not None or runs:
        return found or "python"
    if not spot.known_ns:
        return "unknown"
    return "gil" if max(spot.others_ns.values(), default=-1) >= BUSY_FRACTION * spot.known_ns else "blocked"


_CLEAR_BY_CODE: frozenset[CauseCode] = frozenset({"dataloader_workers", "checkpoint", "collective", "recompilation"})
"""What a library does by functions of its own, whose names say no more."""


def how(code: CauseCode, spot: Spot) -> str:
    """By what a place does it: the library's function that it calls, and the thread that it waits for."""
    called = "" if code in _CLEAR_BY_CODE else called_by(spot)
    if code == "python":
        calls = _calls(spot.frame.source) if spot.line_fraction >= ONE_LINE_FRACTION else []
        return f" in {called}" if called else "" if calls else " in Python"
    shown = f"{called.rpartition('.')[2]}(" in spot.frame.source
    text = f" ({called})" if called and not shown else ""
    if code == "lock":
        for (name, frame), times in spot.meanwhile.most_common(1):
            if 2 * times >= spot.samples:
                text += f", while thread {name!r} is in {place(frame)}"
    return text


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


_IN_TORCH = re.compile(r"/torch/")
_CALLS_TORCH = re.compile(r"\b(torch|nn|F)\.\w")
"""A file of torch's, and a line that calls it: what has no Python of its own leaves no frame."""


def in_torch(samples: StackSamples, stage: str | None) -> bool:
    """Whether the place that took most of a stage is a call of torch, of which operators would say more."""
    for first in spots(samples, stage)[:1]:
        return bool(_CALLS_TORCH.search(first.frame.source)) or any(_IN_TORCH.search(one.file) for one in first.within)
    return False


def left_open(code: CauseCode, *, operators: bool, stacks: bool, torch_call: bool = False) -> LeftOpen:
    """What a capture leaves open of why its rank was slow, and another means would show.

    ``operators`` and ``stacks`` were recorded, or not; most of the stage is one ``torch_call``.
    """
    if code == "python" and torch_call and not operators:
        return "operators"
    if code not in ("unknown", "blocked"):
        return ""
    return "operators" if not operators else "system" if stacks else "stacks"


_WAITS = re.compile(r"torch/utils/data/dataloader\.py (\w+\.)?_(try_)?get_data$")
_NO_TASK = re.compile(r"/multiprocessing/queues\.py (\w+\.)?get$")
"""Where the training thread stands that waits for its workers, and where a worker does that has nothing to do."""

MAIN_FRACTION = 0.5
"""Of the time in which the workers are waited for and busy, what a place takes at least to be named."""

_WAITED_FOR = "waited for"


def in_workers(
    sampled: StackSamples, control: StackSamples | None, stage: str, steps: Collection[int] | None = None
) -> tuple[Spot, float, float | None] | None:
    """Where the workers are while a stage waits for them, in some steps or in all; None where no place stands out.

    Also the seconds that all workers spend there in a step, whether the stage waits or not, and the control's.
    """
    theirs = _as_one(sampled, stage)
    found = [] if theirs is None else spots(theirs, _WAITED_FOR, steps)
    if theirs is None or not found or found[0].weight_ns < MAIN_FRACTION * sum(one.weight_ns for one in found):
        return None
    beside = None if control is None else _as_one(control, stage)
    control_s = None if beside is None else _step_s(beside, found[0], None)
    return found[0], _step_s(theirs, found[0], steps), control_s


def _step_s(theirs: StackSamples, spot: Spot, steps: Collection[int] | None) -> float:
    found = (one for one in spots(theirs, None, steps) if one.place == spot.place)
    n_steps = len({step for step in theirs.step_N if steps is None or step in steps})
    return sum(one.weight_ns for one in found) * 1e-9 / max(1, n_steps)


def _as_one(samples: StackSamples, stage: str) -> StackSamples | None:
    """All workers as if they were one thread, in the steps of the training thread; None where there are none.

    A sample stands for the time before it, and so for what the training thread did at its own next sample.
    """
    rows = [row for worker in samples.workers if worker.time_ns_W for row in _rows(samples, worker, stage)]
    if not rows:
        return None
    time_ns, step, at, since_ns, stack, times, own = zip(*rows, strict=True)
    return StackSamples(
        frames=samples.frames,
        period_ns=samples.period_ns,
        time_ns_N=time_ns,
        step_N=step,
        stage_N=at,
        since_ns_N=since_ns,
        training=_thread(stack, times),
        others=(),
        sampler=_thread((), own),
    )


_Row = tuple[int, int, str, int, tuple[int, ...], tuple[int, int], tuple[int, int]]


def _rows(samples: StackSamples, worker: WorkerSamples, stage: str) -> Iterator[_Row]:
    """A worker's samples, after one without a stack that keeps them from those of the worker before."""
    main, unknown = worker.threads[0], (-1, -1)
    yield worker.time_ns_W[0] - worker.period_ns, samples.step_N[0], "", 0, (), unknown, unknown
    for row, time_ns in enumerate(worker.time_ns_W):
        at = bisect_left(samples.time_ns_N, time_ns)
        if at == len(samples.time_ns_N):
            return
        waits = samples.stage_N[at] == stage and _any(samples.frames, samples.training.stacks_N[at], _WAITS)
        stack = main.stacks_N[row]
        yield (
            time_ns,
            samples.step_N[at],
            _WAITED_FOR if waits else "",
            samples.since_ns_N[at],
            # (the outermost is the worker's loop, which takes what it is to do from a queue)
            () if _any(samples.frames, stack[1:2], _NO_TASK) else stack,
            (main.run_ns_N[row], main.waited_ns_N[row]),
            (worker.sampler.run_ns_N[row], worker.sampler.waited_ns_N[row]),
        )


def _any(frames: Sequence[Frame], stack: Sequence[int], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(f"{frames[one].file} {frames[one].function}") for one in stack)


def _thread(stacks: Sequence[tuple[int, ...]], times_ns: Sequence[tuple[int, int]]) -> ThreadSamples:
    run_ns, waited_ns = zip(*times_ns, strict=True)
    return ThreadSamples("", tuple(stacks), run_ns, waited_ns)
