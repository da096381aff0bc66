"""Long jobs of many ranks out of short recordings of few, and the faults that are put into them.

A rank's time in a sync stage is its own part (until its last gradient is ready), then waiting for the last arrival,
then the sync's own work. `own_times` takes the waiting out of a recorded window; `OwnTimes.window` puts in what follows
from the own times: every rank continues when the last has arrived and the work is done. So a delay put into the own
times (`slowed`) makes the others wait exactly as long as the rank that has it is the last, what comes after the last
sync of a step delays the first sync of the next, and ranks recorded apart wait for each other once they are put side by
side. The ranks do not leave a sync at one instant: ``rest_NRG`` is by how much each stayed longer than the median rank.
It is kept as recorded, so that taking the waiting out and putting it in again changes nothing.

A job is put together of blocks: 100 to 400 consecutive recorded steps with all ranks of the recording, so that what
belongs together (a burst of load, the step after a hiccup) stays together; a job with a period has blocks of whole
periods. More ranks than were recorded are several rows of blocks side by side, each a host of its own, all of the same
sort of job and load. Within a stretch, as long as the recording (2,000 steps at most), a rank stays who it is; between
stretches the ranks of a host change places. So a hiccup that a rank had once does not come to it again and again.

What this cannot show: anything rarer than the recordings are long, and noise that hosts share, for hosts are drawn
apart. Of hosts under a load that comes and goes one is busier than the others for some hundred steps, and is named for
it: that counts as a false name. The recordings' own chance is not in the intervals of the counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.rows import LOCAL_PLACES, STAGE_OF, Deck
from sftriage.model.windows import OTHER, StageSchema, Window, axes_of
from sftriage.windows.npz import counted_of

FloatArray = NDArray[np.float64]
Index = slice | NDArray[np.intp]


SIZES = (0.02, 0.05, 0.10, 0.20, 0.50)
COURSES = ("constant", "recurring", "growing", "bursts")
SCOPES = ("rank", "host")
GROWS_STEPS = 400
"""How long a growing fault grows before it has its size."""
BURST_STEPS = (20, 60)
PERIODS = range(5, 31)
LEAD_STEPS = (300, 500)
"""The job is healthy for so many steps before."""
LASTS_STEPS = 800
JITTER = 0.1
"""A delay varies from step to step by so much of itself."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnTimes:
    """N steps × R ranks without their waiting, in seconds. S stages, of which G are sync stages."""

    schema: StageSchema
    local_NRS: FloatArray  # what each stage takes a rank by itself; of ``other`` what comes after the last sync
    outside_NRG: FloatArray  # time outside the stages before each sync
    between_NR: FloatArray  # time between the step before and this one
    sync_NG: FloatArray  # the work of each sync, once all have arrived
    rest_NRG: FloatArray  # by how much a rank stays longer in it than the median rank; may be negative
    work_NR: FloatArray  # how much work the step is; 0 where nobody says
    kinds_N: NDArray[np.str_]  # of what kind it is
    queued_NR: FloatArray  # how long the rank waited for a CPU; NaN where nobody knows
    preempted_NR: FloatArray  # how often one was taken from it; NaN where nobody knows
    hosts_R: NDArray[np.str_]  # where the ranks are
    split: bool  # whether the moment of the last ready gradient is known

    def __len__(self) -> int:
        return len(self.between_NR)

    @property
    def n_ranks(self) -> int:
        return int(self.between_NR.shape[1])

    @property
    def sync_columns(self) -> list[int]:
        return [self.schema.stages.index(stage) for stage in self.schema.sync_in_order]

    @property
    def tail_NR(self) -> FloatArray:
        """What comes after a step's last sync, and holds up the first sync of the next step."""
        tail_NR: FloatArray = self.local_NRS[:, :, self.sync_columns[-1] + 1 :].sum(axis=2)
        return tail_NR

    def steps(self, index: Index) -> OwnTimes:
        return self._taken("N", index)

    def ranks(self, index: NDArray[np.intp]) -> OwnTimes:
        return self._taken("R", index)

    def arrivals_NRG(self, before_R: FloatArray | None = None) -> FloatArray:
        """When each rank is ready for each sync, since all were together at the end of the sync before.

        ``before_R`` is what came after the last sync of the step before these.
        """
        tail_NR = self.tail_NR
        before_NR = np.concatenate([np.zeros((1, self.n_ranks)) if before_R is None else before_R[None], tail_NR[:-1]])
        arrivals = []
        first = 0
        for g, sync in enumerate(self.sync_columns):
            arrival_NR = self.local_NRS[:, :, first : sync + 1].sum(axis=2) + self.outside_NRG[:, :, g]
            arrivals.append(arrival_NR + before_NR + self.between_NR if g == 0 else arrival_NR)
            first = sync + 1
        return np.stack(arrivals, axis=2)

    def exposed_N(self, before_R: FloatArray | None = None) -> FloatArray:
        """What each step takes, from the end of the last sync before it to that of its own."""
        exposed_N: FloatArray = (self.arrivals_NRG(before_R).max(axis=1) + self.sync_NG).sum(axis=1)
        return exposed_N

    def led_and_waited(self, ranks: Sequence[int]) -> tuple[float, float]:
        """By how much of a step some ranks held up all others, and which part of their lateness they waited for a CPU.

        Means over all steps: of the lead of the last of these ranks over the last of all others, as a fraction of the
        step; and, where it was counted, of the ranks' run-queue wait over the others', as a fraction of their time over
        the others'. 0 where they were not late, or it was not.
        """
        others_R = ~np.isin(np.arange(self.n_ranks), ranks)
        arrivals_NRG = self.arrivals_NRG()
        lead_NG = arrivals_NRG[:, ~others_R].max(axis=1) - arrivals_NRG[:, others_R].max(axis=1)
        known_N = np.isfinite(self.queued_NR).all(axis=1)
        late_s, waited_s = (
            float(values_NR[known_N][:, ~others_R].sum() / (~others_R).sum())
            - float(values_NR[known_N][:, others_R].sum() / others_R.sum())
            for values_NR in (arrivals_NRG.sum(axis=2), self.queued_NR)
        )
        led_s = float(np.clip(lead_NG, 0.0, None).sum(axis=1).mean())
        waited = max(0.0, waited_s / late_s) if late_s > 0.0 else 0.0
        return led_s / float(self.exposed_N().mean()), waited

    def window(self, first_step: int = 0, before_R: FloatArray | None = None) -> Window:
        arrivals_NRG = self.arrivals_NRG(before_R)
        # The ranks of a stage lie side by side in memory, as in a window that was gathered.
        durations_SNR = self.local_NRS.transpose(2, 0, 1).copy()
        for g, sync in enumerate(self.sync_columns):
            waits_NR = arrivals_NRG[:, :, g].max(axis=1, keepdims=True) - arrivals_NRG[:, :, g]
            after_NR = waits_NR + self.sync_NG[:, g, None] + self.rest_NRG[:, :, g]
            durations_SNR[sync] += np.maximum(after_NR, 0.0)
        ready_NR = self.local_NRS[:, :, self.sync_columns[0]].copy() if self.split else None
        durations_SNR[-1] += self.outside_NRG.sum(axis=2)
        kinds = tuple(self.kinds_N.tolist())
        return Window(
            schema=self.schema,
            first_step=first_step,
            durations_NRS=durations_SNR.transpose(1, 2, 0),
            outside_NRG=self.outside_NRG,
            between_NR=self.between_NR,
            ready_NR=ready_NR,
            hosts=tuple(self.hosts_R.tolist()),
            kinds=kinds if any(kinds) else None,
            work_NR=self.work_NR if self.work_NR.any() else None,
            counted_NRC=counted_of({"queued_s": self.queued_NR, "preempted": self.preempted_NR})
            if np.isfinite(self.queued_NR).any()
            else None,
        )

    def _taken(self, axis: str, index: Index) -> OwnTimes:
        taken: dict[str, Any] = {}
        for name in OwnTimes.__dataclass_fields__:
            if axis in axes_of(name):
                along = axes_of(name).index(axis)
                taken[name] = getattr(self, name)[(slice(None),) * along + (index,)]
        return replace(self, **taken)


def own_times(window: Window) -> OwnTimes:
    """A recorded window without its waiting. It is of complete steps, its schema closed and with a sync stage.

    Raises:
        ValueError: it is not.
    """
    schema = window.schema
    if not schema.sync or schema.stages[-1] != OTHER or not np.isfinite(window.durations_NRS).all():
        raise ValueError("a window to take the waiting out of has a sync stage, ends in other, and lacks no step")
    n_steps, n_ranks, _ = window.durations_NRS.shape
    outside_NRG = np.zeros((n_steps, n_ranks, len(schema.sync))) if window.outside_NRG is None else window.outside_NRG
    local_NRS = np.array(window.durations_NRS)
    local_NRS[:, :, -1] = np.maximum(local_NRS[:, :, -1] - outside_NRG.sum(axis=2), 0.0)
    split = window.ready_NR is not None and bool(np.isfinite(window.ready_NR).any())
    syncs = [schema.stages.index(stage) for stage in schema.sync_in_order]
    left_NRG = local_NRS[:, :, syncs].copy()
    local_NRS[:, :, syncs] = 0.0
    if split and window.ready_NR is not None:
        # A step whose moment was not seen is taken to have had it when the rank usually has.
        usual_R = np.nanmedian(window.ready_NR, axis=0)
        ready_NR = np.where(np.isfinite(window.ready_NR), window.ready_NR, usual_R)
        local_NRS[:, :, syncs[0]] = np.minimum(ready_NR, left_NRG[:, :, 0])
        left_NRG[:, :, 0] -= local_NRS[:, :, syncs[0]]
    zeros_NRG, unknown_NR = np.zeros_like(outside_NRG), np.full((n_steps, n_ranks), np.nan)
    alone = OwnTimes(
        schema=schema,
        local_NRS=local_NRS,
        outside_NRG=outside_NRG,
        between_NR=np.zeros((n_steps, n_ranks)) if window.between_NR is None else window.between_NR,
        sync_NG=zeros_NRG[:, 0],
        rest_NRG=zeros_NRG,
        work_NR=np.zeros((n_steps, n_ranks)) if window.work_NR is None else window.work_NR,
        kinds_N=np.array(window.kinds or ("",) * n_steps),
        queued_NR=unknown_NR if window.counted_NRC is None else window.counted("queued_s"),
        preempted_NR=unknown_NR if window.counted_NRC is None else window.counted("preempted"),
        hosts_R=np.array(window.hosts or ("",) * n_ranks),
        split=split,
    )
    arrivals_NRG = alone.arrivals_NRG()
    after_NRG = left_NRG - (arrivals_NRG.max(axis=1, keepdims=True) - arrivals_NRG)
    sync_NG = np.maximum(np.median(after_NRG, axis=1), 0.0)
    return replace(alone, sync_NG=sync_NG, rest_NRG=after_NRG - sync_NG[:, None])


def side_by_side(parts: Sequence[OwnTimes]) -> OwnTimes:
    """Ranks recorded apart as the ranks of one job, each part on a host of its own: as many steps of each.

    A sync's own work is that of the slowest part: an all-reduce is over when its last share is.
    """
    across = {name: axes_of(name).index("R") for name in OwnTimes.__dataclass_fields__ if "R" in axes_of(name)}
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=axis) for name, axis in across.items()
    }
    joined["sync_NG"] = np.max([part.sync_NG for part in parts], axis=0)
    joined["hosts_R"] = np.repeat([f"host-{number}" for number in range(len(parts))], [part.n_ranks for part in parts])
    return replace(parts[0], **joined)


def one_after_the_other(parts: Sequence[OwnTimes]) -> OwnTimes:
    along = [name for name in OwnTimes.__dataclass_fields__ if "N" in axes_of(name)]
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in along}
    return replace(parts[0], **joined)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How recordings are cut up."""

    least: int = 100  # steps of the shortest block
    most: int = 400  # steps of the longest one
    stretch: int = 2000  # steps after which the ranks of a host change places, if the recordings are as long
    whole: int = 50  # steps that a stretch is a multiple of: no window lies across the border of two


def block(recorded: OwnTimes, period: int, blocks: Blocks, rng: np.random.Generator) -> OwnTimes:
    there = len(recorded) // period
    least, most = (min(max(1, steps // period), there) for steps in (blocks.least, blocks.most))
    length = int(rng.integers(least, most + 1))
    first = int(rng.integers(0, there - length + 1))
    return recorded.steps(slice(first * period, (first + length) * period))


def row_of_blocks(recorded: OwnTimes, period: int, n_steps: int, blocks: Blocks, rng: np.random.Generator) -> OwnTimes:
    parts: list[OwnTimes] = []
    while sum(map(len, parts)) < n_steps:
        parts.append(block(recorded, period, blocks, rng))
    return one_after_the_other(parts).steps(slice(0, n_steps))


def stretch_steps(recordings: Sequence[OwnTimes], period: int, blocks: Blocks) -> int:
    """How long a stretch is: no longer than any of the recordings, whole periods and whole windows."""
    whole = math.lcm(period, blocks.whole)
    return max(1, min(blocks.stretch, *map(len, recordings)) // whole) * whole


def stretches(
    recordings: Sequence[OwnTimes], period: int, n_ranks: int, n_steps: int, blocks: Blocks, rng: np.random.Generator
) -> Iterator[OwnTimes]:
    """A job of so many ranks and steps, a stretch at a time.

    Raises:
        ValueError: the ranks are no multiple of those recorded.
    """
    recorded_ranks = recordings[0].n_ranks
    if n_ranks % recorded_ranks:
        raise ValueError(f"{n_ranks} ranks of {recorded_ranks}")
    stretch = stretch_steps(recordings, period, blocks)
    for first in range(0, n_steps, stretch):
        parts = []
        for _ in range(n_ranks // recorded_ranks):
            # Which rank is which in two recordings is chance: a host's stretch is of one.
            recorded = recordings[int(rng.integers(len(recordings)))]
            one = row_of_blocks(recorded, period, min(stretch, n_steps - first), blocks, rng)
            parts.append(one.ranks(rng.permutation(recorded_ranks)))
        yield side_by_side(parts)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is put into a job."""

    size: float  # the delay in its steps as a fraction of the typical step; of a growing one, once it is full
    course: str  # of `COURSES`
    scope: str  # of `SCOPES`
    place: str  # a key of `STAGE_OF`
    ranks: tuple[int, ...]
    onset: int  # the first step that has it
    period_steps: int = 1  # of a recurring one
    seed: int = 0  # of its bursts and its jitter

    @property
    def stage(self) -> str:
        return STAGE_OF[self.place]

    def fractions_N(self, n_steps: int) -> FloatArray:
        since_N = np.arange(n_steps) - self.onset
        there_N = since_N >= 0
        if self.course == "recurring":
            there_N &= since_N % self.period_steps == 0
        if self.course == "bursts":
            there_N &= _bursts_N(n_steps, self.onset, random.Random(self.seed))
        grown_N = np.clip((since_N + 1) / GROWS_STEPS, 0.0, 1.0) if self.course == "growing" else np.ones(n_steps)
        return np.where(there_N, self.size * grown_N, 0.0)

    def delay_NR(self, n_steps: int, n_ranks: int, step_s: float) -> FloatArray:
        """Seconds that each rank takes longer in each step, where a typical one takes ``step_s``."""
        rng = np.random.default_rng(self.seed)
        delay_NR = np.zeros((n_steps, n_ranks))
        jitter_NR = np.clip(1.0 + JITTER * rng.standard_normal((n_steps, len(self.ranks))), 0.0, 2.0)
        delay_NR[:, list(self.ranks)] = self.fractions_N(n_steps)[:, None] * jitter_NR * step_s
        return delay_NR


def _bursts_N(n_steps: int, onset: int, rng: random.Random) -> NDArray[np.bool_]:
    on_N = np.zeros(n_steps, dtype=np.bool_)
    first = onset
    while first < n_steps:
        length = rng.randint(*BURST_STEPS)
        on_N[first : first + length] = True
        first += length + rng.randint(*BURST_STEPS)
    return on_N


def slowed(own: OwnTimes, place: str, delay_NR: FloatArray) -> OwnTimes:
    """The ranks' own times with a delay in one place of the step. The waits for it are put in by `OwnTimes.window`.

    Raises:
        ValueError: the place is inside a sync stage of which nobody knows when the last gradient was ready.
    """
    stage, sync = STAGE_OF[place], own.sync_columns[0]
    if place == "between":
        return replace(own, between_NR=own.between_NR + delay_NR)
    if place == "before":
        outside_NRG = own.outside_NRG.copy()
        outside_NRG[:, :, 0] += delay_NR
        return replace(own, outside_NRG=outside_NRG)
    column = own.schema.stages.index(stage)
    if column == sync and not own.split:
        raise ValueError(f"{stage} has no part of its own")
    local_NRS = own.local_NRS.copy()
    # What is outside the stages after the last sync is `other`, which is last.
    local_NRS[:, :, -1 if stage == OTHER else column] += delay_NR
    return replace(own, local_NRS=local_NRS)


class Dealer:
    """Faults of every size and course alike, dealt so that a few of each cover places, ranks and periods evenly."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"faults-{seed}")
        self._places = {True: Deck(list(STAGE_OF), self.rng), False: Deck(LOCAL_PLACES, self.rng)}
        self._periods = Deck(PERIODS, self.rng)

    def deal(self, size: float, course: str, scope: str, hosts_R: NDArray[np.str_], *, split: bool) -> Fault:
        rank = self.rng.randrange(len(hosts_R))
        ranks = np.flatnonzero(hosts_R == hosts_R[rank]).tolist() if scope == "host" else [rank]
        return Fault(
            size=size,
            course=course,
            scope=scope,
            place=self._places[split].deal(),
            ranks=tuple(ranks),
            onset=self.rng.randint(*LEAD_STEPS),
            period_steps=self._periods.deal() if course == "recurring" else 1,
            seed=self.rng.randrange(1 << 30),
        )
