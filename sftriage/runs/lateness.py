"""What step logs show of ranks: how late each was at every step, as a map of a bounded size; and captured steps.

A column of steps is read once, and its lateness remembered as the run goes on. Of a long run only some steps of each
column are read, the same ones of every rank, and the page says so.

Lateness is a rank's arrival at a sync stage, less the median arrival of its cohort; of several sync stages in a step
the one at which it was the latest. Axes: N steps, R ranks, M rows of a segment, C columns, G groups of ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sftriage.model.verdicts import Clock
from sftriage.model.windows import OTHER, StageSchema, StepRecord, Window
from sftriage.traces.manifest import MAX_RECORDED_STEPS, Manifest, RecordedRank, RecordedStep, RecordedSteps
from sftriage.trainer.layout import RingInfo
from sftriage.verdict.accounting import anchored, segments
from sftriage.verdict.units import system_counts
from sftriage.windows.logs import LOG_KIND, LogReader, StepLogs, Thinning, counted_steps, windows
from sftriage.windows.steplog import BLOCK_STEPS, PERIOD_STEPS

MAX_ROWS = 128
MAX_COLUMNS = 400

LEVELS = 255
"""Resolution of cells; the last byte value is a cell without data."""
UNKNOWN = 255

MIN_SAMPLED = 4
"""Steps read per column, however many ranks there are."""

MAX_READ = 2_000_000
"""Approximate maximum steps of single ranks read for one new map."""

MAX_VECTORS = 400_000
"""Steps of single ranks that are held in memory at once."""

MAX_REMEMBERED = 3000
"""Columns: of a job of 8,192 ranks they are some 100 MB."""

N_LATEST = 10
"""Number of latest ranks that are named."""

Key = tuple[int, int, int]
FloatArray = NDArray[np.float64]
SingleArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]


def lateness_of(window: Window) -> FloatArray:
    """Seconds that each rank was late at each step (N, R), NaN where its step is missing; early is below nothing."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    late_NR = np.full((n_steps, n_ranks), -np.inf)
    for segment in segments(window, np.ones(n_steps, dtype=np.bool_)):
        arrival_MR = np.zeros((segment.n_rows, n_ranks))
        for column in segment.local:
            arrival_MR[column.offset : column.offset + column.n_steps] += column.values_NR
        arrival_NR = arrival_MR[:n_steps]
        np.fmax(late_NR, arrival_NR - _reference(arrival_NR, window.cohorts), out=late_NR)
        late_NR[np.isnan(arrival_NR)] = np.nan
    return late_NR


def _reference(arrival_NR: FloatArray, cohorts: tuple[str, ...] | None) -> FloatArray:
    if cohorts is None:
        return _median(arrival_NR)
    reference_NR = np.empty_like(arrival_NR)
    of_rank = np.array(cohorts)
    for cohort in set(cohorts):
        member_R = of_rank == cohort
        reference_NR[:, member_R] = _median(arrival_NR[:, member_R])
    return reference_NR


def _median(values_NR: FloatArray) -> FloatArray:
    if np.isfinite(values_NR).all():
        return np.asarray(np.median(values_NR, axis=1, keepdims=True))
    known_N = ~np.isnan(values_NR).all(axis=1)
    median_N1 = np.full((len(values_NR), 1), np.nan)
    median_N1[known_N] = np.nanmedian(values_NR[known_N], axis=1, keepdims=True)
    return median_N1


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank and how late it was, seconds a step, over the steps that are shown."""

    rank: int
    host: str
    mean_s: float
    worst_s: float
    worst_first_step: int
    worst_last_step: int


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """The map. A cell is the latest rank of its group, as the mean over the steps of its column that were looked at.

    Attributes:
        first_step: the first step of the first column; ``last_step`` the last one of the last.
        column_steps: steps in a column, of which ``sampled_steps`` were looked at.
        row_ranks: ranks in a row, of ``ranks`` in all.
        levels_GC: lateness from 0 to `LEVELS` - 1, which is ``scale_s`` and more, or `UNKNOWN`.
        latest: the ranks that were the latest.
        thinned: what of these steps is no longer there; None where all is.
        stages: those of a step, in their order.
        advances_CS: what each stage moved the frontier in the steps read of a column, in seconds a step; NaN where no
            step is complete.
        clock: the clock of all these times.
    """

    first_step: int
    last_step: int
    column_steps: int
    sampled_steps: int
    row_ranks: int
    ranks: int
    levels_GC: ByteArray
    scale_s: float
    latest: tuple[LateRank, ...]
    thinned: Thinning | None = None
    stages: tuple[str, ...] = ()
    advances_CS: SingleArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    attempt: int = 0
    clock: Clock = "host"


def heat_map(
    late_CR: SingleArray,
    starts: list[int],
    column_steps: int,
    sampled_steps: int,
    last_step: int,
    ranks: list[RingInfo],
    thinned: Thinning | None = None,
) -> HeatMap:
    """The map of the mean lateness of ranks, seconds, in columns of steps from each start; NaN: nothing is known."""
    row_ranks = max(1, -(-len(ranks) // MAX_ROWS))
    cells_GC = np.fmax.reduceat(late_CR, np.arange(0, len(ranks), row_ranks), axis=1).T
    scale_s = _scale_s(cells_GC)
    scaled_GC = np.clip(np.nan_to_num(cells_GC, nan=0.0) / scale_s, 0.0, 1.0) * (LEVELS - 1)
    means_R = np.nan_to_num(_mean(late_CR), nan=-np.inf)
    latest = []
    for r in np.argsort(-means_R, kind="stable")[:N_LATEST]:
        if np.isfinite(means_R[r]):
            worst = int(np.nanargmax(late_CR[:, r]))
            until = min(starts[worst] + column_steps - 1, last_step)
            times_s = float(means_R[r]), float(late_CR[worst, r])
            latest.append(LateRank(ranks[r].rank, ranks[r].host, *times_s, starts[worst], until))
    return HeatMap(
        first_step=starts[0],
        last_step=last_step,
        column_steps=column_steps,
        sampled_steps=sampled_steps,
        row_ranks=row_ranks,
        ranks=len(ranks),
        levels_GC=np.where(np.isnan(cells_GC), UNKNOWN, np.rint(scaled_GC)).astype(np.uint8),
        scale_s=scale_s,
        latest=tuple(latest),
        thinned=thinned if thinned is not None and starts[0] < thinned.whole_from_step else None,
    )


def _scale_s(cells_GC: SingleArray) -> float:
    """The lateness that is the darkest.

    A single hiccup must not leave the rest of the map blank; one late rank among thousands must stand out from what all
    of them jitter; and what is next to nothing must not look like much.
    """
    high_G = np.quantile(np.nan_to_num(cells_GC, nan=0.0), 0.95, axis=1)
    return float(max(high_G.max(), 4.0 * np.quantile(high_G, 0.5, method="lower"), 1e-3))


@dataclass(slots=True)
class HeatSource:
    """Makes maps of a run's logs."""

    logs: StepLogs
    read: int = 0
    _columns: OrderedDict[Key, SingleArray] = field(default_factory=OrderedDict)

    @property
    def clock(self) -> Clock:
        return "device" if self.logs.kind == LOG_KIND else "host"

    def map(self, attempt: int, first_step: int, last_step: int, each: int) -> HeatMap | None:
        """The map of some completed steps of an attempt; None without any log.

        A column holds ``each`` steps, a power of two: columns of a longer run are made of those of a shorter one.
        """
        self.logs.refresh()
        ranks = self.logs.of(attempt)
        if not ranks or last_step < first_step:
            return None
        sampled = min(each, max(MIN_SAMPLED, MAX_READ // (MAX_COLUMNS * len(ranks))))
        indices = range(first_step // each, last_step // each + 1)
        thinned = self.logs.thinning(attempt)
        infos = [one.info for one in ranks.values()]
        stages, n_ranks = infos[0].schema.stages, len(ranks)
        known = {index: self._known((attempt, each, index), n_ranks + len(stages)) for index in indices}
        columns = {index: column for index, column in known.items() if column is not None}
        missing = [index for index in indices if index not in columns]
        runs = runs_of(missing, each, sampled, last_step, thinned)
        for index, late_X in zip(missing, self._means(ranks, runs), strict=True):
            columns[index] = late_X
            # A column that is not full yet is read again, as are device times: they come later than the steps.
            if (index + 1) * each - 1 <= last_step and (self.clock == "host" or np.isfinite(late_X).any()):
                self._remember((attempt, each, index), late_X)
        means_CX, starts = np.stack([columns[index] for index in indices]), [index * each for index in indices]
        map_ = heat_map(means_CX[:, :n_ranks], starts, each, sampled, last_step, infos, thinned)
        return replace(map_, stages=stages, advances_CS=means_CX[:, n_ranks:], attempt=attempt, clock=self.clock)

    def lateness(self, ranks: Mapping[int, LogReader], first_step: int, n_steps: int) -> dict[int, float]:
        """The mean lateness of some ranks over a run of steps, in seconds; of those that have any of them."""
        (late_X,) = self._means(ranks, [(first_step, n_steps)])
        late_R = late_X[: len(ranks)]
        return {rank: float(late_s) for rank, late_s in zip(ranks, late_R, strict=True) if np.isfinite(late_s)}

    def _means(self, ranks: Mapping[int, LogReader], runs: list[tuple[int, int]]) -> list[SingleArray]:
        """The mean lateness of the ranks over each run of steps, and after these (X) the mean advance of each stage."""
        means: list[SingleArray] = []
        for window in windows(ranks, [(first - 1, n_steps + 1) for first, n_steps in runs], MAX_VECTORS):
            self.read += window.durations_NRS.shape[0] * window.durations_NRS.shape[1]
            # The step before opens the first segment of the first one, and has no lateness of its own.
            found = anchored(window)
            advances_NS = np.where(found.complete_N[:, None], found.advances_NS, np.nan)
            means.append(_mean(np.hstack([lateness_of(window), advances_NS])[1:]))
        return means

    def _known(self, key: Key, n_values: int) -> SingleArray | None:
        attempt, each, index = key
        known = self._columns.get(key)
        if known is None and each > 1:
            halves = [self._columns.get((attempt, each // 2, 2 * index + half)) for half in (0, 1)]
            if halves[0] is not None and halves[1] is not None and len(halves[0]) == len(halves[1]):
                known = _mean(np.stack([halves[0], halves[1]]))
                self._remember(key, known)
        # A rank whose log came later was not in it.
        if known is None or len(known) != n_values:
            return None
        self._columns.move_to_end(key)
        return known

    def _remember(self, key: Key, late_X: SingleArray) -> None:
        self._columns[key] = late_X
        self._columns.move_to_end(key)
        while len(self._columns) > MAX_REMEMBERED:
            self._columns.popitem(last=False)


def runs_of(
    indices: list[int], each: int, sampled: int, last_step: int, thinned: Thinning | None
) -> list[tuple[int, int]]:
    """The steps read of some columns: for each the first step and the number of steps."""
    runs = []
    for index in indices:
        first = index * each
        there = min(each, last_step - first + 1)
        if thinned is not None and first < thinned.whole_from_step:
            # Of what is left, after the step that opens it.
            in_block = 0 < first % PERIOD_STEPS < BLOCK_STEPS
            start = first if in_block else -(-first // PERIOD_STEPS) * PERIOD_STEPS + 1
            if start < first + there:
                runs.append((start, min(sampled, BLOCK_STEPS - start % PERIOD_STEPS, first + there - start)))
                continue
        looked_at = min(sampled, there)
        # Not always the same place: periodic lateness must not hide.
        runs.append((first + (index * 7919) % (there - looked_at + 1), looked_at))
    return runs


def _mean(late_NR: FloatArray | SingleArray) -> SingleArray:
    known_NR = ~np.isnan(late_NR)
    sums_R = np.where(known_NR, late_NR, 0.0).sum(axis=0)
    counts_R = known_NR.sum(axis=0)
    return np.where(counts_R > 0, sums_R / np.maximum(counts_R, 1), np.nan).astype(np.float32)


WIDTH = 1000.0
NS = 1e-9

_Block = tuple[int, int, int]
"""A stage by its number, and when it began and ended, nanoseconds on its rank's clock."""


@dataclass(frozen=True, slots=True)
class LaneBlock:
    """One stage of one step. ``x`` and ``width`` are of the drawing."""

    stage: str
    number: int
    step: int
    x: float
    width: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """One rank's steps. ``means_s`` is the mean duration of each stage over them."""

    title: str
    rank: int
    host: str
    blocks: tuple[LaneBlock, ...]
    means_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The drawing. ``one_clock``: the ranks share a clock; otherwise they are aligned where they first meet."""

    lanes: tuple[DrawnRank, ...]
    stages: tuple[str, ...]
    sync: tuple[str, ...]
    first_step: int
    last_step: int
    span_s: float
    one_clock: bool


Title = Literal["captured", "control"]


def recorded_of(ranks: Sequence[tuple[Title, RingInfo, Sequence[StepRecord]]]) -> RecordedSteps | None:
    """The first steps of some ranks, as a manifest keeps them; None if there are none."""
    ranks = [(title, info, records[:MAX_RECORDED_STEPS]) for title, info, records in ranks if records]
    if not ranks:
        return None
    schema = ranks[0][1].schema
    kept = [
        RecordedRank(
            title=title,
            rank=info.rank,
            host=info.host,
            steps=tuple(RecordedStep.model_validate(record, from_attributes=True) for record in records),
        )
        for title, info, records in ranks
    ]
    return RecordedSteps(stages=schema.stages, sync=schema.sync, ranks=tuple(kept))


def lanes_of(recorded: RecordedSteps | None) -> Lanes | None:
    """The drawing; None if the steps are not kept."""
    if recorded is None:
        return None
    ranks, schema = recorded.ranks, recorded.schema_
    one_clock = len({one.host for one in ranks}) == 1
    drawn = []
    for rank in ranks:
        steps = [(one.step, _blocks(one, schema)) for one in rank.steps]
        # Of clocks that have nothing to do with each other, the end of the first sync stage is the same moment.
        met = (end for stage, _, end in steps[0][1] if schema.stages[stage] in schema.sync)
        zero = 0 if one_clock else next(met, steps[0][1][0][1])
        drawn.append([(step, at, start - zero, end - zero) for step, blocks in steps for at, start, end in blocks])
    begin = min(start for blocks in drawn for *_, start, _ in blocks)
    span = max(1, max(end for blocks in drawn for *_, end in blocks) - begin)
    lanes = []
    for rank, laid in zip(ranks, drawn, strict=True):
        blocks = tuple(
            LaneBlock(
                schema.stages[at],
                at,
                step,
                round((start - begin) / span * WIDTH, 2),
                round((end - start) / span * WIDTH, 2),
                (end - start) * NS,
            )
            for step, at, start, end in laid
            if end > start
        )
        mean_ns_S = np.mean([one.durations_ns for one in rank.steps], axis=0)
        means_s = {stage: float(mean_ns) * NS for stage, mean_ns in zip(schema.stages, mean_ns_S, strict=True)}
        lanes.append(DrawnRank(rank.title, rank.rank, rank.host, blocks, means_s))
    numbers = [one.step for rank in ranks for one in rank.steps]
    return Lanes(tuple(lanes), schema.stages, schema.sync, min(numbers), max(numbers), span * NS, one_clock)


def _blocks(record: RecordedStep, schema: StageSchema) -> list[_Block]:
    """The stages in the order of the step, with the time outside them in its place: before the sync stage, or last."""
    outside_ns, parts = iter(record.outside_ns), []
    for number, (stage, duration_ns) in enumerate(zip(schema.stages, record.durations_ns, strict=True)):
        if stage in schema.sync:
            parts.append((len(schema.stages) - 1 if schema.stages[-1] == OTHER else number, next(outside_ns, 0)))
        parts.append((number, max(0, duration_ns - sum(record.outside_ns)) if stage == OTHER else duration_ns))
    ends = accumulate((duration_ns for _, duration_ns in parts), initial=record.start_ns)
    return [(stage, *span) for (stage, _), span in zip(parts, pairwise(ends), strict=True)]


PEERS_LOOKED_AT = 128
"""Maximum ranks searched for the median one: those of a large job take seconds to read."""
STEPS_COUNTED, PEERS_COUNTED = 200, 32
"""Maximum steps up to the end of a capture, and maximum peers, whose kernel counters are read."""


def peers_of(manifest: Manifest, ranks: Collection[int], number: int) -> list[int]:
    """At most ``number`` ranks that were neither captured nor suspects, spread evenly over the job."""
    peers = [rank for rank in ranks if rank not in (manifest.capture.rank, *manifest.trigger.ranks)]
    return peers[:: max(1, -(-len(peers) // number))]


def steps_beside(source: HeatSource, manifest: Manifest, attempt: int, control: int | None) -> RecordedSteps | None:
    """The captured steps of the captured rank, beside those of a control rank; None for steps not on record.

    Without a control, it is the rank that came nearest to the median in these steps, of some of a large job.
    """
    capture = manifest.capture
    n_steps = min(capture.steps, MAX_RECORDED_STEPS)
    source.logs.refresh()
    ranks = sorted(source.logs.attempts.get(attempt, ()))
    if not ranks:
        return None
    if control is None or control == capture.rank or not source.logs.of(attempt, [control]):
        peers = source.logs.of(attempt, peers_of(manifest, ranks, PEERS_LOOKED_AT))
        late = source.lateness(peers, capture.first_step, n_steps) if peers else {}
        control = min(late, key=lambda rank: (abs(late[rank]), rank), default=None)
    wanted: list[tuple[Title, int | None]] = [("captured", capture.rank), ("control", control)]
    files = source.logs.of(attempt, [rank for _, rank in wanted if rank is not None])
    return recorded_of(
        [
            (title, files[rank].info, files[rank].steps([(capture.first_step, n_steps)])[1].records())
            for title, rank in wanted
            if rank is not None and rank in files
        ]
    )


def counted_beside(source: HeatSource, manifest: Manifest, attempt: int) -> dict[str, float] | None:
    """The captured rank's kernel counters over its peers', per step; None if unknown.

    A few captured steps are soon over, and counters are read a few times a second: the steps that led to the capture
    count with them.
    """
    capture, why = manifest.capture, manifest.trigger
    first = min(capture.first_step, why.window.first_step if why.label == "suspect" else capture.first_step)
    first = max(first, why.onset_step or 0, capture.last_step - STEPS_COUNTED + 1)
    source.logs.refresh()
    peers = peers_of(manifest, sorted(source.logs.attempts.get(attempt, ())), PEERS_COUNTED)
    files = source.logs.of(attempt, [capture.rank, *peers])
    if capture.rank not in files or len(files) == 1:
        return None
    ranks = [capture.rank, *(rank for rank in files if rank != capture.rank)]
    window = counted_steps(source.logs, attempt, ranks, min(first, capture.first_step), capture.last_step)
    found = None if window is None else system_counts(window, [0], np.ones(len(window.durations_NRS), dtype=np.bool_))
    return None if found is None else dict(found.over)


def captured_steps(logs: StepLogs, manifest: Manifest, attempt: int) -> dict[int, dict[str, float]]:
    """What each stage of each captured step took, in seconds, by the step's number; of those that are on record."""
    capture = manifest.capture
    logs.refresh()
    file = logs.of(attempt, [capture.rank]).get(capture.rank)
    if file is None:
        return {}
    stages = file.info.schema.stages
    records = file.steps([(capture.first_step, capture.steps)])[1].records()
    return {one.step: {name: ns * 1e-9 for name, ns in zip(stages, one.durations_ns, strict=True)} for one in records}


def control_of(manifest: Manifest) -> int | None:
    """The rank that a trace was compared with; None if it was not another rank."""
    found = manifest.findings
    return found.control.rank if found is not None and found.control is not None and found.beside == "rank" else None
