"""Where a stage's time was spent by the sampled stacks alone: by function of the program, and in DataLoader workers.

No trace says it; the recorded steps say how long a stage was. Axes: N samples of the training thread, W samples of all
workers, one worker after the other. Pure.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from sftriage.errors import InputError
from sftriage.model.captures import LeftOpen
from sftriage.reduce.samples import OURS, Frame, StackSamples, ThreadSamples, WorkerSamples, own_at, weights
from sftriage.traces.manifest import CONTROL, MAX_SHARES, CauseCode, Findings, Share, StageProfile

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


_WAITS = re.compile(r"torch/utils/data/dataloader\.py (\w+\.)?_(try_)?get_data$")
_NO_TASK = re.compile(r"/multiprocessing/queues\.py (\w+\.)?get$")
"""Where the training thread stands that waits for its workers, and where a worker does that has nothing to do."""

MAIN_FRACTION = 0.5
"""Of the time in which the workers are waited for and busy, what a place takes at least to be named."""

_WAITED_FOR = "waited for"


@dataclass(frozen=True, slots=True)
class WorkerSpot:
    """A place in the workers that the training thread waits for.

    ``step_s`` is what all of them spend there a step, waited for or not; ``control_s`` the same of the control's.
    """

    spot: Spot
    step_s: float
    control_s: float | None


def in_workers(
    sampled: StackSamples, control: StackSamples | None, stage: str, steps: Collection[int] | None = None
) -> WorkerSpot | None:
    """Where the workers are while a stage waits for them, in some steps or in all; None where no place stands out."""
    theirs = _as_one(sampled, stage)
    found = [] if theirs is None else spots(theirs, _WAITED_FOR, steps)
    if theirs is None or not found or found[0].weight_ns < MAIN_FRACTION * sum(one.weight_ns for one in found):
        return None
    beside = None if control is None else _as_one(control, stage)
    control_s = None if beside is None else _step_s(beside, found[0], None)
    return WorkerSpot(found[0], _step_s(theirs, found[0], steps), control_s)


def _step_s(theirs: StackSamples, spot: Spot, steps: Collection[int] | None) -> float:
    same = (spot.frame.function, spot.frame.file)
    found = (one for one in spots(theirs, None, steps) if (one.frame.function, one.frame.file) == same)
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


_IN_TORCH = re.compile(r"/torch/")
_CALLS_TORCH = re.compile(r"\b(torch|nn|F)\.\w")
"""A file of torch's, and a line that calls it: what has no Python of its own leaves no frame."""

_NO_CAUSE: frozenset[CauseCode] = frozenset({"unknown", "blocked"})
"""Codes of a cause that is none."""


@dataclass(frozen=True, slots=True)
class SampledRank:
    """One rank's captured steps: what its stages took, in seconds, by step, and its stacks, of the file ``source``."""

    source: str
    rank: int
    steps: Mapping[int, Mapping[str, float]]
    samples: StackSamples

    def mean_s(self, stage: str | None = None, steps: Collection[int] = ()) -> float:
        """What a stage took in the mean of some steps, or of all; without a stage the step itself."""
        chosen = [self.steps[one] for one in steps or self.steps]
        return sum(sum(one.values()) if stage is None else one.get(stage, 0.0) for one in chosen) / len(chosen)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a step, in order."""
        return tuple(next(iter(self.steps.values())))


def slowest(suspect: SampledRank, control: SampledRank | None) -> str:
    """The longest stage; beside a control the one that is longest against it."""
    return max(suspect.stages, key=lambda one: suspect.mean_s(one) - (control.mean_s(one) if control else 0.0))


def find_sampled(
    suspect: SampledRank, stage: str, control: SampledRank | None = None, fault_steps: Collection[int] = ()
) -> Findings:
    """What filled a stage of one rank, as `inside.find` does for a trace.

    ``working_s`` is what the training thread ran, or could have with a core; ``waiting_s`` what it did not. Raises
    InputError where the steps have no such stage, or there are none.
    """
    if not suspect.steps or (control is not None and not control.steps):
        raise InputError(f"{suspect.source}: nothing was recorded of its steps")
    if stage not in suspect.stages:
        raise InputError(f"{suspect.source}: no stage {stage!r} in it; there are: {', '.join(suspect.stages)}")
    wanted = sorted(set(suspect.steps) & set(fault_steps)) or sorted(suspect.steps)
    others = sorted(set(suspect.steps) - set(wanted))
    beside, its_steps = (suspect, others) if others else (None, others)
    if control is not None:
        shared = sorted(set(wanted) & set(control.steps))
        beside, wanted, its_steps = control, shared or wanted, shared or sorted(control.steps)
    profile, named = _profile_of(suspect, stage, wanted)
    against, its = (None, {}) if beside is None else _profile_of(beside, stage, its_steps)
    if against is not None and beside is suspect and against.stage_s >= profile.stage_s:
        # What makes these steps the faulty ones is not that the stage is longer in them: its peers were quicker.
        against, its = None, {}
    shares = tuple(
        one if against is None else one.model_copy(update={"control_self_s": its[key].self_s if key in its else 0.0})
        for key, one in named.items()
    )
    whose = "" if against is None else "its other steps" if beside is suspect else f"rank {against.rank}"
    return Findings(
        stage=stage,
        suspect=profile,
        control=against,
        shares=shares,
        summary=_summary(stage, profile, against, whose, shares),
        of_steps=len(suspect.steps) if others else None,
        beside="steps" if beside is suspect else "rank",
    )


def _profile_of(one: SampledRank, stage: str, steps: list[int]) -> tuple[StageProfile, dict[tuple[str, str], Share]]:
    found = spots(one.samples, stage, steps)
    stage_s, weight_ns = one.mean_s(stage, steps), sum(spot.weight_ns for spot in found)
    per_ns = stage_s / weight_ns if weight_ns else 0.0
    known = [spot for spot in found if spot.run_fraction is not None]
    known_s = sum(spot.weight_ns for spot in known) * per_ns
    working_s = sum(spot.weight_ns * _worked(spot) for spot in known) * per_ns
    profile = StageProfile(
        source=CONTROL.sub("?", one.source)[-2000:],
        rank=one.rank,
        first_step=steps[0],
        last_step=steps[-1],
        steps=len(steps),
        step_s=one.mean_s(None, steps),
        stage_s=stage_s,
        working_s=working_s,
        waiting_s=known_s - working_s,
        unseen_s=stage_s - known_s,
        **dict.fromkeys(("device_s", "collective_s", "kernels", "launches", "launch_s"), 0.0),
    )
    return profile, {
        (spot.frame.function, spot.frame.file): Share(
            name=f"{spot.frame.function} ({PurePath(spot.frame.file).name}:{spot.frame.line})"[-100:],
            kind="python",
            waits=spot.run_fraction is not None and _worked(spot) < RUNS_FRACTION,
            self_s=spot.weight_ns * per_ns,
            calls=0.0,
        )
        for spot in found[:MAX_SHARES]
    }


def _worked(spot: Spot) -> float:
    return min(1.0, (spot.run_fraction or 0.0) + (spot.waited_fraction or 0.0))


def _summary(
    stage: str, profile: StageProfile, control: StageProfile | None, whose: str, shares: tuple[Share, ...]
) -> str:
    took = f"{profile.stage_s * 1e3:.1f} of the {profile.step_s * 1e3:.1f} ms of a step"
    parts = {
        "running": profile.working_s,
        "waiting": profile.waiting_s,
        "of which the system says nothing": profile.unseen_s,
    }
    said = ", ".join(f"{seconds * 1e3:.1f} ms {what}" for what, seconds in parts.items() if seconds > 0.0)
    sentence = f"{stage} took {took}, by its stacks: {said or 'no sample'}"
    if control is not None:
        longer_s = profile.stage_s - control.stage_s
        sentence += f"; {abs(longer_s) * 1e3:.1f} ms {'more' if longer_s >= 0 else 'less'} than {whose}"
    return f"{sentence}. What stands out is {shares[0].name}." if shares else f"{sentence}."


def in_torch(samples: StackSamples, stage: str | None) -> bool:
    """Whether the place that took most of a stage is a call of torch, of which operators would say more."""
    first = next(iter(spots(samples, stage)), None)
    if first is None:
        return False
    return bool(_CALLS_TORCH.search(first.frame.source)) or any(_IN_TORCH.search(one.file) for one in first.within)


def left_open(code: CauseCode, *, operators: bool, stacks: bool, torch_call: bool = False) -> LeftOpen:
    """What a capture leaves open of why its rank was slow, and another means would show.

    ``operators`` and ``stacks`` were recorded, or not; most of the stage is one ``torch_call``.
    """
    if code == "python" and torch_call and not operators:
        return "operators"
    if code not in _NO_CAUSE:
        return ""
    return "operators" if not operators else "system" if stacks else "stacks"
