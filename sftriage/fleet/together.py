"""Rows of all hosts, told up to the step that every rank has come to.

Hosts ship at moments of their own, a second's steps at a time. A window does not wait for a rank that others are a
window ahead of: steps that only some hosts have told of so far are held back, for so long as the others may take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sftriage.recorder.layout import MAX_COUNT
from sftriage.windows.decoding import StepArrays
from sftriage.windows.shipped import Rows

_NEVER = -MAX_COUNT


class Together:
    """Holds rows back, for ``hold_s`` seconds at most. Those of one agent are told in the order in which they came."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        # With when they came, and the first and the last step in them.
        self._held: deque[_Held] = deque()
        self._generation = -1
        self._latest_R = np.zeros(0, dtype=np.int64)
        # Of the newest generation: what has come since that was looked at.
        self._new: list[StepArrays] = []

    def add(self, rows: Rows, now_s: float) -> None:
        """Take rows that have come at ``now_s``."""
        if rows.generation > self._generation:
            self._generation = rows.generation
            self._latest_R, self._new = np.full(rows.world_size, _NEVER), []
        if rows.generation == self._generation:
            self._new.append(rows.steps)
        self._held.append(_Held(now_s, rows, *_span(rows)))

    def told(self, now_s: float, away: Iterable[int] = ()) -> list[Rows]:
        """The rows that need not wait any longer; for the ranks that are ``away`` nobody waits."""
        self._look()
        told: list[Rows] = []
        held: deque[_Held] = deque()
        here_R = np.ones(len(self._latest_R), dtype=np.bool_)
        here_R[[rank for rank in away if rank < len(here_R)]] = False
        common = int(self._latest_R.min(initial=MAX_COUNT, where=here_R))
        for one in self._held:
            rows = one.rows
            # (before all ranks of a generation have come, hosts may have to tell of the one before it yet)
            is_due = one.last_step <= common != _NEVER
            if is_due or rows.generation < self._generation or now_s >= one.came_s + self._hold_s:
                told.append(rows)
            elif one.first_step > common or common == _NEVER:
                held.append(one)
            else:
                now, later = _parted(rows, common)
                told.append(now)
                held.append(_Held(one.came_s, later, *_span(later)))
        self._held = held
        return told

    def _look(self) -> None:
        """See how far each rank has come."""
        if self._new:
            rank_B = np.concatenate([steps.rank_B for steps in self._new])
            here_B = rank_B < len(self._latest_R)
            step_B = np.concatenate([steps.step_B for steps in self._new])
            np.maximum.at(self._latest_R, rank_B[here_B], step_B[here_B])
            self._new = []

    def holds(self, agent: str, position: int) -> bool:
        """Whether rows of an agent are held back, of a message up to that position."""
        return any(one.rows.agent == agent and one.rows.position <= position for one in self._held)


class _Held(NamedTuple):
    came_s: float
    rows: Rows
    first_step: int
    last_step: int


def _span(rows: Rows) -> tuple[int, int]:
    """The first and the last step of rows, by whichever clock; without any, what is told at once."""
    some = rows.steps.step_B.tolist() + ([] if rows.device_steps is None else rows.device_steps.step_B.tolist())
    return min(some, default=_NEVER), max(some, default=_NEVER)


def _parted(rows: Rows, last_step: int) -> tuple[Rows, Rows]:
    """The part up to a step, and the one after it, to which belongs what is said once: the message, and what is over.

    What has been told of the first part is no reason to take the message for settled: it is as far as that before it.
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
