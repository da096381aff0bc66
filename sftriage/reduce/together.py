"""Reads and reduces the traces of all ranks, joins them into a window, and compares them with the recorded signal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from sftriage.errors import InputError
from sftriage.model.windows import StageSchema, Window
from sftriage.reduce.events import Ints, Trace
from sftriage.reduce.reading import read_traces
from sftriage.reduce.stages import Names, Reduction, TracedSteps, outside_ns, reduce_trace
from sftriage.traces.manifest import MANIFEST_NAME, Manifest
from sftriage.words.verdicts import lasted

APART_S = 5.0
APART_STEPS = 3.0
"""Ranks that begin the same step further apart than both limits are not of one run: ranks that wait for each other
differ by part of a step, and their hosts' clocks by less than seconds."""

MAX_WINDOW_STEPS = 100_000


def together(reductions: Sequence[Reduction]) -> Window:
    """Join the traces of all ranks into one window, in the order of the ranks.

    If their clocks are absolute, the time between the first rank's first step and a rank's own counts as before it.
    Raises InputError unless the traces are one per rank, of one job and one time, with steps in common.
    """
    by_rank = _by_rank(reductions)
    schema = _schema(by_rank)
    common = by_rank[0].steps.number_N
    for reduction in by_rank[1:]:
        common = np.intersect1d(common, reduction.steps.number_N)
    if not len(common):
        ranges = ((each.trace.rank, each.steps.number_N) for each in by_rank[:4])
        had = "; ".join(f"rank {rank} steps {number_N[0]} to {number_N[-1]}" for rank, number_N in ranges)
        raise InputError(f"the traces have no step in common: {had}")
    _check_times(by_rank, common)
    first = min(int(each.steps.number_N.min()) for each in by_rank)
    last = max(int(each.steps.number_N.max()) for each in by_rank)
    if last - first >= MAX_WINDOW_STEPS:
        raise InputError(f"steps {first} to {last} are more than {MAX_WINDOW_STEPS}")
    shape = (last - first + 1, len(by_rank))
    durations_NRS = np.full((*shape, len(schema.stages)), np.nan)
    outside_NRG = np.full((*shape, len(schema.sync)), np.nan)
    between_NR = np.full(shape, np.nan)
    dated = all(each.trace.absolute for each in by_rank)
    opening = int(common[0])
    earliest_ns = min(_start(each.steps, opening) for each in by_rank)
    for rank, reduction in enumerate(by_rank):
        at = reduction.steps.number_N - first
        durations_NRS[at, rank] = 0.0
        own = [schema.stages.index(stage) for stage in reduction.schema.stages]
        durations_NRS[at[:, None], rank, own] = reduction.durations_ns_NS * 1e-9
        outside_NRG[at, rank] = outside_ns(reduction.steps, reduction.spans, schema) * 1e-9
        between_NR[at, rank] = reduction.between_ns_N * 1e-9
        if dated:
            between_NR[opening - first, rank] = (_start(reduction.steps, opening) - earliest_ns) * 1e-9
    return Window(schema, first, durations_NRS, outside_NRG if schema.sync else None, between_NR)


def _by_rank(reductions: Sequence[Reduction]) -> list[Reduction]:
    sizes = sorted({each.trace.world_size for each in reductions if each.trace.world_size is not None})
    ranks = {each.trace.rank for each in reductions}
    missing = sorted(set(range(sizes[-1])) - ranks) if sizes and None not in ranks else []
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise InputError(f"{len(missing)} ranks have no trace here ({shown})")
    of_rank: dict[int, Reduction] = {}
    for reduction in reductions:
        rank = reduction.trace.check_rank()
        if rank in of_rank:
            raise InputError(f"two traces of rank {rank}: {of_rank[rank].trace.source} and {reduction.trace.source}")
        of_rank[rank] = reduction
    jobs = sorted({each.trace.job for each in reductions if each.trace.job is not None})
    if len(sizes) > 1:
        raise InputError(f"the traces are of different jobs: their world sizes are {', '.join(map(str, sizes))}")
    if len(jobs) > 1:
        raise InputError(f"the traces are of different jobs: {', '.join(map(repr, jobs))}")
    if sorted(of_rank) != list(range(len(of_rank))):
        raise InputError(f"not all ranks have a trace: only {', '.join(map(str, sorted(of_rank)))}")
    return [reduction for _, reduction in sorted(of_rank.items())]


def _schema(reductions: Sequence[Reduction]) -> StageSchema:
    places: dict[str, list[float]] = defaultdict(list)
    for reduction in reductions:
        for place, stage in enumerate(reduction.schema.stages[:-1]):
            places[stage].append(place / len(reduction.schema.stages))
    stages = tuple(sorted(places, key=lambda stage: float(np.mean(places[stage]))))
    ended = Counter(stage for reduction in reductions for stage in reduction.schema.sync)
    sync = tuple(stage for stage in stages if 2 * ended[stage] > len(reductions))
    return StageSchema.closed(stages, sync)


def _check_times(reductions: Sequence[Reduction], common: Ints) -> None:
    dated = [reduction for reduction in reductions if reduction.trace.absolute]
    if len(dated) < len(reductions):
        return
    starts_RN = np.array([reduction.steps.start_N[np.isin(reduction.steps.number_N, common)] for reduction in dated])
    lengths_ns = np.concatenate([reduction.steps.end_N - reduction.steps.start_N for reduction in dated])
    lasts_s = float(np.median(lengths_ns)) * 1e-9
    apart_s = float((starts_RN.max(axis=0) - starts_RN.min(axis=0)).max()) * 1e-9
    if apart_s > max(APART_S, APART_STEPS * lasts_s):
        early, late = int(starts_RN[:, 0].argmin()), int(starts_RN[:, 0].argmax())
        raise InputError(
            f"the traces are not of one run: the same step begins {lasted(apart_s)} apart "
            f"({dated[early].trace.source} and {dated[late].trace.source})"
        )


def _start(steps: TracedSteps, number: int) -> int:
    return int(steps.start_N[steps.number_N == number][0])


Agrees = Literal["yes", "partly", "no"]

STAGE_FRACTION = 0.10
STEP_FRACTION = 0.02
"""A stage agrees within a tenth of itself or a fiftieth of the step, whichever is more: marking a stage for the
profiler takes some microseconds, and names of events mark a stage with slightly different ends."""


@dataclass(frozen=True, slots=True)
class StageAgreement:
    """One stage in the trace and in the signal, in seconds per step."""

    stage: str
    trace_s: float
    signal_s: float
    difference_s: float
    allowed_s: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Trace and signal compared, over the common steps of a rank: ``no`` if the stage in question disagrees."""

    agrees: Agrees
    rank: int
    steps: int
    first_step: int
    last_step: int
    stage: str
    stages: tuple[StageAgreement, ...]


def compare(
    trace_s: Mapping[str, float],
    signal_s: Mapping[str, float],
    *,
    stage: str | None,
    rank: int,
    numbers: tuple[int, ...],
) -> Agreement:
    """Compare a rank's mean stage times over some steps; ``stage`` is in question (None: the signal's longest)."""
    step_s = sum(signal_s.values())
    stages = []
    for name in dict.fromkeys((*signal_s, *trace_s)):
        heavy_s, coarse_s = trace_s.get(name, 0.0), signal_s.get(name, 0.0)
        allowed_s = max(STAGE_FRACTION * coarse_s, STEP_FRACTION * step_s)
        difference_s = heavy_s - coarse_s
        stages.append(StageAgreement(name, heavy_s, coarse_s, difference_s, allowed_s, abs(difference_s) <= allowed_s))
    in_question = stage if stage is not None and stage in signal_s else max(signal_s, key=lambda name: signal_s[name])
    agrees: Agrees = "yes"
    if not all(row.agrees for row in stages):
        agrees = "partly" if next(row for row in stages if row.stage == in_question).agrees else "no"
    return Agreement(agrees, rank, len(numbers), min(numbers), max(numbers), in_question, tuple(stages))


def overall(agreements: tuple[Agreement, ...], *, verdicts_agree: bool | None = None) -> Agrees:
    """Over several ranks: ``yes`` if all of them and any verdicts agree, ``no`` if no rank agrees, else ``partly``."""
    words = {agreement.agrees for agreement in agreements}
    if words == {"yes"} and verdicts_agree is not False:
        return "yes"
    return "no" if words == {"no"} else "partly"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A trace that was not reduced, and why."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduced traces, each with its file, and those that could not be reduced."""

    reductions: tuple[Reduction, ...]
    files: tuple[Path, ...]
    refused: tuple[Refusal, ...]

    def whole(self, rank: int, names: Names, ranks: Mapping[str, int]) -> Reduction:
        """The reduction of one rank with its events, read again if they were dropped."""
        at = next(index for index, reduction in enumerate(self.reductions) if reduction.trace.rank == rank)
        known = self.reductions[at]
        if known.trace.blocks:
            return known
        for trace in read_traces(self.files[at]):
            if trace.source == known.trace.source and (again := _described(trace, self.files[at], ranks)).rank == rank:
                return reduce_trace(again, names)
        raise InputError(f"{known.trace.source}: the file changed while being read")


def read_all(paths: Sequence[Path], names: Names, ranks: Mapping[str, int]) -> Reduced:
    """Read and reduce traces one by one; with several, only the stages stay in memory."""
    reductions: list[Reduction] = []
    files: list[Path] = []
    refused: list[Refusal] = []
    for path in paths:
        try:
            for trace in read_traces(path):
                if reductions:
                    reductions[-1] = reductions[-1].without_events()
                try:
                    reductions.append(reduce_trace(_described(trace, path, ranks), names))
                    files.append(path)
                except InputError as error:
                    refused.append(Refusal(trace.source, str(error)))
                del trace
        except InputError as error:
            refused.append(Refusal(str(path), str(error)))
    if len(reductions) > 1:
        reductions[-1] = reductions[-1].without_events()
    return Reduced(tuple(reductions), tuple(files), tuple(refused))


def _described(trace: Trace, path: Path, ranks: Mapping[str, int]) -> Trace:
    """The trace with the user's rank for it, and with fields of the manifest beside it that the trace lacks."""
    manifest = manifest_beside(path, trace)
    if manifest is not None:
        capture = manifest.capture
        trace = replace(
            trace,
            rank=capture.rank if trace.rank is None else trace.rank,
            world_size=trace.world_size or capture.world_size,
            job=trace.job or manifest.job,
            capture_id=manifest.capture_id,
        )
    member = trace.source.rpartition("!")[2]
    for name in (trace.source, member, Path(member).name, str(path), path.name):
        if name in ranks:
            return replace(trace, rank=ranks[name])
    return trace


def manifest_beside(path: Path, trace: Trace) -> Manifest | None:
    """The manifest in the directory of a trace, unless it is of another capture."""
    beside = path.parent / MANIFEST_NAME
    try:
        manifest = Manifest.from_json(beside.read_bytes(), str(beside))
    except (OSError, InputError):
        return None
    ours = any(artefact.name == path.name for artefact in manifest.artefacts)
    return manifest if ours and trace.capture_id in (None, manifest.capture_id) else None
