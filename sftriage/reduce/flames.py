"""The tree of functions of a stage, from its sampled stacks, for a flame graph.

A function is one node, whatever its line; the lines at which it was itself sampled are leaves below it. So a function
takes the sum of its leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, weights

MAX_DEPTH = 128
"""How many functions of a stack to keep; deeper ones count for the last of them."""

MAX_STACKS = 1000
"""How many different stacks of one side to keep; the smallest others are joined."""


OTHERS = Frame("(other stacks)", "", 0)

Kind = Literal["root", "function", "line"]


@dataclass(frozen=True, slots=True)
class Folded:
    """What a thread did in a stage: the time of each stack over all ``steps``, and the number of samples.

    ``measured_s`` is the stage's time per step, of which the stacks are parts; None if unknown.
    """

    stacks_ns: Sequence[tuple[tuple[Frame, ...], int]]
    samples: int
    steps: int
    measured_s: float | None = None

    @property
    def weight_ns(self) -> int:
        return sum(ns for _, ns in self.stacks_ns)


@dataclass(frozen=True, slots=True)
class Flame:
    """A function in its caller, or a line at which it was itself sampled; the root is the stage.

    ``path`` is unique in a tree, and the same in every tree. ``frame`` is at the function's most frequent line.
    ``took_s`` is its time per step, with all that it calls; ``beside_s`` that of the control. ``children`` are sorted,
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
        """Its time on the suspect (0), or on the control (1)."""
        return self.beside_s if side else self.took_s

    def walk(self) -> Iterator[Flame]:
        """This node and all below it, parents first."""
        waiting = [self]
        while waiting:
            child = waiting.pop()
            yield child
            waiting += reversed(child.children)


def fold(
    samples: StackSamples,
    thread: ThreadSamples,
    stage: str | None,
    steps: Collection[int] | None = None,
    measured_s: float | None = None,
) -> Folded:
    """What a thread did while the training thread was in a stage (None: all) of some steps (None: all)."""
    by_stack: dict[tuple[int, ...], int] = {}
    taken = 0
    for at, weight_ns in weights(samples, stage, steps):
        if stack := thread.stacks_N[at]:
            taken += 1
            by_stack[stack] = by_stack.get(stack, 0) + weight_ns
    # (a step has no sample if the sampler was held up)
    numbers = range(min(samples.step_N, default=0), max(samples.step_N, default=0) + 1)
    met = len(numbers) if steps is None else sum(number in steps for number in numbers)
    by_size = sorted(by_stack.items(), key=lambda item: -item[1])
    stacks_ns = [
        (tuple(samples.frames[number] for number in stack[:MAX_DEPTH]), ns) for stack, ns in by_size[:MAX_STACKS]
    ]
    if left := by_size[MAX_STACKS:]:
        stacks_ns.append(((OTHERS,), sum(ns for _, ns in left)))
    return Folded(tuple(stacks_ns), taken, met, measured_s)


def flames(*sides: Folded) -> Flame:
    """The tree of a stage's time per step: of the suspect, and of the rank or steps that it is compared with."""
    root = _Node()
    for side, folded in enumerate(sides):
        weight_ns, measured_s = folded.weight_ns, folded.measured_s
        a_step = 1e-9 / max(1, folded.steps) if measured_s is None or not weight_ns else measured_s / weight_ns
        for stack, ns in folded.stacks_ns:
            root.add(stack, side, ns * a_step)
        # (a short stage may have no sample)
        root.seconds[side] = weight_ns * a_step if measured_s is None else measured_s
    return root.flame("root", "all", Frame("", "", 0))


@dataclass(slots=True)
class _Node:
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    # By line, since hashing a frame would take as long as all the rest.
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
            *(child.flame("function", _below(path, "in", *key), child.most()) for key, child in self.functions.items()),
            *(
                Flame("line", _below(path, "at", str(at.line), at.source), at, took_s, beside_s)
                for at, (took_s, beside_s) in self.stood.items()
            ),
        ]
        below.sort(key=lambda child: (-max(child.took_s, child.beside_s), child.path))
        return Flame(kind, path, frame, self.seconds[0], self.seconds[1], tuple(below))

    def most(self) -> Frame:
        return max(self.lines.values(), key=lambda met: (met[0], -met[1].line))[1]


def _below(path: str, *names: str) -> str:
    return hashlib.blake2b("\0".join((path, *names)).encode(errors="surrogatepass"), digest_size=5).hexdigest()
