"""Sampled Python stacks of a capture (`recorder.sampling`): where a stage's time was spent, line by line.

Axes: N samples of the training thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sftriage.errors import InputError
from sftriage.traces.manifest import CONTROL, first_problem

MAX_FILE_BYTES = 256 * 2**20

_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib/python\d[^/]*/|/sftriage/recorder/")
"""Files that are not the program's own: the interpreter's, installed packages, and what records the steps."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One function of a stack, and the line at which it stands; ``source`` is that line, "" where nobody has it."""

    function: str
    file: str
    line: int
    source: str = ""

    @property
    def own(self) -> bool:
        """It is the program's own, and not a library's."""
        return _LIBRARY.search(self.file) is None


@dataclass(frozen=True, slots=True)
class ThreadSamples:
    """One thread at each sample.

    Attributes:
        name: what it is called.
        stacks_N: its stack, as numbers of frames, the outermost first; empty where it was not there.
        run_ns_N, waited_ns_N: how long it had run, and waited for a core, by then; -1 where nobody knows.
    """

    name: str
    stacks_N: tuple[tuple[int, ...], ...]
    run_ns_N: tuple[int, ...]
    waited_ns_N: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackSamples:
    """Samples of all threads of a rank, in the order of time.

    Attributes:
        frames: the functions that were met.
        period_ns: the time from one sample to the next, where nothing keeps the sampler from it.
        time_ns_N: when each was taken, on the host's monotonic clock.
        step_N, stage_N: the step and the stage that the training thread was in, ``since_ns_N`` since when.
        training: the training thread; ``others`` the others; ``sampler`` the one that samples, without its stack.
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

    def own_frame(self, stack: Sequence[int]) -> Frame:
        """The innermost function of the program itself in a stack."""
        return self.frames[stack[_own(self.frames, stack)]]


@dataclass(frozen=True, slots=True)
class Spot:
    """A function of the program itself, and what of a stage's samples it stands for.

    Attributes:
        frame: the function, at the line that was met the most.
        within: the stack below it, outermost first, that was met the most: the libraries' functions that it calls.
        samples: how many were taken there, in how many ``steps``.
        weight_ns: the time that they stand for.
        run_fraction: of that time, what the thread ran; ``waited_fraction`` what it waited for a core;
            ``stopped_fraction`` what the whole process stood still; ``gil_fraction`` what another thread kept even the
            sampler from the interpreter. None where the system does not say.
        beside: another thread, by its number among the others, that was busy most of the time; None where none was.
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
    beside: int | None


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
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    others_ns: dict[int, int] = field(default_factory=dict)

    def add_times(self, samples: StackSamples, at: int) -> None:
        """What the threads did between the sample before and this one."""
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
        late_ns = since_ns - samples.period_ns - (_ran(samples.sampler, at)[1] or 0)
        if since_ns > LATE_PERIODS * samples.period_ns and late_ns > 0:
            own_ns, others_ns = run_ns + waited_ns, max(busy_ns, default=0)
            self.stopped_ns += max(0, late_ns - max(own_ns, others_ns))
            self.gil_ns += max(0, min(late_ns, others_ns) - run_ns) if others_ns > own_ns else 0


def _ran(thread: ThreadSamples, at: int) -> tuple[int | None, int | None]:
    """How long a thread ran, and waited for a core, since the sample before."""
    run, waited = thread.run_ns_N[at - 1 : at + 1], thread.waited_ns_N[at - 1 : at + 1]
    return (None, None) if min(run) < 0 or min(waited) < 0 else (run[1] - run[0], waited[1] - waited[0])


def spots(samples: StackSamples, stage: str | None, steps: Collection[int] | None = None) -> list[Spot]:
    """Where a stage, or all of them, was spent in some steps, or in all, by function of the program: longest first.

    A sample stands for the time since the one before, or since the stage was entered. Of a stack, the innermost
    function that is not a library's counts; where all are, the innermost.
    """
    spent: dict[tuple[str, str], _Spent] = {}
    for at, stack in enumerate(samples.training.stacks_N):
        if (
            stage not in (None, samples.stage_N[at])
            or not stack
            or (steps is not None and samples.step_N[at] not in steps)
        ):
            continue
        frame, since_ns = samples.own_frame(stack), samples.since_ns_N[at]
        before_ns = samples.time_ns_N[at - 1] if at else samples.time_ns_N[0] - samples.period_ns
        # (of all stages, whatever was between two samples)
        since_ns = since_ns if stage is not None else before_ns
        one = spent.setdefault((frame.function, frame.file), _Spent())
        weight_ns = max(0, samples.time_ns_N[at] - max(before_ns, since_ns))
        one.samples += 1
        one.steps.add(samples.step_N[at])
        one.weight_ns += weight_ns
        one.stacks[stack] = one.stacks.get(stack, 0) + weight_ns
        if at and since_ns <= before_ns:
            one.add_times(samples, at)
    found = [_spot(samples.frames, one) for one in spent.values()]
    return sorted(found, key=lambda one: (-one.weight_ns, one.frame.file, one.frame.line))


def _own(frames: Sequence[Frame], stack: Sequence[int]) -> int:
    """Where in a stack the innermost function of the program itself is, or else the innermost one."""
    return next((at for at in range(len(stack) - 1, -1, -1) if frames[stack[at]].own), len(stack) - 1)


def _spot(frames: Sequence[Frame], spent: _Spent) -> Spot:
    lines: dict[int, int] = {}
    for stack, weight_ns in spent.stacks.items():
        number = stack[_own(frames, stack)]
        lines[number] = lines.get(number, 0) + weight_ns
    number = max(lines, key=lambda one: lines[one])
    those = {stack: weight_ns for stack, weight_ns in spent.stacks.items() if stack[_own(frames, stack)] == number}
    stack = max(those, key=lambda one: those[one])
    seen_ns = spent.seen_ns
    times_ns = spent.run_ns, spent.waited_ns, spent.stopped_ns, spent.gil_ns
    run, waited, stopped, gil = ((min(1.0, one / seen_ns) if seen_ns else None) for one in times_ns)
    busiest = max(spent.others_ns, key=lambda one: spent.others_ns[one], default=None)
    if busiest is not None and spent.others_ns[busiest] < BUSY_FRACTION * seen_ns:
        busiest = None
    return Spot(
        frame=frames[number],
        within=tuple(frames[one] for one in stack[_own(frames, stack) + 1 :]),
        samples=spent.samples,
        steps=len(spent.steps),
        weight_ns=spent.weight_ns,
        run_fraction=run,
        waited_fraction=waited,
        stopped_fraction=stopped,
        gil_fraction=gil,
        beside=busiest,
    )


def read_samples(path: Path) -> StackSamples:
    """The samples of a file that the recorder wrote; nothing in it is trusted.

    Raises:
        InputError: it cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{path}: over {MAX_FILE_BYTES} bytes of stacks")
        return _Document.model_validate_json(data).samples()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        raise InputError(f"{path}: not sampled stacks: {first_problem(error)}") from None


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


Whole = Annotated[int, Field(ge=-1, lt=2**63)]


class _Frame(_Model):
    name: str
    file: str
    line: Whole


class _Shared(_Model):
    frames: tuple[_Frame, ...]


class _Profile(_Model):
    name: str
    samples: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]


class _Thread(_Model):
    run_ns: tuple[Whole, ...]
    waited_ns: tuple[Whole, ...]


class _Columns(_Model):
    schema_version: Literal[1]
    period_s: Annotated[float, Field(gt=0, lt=3600)]
    time_ns: tuple[Whole, ...]
    step: tuple[Whole, ...]
    stage: tuple[str, ...]
    since_ns: tuple[Whole, ...]
    threads: tuple[_Thread, ...]
    sampler: _Thread
    source: tuple[str, ...]


class _Document(_Model):
    shared: _Shared
    profiles: Annotated[tuple[_Profile, ...], Field(min_length=1)]
    sftriage: _Columns

    @model_validator(mode="after")
    def _fits(self) -> _Document:
        columns, n_frames = self.sftriage, len(self.shared.frames)
        lengths = {len(column) for column in (columns.time_ns, columns.step, columns.stage, columns.since_ns)}
        lengths |= {len(one) for thread in (*columns.threads, columns.sampler) for one in dict(thread).values()}
        lengths |= {len(one.samples) for one in self.profiles}
        if len(lengths) > 1 or len(columns.threads) != len(self.profiles):
            raise ValueError("columns of unequal lengths")
        if len(columns.source) != n_frames:
            raise ValueError("lines of source for other frames")
        if any(number >= n_frames for one in self.profiles for stack in one.samples for number in stack):
            raise ValueError("a stack names a frame that is not there")
        return self

    def samples(self) -> StackSamples:
        columns = self.sftriage
        frames = zip(self.shared.frames, columns.source, strict=True)
        training, *others = (
            ThreadSamples(_clean(profile.name), profile.samples, thread.run_ns, thread.waited_ns)
            for profile, thread in zip(self.profiles, columns.threads, strict=True)
        )
        return StackSamples(
            frames=tuple(Frame(_clean(one.name), _clean(one.file), one.line, _clean(line)) for one, line in frames),
            period_ns=int(columns.period_s * 1e9),
            time_ns_N=columns.time_ns,
            step_N=columns.step,
            stage_N=columns.stage,
            since_ns_N=columns.since_ns,
            training=training,
            others=tuple(others),
            sampler=ThreadSamples("", (), columns.sampler.run_ns, columns.sampler.waited_ns),
        )


def _clean(text: str) -> str:
    return CONTROL.sub("?", text)[:300]
