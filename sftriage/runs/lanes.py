"""A few captured steps of two ranks side by side: from the logs of their run, in a manifest, and as a drawing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from pydantic import ValidationError

from sftriage.model.windows import OTHER, StageSchema, StepRecord
from sftriage.recorder import RingInfo
from sftriage.runs.lateness import HeatSource
from sftriage.traces.manifest import MAX_RECORDED_STEPS, Manifest, RecordedRank, RecordedStep, RecordedSteps
from sftriage.verdicts.system import system_counts
from sftriage.windows.logs import StepLogs, counted_steps

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
class Lane:
    """One rank's steps. ``means_s`` is the mean duration of each stage over them."""

    title: str
    rank: int
    host: str
    blocks: tuple[LaneBlock, ...]
    means_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The drawing. ``one_clock``: the ranks share a clock; otherwise they are laid together where they first meet."""

    lanes: tuple[Lane, ...]
    stages: tuple[str, ...]
    sync: tuple[str, ...]
    first_step: int
    last_step: int
    span_s: float
    one_clock: bool


Title = Literal["captured", "control"]


def recorded_of(ranks: Sequence[tuple[Title, RingInfo, Sequence[StepRecord]]]) -> RecordedSteps | None:
    """The first steps of some ranks, as a manifest keeps them; None where there are none, or not as they should be."""
    ranks = [(title, info, records[:MAX_RECORDED_STEPS]) for title, info, records in ranks if records]
    if not ranks:
        return None
    schema = ranks[0][1].schema
    try:
        kept = [
            RecordedRank(
                title=title,
                rank=info.rank,
                host=info.host,
                steps=tuple(
                    RecordedStep(**{name: getattr(record, name) for name in RecordedStep.model_fields})
                    for record in records
                ),
            )
            for title, info, records in ranks
        ]
        return RecordedSteps(stages=schema.stages, sync=schema.sync, ranks=tuple(kept))
    except ValidationError:
        return None


def lanes_of(recorded: RecordedSteps | None) -> Lanes | None:
    """The drawing; None where nothing is kept of the steps."""
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
        lanes.append(Lane(rank.title, rank.rank, rank.host, blocks, _means(rank.steps, schema)))
    numbers = [one.step for rank in ranks for one in rank.steps]
    return Lanes(tuple(lanes), schema.stages, schema.sync, min(numbers), max(numbers), span * NS, one_clock)


def _blocks(record: RecordedStep, schema: StageSchema) -> list[_Block]:
    """The stages in the order of the step, with the time outside them where it was: before its sync stage, or last."""
    outside_ns, parts = iter(record.outside_ns), []
    for number, (stage, duration_ns) in enumerate(zip(schema.stages, record.durations_ns, strict=True)):
        if stage in schema.sync:
            parts.append((len(schema.stages) - 1 if schema.stages[-1] == OTHER else number, next(outside_ns, 0)))
        parts.append((number, max(0, duration_ns - sum(record.outside_ns)) if stage == OTHER else duration_ns))
    ends = accumulate((duration_ns for _, duration_ns in parts), initial=record.start_ns)
    return [(stage, *span) for (stage, _), span in zip(parts, pairwise(ends), strict=True)]


def _means(records: Sequence[RecordedStep], schema: StageSchema) -> dict[str, float]:
    return {
        stage: sum(record.durations_ns[number] for record in records) * NS / len(records)
        for number, stage in enumerate(schema.stages)
    }


PEERS_LOOKED_AT = 128
"""Of so many ranks at most the one in the middle is looked for: those of a large job take seconds to read."""
STEPS_COUNTED, PEERS_COUNTED = 200, 32
"""At most so many steps up to the end of a capture, and of so many peers, are looked at for what the kernel counted."""


def peers_of(manifest: Manifest, ranks: Collection[int], number: int) -> list[int]:
    """So many ranks at most that neither were captured nor were suspects, spread evenly over the job."""
    peers = [rank for rank in ranks if rank not in (manifest.capture.rank, *manifest.trigger.ranks)]
    return peers[:: max(1, -(-len(peers) // number))]


def steps_beside(source: HeatSource, manifest: Manifest, attempt: int, control: int | None) -> RecordedSteps | None:
    """The captured steps of the rank that was captured, beside those of a control rank; None of what is not on record.

    Without a control, it is the rank that came nearest to the median in these steps, of some of a large job.
    """
    capture = manifest.capture
    n_steps = min(capture.steps, MAX_RECORDED_STEPS)
    source.logs.look()
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
    """What the kernel counted of the captured rank over its peers', a step; None where that is not known.

    A few captured steps are soon over, and counters are read a few times a second: the steps that led to the capture
    count with them.
    """
    capture, why = manifest.capture, manifest.trigger
    first = min(capture.first_step, why.window.first_step if why.label == "suspect" else capture.first_step)
    first = max(first, why.onset_step or 0, capture.last_step - STEPS_COUNTED + 1)
    source.logs.look()
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
    logs.look()
    file = logs.of(attempt, [capture.rank]).get(capture.rank)
    if file is None:
        return {}
    stages = file.info.schema.stages
    records = file.steps([(capture.first_step, capture.steps)])[1].records()
    return {one.step: {name: ns * 1e-9 for name, ns in zip(stages, one.durations_ns, strict=True)} for one in records}


def control_of(manifest: Manifest) -> int | None:
    """The rank that what a trace shows was compared with; None where that was no other rank."""
    found = manifest.findings
    return found.control.rank if found is not None and found.control is not None and found.beside == "rank" else None
