"""A few steps of two ranks beside each other, stage by stage, as a drawing of a fixed width. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sftriage.recorder import RingInfo
from sftriage.records import OTHER, StageSchema, StepRecord

WIDTH = 1000.0
MAX_STEPS = 8
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


def lanes_of(ranks: Sequence[tuple[str, RingInfo, Sequence[StepRecord]]]) -> Lanes | None:
    """The drawing of some ranks' steps, each with its title; None where nothing of them was recorded."""
    ranks = [(title, info, records[:MAX_STEPS]) for title, info, records in ranks if records]
    if not ranks:
        return None
    schema = ranks[0][1].schema
    one_clock = len({info.host for _, info, _ in ranks}) == 1
    drawn = []
    for _, _, records in ranks:
        steps = [(record.step, _blocks(record, schema)) for record in records]
        # Of clocks that have nothing to do with each other, the end of the first sync stage is the same moment.
        zero = 0 if one_clock else _meeting_ns(steps[0][1], schema)
        drawn.append([(step, at, start - zero, end - zero) for step, blocks in steps for at, start, end in blocks])
    begin = min(start for blocks in drawn for *_, start, _ in blocks)
    span = max(1, max(end for blocks in drawn for *_, end in blocks) - begin)
    lanes = []
    for (title, info, records), laid in zip(ranks, drawn, strict=True):
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
        lanes.append(Lane(title, info.rank, info.host, blocks, _means(records, schema)))
    numbers = [record.step for _, _, records in ranks for record in records]
    return Lanes(tuple(lanes), schema.stages, schema.sync, min(numbers), max(numbers), span * NS, one_clock)


def _blocks(record: StepRecord, schema: StageSchema) -> list[_Block]:
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


def _means(records: Sequence[StepRecord], schema: StageSchema) -> dict[str, float]:
    return {
        stage: sum(record.durations_ns[number] for record in records) * NS / len(records)
        for number, stage in enumerate(schema.stages)
    }
