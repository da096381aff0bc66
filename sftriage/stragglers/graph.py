"""Operations that wait for each other, and their replay: all steps and workers of one shape at once.

T operations form a step of one column of workers; their graph is the same in every step (N) and every column (W, the
data-parallel ranks). An operation begins when all operations that it depends on have ended; those of a group (a
transfer, a collective) do their work after the last of them has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
AnyFloat = NDArray[Any]
"""Durations in their recorded precision; a replay adds them in double precision."""

BLOCK_BYTES = 1 << 22
"""Steps are replayed in batches of this size, which stay in the cache from level to level."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Operations that depend only on earlier levels, those of a group side by side.

    Attributes:
        ops: the operations (L), groups first.
        before: the operations that each waits for, padded by repetition; None at the start of a step.
        groups: where in ``ops`` each group begins; the first ``n_grouped`` operations are in groups.
        joined: whether each group spans all columns.
    """

    ops: IndexArray
    before: IndexArray | None
    groups: IndexArray
    n_grouped: int
    joined: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The order in which T operations are replayed. ``group_T`` is -1 for an operation without peers."""

    group_T: IndexArray
    levels: tuple[Level, ...]


def graph_of(
    n_ops: int,
    dependencies: Iterable[tuple[int, int]],
    groups: Sequence[Sequence[int]],
    joined: Sequence[bool],
    names: Callable[[int], str] = str,
) -> Graph:
    """Sort operations into levels; raises InputError if they wait for each other in a circle.

    Args:
        n_ops: the number of operations.
        dependencies: pairs (earlier, later).
        groups: operations that wait for each other; no operation is in two groups.
        joined: for each group, whether its operations also wait for those of all other columns.
        names: an operation's name in the error.
    """
    group_T, joined_T = np.full(n_ops, -1, dtype=np.intp), np.zeros(n_ops, dtype=np.bool_)
    for group, (ops, is_joined) in enumerate(zip(groups, joined, strict=True)):
        group_T[list(ops)], joined_T[list(ops)] = group, is_joined
    before: list[set[int]] = [set() for _ in range(n_ops)]
    for earlier, later in dependencies:
        before[later].add(earlier)
    # A group is one node of the order: that of its first member.
    peers_T = [list(groups[int(group)]) if group >= 0 else [op] for op, group in enumerate(group_T)]
    order: TopologicalSorter[int] = TopologicalSorter()
    for op, waits_for in enumerate(before):
        order.add(peers_T[op][0], *(peers_T[earlier][0] for earlier in waits_for))
    try:
        order.prepare()
    except CycleError as error:
        circle = set(error.args[1])
        raise InputError(
            f"{len(circle)} operations wait for one another in a circle, such as {names(min(circle))}"
        ) from None
    levels = []
    while firsts := order.get_ready():
        ready = [op for first in firsts for op in peers_T[first]]
        ready.sort(key=lambda op: (group_T[op] < 0, group_T[op], op))
        levels.append(_level(ready, before, group_T, joined_T))
        order.done(*firsts)
    return Graph(group_T, tuple(levels))


def _level(ops: list[int], before: Sequence[set[int]], group_T: IndexArray, joined_T: BoolArray) -> Level:
    n_grouped = sum(1 for op in ops if group_T[op] >= 0)
    firsts = [index for index in range(n_grouped) if not index or group_T[ops[index]] != group_T[ops[index - 1]]]
    most = max(len(before[op]) for op in ops)
    table = None
    if most:
        # An operation that waits for nothing, beside others that do, begins with the step: row -1 of the ends is 0.
        rows = [sorted(before[op]) or [-1] for op in ops]
        table = np.array([row + row[-1:] * (most - len(row)) for row in rows], dtype=np.intp)
    joined = joined_T[[ops[index] for index in firsts]] if firsts else np.zeros(0, dtype=np.bool_)
    return Level(np.array(ops, dtype=np.intp), table, np.array(firsts, dtype=np.intp), n_grouped, joined)


class Spans(NamedTuple):
    """The duration of steps (N) in a replay, and when the last of their final operations ended; seconds."""

    whole_N: FloatArray
    finish_N: FloatArray


Fill = Callable[[slice, FloatArray], None]
"""Writes the durations of some steps into an array of shape (T, steps, W)."""


def spans(graph: Graph, fill: Fill, n_steps: int, n_columns: int, final_T: BoolArray) -> Spans:
    """Replay steps in batches; ``final_T`` are the operations that end a step."""
    result = Spans(np.empty(n_steps), np.empty(n_steps))
    for batch in batches(len(final_T), n_steps, n_columns):
        work_TBW = np.empty((len(final_T), batch.stop - batch.start, n_columns))
        fill(batch, work_TBW)
        start_TBW, end_TBW = timeline(graph, work_TBW)
        # One axis after the other: numpy takes several times as long for both at once.
        result.whole_N[batch] = end_TBW.max(axis=0).max(axis=1) - start_TBW.min(axis=0).min(axis=1)
        result.finish_N[batch] = end_TBW[final_T].max(axis=0).max(axis=1)
    return result


def batches(n_ops: int, n_steps: int, n_columns: int) -> Iterator[slice]:
    """Steps that are replayed at a time."""
    at_a_time = max(1, BLOCK_BYTES // (8 * n_ops * n_columns))
    return (slice(low, min(low + at_a_time, n_steps)) for low in range(0, n_steps, at_a_time))


def timeline(graph: Graph, work_TNW: AnyFloat) -> tuple[FloatArray, FloatArray]:
    """When each operation begins and ends (T × N × W each), in seconds since the step began.

    ``work_TNW`` is an operation's duration since it began, in a group since all of the group began.
    """
    n_ops, n_steps, n_columns = work_TNW.shape
    start_TNW = np.zeros((n_ops, n_steps, n_columns))
    # One more row, for the start of the step.
    end_TNW = np.zeros((n_ops + 1, n_steps, n_columns))
    for level in graph.levels:
        begin_LNW = _begins(level, end_TNW)
        start_TNW[level.ops] = begin_LNW
        if level.n_grouped:
            _wait(level, begin_LNW)
        begin_LNW += work_TNW[level.ops]
        end_TNW[level.ops] = begin_LNW
    return start_TNW, end_TNW[:-1]


def _begins(level: Level, end_TNW: FloatArray) -> FloatArray:
    if level.before is None:
        return np.zeros((len(level.ops), *end_TNW.shape[1:]))
    begin_LNW = end_TNW[level.before[:, 0]]
    for k in range(1, level.before.shape[1]):
        np.maximum(begin_LNW, end_TNW[level.before[:, k]], out=begin_LNW)
    return begin_LNW


def _wait(level: Level, begin_LNW: FloatArray) -> None:
    stops = [*level.groups[1:], level.n_grouped]
    for low, high, joined in zip(level.groups, stops, level.joined, strict=True):
        if joined:
            begin_LNW[low:high] = begin_LNW[low:high].max(axis=0).max(axis=1)[None, :, None]
        elif high - low > 1:
            begin_LNW[low:high] = begin_LNW[low:high].max(axis=0, keepdims=True)


def latest_begins(graph: Graph, start_TNW: AnyFloat) -> AnyFloat:
    """The latest begin in each operation's group (T × N × W); its own if it has no group."""
    latest_TNW = start_TNW.copy()
    for level in graph.levels:
        if level.n_grouped:
            begin_LNW = latest_TNW[level.ops]
            _wait(level, begin_LNW)
            latest_TNW[level.ops] = begin_LNW
    return latest_TNW


IntArray = NDArray[Any]


@dataclass(frozen=True, slots=True)
class OpType:
    """A type of operation.

    Attributes:
        name: identifies it; its operations have one ideal duration.
        part: the name of its share of the slowdown; both ends of a transfer have the same one.
        communication: its ideal is the median; that of a computation is the mean.
        phase: "forward" or "backward" for such a computation, otherwise "".
        of_peers: its ideal is the usual time of its worker's peers, because a straggler dominates a mean of few.
        mixed: communication that includes what workers compute meanwhile.
    """

    name: str
    part: str
    communication: bool
    phase: str = ""
    of_peers: bool = False
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class NamedOperations:
    """The verdict's ``workers`` (dp, pp), slow in ``part`` ("": in all).

    Fixing them saves ``saves_s`` of the ``step_s`` of a step that they slow down. If the system holds them back
    (``held_back``), that includes what they add to communication.
    """

    workers: tuple[tuple[int, int], ...]
    part: str
    saves_s: float
    step_s: float
    held_back: bool = False


@dataclass(frozen=True)
class Operations:
    """T operations of each step (N) in each column of workers (W).

    Attributes:
        graph: their dependencies.
        types: the types of operations; ``type_T`` has each operation's index.
        work_TNW: each operation's own seconds; for a transfer, since the last of its group began.
        dp_TW, pp_TW: their workers, each T × W or broadcast to that.
        steps, measured_N: each step's number, and its seconds.
        chunk_T, microbatch_T: each operation's chunk of the stage's layers, and its microbatch; -1 for none.
        final_T: the operations that end a step.
        notes: sentences about omitted parts of the recording.
        ranks: the global rank of each worker (dp, pp), if known.
        named: the verdict on these steps, if there is one.
        off_N: how far the replay of each step is from its recording, as a fraction of the step; None if it is exact.
    """

    graph: Graph
    types: tuple[OpType, ...]
    type_T: IndexArray
    work_TNW: AnyFloat
    dp_TW: IntArray
    pp_TW: IntArray
    steps: tuple[int, ...]
    measured_N: FloatArray
    chunk_T: IntArray
    microbatch_T: IntArray
    final_T: BoolArray
    notes: Sequence[str] = ()
    ranks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    named: NamedOperations | None = None
    off_N: FloatArray | None = None

    def of_steps(self, kept_N: BoolArray, *notes: str) -> Operations:
        """The same operations in some of the steps."""
        return replace(
            self,
            work_TNW=self.work_TNW[:, kept_N],
            steps=tuple(compress(self.steps, kept_N)),
            measured_N=self.measured_N[kept_N],
            off_N=None if self.off_N is None else self.off_N[kept_N],
            notes=(*self.notes, *notes),
        )

    @cached_property
    def dp_ranks(self) -> tuple[int, ...]:
        return tuple(np.unique(self.dp_TW).tolist())

    @cached_property
    def pp_ranks(self) -> tuple[int, ...]:
        """The pipeline-parallel ranks: the stages."""
        return tuple(np.unique(self.pp_TW).tolist())

    @cached_property
    def phase_T(self) -> NDArray[np.str_]:
        """The phase of each operation's type."""
        return np.array([self.types[index].phase for index in self.type_T])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.work_TNW.shape

    @cached_property
    def ideal_T(self) -> FloatArray:
        """The ideal duration of each operation: its type's mean for a computation, otherwise its median.

        The usual time of peers is the lower median of a stage: of two workers, the faster one's.
        """
        ideal_T = np.empty(len(self.type_T))
        for index, of_type in enumerate(self.types):
            ops_T = self.type_T == index
            if of_type.of_peers:
                usual_MW = np.sort(np.median(self.work_TNW[ops_T], axis=1), axis=1)
                ideal_T[ops_T] = usual_MW[:, (usual_MW.shape[1] - 1) // 2].mean()
            elif ops_T.any():
                values = self.work_TNW[ops_T]
                ideal_T[ops_T] = np.median(values) if of_type.communication else values.mean(dtype=np.float64)
        return ideal_T

    def of_types(self, *indices: int) -> BoolArray:
        return np.isin(self.type_T, indices)[:, None]

    def of_workers(self, workers: Sequence[tuple[int, int]]) -> BoolArray:
        """The operations of some workers (dp, pp), broadcast to T × W."""
        of_TW: BoolArray = np.zeros((1, 1), dtype=np.bool_)
        for dp, pp in workers:
            of_TW = of_TW | ((self.dp_TW == dp) & (self.pp_TW == pp))
        return of_TW

    def replay(self, kept_TW: BoolArray, work_TNW: AnyFloat | None = None) -> Spans:
        """Replay all steps: operations in ``kept_TW`` as measured (or as in ``work_TNW``), others at their ideal."""
        n_ops, n_steps, n_columns = self.shape
        measured_TNW = self.work_TNW if work_TNW is None else work_TNW
        kept_TW = np.broadcast_to(kept_TW, (n_ops, n_columns))
        ideal_T11 = self.ideal_T[:, None, None]

        def fill(some: slice, work_TBW: FloatArray) -> None:
            np.copyto(work_TBW, ideal_T11)
            np.copyto(work_TBW, measured_TNW[:, some], where=kept_TW[:, None, :])

        return spans(self.graph, fill, n_steps, n_columns, self.final_T)

    def ideal_step_s(self) -> float:
        """The duration of any step with all operations at their ideal."""
        _, end_TNW = timeline(self.graph, self.ideal_T[:, None, None])
        return float(end_TNW[self.final_T].max())

    def each_column_alone(self) -> FloatArray:
        """Seconds of each step (N) with one column (W) as measured and all others, which are alike, at their ideal."""
        n_ops, n_steps, n_columns = self.shape
        if n_columns == 1:
            return self.replay(np.ones((1, 1), dtype=np.bool_)).finish_N[:, None]
        work_TX = self.work_TNW.reshape(n_ops, n_steps * n_columns)

        def fill(some: slice, work_TB2: FloatArray) -> None:
            work_TB2[:, :, 0] = work_TX[:, some]
            work_TB2[:, :, 1] = self.ideal_T[:, None]

        finish_X = spans(self.graph, fill, n_steps * n_columns, 2, self.final_T).finish_N
        return finish_X.reshape(n_steps, n_columns)
