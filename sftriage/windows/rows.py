"""The window store: the newest steps of all ranks, a row a step.

Each value (a stage's duration, say) is an array of its own in which the ranks lie side by side: steps are put there as
they are, a value at a time, and whoever accounts for a window passes over one stage of all its ranks without a gap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.model.counters import COUNTERS
from sftriage.model.windows import StageSchema
from sftriage.windows.decoding import BoolArray, FloatArray, IntArray, StepArrays
from sftriage.windows.slots import kind_of

RefinedArray = NDArray[Any]
NS = 1e-9
AGREE_FRACTION = 0.75
"""Of the ranks, so many note that a step is none of the ordinary ones: else it is what some of them do alone."""
_HOST = ("durations_NRS", "outside_NRG", "between_NR")
_DEVICE = ("device_NRS", "device_outside_NRG", "device_between_NR")


class StepRows:
    """A ring of rows, one a step: all ranks' values in seconds, NaN where nothing has come.

    A step's row is its number modulo the number of rows. Axes: C rows, V values (a duration for each stage, an outside
    time for each sync stage, and the time between), R ranks, B steps of single ranks that come together.

    Args:
        schema: the stages.
        world_size: ranks.
        capacity_steps: rows: steps that are in the store at the same time lie within this many of each other.

    Attributes:
        n_rows: the rows that there are by now.
    """

    def __init__(self, schema: StageSchema, world_size: int, capacity_steps: int) -> None:
        self._n_stages, self._n_ranks, self.n_rows = len(schema.stages), world_size, capacity_steps
        self._values_VCR = np.full((len(schema.stages) + len(schema.sync) + 1, capacity_steps, world_size), np.nan)
        # Device times, ready moments, work and counters: made when anybody says any, and most jobs do without some.
        self._refined: dict[str, RefinedArray] = {}
        self._known_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._capturing_C = np.zeros(capacity_steps, dtype=np.bool_)
        # Made when anybody notes any: the two words of each.
        self._kind_CR2: IntArray = np.zeros((0, world_size, 2), dtype=np.int64)

    def grow(self, first_step: int, capacity_steps: int) -> None:
        """Have more rows; the steps that are in the store are from ``first_step`` on."""
        step_C = np.arange(first_step, first_step + self.n_rows)
        before, after = step_C % self.n_rows, step_C % capacity_steps

        def grown(values: RefinedArray, axis: int, fill: float) -> Any:
            larger = np.full(
                (*values.shape[:axis], capacity_steps, *values.shape[axis + 1 :]), fill, dtype=values.dtype
            )
            larger[(slice(None),) * axis + (after,)] = values.take(before, axis=axis)
            return larger

        self._values_VCR = grown(self._values_VCR, 1, np.nan)
        self._refined = {name: grown(values_VCR, 1, np.nan) for name, values_VCR in self._refined.items()}
        self._known_C, self._capturing_C = grown(self._known_C, 0, 0), grown(self._capturing_C, 0, 0)
        if len(self._kind_CR2):
            self._kind_CR2 = grown(self._kind_CR2, 0, 0)
        self.n_rows = capacity_steps

    def put(self, steps: StepArrays) -> None:
        """Take steps; what a rank left half-way says what sort of step it was, and no times."""
        row_B = steps.step_B % self.n_rows
        self._capturing_C[row_B[steps.capturing_B]] = True
        self._put_kinds(steps, row_B)
        complete_B = steps.complete_B
        if not complete_B.all():
            steps, row_B = steps[complete_B], row_B[complete_B]
        self._known_C[row_B] = True
        at_B = row_B * self._n_ranks + steps.rank_B
        _put_times(self._values_VCR, at_B, steps)
        self._refine("ready", at_B, steps.ready_ns_B, steps.ready_ns_B >= 0, NS)
        self._refine("work", at_B, steps.work_B, steps.work_B > 0)
        if steps.counted_BC is not None:
            # (to seven digits, with which no verdict is another one: they are more than all other values together)
            counted_VCR = self._refinement("counted", len(COUNTERS), np.float32)
            for values_CR, column_B in zip(counted_VCR, steps.counted_BC.T, strict=True):
                values_CR.reshape(-1)[at_B] = column_B

    def put_device(self, steps: StepArrays) -> None:
        """Take the device times of steps (see `sftriage.recorder.device`)."""
        at_B = steps.step_B % self.n_rows * self._n_ranks + steps.rank_B
        _put_times(self._refinement("device", len(self._values_VCR)), at_B, steps)
        self._refine("device_ready", at_B, steps.ready_ns_B, steps.ready_ns_B >= 0, NS)

    def clear(self, first_step: int, n_steps: int) -> None:
        """Forget steps, so that their rows can be those of later ones."""
        rows = self._rows(first_step, min(n_steps, self.n_rows))
        for values_VCR in (self._values_VCR, *self._refined.values()):
            values_VCR[:, rows] = np.nan
        self._known_C[rows] = self._capturing_C[rows] = False
        if len(self._kind_CR2):
            self._kind_CR2[rows] = 0

    def any_known(self, first_step: int, n_steps: int) -> bool:
        """Whether any rank completed any of these steps."""
        return bool(self._known_C[self._rows(first_step, n_steps)].any())

    def durations_NRS(self, first_step: int, n_steps: int) -> FloatArray:
        """The durations of the stages of these steps."""
        values_VNR = self._values_VCR[: self._n_stages].take(self._rows(first_step, n_steps), axis=1)
        return values_VNR.transpose(1, 2, 0)

    def window(self, first_step: int, n_steps: int) -> dict[str, Any]:
        """What these steps give a `Window`: copies, with the ranks of one value side by side."""
        rows = self._rows(first_step, n_steps)
        found: dict[str, Any] = {"capturing_N": self._capturing_C[rows]}
        found |= self._times(_HOST, self._values_VCR.take(rows, axis=1))
        found |= self._kinds(rows)
        for name, values_VCR in self._refined.items():
            values_VNR = values_VCR.take(rows, axis=1)
            if np.isnan(values_VNR if name == "counted" else values_VNR[-1]).all():
                continue
            if name == "device":
                found |= self._times(_DEVICE, values_VNR)
            elif name == "counted":
                found["counted_NRC"] = values_VNR.transpose(1, 2, 0)
            else:
                found[f"{name}_NR"] = np.nan_to_num(values_VNR[0], nan=0.0) if name == "work" else values_VNR[0]
        return found

    def _times(self, names: tuple[str, ...], values_VNR: FloatArray) -> dict[str, FloatArray | None]:
        values_NRV = values_VNR.transpose(1, 2, 0)
        outside_NRG = values_NRV[:, :, self._n_stages : -1] if len(values_VNR) > self._n_stages + 1 else None
        return dict(zip(names, (values_NRV[:, :, : self._n_stages], outside_NRG, values_NRV[:, :, -1]), strict=True))

    def _refine(
        self, name: str, at_B: IntArray, values_B: IntArray | FloatArray, said_B: BoolArray, unit: float = 1.0
    ) -> None:
        if said_B.any():
            self._refinement(name, 1).reshape(-1)[at_B[said_B]] = values_B[said_B] * unit

    def _refinement(self, name: str, n_values: int, kind: type[np.floating[Any]] = np.float64) -> RefinedArray:
        if name not in self._refined:
            self._refined[name] = np.full((n_values, self.n_rows, self._n_ranks), np.nan, dtype=kind)
        return self._refined[name]

    def _put_kinds(self, steps: StepArrays, row_B: IntArray) -> None:
        kind_B2 = steps.kind_B2
        noted_B = kind_B2.any(axis=1)
        if noted_B.any():
            if not len(self._kind_CR2):
                self._kind_CR2 = np.zeros((self.n_rows, self._n_ranks, 2), dtype=np.int64)
            self._kind_CR2[row_B[noted_B], steps.rank_B[noted_B]] = kind_B2[noted_B]

    def _kinds(self, rows: IntArray) -> dict[str, Any]:
        """The kinds of steps on which the ranks agree, and what only some of them note.

        A step is of the kind that its lowest rank notes, if `AGREE_FRACTION` of the ranks that have it note any.
        """
        kind_NR2 = self._kind_CR2[rows] if len(self._kind_CR2) else self._kind_CR2
        noted_NR = kind_NR2.any(axis=2)
        if not noted_NR.any():
            return {}
        there_NR = ~np.isnan(self._values_VCR[0, rows]) | noted_NR
        agree_N = noted_NR.sum(axis=1) >= AGREE_FRACTION * np.maximum(there_NR.sum(axis=1), 1)
        words_NR = np.full(noted_NR.shape, "", dtype="U16")
        for kind_2 in np.unique(kind_NR2[noted_NR], axis=0):
            words_NR[(kind_NR2 == kind_2).all(axis=2)] = kind_of(int(kind_2[0]), int(kind_2[1]))
        found: dict[str, Any] = {}
        if agree_N.any():
            lowest_N = words_NR[np.arange(len(rows)), noted_NR.argmax(axis=1)]
            found["kinds"] = tuple(np.where(agree_N, lowest_N, "").tolist())
        if (noted_NR & ~agree_N[:, None]).any():
            found["noted_NR"] = np.where(agree_N[:, None], "", words_NR)
        return found

    def _rows(self, first_step: int, n_steps: int) -> IntArray:
        return np.arange(first_step, first_step + n_steps) % self.n_rows


def _put_times(values_VCR: RefinedArray, at_B: IntArray, steps: StepArrays) -> None:
    columns = (*steps.times_ns_BV.T, steps.between_ns_B)
    # One assignment a value: four times as fast as one for all, which numpy would make element by element.
    for values_CR, column_ns_B in zip(values_VCR, columns, strict=True):
        values_CR.reshape(-1)[at_B] = column_ns_B * NS
