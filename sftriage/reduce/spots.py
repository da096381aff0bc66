"""Where a stage's time was spent, function by function of the program, by the stacks that were sampled.

Axes: N samples of the training thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sftriage.reduce.samples import OURS, Frame, StackSamples, ThreadSamples, own_at

_IDLE = re.compile(r"/(threading|queue|selectors|asyncio/[^/]*)\.py$")
"""Where a thread stands that waits to be given something to do."""


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
            sampler from the interpreter; ``beside_fraction`` what it did none of this, nor waited in a function of the
            kernel that says for what, while another thread was busy. None where the system does not say.
        beside: another thread, by its number among the others, that was busy most of the time; None where none was.
        line_fraction: of that time, how much is of the one line.
        meanwhile: where another thread of the program was most of the time, and what that thread is called; None where
            all waited for something to do.
        waits_in: the function of the kernel in which it waited most of that time; "" where there is none.
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
    """The samples of a stage, or of all, in some steps, or in all: which of the N, and what it stands for (ns).

    That is the time since the one before, or since the stage was entered.
    """
    for at, time_ns in enumerate(samples.time_ns_N):
        if stage in (None, samples.stage_N[at]) and (steps is None or samples.step_N[at] in steps):
            before_ns = samples.time_ns_N[at - 1] if at else time_ns - samples.period_ns
            # (of all stages, whatever was between two samples)
            since_ns = before_ns if stage is None else samples.since_ns_N[at]
            yield at, max(0, time_ns - max(before_ns, since_ns))


def spots(samples: StackSamples, stage: str | None, steps: Collection[int] | None = None) -> list[Spot]:
    """Where a stage, or all of them, was spent in some steps, or in all, by function of the program: longest first.

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
