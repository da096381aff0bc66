"""Operations that wait for one another, and their replay: all steps and workers of one shape at once.

T operations make up a step of one column of workers; the graph between them is the same in every step (N) and every
column (W, the data-parallel ranks). An operation begins when all that it depends on have ended. One alone ends its work
later; those of a group, a transfer or a collective, end their work after the last of them has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
AnyFloat = NDArray[Any]
"""Durations in whatever precision they were recorded; a replay adds up in double precision."""

BLOCK_BYTES = 1 << 22
"""Steps that are replayed together: what they have reached stays in the cache from level to level."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Operations that depend on earlier levels alone, those of a group side by side.

    Attributes:
        ops: the operations (L).
        before: what each waits for, padded by repetition (L × the most); None at the start of a step.
        groups: where in ``ops`` each group begins, the groups first; after ``n_grouped`` come the operations alone.
        joined: of the groups, those that span all columns.
    """

    ops: IndexArray
    before: IndexArray | None
    groups: IndexArray
    n_grouped: int
    joined: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The order in which T operations are replayed. ``group_T`` is -1 for an operation that is nobody's peer."""

    n_ops: int
    group_T: IndexArray
    levels: tuple[Level, ...]


def graph_of(
    n_ops: int,
    dependencies: Iterable[tuple[int, int]],
    groups: Sequence[Sequence[int]],
    joined: Sequence[bool],
    names: Callable[[int], str] = str,
) -> Graph:
    """Put operations into levels; raises InputError where they wait for one another in a circle.

    Args:
        n_ops: how many there are.
        dependencies: (earlier, later).
        groups: operations that wait for one another; no operation is in two.
        joined: of each group, whether its operations wait for those of all other columns too.
        names: what an operation is called in the error.
    """
    group_T, joined_T = np.full(n_ops, -1, dtype=np.intp), np.zeros(n_ops, dtype=np.bool_)
    for group, (ops, is_joined) in enumerate(zip(groups, joined, strict=True)):
        group_T[list(ops)], joined_T[list(ops)] = group, is_joined
    before: list[set[int]] = [set() for _ in range(n_ops)]
    for earlier, later in dependencies:
        before[later].add(earlier)
    members = {group: list(ops) for group, ops in enumerate(groups)}
    levels = [
        _level(sorted(ready, key=lambda op: (group_T[op] < 0, group_T[op], op)), before, group_T, joined_T)
        for ready in _in_order(before, group_T, members, names)
    ]
    return Graph(n_ops, group_T, tuple(levels))


def _in_order(
    before: Sequence[set[int]], group_T: IndexArray, members: dict[int, list[int]], names: Callable[[int], str]
) -> list[list[int]]:
    peers_T = [members.get(int(group), [op]) for op, group in enumerate(group_T)]
    after: list[list[int]] = [[] for _ in before]
    for later, earlier_ones in enumerate(before):
        for earlier in earlier_ones:
            after[earlier].append(later)
    # What a group waits for is counted at its first member.
    waiting_for = [0] * len(before)
    for op, earlier_ones in enumerate(before):
        waiting_for[peers_T[op][0]] += len(earlier_ones)
    firsts = [op for op, peers in enumerate(peers_T) if peers[0] == op]
    ready = [op for op in firsts if not waiting_for[op]]
    levels = []
    while ready:
        levels.append([op for first in ready for op in peers_T[first]])
        upcoming = []
        for ended in levels[-1]:
            for later in after[ended]:
                first = peers_T[later][0]
                waiting_for[first] -= 1
                if not waiting_for[first]:
                    upcoming.append(first)
        ready = upcoming
    if stuck := [op for op in firsts if waiting_for[op]]:
        raise InputError(f"{len(stuck)} operations wait for one another in a circle, {names(stuck[0])} among them")
    return levels


def _level(ops: list[int], before: Sequence[set[int]], group_T: IndexArray, joined_T: BoolArray) -> Level:
    n_grouped = sum(1 for op in ops if group_T[op] >= 0)
    firsts = [at for at in range(n_grouped) if not at or group_T[ops[at]] != group_T[ops[at - 1]]]
    most = max(len(before[op]) for op in ops)
    table = None
    if most:
        # One that waits for nothing, beside others that do, begins with the step: row -1 of what has ended is all 0.
        rows = [sorted(before[op]) or [-1] for op in ops]
        table = np.array([row + row[-1:] * (most - len(row)) for row in rows], dtype=np.intp)
    joined = joined_T[[ops[at] for at in firsts]] if firsts else np.zeros(0, dtype=np.bool_)
    return Level(np.array(ops, dtype=np.intp), table, np.array(firsts, dtype=np.intp), n_grouped, joined)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """When steps (N) began and ended in a replay, seconds. ``finish_N`` is when the last of some operations ended."""

    first_N: FloatArray
    last_N: FloatArray
    finish_N: FloatArray

    @property
    def whole_N(self) -> FloatArray:
        """From the first begin to the last end."""
        return self.last_N - self.first_N


Fill = Callable[[slice, FloatArray], None]
"""Write the durations of some steps (T by steps by W) into an array of that shape."""


def spans(graph: Graph, fill: Fill, n_steps: int, n_columns: int, final_T: BoolArray) -> Spans:
    """Replay steps, some at a time, and say when they began and ended; ``final_T`` are the operations that end one."""
    first_N, last_N, finish_N = np.empty(n_steps), np.empty(n_steps), np.empty(n_steps)
    at_a_time = max(1, BLOCK_BYTES // (8 * graph.n_ops * n_columns))
    for low in range(0, n_steps, at_a_time):
        some = slice(low, min(low + at_a_time, n_steps))
        work_TBW = np.empty((graph.n_ops, some.stop - some.start, n_columns))
        fill(some, work_TBW)
        start_TBW, end_TBW = timeline(graph, work_TBW)
        # One axis after the other: over both at once numpy takes several times as long.
        first_N[some] = start_TBW.min(axis=0).min(axis=1)
        last_N[some] = end_TBW.max(axis=0).max(axis=1)
        finish_N[some] = end_TBW[final_T].max(axis=0).max(axis=1)
    return Spans(first_N, last_N, finish_N)


def timeline(graph: Graph, work_TNW: AnyFloat) -> tuple[FloatArray, FloatArray]:
    """When each operation begins and ends (T × N × W each), seconds since the step began.

    ``work_TNW`` is what an operation takes once it has begun; of one in a group, once all of the group have.
    """
    n_ops, n_steps, n_columns = work_TNW.shape
    start_TNW = np.zeros((n_ops, n_steps, n_columns))
    # One row more, for the beginning of the step.
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
    """For each operation the latest begin in its group (T × N × W); its own where it is in none."""
    latest_TNW = start_TNW.copy()
    for level in graph.levels:
        if level.n_grouped:
            begin_LNW = latest_TNW[level.ops]
            _wait(level, begin_LNW)
            latest_TNW[level.ops] = begin_LNW
    return latest_TNW
