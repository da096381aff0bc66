"""Gathering the ranks' steps into windows. The same code serves a running job and a recording of one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sftriage.records import StageSchema, StepRecord, Window

NS = 1e-9
MAX_GAP_STEPS = 10_000
"""Steps that nobody recorded are a gap in the numbering; over a longer one the job is taken up anew."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How windows are cut: N steps, one every so many steps, after the job's own warm-up steps."""

    window_steps: int
    stride_steps: int
    warmup_steps: int


class Gatherer:
    """Windows of one attempt of a job from its ranks' steps, in whatever order they come.

    A window is ready when every rank has passed its last step. A rank that stays away does not hold the others up: once
    another rank is a whole window further, the window goes out with the missing vectors missing.
    """

    def __init__(self, schema: StageSchema, world_size: int, shape: Shape, *, attempt: int = 0) -> None:
        self._schema = schema
        self._shape = shape
        self._attempt = attempt
        self._world_size = world_size
        self._n_sync = len(schema.sync)
        self._latest_R = np.full(world_size, -1, dtype=np.int64)
        self._next_first: int | None = None
        self._early: list[StepRecord] = []
        self._earliest = sys.maxsize
        # A row a step from `_base` on: durations, outside and between in nanoseconds; NaN where nothing has come yet.
        self._base = 0
        self._rows_NRV: NDArray[np.float64] = self._empty(0)
        self._capturing_N: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def add(self, record: StepRecord) -> None:
        """Take one rank's step. Incomplete steps and ranks beyond the world size count as missing."""
        if not 0 <= record.rank < self._world_size:
            return
        if self._next_first is None:
            self._early.append(record)
            self._latest_R[record.rank] = max(self._latest_R[record.rank], record.step)
            self._earliest = min(self._earliest, record.step)
            if (self._latest_R >= 0).all() or record.step - self._earliest >= self._shape.window_steps:
                self._start()
            return
        if record.step > int(self._latest_R.max()) + MAX_GAP_STEPS:
            self._rows_NRV, self._capturing_N = self._empty(0), np.zeros(0, dtype=np.bool_)
            self._base = self._next_first = record.step
        self._put(record)

    def ready(self, *, ended: bool = False) -> list[Window]:
        """Windows that are complete, oldest first; with ``ended``, those that no more steps will complete too."""
        if ended and self._next_first is None and self._early:
            self._start()
        windows = []
        while self._next_first is not None:
            last = self._next_first + self._shape.window_steps - 1
            fastest = int(self._latest_R.max())
            everybody = bool((self._latest_R >= last).all())
            given_up = fastest >= last + self._shape.window_steps or (ended and fastest >= last)
            if not everybody and not given_up:
                break
            window = self._window(self._next_first)
            if np.isfinite(window.durations_NRS).any():
                windows.append(window)
            self._next_first += self._shape.stride_steps
            self._forget(self._next_first)
        return windows

    def _start(self) -> None:
        """The job's first step is the earliest anybody has shown; what comes before the windows is warm-up."""
        self._next_first = self._earliest + self._shape.warmup_steps
        self._base = self._next_first
        for record in self._early:
            self._put(record)
        self._early = []

    def _put(self, record: StepRecord) -> None:
        self._latest_R[record.rank] = max(self._latest_R[record.rank], record.step)
        row = record.step - self._base
        if row < 0:
            return
        if row >= len(self._rows_NRV):
            self._grow(row + 1)
        self._capturing_N[row] |= record.capturing
        if record.complete:
            self._rows_NRV[row, record.rank] = (*record.durations_ns, *record.outside_ns, record.between_ns)

    def _empty(self, n_steps: int) -> NDArray[np.float64]:
        return np.full((n_steps, self._world_size, len(self._schema.stages) + self._n_sync + 1), np.nan)

    def _grow(self, n_steps: int) -> None:
        more = max(n_steps, 2 * self._shape.window_steps) - len(self._rows_NRV)
        self._rows_NRV = np.concatenate([self._rows_NRV, self._empty(more)])
        self._capturing_N = np.concatenate([self._capturing_N, np.zeros(more, dtype=np.bool_)])

    def _forget(self, before_step: int) -> None:
        rows = before_step - self._base
        self._rows_NRV, self._capturing_N = self._rows_NRV[rows:], self._capturing_N[rows:]
        self._base = before_step

    def _window(self, first_step: int) -> Window:
        row, n_stages = first_step - self._base, len(self._schema.stages)
        if row + self._shape.window_steps > len(self._rows_NRV):
            self._grow(row + self._shape.window_steps)
        rows_NRV = self._rows_NRV[row : row + self._shape.window_steps] * NS
        return Window(
            schema=self._schema,
            first_step=first_step,
            durations_NRS=rows_NRV[:, :, :n_stages],
            outside_NRG=rows_NRV[:, :, n_stages : n_stages + self._n_sync] if self._n_sync else None,
            between_NR=rows_NRV[:, :, -1],
            capturing_N=self._capturing_N[row : row + self._shape.window_steps].copy(),
            attempt=self._attempt,
        )
