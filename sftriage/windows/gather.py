"""Gathering the ranks' steps into windows. The same code serves a running job and a recording of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sftriage.events import Span
from sftriage.recorder.layout import MAX_COUNT
from sftriage.records import StageSchema, Window
from sftriage.windows.decoding import IntArray, StepArrays, together
from sftriage.windows.rows import StepRows

MAX_GAP_STEPS = 10_000
"""Steps that nobody recorded are a gap in the numbering; over a longer one the job is taken up anew."""

DEVICE_LAG_STEPS = 96
"""A device's times come some steps after the host's. A window waits for them so long, or as many steps as it has, and
then goes without."""

_NEVER = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True)
class Shape:
    """How windows are cut: N steps, one every so many steps, after the job's own warm-up steps."""

    window_steps: int
    stride_steps: int
    warmup_steps: int


class Gatherer:
    """Windows of one attempt of a job from its ranks' steps, in whatever order they come.

    A window is ready when every rank has passed its last step. A rank that stays away does not hold the others up: once
    another rank is a whole window further, the window goes out with the missing vectors missing. It goes out once:
    what comes for it later counts in the windows after it, or not at all.

    Nothing that was handed out changes, and the store holds two windows' steps at most, however far the ranks lie
    apart. Windows that a call of `add` completes are kept until `ready` hands them out: whoever adds steps that fill
    many windows has to ask in between.

    Of an attempt that is gone on with, ``due`` is the first step of the window after those that were judged: wherever
    the steps begin that come now, windows begin where they would have.
    """

    def __init__(
        self, schema: StageSchema, world_size: int, shape: Shape, *, attempt: int = 0, due: int | None = None
    ) -> None:
        self._schema = schema
        self._shape = shape
        self._attempt, self._due = attempt, due
        self._world_size = world_size
        # Until the first step of the job is known, steps are kept as they came.
        self._started = False
        self._early: list[StepArrays] = []
        self._earliest = MAX_COUNT
        self._seen_R = np.zeros(world_size, dtype=np.bool_)
        self._latest_R = np.full(world_size, _NEVER)
        self._away_R = np.zeros(world_size, dtype=np.bool_)
        # Of ranks that have shown any device time: the last step of it.
        self._latest_device_R = np.full(world_size, MAX_COUNT)
        self._early_device: list[StepArrays] = []
        self._on_device = False
        self._fastest = _NEVER
        self._next_first = _NEVER
        # A window is given up when a rank is one window past it: no step further than that is ever in the store.
        self._capacity_steps = 2 * shape.window_steps
        # (mostly ranks lie closer together, and of a large job that is much memory)
        self._rows = StepRows(schema, world_size, min(shape.window_steps + shape.stride_steps, self._capacity_steps))
        self._complete: list[Window] = []
        self._hosts, self._cohorts = [""] * world_size, [""] * world_size

    def takes(self, schema: StageSchema, world_size: int) -> bool:
        """Whether steps are of this job: of its stages, and of as many ranks."""
        return (schema, world_size) == (self._schema, self._world_size)

    def describe(self, rank: int, host: str, cohort: str = "") -> None:
        """Say where a rank is and what role it has; windows from now on carry it."""
        if 0 <= rank < self._world_size:
            self._hosts[rank], self._cohorts[rank] = host, cohort

    def runs_on_device(self) -> None:
        """Say that some rank's steps run on a device that its host does not wait for; windows from now on carry it."""
        self._on_device = True

    def add(self, steps: StepArrays) -> None:
        """Take steps of any ranks in any order. Incomplete ones, and ranks beyond the world size, count as missing."""
        steps = self._usable(steps)
        if not len(steps):
            return
        if self._started:
            self._take(steps)
            return
        self._early.append(steps)
        self._seen_R[steps.rank_B] = True
        self._earliest = min(self._earliest, int(steps.step_B.min()))
        self._fastest = max(self._fastest, int(steps.step_B.max()))
        if self._seen_R.all() or self._fastest - self._earliest >= self._shape.window_steps:
            self._start()

    def add_device(self, steps: StepArrays) -> None:
        """Take device times of steps, from the ranks' rings of them. Those of windows that have gone out are dropped.

        Call it after `add` with what was read before that: a step's host time is always published first.
        """
        steps = self._usable(steps)
        if not len(steps):
            return
        if not self._started:
            self._early_device.append(steps)
            return
        rank_B, step_B = steps.rank_B, steps.step_B
        # From now on these ranks are waited for; what is too far ahead for the store is dropped, but has been shown.
        self._latest_device_R[rank_B[self._latest_device_R[rank_B] == MAX_COUNT]] = _NEVER
        np.maximum.at(self._latest_device_R, rank_B, step_B)
        held_B = (step_B >= self._next_first) & (step_B < self._next_first + self._capacity_steps)
        if held_B.any():
            self._have_room(int(step_B[held_B].max()))
            self._rows.put_device(steps[held_B])

    def add_both(self, host: StepArrays, device: StepArrays) -> None:
        """Take what came together, so that of many steps, too, every window has both times.

        No more than a window's steps at a time, and before them the device times of all steps that went before: no
        window is given up for steps that are there.
        """
        host, device = host.in_order(), device.in_order()
        done = given = 0
        while done < len(host):
            step = host.step_B[done]
            until = int(np.searchsorted(device.step_B, step))
            self.add_device(device[given:until])
            end = int(np.searchsorted(host.step_B, step + self._shape.window_steps))
            self.add(host[done:end])
            done, given = end, until
        self.add_device(device[given:])

    def device_over(self, rank: int) -> None:
        """Say that no more device times will come from a rank: it is waited for no longer."""
        if 0 <= rank < self._world_size:
            self._latest_device_R[rank] = MAX_COUNT

    def away(self, ranks: Sequence[int]) -> None:
        """Say that nothing is heard of ranks: until steps of theirs come again, they are waited for no longer."""
        self._away_R[[rank for rank in ranks if 0 <= rank < self._world_size]] = True

    def ready(self, *, ended: bool = False) -> list[Window]:
        """Windows that are complete, oldest first; with ``ended``, those that no more steps will complete too."""
        if ended and self._early:
            self._start()
        if self._started:
            self._advance(ended=ended)
        windows, self._complete = self._complete, []
        return windows

    def cut(self, first_step: int, last_step: int) -> Window | None:
        """Some of the newest steps, whether or not they are all there; None where they are not in the store."""
        n_steps = last_step - first_step + 1
        if not self._started or n_steps < 1 or not self._next_first <= first_step <= last_step < self._room():
            return None
        self._have_room(last_step)
        return self._window(first_step, n_steps) if self._rows.any_known(first_step, n_steps) else None

    def _start(self) -> None:
        """The job's first step is the earliest anybody has shown; what comes before the windows is warm-up."""
        early, self._early = together(self._early), []
        self._started = True
        self._fastest = self._earliest
        self._next_first = self._earliest + self._shape.warmup_steps
        if self._due is not None:
            stride, due = self._shape.stride_steps, self._due
            # (what is to be judged next is not put off for a warm-up, which was long ago)
            self._next_first = min(self._next_first + (due - self._next_first) % stride, due)
            self._next_first = max(self._next_first, self._earliest + (due - self._earliest) % stride)
        self._take(early)
        for steps in self._early_device:
            self.add_device(steps)
        self._early_device = []

    def _usable(self, steps: StepArrays) -> StepArrays:
        """Those of ranks and with numbers that there can be."""
        rank_B, step_B = steps.rank_B, steps.step_B
        usable_B = (rank_B >= 0) & (rank_B < self._world_size) & (step_B > -MAX_COUNT) & (step_B < MAX_COUNT)
        return steps if usable_B.all() else steps[usable_B]

    def _take(self, steps: StepArrays) -> None:
        """Put steps into the store, in order and with windows cut in between where it could not hold all of them."""
        if int(steps.step_B.max()) < self._room():
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
            end = int(np.searchsorted(step_B, self._room()))
            self._put(steps[done:end])
            done = end

    def _room(self) -> int:
        """The first step that cannot be put into the store as things are."""
        return min(self._next_first + self._capacity_steps, self._fastest + MAX_GAP_STEPS + 1)

    def _have_room(self, step: int) -> None:
        """Have a row for a step that the store may hold."""
        if step >= self._next_first + self._rows.n_rows:
            self._rows.grow(self._next_first, self._capacity_steps)

    def _start_over(self, step: int) -> None:
        """What is in the store belongs to a part of the job that is over."""
        self._advance(ended=True)
        self._rows.clear(self._next_first, self._capacity_steps)
        self._next_first = step

    def _put(self, steps: StepArrays) -> None:
        step_B = steps.step_B
        np.maximum.at(self._latest_R, steps.rank_B, step_B)
        self._away_R[steps.rank_B] = False
        self._fastest = max(self._fastest, int(step_B.max()))
        late_B = step_B < self._next_first
        self._have_room(int(step_B.max()))
        self._rows.put(steps[~late_B] if late_B.any() else steps)

    def _advance(self, *, ended: bool = False) -> None:
        """Cut the windows that are ready: every rank has passed them, or they are given up."""
        n_steps, stride = self._shape.window_steps, self._shape.stride_steps
        here_R = ~self._away_R
        through = int(self._latest_R.min(initial=MAX_COUNT, where=here_R))
        through = through if through < MAX_COUNT else _NEVER
        on_device = int(self._latest_device_R.min(initial=MAX_COUNT, where=here_R))
        through = min(through, max(on_device, through - DEVICE_LAG_STEPS))
        through = max(through, self._fastest if ended else self._fastest - n_steps)
        while (last := self._next_first + n_steps - 1) <= through:
            strides = 1
            if self._rows.any_known(self._next_first, n_steps):
                self._complete.append(self._window(self._next_first, n_steps))
            elif not self._rows.any_known(self._next_first, self._capacity_steps):
                # A gap in the numbering: none of its windows holds anything.
                strides += (through - last) // stride
            self._rows.clear(self._next_first, strides * stride)
            self._next_first += strides * stride

    def _window(self, first_step: int, n_steps: int) -> Window:
        return Window(
            schema=self._schema,
            first_step=first_step,
            hosts=tuple(self._hosts) if any(self._hosts) else None,
            cohorts=tuple(self._cohorts) if any(self._cohorts) else None,
            attempt=self._attempt,
            on_device=self._on_device,
            **self._rows.window(first_step, n_steps),
        )


KEPT_STEPS = 4096
"""Steps that are remembered at least: ranks are read one after the other, each with all that it has."""


class StepTimes:
    """The first rank's start and the last rank's end of each of the newest steps, of the newest attempt."""

    def __init__(self, kept_steps: int) -> None:
        self._kept_steps = max(kept_steps, KEPT_STEPS)
        self._attempt = 0
        self._spans: dict[int, Span] = {}

    def note(self, attempt: int, steps: StepArrays, wall_ns_B: int | IntArray = 0) -> None:
        """Take steps that have been read; ``wall_ns_B`` is what their clocks lag behind nanoseconds since the epoch."""
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
        found_X = zip(step_B[first_X].tolist(), start_X.tolist(), end_X.tolist(), strict=True)
        for step, start_ns, end_ns in found_X:
            known = self._spans.get(step)
            if known is not None:
                start_ns, end_ns = min(start_ns, known.start_ns), max(end_ns, known.end_ns)
            self._spans[step] = Span(start_ns, end_ns)
        for step in list(islice(self._spans, max(0, len(self._spans) - self._kept_steps))):
            del self._spans[step]

    def of(self, attempt: int, first_step: int, last_step: int) -> Span | None:
        """From the start of one step to the end of another; None where either is not known any more, or not yet."""
        if attempt != self._attempt or first_step not in self._spans or last_step not in self._spans:
            return None
        return Span(self._spans[first_step].start_ns, self._spans[last_step].end_ns)
