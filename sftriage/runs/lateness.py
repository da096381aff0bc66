"""What step logs show of ranks: heat maps of lateness, and the captured steps of a rank beside a control's.

`RunSource` draws them for the page and reports; the triage process reads captured steps to find a capture's cause. Each
column of a map is read once and cached as the run grows. In a long run only a sample of each column's steps is read,
the same for every rank.

Lateness is a rank's arrival at a sync stage less the median arrival of its cohort; with several sync stages in a step,
the largest counts. Axes: N steps, R ranks, M rows of a segment, C columns, G groups of ranks.
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
"""Levels of lateness in a cell; `UNKNOWN` is the byte value after them."""
UNKNOWN = 255
MIN_SAMPLED = 4
"""Minimum steps read per column, however many ranks there are."""
MAX_READ = 2_000_000
"""Approximate maximum vectors (a rank's step) read for one new map."""
MAX_VECTORS = 400_000
"""Maximum vectors in memory at once."""
MAX_CACHED = 3000
"""Maximum cached columns: about 100 MB for 8,192 ranks."""
N_LATEST = 10
"""Number of latest ranks listed."""

Key = tuple[int, int, int]
FloatArray = NDArray[np.float64]
SingleArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]


def lateness_of(window: Window) -> FloatArray:
    """Seconds by which each rank was late at each step (N, R): negative if early, NaN if its step is missing."""
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
    """A rank and its lateness over the steps of a map, in seconds per step."""

    rank: int
    host: str
    mean_s: float
    worst_s: float
    worst_first_step: int
    worst_last_step: int


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """The map. A cell is the latest rank of its group, as the mean over the steps sampled of its column.

    Attributes:
        first_step: the first step of the first column; ``last_step`` is the last of the last.
        column_steps: steps per column, of which ``sampled_steps`` are read.
        row_ranks: ranks per row, of ``ranks`` in all.
        levels_GC: lateness in levels up to `LEVELS` - 1, which is ``scale_s`` or more, or `UNKNOWN`.
        latest: the latest ranks.
        thinned: the steps that are no longer kept, or None.
        stages: the stages of a step in order.
        advances_CS: the mean advance of each stage over the sampled steps, in seconds; NaN without a complete step.
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
    """The map of mean lateness in seconds (NaN if unknown), for columns that start at the steps ``starts``."""
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
    """The lateness drawn darkest.

    A single hiccup must not blank the rest of the map, one late rank among thousands must stand out from the jitter of
    all, and a negligible lateness must stay pale.
    """
    high_G = np.quantile(np.nan_to_num(cells_GC, nan=0.0), 0.95, axis=1)
    return float(max(high_G.max(), 4.0 * np.quantile(high_G, 0.5, method="lower"), 1e-3))


@dataclass(slots=True)
class HeatSource:
    """Makes heat maps of a run's step logs, or of its logs of device times. ``read`` counts vectors read."""

    logs: StepLogs
    read: int = 0
    _columns: OrderedDict[Key, SingleArray] = field(default_factory=OrderedDict)

    @property
    def clock(self) -> Clock:
        return "device" if self.logs.kind == LOG_KIND else "host"

    def map(self, attempt: int, first_step: int, last_step: int, each: int) -> HeatMap | None:
        """The map of completed steps of an attempt; None without a log.

        A column holds ``each`` steps, a power of two, so that it can be merged from cached ones of half the size.
        """
        self.logs.refresh()
        ranks = self.logs.of(attempt)
        if not ranks or last_step < first_step:
            return None
        sampled = min(each, max(MIN_SAMPLED, MAX_READ // (MAX_COLUMNS * len(ranks))))
        indices = range(first_step // each, last_step // each + 1)
        thinned = self.logs.thinning(attempt)
        infos = [log.info for log in ranks.values()]
        stages, n_ranks = infos[0].schema.stages, len(ranks)
        known = {index: self._known((attempt, each, index), n_ranks + len(stages)) for index in indices}
        columns = {index: column for index, column in known.items() if column is not None}
        missing = [index for index in indices if index not in columns]
        runs = runs_of(missing, each, sampled, last_step, thinned)
        for index, late_X in zip(missing, self._means(ranks, runs), strict=True):
            columns[index] = late_X
            # A column that is not full yet is read again, as are device times: they come later than the steps.
            if (index + 1) * each - 1 <= last_step and (self.clock == "host" or np.isfinite(late_X).any()):
                self._cache((attempt, each, index), late_X)
        means_CX, starts = np.stack([columns[index] for index in indices]), [index * each for index in indices]
        map_ = heat_map(means_CX[:, :n_ranks], starts, each, sampled, last_step, infos, thinned)
        return replace(map_, stages=stages, advances_CS=means_CX[:, n_ranks:], attempt=attempt, clock=self.clock)

    def lateness(self, ranks: Mapping[int, LogReader], first_step: int, n_steps: int) -> dict[int, float]:
        """The mean lateness of ranks over consecutive steps, in seconds; ranks without any of them are left out."""
        (late_X,) = self._means(ranks, [(first_step, n_steps)])
        late_R = late_X[: len(ranks)]
        return {rank: float(late_s) for rank, late_s in zip(ranks, late_R, strict=True) if np.isfinite(late_s)}

    def _means(self, ranks: Mapping[int, LogReader], runs: list[tuple[int, int]]) -> list[SingleArray]:
        """For each run of steps, the mean lateness of the ranks followed by the mean advance of each stage (X)."""
        means: list[SingleArray] = []
        for window in windows(ranks, [(first - 1, n_steps + 1) for first, n_steps in runs], MAX_VECTORS):
            self.read += window.durations_NRS.shape[0] * window.durations_NRS.shape[1]
            # The step before the run opens the first segment; its own lateness is dropped.
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
                self._cache(key, known)
        # A rank's log may have appeared since.
        if known is None or len(known) != n_values:
            return None
        self._columns.move_to_end(key)
        return known

    def _cache(self, key: Key, late_X: SingleArray) -> None:
        self._columns[key] = late_X
        self._columns.move_to_end(key)
        while len(self._columns) > MAX_CACHED:
            self._columns.popitem(last=False)


def runs_of(
    indices: list[int], each: int, sampled: int, last_step: int, thinned: Thinning | None
) -> list[tuple[int, int]]:
    """The steps to read of each column: the first, and their number."""
    runs = []
    for index in indices:
        first = index * each
        there = min(each, last_step - first + 1)
        if thinned is not None and first < thinned.whole_from_step:
            # In what thinning leaves, after the step that opens the block.
            in_block = 0 < first % PERIOD_STEPS < BLOCK_STEPS
            start = first if in_block else -(-first // PERIOD_STEPS) * PERIOD_STEPS + 1
            if start < first + there:
                runs.append((start, min(sampled, BLOCK_STEPS - start % PERIOD_STEPS, first + there - start)))
                continue
        n_steps = min(sampled, there)
        # Not always the same place: periodic lateness must not hide.
        runs.append((first + (index * 7919) % (there - n_steps + 1), n_steps))
    return runs


def _mean(late_NR: FloatArray | SingleArray) -> SingleArray:
    known_NR = ~np.isnan(late_NR)
    sums_R = np.where(known_NR, late_NR, 0.0).sum(axis=0)
    counts_R = known_NR.sum(axis=0)
    return np.where(counts_R > 0, sums_R / np.maximum(counts_R, 1), np.nan).astype(np.float32)


WIDTH = 1000.0
NS = 1e-9

_Block = tuple[int, int, int]
"""A stage by its number, and its start and end in nanoseconds on its rank's clock."""


@dataclass(frozen=True, slots=True)
class StageBlock:
    """One stage of one step; x and width are in the drawing's units."""

    stage: str
    number: int
    step: int
    x: float
    width: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class RankTrack:
    """One rank's steps, with the mean duration of each stage."""

    title: str
    rank: int
    host: str
    blocks: tuple[StageBlock, ...]
    means_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepTracks:
    """The drawing. Ranks not on ``one_clock`` are aligned at the end of their first sync stage."""

    ranks: tuple[RankTrack, ...]
    stages: tuple[str, ...]
    sync: tuple[str, ...]
    first_step: int
    last_step: int
    span_s: float
    one_clock: bool


Title = Literal["captured", "control"]


def recorded_of(ranks: Sequence[tuple[Title, RingInfo, Sequence[StepRecord]]]) -> RecordedSteps | None:
    """The first steps of ranks, as a manifest keeps them; None without any."""
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


def tracks_of(recorded: RecordedSteps | None) -> StepTracks | None:
    """The drawing of kept steps; None without any."""
    if recorded is None:
        return None
    ranks, schema = recorded.ranks, recorded.schema_
    one_clock = len({rank.host for rank in ranks}) == 1
    drawn = []
    for rank in ranks:
        steps = [(step.step, _blocks(step, schema)) for step in rank.steps]
        # On unrelated clocks, the end of the first sync stage is the same moment.
        met = (end for stage, _, end in steps[0][1] if schema.stages[stage] in schema.sync)
        zero = 0 if one_clock else next(met, steps[0][1][0][1])
        drawn.append([(step, at, start - zero, end - zero) for step, blocks in steps for at, start, end in blocks])
    begin = min(start for blocks in drawn for *_, start, _ in blocks)
    span = max(1, max(end for blocks in drawn for *_, end in blocks) - begin)
    tracks = []
    for rank, laid in zip(ranks, drawn, strict=True):
        blocks = tuple(
            StageBlock(
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
        mean_ns_S = np.mean([step.durations_ns for step in rank.steps], axis=0)
        means_s = {stage: float(mean_ns) * NS for stage, mean_ns in zip(schema.stages, mean_ns_S, strict=True)}
        tracks.append(RankTrack(rank.title, rank.rank, rank.host, blocks, means_s))
    numbers = [step.step for rank in ranks for step in rank.steps]
    return StepTracks(tuple(tracks), schema.stages, schema.sync, min(numbers), max(numbers), span * NS, one_clock)


def _blocks(record: RecordedStep, schema: StageSchema) -> list[_Block]:
    """The stages in order, with the time outside them where it was spent: before a sync stage, or last."""
    outside_ns, parts = iter(record.outside_ns), []
    for number, (stage, duration_ns) in enumerate(zip(schema.stages, record.durations_ns, strict=True)):
        if stage in schema.sync:
            parts.append((len(schema.stages) - 1 if schema.stages[-1] == OTHER else number, next(outside_ns, 0)))
        parts.append((number, max(0, duration_ns - sum(record.outside_ns)) if stage == OTHER else duration_ns))
    ends = accumulate((duration_ns for _, duration_ns in parts), initial=record.start_ns)
    return [(stage, *span) for (stage, _), span in zip(parts, pairwise(ends), strict=True)]


MAX_PEERS_SEARCHED = 128
"""Maximum ranks searched for the median one: all ranks of a large job would take seconds."""
STEPS_COUNTED, PEERS_COUNTED = 200, 32
"""Maximum steps up to the end of a capture, and maximum peers, whose kernel counters are read."""


def peers_of(manifest: Manifest, ranks: Collection[int], number: int) -> list[int]:
    """At most ``number`` ranks that were neither captured nor suspects, spread evenly over the job."""
    peers = [rank for rank in ranks if rank not in (manifest.capture.rank, *manifest.trigger.ranks)]
    return peers[:: max(1, -(-len(peers) // number))]


def steps_beside(source: HeatSource, manifest: Manifest, attempt: int, control: int | None) -> RecordedSteps | None:
    """The steps of the captured rank beside those of a control rank; None if they are not on record.

    Without a usable ``control``, the rank nearest to the median in these steps is taken, in a large job of a sample.
    """
    capture = manifest.capture
    n_steps = min(capture.steps, MAX_RECORDED_STEPS)
    source.logs.refresh()
    ranks = sorted(source.logs.attempts.get(attempt, ()))
    if not ranks:
        return None
    if control is None or control == capture.rank or not source.logs.of(attempt, [control]):
        peers = source.logs.of(attempt, peers_of(manifest, ranks, MAX_PEERS_SEARCHED))
        late = source.lateness(peers, capture.first_step, n_steps) if peers else {}
        control = min(late, key=lambda rank: (abs(late[rank]), rank), default=None)
    sides: list[tuple[Title, int | None]] = [("captured", capture.rank), ("control", control)]
    files = source.logs.of(attempt, [rank for _, rank in sides if rank is not None])
    return recorded_of(
        [
            (title, files[rank].info, files[rank].steps([(capture.first_step, n_steps)])[1].records())
            for title, rank in sides
            if rank is not None and rank in files
        ]
    )


def counted_beside(source: HeatSource, manifest: Manifest, attempt: int) -> dict[str, float] | None:
    """The captured rank's kernel counters over its peers', per step; None if unknown.

    Counters are read only a few times a second, so the steps that led to the capture count as well.
    """
    capture, trigger = manifest.capture, manifest.trigger
    first = min(capture.first_step, trigger.window.first_step if trigger.label == "suspect" else capture.first_step)
    first = max(first, trigger.onset_step or 0, capture.last_step - STEPS_COUNTED + 1)
    source.logs.refresh()
    peers = peers_of(manifest, sorted(source.logs.attempts.get(attempt, ())), PEERS_COUNTED)
    files = source.logs.of(attempt, [capture.rank, *peers])
    if capture.rank not in files or len(files) == 1:
        return None
    ranks = [capture.rank, *(rank for rank in files if rank != capture.rank)]
    window = counted_steps(source.logs, attempt, ranks, min(first, capture.first_step), capture.last_step)
    return None if window is None else _over_others(window)


def counted_in(window: Window | None, manifest: Manifest) -> dict[str, float] | None:
    """The same, from steps of all ranks: a controller has no logs of counters."""
    if window is None:
        return None
    peers = peers_of(manifest, range(window.durations_NRS.shape[1]), PEERS_COUNTED)
    return _over_others(window.of_ranks([manifest.capture.rank, *peers]))


def _over_others(window: Window) -> dict[str, float] | None:
    found = system_counts(window, [0], np.ones(len(window.durations_NRS), dtype=np.bool_))
    return None if found is None else dict(found.over)


def captured_steps(logs: StepLogs, manifest: Manifest, attempt: int) -> dict[int, dict[str, float]]:
    """The duration of each stage in seconds, by captured step, as far as they are on record."""
    capture = manifest.capture
    logs.refresh()
    file = logs.of(attempt, [capture.rank]).get(capture.rank)
    if file is None:
        return {}
    stages = file.info.schema.stages
    records = file.steps([(capture.first_step, capture.steps)])[1].records()
    return {step.step: dict(zip(stages, (ns * NS for ns in step.durations_ns), strict=True)) for step in records}


def control_of(manifest: Manifest) -> int | None:
    """The rank that a trace was compared with; None if it was no other rank."""
    found = manifest.findings
    return found.control.rank if found is not None and found.control is not None and found.beside == "rank" else None
