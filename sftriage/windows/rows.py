"""The window store: the newest steps of all ranks, a row a step.

Each value (a stage's duration, say) is an array of its own in which the ranks lie side by side: steps are put there as
they are, a value at a time, and whoever accounts for a window passes over one stage of all its ranks without a gap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sftriage.recorder.layout import kind_of
from sftriage.records import StageSchema
from sftriage.windows.decoding import FloatArray, IntArray, StepArrays

NS = 1e-9


class StepRows:
    """A ring of rows, one a step: all ranks' values in seconds, NaN where nothing has come.

    A step's row is its number modulo the number of rows, so that nothing is moved when the store goes on. Axes: C rows,
    V values (a duration for each stage, an outside time for each sync stage, and the time between), R ranks, B steps of
    single ranks that come together.

    Args:
        schema: the stages.
        world_size: ranks.
        capacity_steps: rows. Steps that are in the store at the same time have to lie within so many of each other.
    """

    def __init__(self, schema: StageSchema, world_size: int, capacity_steps: int) -> None:
        n_stages, n_sync = len(schema.stages), len(schema.sync)
        self._n_stages, self._n_ranks, self._n_rows = n_stages, world_size, capacity_steps
        self._values_VCR = np.full((n_stages + n_sync + 1, capacity_steps, world_size), np.nan)
        # Made when the first rank says any: most jobs do without.
        self._ready_CR: FloatArray | None = None
        self._work_CR: FloatArray | None = None
        self._device_VCR: FloatArray | None = None
        self._known_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._touched_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._capturing_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._ready_said_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._work_said_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._device_said_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._kind_C2 = np.zeros((capacity_steps, 2), dtype=np.int64)
        self._kind_rank_C = np.full(capacity_steps, world_size)

    def put(self, steps: StepArrays) -> None:
        """Take steps; what a rank left half-way says what sort of step it was, and no times."""
        row_B = steps.step_B % self._n_rows
        self._touched_C[row_B] = True
        self._capturing_C[row_B[steps.capturing_B]] = True
        self._put_kinds(steps, row_B)
        complete_B = steps.complete_B
        if not complete_B.all():
            steps, row_B = steps[complete_B], row_B[complete_B]
        self._known_C[row_B] = True
        at_B = row_B * self._n_ranks + steps.rank_B
        _put_times(self._values_VCR, at_B, steps)
        self._put_refinements(steps, row_B, at_B)

    def put_device(self, steps: StepArrays) -> None:
        """Take the device times of steps (see `sftriage.recorder.device`)."""
        if self._device_VCR is None:
            self._device_VCR = np.full_like(self._values_VCR, np.nan)
        row_B = steps.step_B % self._n_rows
        self._touched_C[row_B] = True
        self._device_said_C[row_B] = True
        _put_times(self._device_VCR, row_B * self._n_ranks + steps.rank_B, steps)

    def clear(self, first_step: int, n_steps: int) -> None:
        """Forget steps, so that their rows can be those of later ones."""
        rows = np.arange(first_step, first_step + min(n_steps, self._n_rows)) % self._n_rows
        rows = rows[self._touched_C[rows]]
        if not len(rows):
            return
        self._values_VCR[:, rows] = np.nan
        if self._ready_CR is not None:
            self._ready_CR[rows] = np.nan
        if self._work_CR is not None:
            self._work_CR[rows] = 0.0
        if self._device_VCR is not None:
            self._device_VCR[:, rows] = np.nan
        said = (self._known_C, self._touched_C, self._capturing_C, self._ready_said_C, self._work_said_C)
        for said_C in (*said, self._device_said_C):
            said_C[rows] = False
        self._kind_C2[rows] = 0
        self._kind_rank_C[rows] = self._n_ranks

    def any_known(self, first_step: int, n_steps: int) -> bool:
        """Whether any rank completed any of these steps."""
        return bool(self._known_C[self._rows(first_step, n_steps)].any())

    def window(self, first_step: int, n_steps: int) -> dict[str, Any]:
        """What these steps give a `Window`: copies, with the ranks of one value side by side."""
        rows = self._rows(first_step, n_steps)
        times = self._times(self._values_VCR, first_step, n_steps)
        ready_CR = self._ready_CR if self._ready_said_C[rows].any() else None
        work_CR = self._work_CR if self._work_said_C[rows].any() else None
        kinds = tuple(kind_of(int(first), int(rest)) for first, rest in self._kind_C2[rows])
        return {
            "durations_NRS": times[0],
            "outside_NRG": times[1],
            "between_NR": times[2],
            "ready_NR": None if ready_CR is None else self._copied(ready_CR[None], first_step, n_steps)[0],
            "work_NR": None if work_CR is None else self._copied(work_CR[None], first_step, n_steps)[0],
            "capturing_N": self._capturing_C[rows],
            "kinds": kinds if any(kinds) else None,
        } | self._device(first_step, n_steps)

    def _device(self, first_step: int, n_steps: int) -> dict[str, FloatArray | None]:
        if self._device_VCR is None or not self._device_said_C[self._rows(first_step, n_steps)].any():
            return {}
        times = self._times(self._device_VCR, first_step, n_steps)
        return dict(zip(("device_NRS", "device_outside_NRG", "device_between_NR"), times, strict=True))

    def _times(
        self, values_VCR: FloatArray, first_step: int, n_steps: int
    ) -> tuple[FloatArray, FloatArray | None, FloatArray]:
        """Durations, outside times and between times of these steps."""
        values_NRV = self._copied(values_VCR, first_step, n_steps).transpose(1, 2, 0)
        outside_NRG = values_NRV[:, :, self._n_stages : -1] if len(values_VCR) > self._n_stages + 1 else None
        return values_NRV[:, :, : self._n_stages], outside_NRG, values_NRV[:, :, -1]

    def _put_kinds(self, steps: StepArrays, row_B: IntArray) -> None:
        """A step is of the kind that the lowest rank says that says any, in whatever order they come."""
        kind_B2, ranks_B = steps.kind_B2, steps.rank_B
        said = np.flatnonzero(kind_B2[:, 0] | kind_B2[:, 1])
        if not len(said):
            return
        said = said[np.lexsort((ranks_B[said], row_B[said]))]
        rows, first = np.unique(row_B[said], return_index=True)
        lowest = said[first]
        better = ranks_B[lowest] <= self._kind_rank_C[rows]
        rows, lowest = rows[better], lowest[better]
        self._kind_rank_C[rows] = ranks_B[lowest]
        self._kind_C2[rows] = kind_B2[lowest]

    def _put_refinements(self, steps: StepArrays, row_B: IntArray, at_B: IntArray) -> None:
        said_B = steps.ready_ns_B >= 0
        if said_B.any():
            if self._ready_CR is None:
                self._ready_CR = np.full((self._n_rows, self._n_ranks), np.nan)
            self._ready_CR.reshape(-1)[at_B[said_B]] = steps.ready_ns_B[said_B] * NS
            self._ready_said_C[row_B[said_B]] = True
        said_B = steps.work_B > 0
        if said_B.any():
            if self._work_CR is None:
                self._work_CR = np.zeros((self._n_rows, self._n_ranks))
            self._work_CR.reshape(-1)[at_B[said_B]] = steps.work_B[said_B]
            self._work_said_C[row_B[said_B]] = True

    def _rows(self, first_step: int, n_steps: int) -> IntArray:
        return np.arange(first_step, first_step + n_steps) % self._n_rows

    def _copied(self, values_VCR: FloatArray, first_step: int, n_steps: int) -> FloatArray:
        """The rows of these steps in order (V, N, R); the ring may turn over within them."""
        start = first_step % self._n_rows
        before_turn = min(n_steps, self._n_rows - start)
        values_VNR = np.empty((len(values_VCR), n_steps, self._n_ranks))
        values_VNR[:, :before_turn] = values_VCR[:, start : start + before_turn]
        values_VNR[:, before_turn:] = values_VCR[:, : n_steps - before_turn]
        return values_VNR


def _put_times(values_VCR: FloatArray, at_B: IntArray, steps: StepArrays) -> None:
    """Put all times of steps to their places among the rows and ranks."""
    columns = (*steps.times_ns_BV.T, steps.between_ns_B)
    # One assignment a value: four times as fast as one for all, which numpy would make element by element.
    for values_CR, column_ns_B in zip(values_VCR, columns, strict=True):
        values_CR.reshape(-1)[at_B] = column_ns_B * NS
