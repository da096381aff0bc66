"""Gathers the ranks' steps into windows: a store of the newest steps, and the cutting of windows from it.

The controller uses it for a running job, `runs.recordings` for a recorded one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.model.events import Span
from sftriage.model.windows import COUNTERS, LOADER_START, StageSchema, Window
from sftriage.trainer.layout import MAX_COUNT
from sftriage.windows.decoding import BoolArray, FloatArray, IntArray, StepArrays, kind_of, together
from sftriage.windows.rings import Rows

RefinedArray = NDArray[Any]
NS = 1e-9
AGREE_FRACTION = 0.75
"""Fraction of ranks that must note a kind of step; with fewer, some ranks do something alone."""
_HOST = ("durations_NRS", "outside_NRG", "between_NR")
_DEVICE = ("device_NRS", "device_outside_NRG", "device_between_NR")


class StepRows:
    """A ring of rows, one per step: all ranks' values in seconds, NaN if not received yet.

    A step's row is its number modulo the number of rows (``n_rows``): steps in the store lie within this many of each
    other. Axes: C rows, V values (a duration for each stage, an outside time for each sync stage, and the time
    between), R ranks, B steps of single ranks that arrive together.
    """

    def __init__(self, schema: StageSchema, world_size: int, capacity_steps: int) -> None:
        self._n_stages, self._n_ranks, self.n_rows = len(schema.stages), world_size, capacity_steps
        self._values_VCR = np.full((len(schema.stages) + len(schema.sync) + 1, capacity_steps, world_size), np.nan)
        # Device times, ready moments, work and counters: allocated on first use, as most jobs lack some.
        self._refined: dict[str, RefinedArray] = {}
        self._known_C = np.zeros(capacity_steps, dtype=np.bool_)
        self._capturing_C = np.zeros(capacity_steps, dtype=np.bool_)
        # Allocated on first use: the two words of each kind.
        self._kind_CR2: IntArray = np.zeros((0, world_size, 2), dtype=np.int64)

    def grow(self, first_step: int, capacity_steps: int) -> None:
        """Add rows; the store then begins at ``first_step``."""
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

    def put(self, steps: StepArrays, step_B: IntArray | None = None) -> None:
        """Store steps, numbered ``step_B`` if given; those left half-way have a kind and no times."""
        row_B = (steps.step_B if step_B is None else step_B) % self.n_rows
        self._capturing_C[row_B[steps.capturing_B]] = True
        noted_B = steps.kind_B2.any(axis=1)
        if noted_B.any():
            if not len(self._kind_CR2):
                self._kind_CR2 = np.zeros((self.n_rows, self._n_ranks, 2), dtype=np.int64)
            self._kind_CR2[row_B[noted_B], steps.rank_B[noted_B]] = steps.kind_B2[noted_B]
        complete_B = steps.complete_B
        if not complete_B.all():
            steps, row_B = steps[complete_B], row_B[complete_B]
        self._known_C[row_B] = True
        at_B = row_B * self._n_ranks + steps.rank_B
        _put_times(self._values_VCR, at_B, steps)
        self._refine("ready", at_B, steps.ready_ns_B, steps.ready_ns_B >= 0, NS)
        self._refine("work", at_B, steps.work_B, steps.work_B > 0)
        if steps.counted_BC is not None:
            # (seven digits change no verdict, and counters take more memory than all other values together)
            counted_VCR = self._refinement("counted", len(COUNTERS), np.float32)
            for values_CR, column_B in zip(counted_VCR, steps.counted_BC.T, strict=True):
                values_CR.reshape(-1)[at_B] = column_B

    def put_device(self, steps: StepArrays) -> None:
        """Store the device times of steps (see `sftriage.trainer.device`)."""
        at_B = steps.step_B % self.n_rows * self._n_ranks + steps.rank_B
        _put_times(self._refinement("device", len(self._values_VCR)), at_B, steps)
        self._refine("device_ready", at_B, steps.ready_ns_B, steps.ready_ns_B >= 0, NS)

    def clear(self, first_step: int, n_steps: int) -> None:
        rows = self._rows(first_step, min(n_steps, self.n_rows))
        for values_VCR in (self._values_VCR, *self._refined.values()):
            values_VCR[:, rows] = np.nan
        self._known_C[rows] = self._capturing_C[rows] = False
        if len(self._kind_CR2):
            self._kind_CR2[rows] = 0

    def any_known(self, first_step: int, n_steps: int) -> bool:
        return bool(self._known_C[self._rows(first_step, n_steps)].any())

    def durations_NRS(self, first_step: int, n_steps: int) -> FloatArray:
        values_VNR = self._values_VCR[: self._n_stages].take(self._rows(first_step, n_steps), axis=1)
        return values_VNR.transpose(1, 2, 0)

    def window(self, first_step: int, n_steps: int) -> dict[str, Any]:
        """The arrays of a `Window` of these steps: copies, with the ranks of one value side by side."""
        rows = self._rows(first_step, n_steps)
        arrays: dict[str, Any] = {"capturing_N": self._capturing_C[rows]}
        arrays |= self._times(_HOST, self._values_VCR.take(rows, axis=1))
        arrays |= self._kinds(rows)
        for name, values_VCR in self._refined.items():
            values_VNR = values_VCR.take(rows, axis=1)
            if np.isnan(values_VNR if name == "counted" else values_VNR[-1]).all():
                continue
            if name == "device":
                arrays |= self._times(_DEVICE, values_VNR)
            elif name == "counted":
                arrays["counted_NRC"] = values_VNR.transpose(1, 2, 0)
            else:
                arrays[f"{name}_NR"] = np.nan_to_num(values_VNR[0], nan=0.0) if name == "work" else values_VNR[0]
        return arrays

    def _times(self, names: tuple[str, ...], values_VNR: FloatArray) -> dict[str, FloatArray | None]:
        values_NRV = values_VNR.transpose(1, 2, 0)
        outside_NRG = values_NRV[:, :, self._n_stages : -1] if len(values_VNR) > self._n_stages + 1 else None
        return dict(zip(names, (values_NRV[:, :, : self._n_stages], outside_NRG, values_NRV[:, :, -1]), strict=True))

    def _refine(
        self, name: str, at_B: IntArray, values_B: IntArray | FloatArray, known_B: BoolArray, unit: float = 1.0
    ) -> None:
        if known_B.any():
            self._refinement(name, 1).reshape(-1)[at_B[known_B]] = values_B[known_B] * unit

    def _refinement(self, name: str, n_values: int, kind: type[np.floating[Any]] = np.float64) -> RefinedArray:
        if name not in self._refined:
            self._refined[name] = np.full((n_values, self.n_rows, self._n_ranks), np.nan, dtype=kind)
        return self._refined[name]

    def _kinds(self, rows: IntArray) -> dict[str, Any]:
        """The kinds of steps on which the ranks agree, and those that only some of them note.

        A step has the kind that its lowest rank notes, if `AGREE_FRACTION` of its ranks note any kind.
        """
        kind_NR2 = self._kind_CR2[rows] if len(self._kind_CR2) else self._kind_CR2
        noted_NR = kind_NR2.any(axis=2)
        if not noted_NR.any():
            return {}
        words_NR = np.full(noted_NR.shape, "", dtype="U16")
        for kind_2 in np.unique(kind_NR2[noted_NR], axis=0):
            words_NR[(kind_NR2 == kind_2).all(axis=2)] = kind_of(int(kind_2[0]), int(kind_2[1]))
        # (such a step is an ordinary one to verdicts, which would miss a rank that is late there)
        anew_NR = words_NR == LOADER_START
        kinds: dict[str, Any] = {"loaders_N": anew_NR.any(axis=1)} if anew_NR.any() else {}
        words_NR[anew_NR], noted_NR = "", noted_NR & ~anew_NR
        there_NR = ~np.isnan(self._values_VCR[0, rows]) | noted_NR
        agree_N = noted_NR.sum(axis=1) >= AGREE_FRACTION * np.maximum(there_NR.sum(axis=1), 1)
        if agree_N.any():
            lowest_N = words_NR[np.arange(len(rows)), noted_NR.argmax(axis=1)]
            kinds["kinds"] = tuple(np.where(agree_N, lowest_N, "").tolist())
        if (noted_NR & ~agree_N[:, None]).any():
            kinds["noted_NR"] = np.where(agree_N[:, None], "", words_NR)
        return kinds

    def _rows(self, first_step: int, n_steps: int) -> IntArray:
        return np.arange(first_step, first_step + n_steps) % self.n_rows


def _put_times(values_VCR: RefinedArray, at_B: IntArray, steps: StepArrays) -> None:
    columns = (*steps.times_ns_BV.T, steps.between_ns_B)
    # One assignment per value: four times as fast as one for all, which numpy does element by element.
    for values_CR, column_ns_B in zip(values_VCR, columns, strict=True):
        values_CR.reshape(-1)[at_B] = column_ns_B * NS


MAX_GAP_STEPS = 10_000
"""Longest gap of unrecorded steps; after a longer one, gathering starts again."""

DEVICE_LAG_STEPS = 96
"""Maximum steps (or a window's) for which a window waits for a device's times, which come after the host's."""

_NEVER = int(np.iinfo(np.int64).min)


LONG_WINDOW_S, LEAST_WINDOW_STEPS = 6.0, 10
"""Maximum duration of a window, and minimum steps: windows of long steps have fewer of them."""
QUICK_WINDOW_S, MOST_WINDOW_STEPS = 0.5, 2000
"""Minimum duration of a window, up to the maximum of steps; such windows lie end to end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How windows are cut: ``window_steps`` each, one every ``stride_steps``, after the job's ``warmup_steps``.

    The numbers in ``shrinks`` are for steps that are neither long nor quick. If a whole window would last longer than
    `LONG_WINDOW_S`, they shrink in proportion, down to windows of `LEAST_WINDOW_STEPS`. If steps are quick, windows
    grow until they last `QUICK_WINDOW_S`, and do not overlap.
    """

    window_steps: int
    stride_steps: int
    warmup_steps: int
    shrinks: frozenset[str] = frozenset()

    def at(self, step_s: float, step: int = 0) -> Shape:
        """The fixed numbers for steps that take ``step_s``, from ``step`` on.

        A window of quick steps has at most ``step`` steps: a job that has just begun is judged sooner.
        """
        least = LEAST_WINDOW_STEPS / self.window_steps
        part = min(1.0, max(least, LONG_WINDOW_S / max(self.window_steps * step_s, LONG_WINDOW_S)))
        window, warmup = (
            math.ceil(getattr(self, name) * part) if name in self.shrinks else getattr(self, name)
            for name in ("window_steps", "warmup_steps")
        )
        stride = self.stride_after(window)
        quick = min(step, MOST_WINDOW_STEPS, math.ceil(QUICK_WINDOW_S / step_s) if step_s > 0.0 else 0)
        if quick > window and {"window_steps", "stride_steps"} <= self.shrinks:
            window = stride = quick
        return Shape(max(window, stride), stride, warmup)

    def first_verdict_step(self, first_step: int, step_s: float) -> int:
        """The step of the first verdict, in a job whose steps take ``step_s`` from ``first_step`` on."""
        cut = self.at(step_s)
        return first_step + cut.warmup_steps + cut.window_steps - 1

    def stride_after(self, window_steps: int) -> int:
        """The steps from a window of this many steps to the next one."""
        if "stride_steps" not in self.shrinks or window_steps == self.window_steps:
            return self.stride_steps
        if window_steps > self.window_steps:
            return window_steps
        return math.ceil(self.stride_steps * window_steps / self.window_steps)


def pace_s(durations_NRS: RefinedArray) -> float:
    """The duration of an undelayed step, from a few steps: the lower quartile; 0 if none is complete."""
    step_N = np.fmax.reduce(durations_NRS.sum(axis=2), axis=1, initial=0.0)
    taken_N = np.sort(step_N[step_N > 0.0])
    return float(taken_N[(len(taken_N) - 1) // 4]) if len(taken_N) else 0.0


class Gatherer:
    """Makes windows of one attempt of a job from its ranks' steps, which may arrive in any order.

    A window is ready when every rank has passed its last step, or one rank is a whole window further: then it has
    missing vectors. Steps that arrive later count in the next windows, or not at all. Returned windows never change,
    and the store holds at most two windows' steps.

    In a resumed attempt, ``due`` is the first step of the window after those that were judged: windows begin where they
    would have begun. The duration of a window's first steps decides its length (`Shape.at`), that of the job's first
    steps the warm-up: the windows do not depend on how the steps arrive.
    """

    def __init__(
        self, schema: StageSchema, world_size: int, shape: Shape, *, attempt: int = 0, due: int | None = None
    ) -> None:
        self.schema = schema
        self._shape = shape
        # The cut of the last window, and whether the job's warm-up is still to be skipped.
        self._cut, self._warms_up = replace(shape, shrinks=frozenset()), True
        self._attempt, self._due = attempt, due
        self.world_size = world_size
        # Until the job's first step is known, steps are kept as received.
        self._started = False
        self._early: list[StepArrays] = []
        self._earliest = MAX_COUNT
        self._observed_R = np.zeros(world_size, dtype=np.bool_)
        self._latest_R = np.full(world_size, _NEVER)
        self._away_R = np.zeros(world_size, dtype=np.bool_)
        # The last step with device times of each rank that has shown any.
        self._latest_device_R = np.full(world_size, MAX_COUNT)
        self._early_device: list[StepArrays] = []
        self.on_device = False
        self._fastest = _NEVER
        self._next_first = _NEVER
        # The store never has a step further ahead: once a rank is one window past a window, that is complete.
        self._capacity_steps = 2 * shape.window_steps
        # (usually ranks lie closer together, and a large job would take much memory)
        self._rows = StepRows(schema, world_size, min(shape.window_steps + shape.stride_steps, self._capacity_steps))
        self._complete: list[Window] = []
        self._hosts, self._agents, self._cohorts = [""] * world_size, [""] * world_size, [""] * world_size

    def add(self, steps: StepArrays) -> None:
        """Add steps of any ranks in any order. Incomplete steps, and ranks beyond the world size, count as missing."""
        steps = self._usable(steps)
        if not len(steps):
            return
        if self._started:
            self._take(steps)
            return
        self._early.append(steps)
        self._observed_R[steps.rank_B] = True
        self._earliest = min(self._earliest, int(steps.step_B.min()))
        self._fastest = max(self._fastest, int(steps.step_B.max()))
        n_steps = self._fastest - self._earliest
        if not self._observed_R.all() and LEAST_WINDOW_STEPS <= n_steps < self._cut.window_steps:
            # A rank is missing.
            self._cut = self._shape.at(pace_s(together(self._early).durations_ns_BS[:, None] * NS))
        if self._observed_R.all() or n_steps >= self._cut.window_steps:
            self._start()

    def add_device(self, steps: StepArrays) -> None:
        """Add device times of steps. Those of windows that were returned are dropped.

        Call it after `add`, with times that were read before: a step's host time is always published first.
        """
        steps = self._usable(steps)
        if not len(steps):
            return
        if not self._started:
            self._early_device.append(steps)
            return
        rank_B, step_B = steps.rank_B, steps.step_B
        # From now on windows wait for these ranks. Steps too far ahead for the store are dropped, but count as shown.
        self._latest_device_R[rank_B[self._latest_device_R[rank_B] == MAX_COUNT]] = _NEVER
        np.maximum.at(self._latest_device_R, rank_B, step_B)
        held_B = (step_B >= self._next_first) & (step_B < self._next_first + self._capacity_steps)
        if held_B.any():
            self._make_space(int(step_B[held_B].max()))
            self._rows.put_device(steps[held_B])

    def take(self, sent: Sequence[Rows]) -> StepArrays:
        """Add rows of all hosts at once, so that every window has both times; returns their host steps.

        A window's steps at a time, after the device times of all steps before, so that no window is cut without steps
        that have arrived. Windows do not wait for away ranks until their steps arrive.
        """
        for rows in sent:
            for rank, ring in rows.ranks.items():
                if 0 <= rank < self.world_size:
                    self._hosts[rank], self._cohorts[rank] = ring.host, ring.cohort
                    self._agents[rank] = rows.agent or self._agents[rank]
            self._away_R[[rank for rank in rows.away if 0 <= rank < self.world_size]] = True
        steps = together([rows.steps for rows in sent])
        of_devices = [rows.device_steps for rows in sent if rows.device_steps is not None]
        if not of_devices:
            self.add(steps)
            return steps
        self.on_device = True
        host, device = steps.in_order(), together(of_devices).in_order()
        n_host = n_device = 0
        while n_host < len(host):
            step = host.step_B[n_host]
            until = int(np.searchsorted(device.step_B, step))
            self.add_device(device[n_device:until])
            end = int(np.searchsorted(host.step_B, step + self._cut.window_steps))
            self.add(host[n_host:end])
            n_host, n_device = end, until
        self.add_device(device[n_device:])
        over = (rank for rows in sent for rank in rows.device_over)
        self._latest_device_R[[rank for rank in over if 0 <= rank < self.world_size]] = MAX_COUNT
        return steps

    def ready(self, *, ended: bool = False) -> list[Window]:
        """The complete windows, oldest first; with ``ended``, also those that no more steps will complete."""
        if ended and self._early:
            self._start()
        if self._started:
            self._advance(ended=ended)
        windows, self._complete = self._complete, []
        return windows

    def cut(self, first_step: int, last_step: int) -> Window | None:
        """Some of the newest steps, complete or not; None if they are not in the store."""
        n_steps = last_step - first_step + 1
        if not self._started or n_steps < 1 or not self._next_first <= first_step <= last_step < self._first_beyond():
            return None
        self._make_space(last_step)
        return self._window(first_step, n_steps) if self._rows.any_known(first_step, n_steps) else None

    def _start(self) -> None:
        """Begin with the earliest step of any rank as the job's first; steps before the first window are warm-up."""
        early, self._early = together(self._early), []
        self._started = True
        self._fastest = self._earliest
        self._next_first = self._earliest
        if "warmup_steps" not in self._shape.shrinks:
            self._warm_up(self._shape)
        self._take(early)
        for steps in self._early_device:
            self.add_device(steps)
        self._early_device = []

    def _warm_up(self, cut: Shape) -> None:
        self._warms_up = False
        first = self._next_first + cut.warmup_steps
        if self._due is not None:
            stride, due = cut.stride_steps, self._due
            # (the next window to judge does not wait for a warm-up, which was long ago)
            first = min(first + (due - first) % stride, due)
            first = max(first, self._earliest + (due - self._earliest) % stride)
        self._move_to(first)

    def _move_to(self, first_step: int) -> None:
        self._rows.clear(self._next_first, first_step - self._next_first)
        self._next_first = first_step

    def _usable(self, steps: StepArrays) -> StepArrays:
        rank_B, step_B = steps.rank_B, steps.step_B
        usable_B = (rank_B >= 0) & (rank_B < self.world_size) & (step_B > -MAX_COUNT) & (step_B < MAX_COUNT)
        return steps if usable_B.all() else steps[usable_B]

    def _take(self, steps: StepArrays) -> None:
        """Store steps in order, and cut windows in between if it cannot hold all of them."""
        back = int(steps.step_B.max()) < self._next_first - MAX_GAP_STEPS
        if back and 2 * len(np.unique(steps.rank_B)) > self.world_size:
            # A rank had shown a step that the job has not reached.
            self._start_over(int(steps.step_B.min()))
            self._fastest = self._next_first
            self._latest_R[:] = _NEVER
        if int(steps.step_B.max()) < self._first_beyond():
            self._put(steps)
            return
        steps = steps.in_order()
        step_B = steps.step_B
        done = 0
        while done < len(steps):
            step = int(step_B[done])
            if step > self._fastest + MAX_GAP_STEPS:
                self._start_over(step)
            self._fastest = max(self._fastest, step)
            self._advance()
            end = int(np.searchsorted(step_B, self._first_beyond()))
            self._put(steps[done:end])
            done = end

    def _first_beyond(self) -> int:
        """The first step that is too far ahead for the store."""
        return min(self._next_first + self._capacity_steps, self._fastest + MAX_GAP_STEPS + 1)

    def _make_space(self, step: int) -> None:
        if step >= self._next_first + self._rows.n_rows:
            self._rows.grow(self._next_first, self._capacity_steps)

    def _start_over(self, step: int) -> None:
        """Cut what is in the store, which belongs to an ended part of the job, and begin at ``step``."""
        self._advance(ended=True)
        self._rows.clear(self._next_first, self._capacity_steps)
        self._next_first = step

    def _put(self, steps: StepArrays) -> None:
        step_B = steps.step_B
        np.maximum.at(self._latest_R, steps.rank_B, step_B)
        self._away_R[steps.rank_B] = False
        self._fastest = max(self._fastest, int(step_B.max()))
        late_B = step_B < self._next_first
        self._make_space(int(step_B.max()))
        self._rows.put(steps[~late_B] if late_B.any() else steps)

    def _advance(self, *, ended: bool = False) -> None:
        here_R = ~self._away_R
        through = int(self._latest_R.min(initial=MAX_COUNT, where=here_R))
        through = through if through < MAX_COUNT else _NEVER
        on_device = int(self._latest_device_R.min(initial=MAX_COUNT, where=here_R))
        through = min(through, max(on_device, through - DEVICE_LAG_STEPS))
        through = max(through, self._fastest if ended else self._fastest - self._cut.window_steps)
        while self._shaped(through, ended=ended) and (last := self._next_first + self._cut.window_steps - 1) <= through:
            n_steps, stride = self._cut.window_steps, self._cut.stride_steps
            strides = 1
            if self._rows.any_known(self._next_first, n_steps):
                self._complete.append(self._window(self._next_first, n_steps))
            elif not self._rows.any_known(self._next_first, self._capacity_steps):
                # A gap in the numbering: all of its windows are empty.
                strides += (through - last) // stride
            first, due = self._next_first + strides * stride, self._due
            self._move_to(due if due is not None and self._next_first < due < first else first)

    def _shaped(self, through: int, *, ended: bool) -> bool:
        """Whether the cut of the next window is known: all ranks have its first steps."""
        if not self._shape.shrinks:
            return True
        while through >= self._next_first + LEAST_WINDOW_STEPS - 1:
            step_s = pace_s(self._rows.durations_NRS(self._next_first, LEAST_WINDOW_STEPS))
            # (at the end, no larger than the remaining steps)
            left = through + 1 - self._next_first if ended else self._next_first
            self._cut = self._shape.at(step_s, min(left, self._next_first))
            self._capacity_steps = max(self._capacity_steps, 2 * self._cut.window_steps)
            if not self._warms_up:
                return True
            self._warm_up(self._cut)
        return False

    def _places(self) -> tuple[str, ...] | None:
        """The ranks' hosts; those of one host by their agents, of which each pod has its own."""
        one_host = len(set(filter(None, self._hosts))) == 1
        places = self._agents if one_host and len(set(filter(None, self._agents))) > 1 else self._hosts
        return tuple(places) if any(places) else None

    def _window(self, first_step: int, n_steps: int) -> Window:
        return Window(
            schema=self.schema,
            first_step=first_step,
            hosts=self._places(),
            cohorts=tuple(self._cohorts) if any(self._cohorts) else None,
            attempt=self._attempt,
            on_device=self.on_device,
            **self._rows.window(first_step, n_steps),
        )


KEPT_STEPS = 4096
"""Minimum steps that are kept: ranks are read one after the other, each with all its new steps."""


class StepTimes:
    """The first rank's start and the last rank's end of each of the newest steps, of the newest attempt."""

    def __init__(self, kept_steps: int) -> None:
        self._kept_steps = max(kept_steps, KEPT_STEPS)
        self._attempt = 0
        self._spans: dict[int, Span] = {}

    def note(self, attempt: int, steps: StepArrays, wall_ns_B: int | IntArray = 0) -> None:
        """Add steps; ``wall_ns_B`` is the offset from their clocks to nanoseconds since the epoch."""
        if attempt < self._attempt:
            return
        if attempt > self._attempt:
            self._attempt, self._spans = attempt, {}
        if not len(steps):
            return
        order_B = np.argsort(steps.step_B, kind="stable")
        step_B, start_ns_B = steps.step_B[order_B], (steps.start_ns_B + wall_ns_B)[order_B]
        end_ns_B = start_ns_B + steps.durations_ns_BS.sum(axis=1)[order_B]
        first_X = np.flatnonzero(np.diff(step_B, prepend=step_B[0] - 1))
        start_X, end_X = np.minimum.reduceat(start_ns_B, first_X), np.maximum.reduceat(end_ns_B, first_X)
        spans = zip(step_B[first_X].tolist(), start_X.tolist(), end_X.tolist(), strict=True)
        for step, start_ns, end_ns in spans:
            known = self._spans.get(step)
            if known is not None:
                start_ns, end_ns = min(start_ns, known.start_ns), max(end_ns, known.end_ns)
            self._spans[step] = Span(start_ns, end_ns)
        for step in list(islice(self._spans, max(0, len(self._spans) - self._kept_steps))):
            del self._spans[step]

    def of(self, attempt: int, first_step: int, last_step: int) -> dict[int, Span]:
        """The spans of the steps from ``first_step`` to ``last_step``, by number, as far as known."""
        steps = range(first_step, last_step + 1) if attempt == self._attempt else ()
        return {step: self._spans[step] for step in steps if step in self._spans}
