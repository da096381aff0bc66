"""A few steps of two ranks beside each other, stage by stage: as a manifest keeps them, and as a drawing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from pydantic import ValidationError

from sftriage.recorder import RingInfo
from sftriage.records import OTHER, StageSchema, StepRecord
from sftriage.traces.manifest import MAX_RECORDED_STEPS, RecordedRank, RecordedStep, RecordedSteps

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
        zero = 0 if one_clock else _meeting_ns(steps[0][1], schema)
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


def _meeting_ns(blocks: Sequence[_Block], schema: StageSchema) -> int:
    """When a step's first sync stage ended; of a schema without one, when the step began."""
    met = (end for stage, _, end in blocks if schema.stages[stage] in schema.sync)
    return next(met, blocks[0][1])


def _means(records: Sequence[RecordedStep], schema: StageSchema) -> dict[str, float]:
    return {
        stage: sum(record.durations_ns[number] for record in records) * NS / len(records)
        for number, stage in enumerate(schema.stages)
    }
