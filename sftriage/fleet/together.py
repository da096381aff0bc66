"""Rows of all hosts, told up to the step that every rank has come to.

Hosts ship at moments of their own, a second's steps at a time. A window does not wait for a rank that others are a
window ahead of: steps that only some hosts have told of so far are held back, for so long as the others may take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from sftriage.recorder.layout import MAX_COUNT
from sftriage.windows.shipped import Rows

_NEVER = -MAX_COUNT


class Together:
    """Holds rows back, for ``hold_s`` seconds at most. Those of one agent are told in the order in which they came."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: deque[tuple[float, Rows]] = deque()
        self._generation = -1
        self._latest_R = np.zeros(0, dtype=np.int64)

    def add(self, rows: Rows, now_s: float) -> None:
        """Take rows that have come at ``now_s``."""
        if rows.generation > self._generation:
            self._generation = rows.generation
            self._latest_R = np.full(rows.world_size, _NEVER)
        if rows.generation == self._generation and len(rows.steps):
            here_B = rows.steps.rank_B < len(self._latest_R)
            np.maximum.at(self._latest_R, rows.steps.rank_B[here_B], rows.steps.step_B[here_B])
        self._held.append((now_s, rows))

    def told(self, now_s: float, away: Iterable[int] = ()) -> list[Rows]:
        """The rows that need not wait any longer; for the ranks that are ``away`` nobody waits."""
        told: list[Rows] = []
        held: deque[tuple[float, Rows]] = deque()
        here_R = np.ones(len(self._latest_R), dtype=np.bool_)
        here_R[[rank for rank in away if rank < len(here_R)]] = False
        common = int(self._latest_R.min(initial=MAX_COUNT, where=here_R))
        for came_s, rows in self._held:
            if rows.generation < self._generation or now_s >= came_s + self._hold_s:
                told.append(rows)
                continue
            # Before all ranks of a generation have come, hosts may have to tell of the one before it yet.
            now, later = (None, rows) if common == _NEVER else _parted(rows, common)
            told += [] if now is None else [now]
            if later is not None:
                held.append((came_s, later))
        self._held = held
        return told

    def holds(self, agent: str, position: int) -> bool:
        """Whether rows of an agent are held back, of a message up to that position."""
        return any(rows.agent == agent and rows.position <= position for _, rows in self._held)


def _parted(rows: Rows, last_step: int) -> tuple[Rows | None, Rows | None]:
    """The part up to a step, and the one after it, to which belongs what is said once: the message, and what is over.

    What has been told of the first part is no reason to take the message for settled: it is as far as that before it.
    """
    device = rows.device_steps
    upto_B = rows.steps.step_B <= last_step
    device_upto_B = np.zeros(0, dtype=np.bool_) if device is None else device.step_B <= last_step
    if upto_B.all() and device_upto_B.all():
        return rows, None

    def part(upto: bool) -> Rows:
        return replace(
            rows,
            steps=rows.steps[upto_B == upto],
            device_steps=None if device is None else device[device_upto_B == upto],
        )

    if not (upto_B.any() or device_upto_B.any()):
        return None, rows
    return replace(part(True), device_over=(), position=rows.position - 1), part(False)
