"""Rows from all hosts: each step passed on once, and held back until every rank has reached it.

Hosts ship at their own times, a second's steps at a time, and a restarted agent ships again what it finds in the rings.
A window does not wait for a rank that others are a window ahead of, so steps that only some hosts have shipped are held
back for as long as the others may take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sftriage.fleet.messages import Incarnation
from sftriage.recorder.layout import MAX_COUNT
from sftriage.windows.decoding import StepArrays
from sftriage.windows.shipped import Rows

_NEVER = -MAX_COUNT


class Deduplicator:
    """Remembers the last step of each process.

    Attributes:
        steps: number of steps passed on.
        missed: number of steps between them that never came.
    """

    def __init__(self) -> None:
        self.steps = self.missed = 0
        self._last_seq: dict[Incarnation, int] = {}

    def new(self, steps: StepArrays, of: Mapping[int, Incarnation]) -> StepArrays:
        """The steps, in any order, that were not passed on before; ``of`` has the process of each rank."""
        # (mostly a few steps of each: a loop is over before numpy has begun)
        before = {rank: self._last_seq.get(process) for rank, process in of.items()}
        new: list[bool] = []
        came: dict[int, list[int]] = {}
        for rank, seq in zip(steps.rank_B.tolist(), steps.seq_B.tolist(), strict=True):
            is_new = rank in before and seq > (before[rank] or 0)
            new.append(is_new)
            if is_new:
                came.setdefault(rank, []).append(seq)
        for rank, seqs in came.items():
            last, highest = before[rank], max(seqs)
            # (steps from before an unknown process first shipped are not missed)
            first = min(seqs) if last is None else last + 1
            self.steps += len(seqs)
            self.missed += highest - first + 1 - len(seqs)
            self._last_seq[of[rank]] = highest
        return steps if all(new) else steps[np.array(new, dtype=np.bool_)]


class RowBuffer:
    """Holds rows back, for ``hold_s`` seconds at most, and releases those of one agent in the order of arrival."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: deque[_Held] = deque()
        self._generation = -1
        self._latest_R = np.zeros(0, dtype=np.int64)
        # Steps of the newest generation that `_latest_R` does not count yet.
        self._new: list[StepArrays] = []

    def add(self, rows: Rows, now_s: float) -> None:
        """Take rows that arrived at ``now_s``."""
        if rows.generation > self._generation:
            self._generation = rows.generation
            self._latest_R, self._new = np.full(rows.world_size, _NEVER), []
        if rows.generation == self._generation:
            self._new.append(rows.steps)
        self._held.append(_Held(now_s, rows, *_span(rows)))

    def due(self, now_s: float, away: Iterable[int] = ()) -> list[Rows]:
        """Remove and return the rows that need not wait any longer; ranks that are ``away`` hold nothing back."""
        if self._new:
            rank_B = np.concatenate([steps.rank_B for steps in self._new])
            step_B = np.concatenate([steps.step_B for steps in self._new])
            here_B = rank_B < len(self._latest_R)
            np.maximum.at(self._latest_R, rank_B[here_B], step_B[here_B])
            self._new = []
        here_R = np.ones(len(self._latest_R), dtype=np.bool_)
        here_R[[rank for rank in away if rank < len(here_R)]] = False
        common = int(self._latest_R.min(initial=MAX_COUNT, where=here_R))
        due: list[Rows] = []
        held: deque[_Held] = deque()
        for one in self._held:
            rows = one.rows
            # (before all ranks of a generation have come, hosts may still ship steps of the one before it)
            is_due = one.last_step <= common != _NEVER
            if is_due or rows.generation < self._generation or now_s >= one.came_s + self._hold_s:
                due.append(rows)
            elif one.first_step > common or common == _NEVER:
                held.append(one)
            else:
                now, later = _split(rows, common)
                due.append(now)
                held.append(_Held(one.came_s, later, *_span(later)))
        self._held = held
        return due

    def holds(self, agent: str, position: int) -> bool:
        """Whether rows of an agent are held back, of a message up to that position."""
        return any(one.rows.agent == agent and one.rows.position <= position for one in self._held)


class _Held(NamedTuple):
    came_s: float
    rows: Rows
    first_step: int
    last_step: int


def _span(rows: Rows) -> tuple[int, int]:
    """The first and last step, by either clock; rows without any are due at once."""
    some = rows.steps.step_B.tolist() + ([] if rows.device_steps is None else rows.device_steps.step_B.tolist())
    return min(some, default=_NEVER), max(some, default=_NEVER)


def _split(rows: Rows, last_step: int) -> tuple[Rows, Rows]:
    """The rows up to a step, and those after it.

    What is reported once (the message's position and ranks whose device times are over) goes with the second part: to
    have used the first does not settle the message.
    """
    device = rows.device_steps
    upto_B = rows.steps.step_B <= last_step
    device_upto_B = np.zeros(0, dtype=np.bool_) if device is None else device.step_B <= last_step

    def part(upto: bool) -> Rows:
        return replace(
            rows,
            steps=rows.steps[upto_B == upto],
            device_steps=None if device is None else device[device_upto_B == upto],
        )

    return replace(part(True), device_over=(), position=rows.position - 1), part(False)
