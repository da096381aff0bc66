"""A stall as a picture: where in the step each rank is, which ranks are in a sync stage, and which are not. Pure.

`RunSummary` makes it from the window that judged the stall; the page, the report and `sftriage watch` draw it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sftriage.runs.decisions import StallCounts, WindowRow
from sftriage.words.verdicts import counted

MAX_SINGLE = 16
"""The largest job of which every rank has a row of its own."""

State = Literal["missing", "waiting", "unknown"]
Cell = Literal["passed", "ahead", "missing", "waiting", "unknown"]

_MISSING = {"no_rank_waits": "least far", "died": "ended", "left_early": "stopped recording"}


@dataclass(frozen=True, slots=True)
class StallRow:
    """Ranks in the same place: their name, their state in a few words, and a cell for each stage of the step."""

    name: str
    state: State
    text: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """The stalled step when it was judged, at ``time_s``: no rank had moved for ``still_s`` seconds."""

    step: int
    still_s: float
    time_s: float
    stages: tuple[str, ...]
    sync: frozenset[str]
    rows: tuple[StallRow, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks in one of some ``stages``; ``ranks`` are all of them, or empty if they are too many or unknown."""

    name: str
    ranks: tuple[int, ...]
    state: State
    text: str
    stages: tuple[str, ...] = ()


def stall_of(rows: Sequence[WindowRow], stalled: WindowRow, world_size: int) -> Stall | None:
    """The picture of a stall; None if no rank is in a step, or none is known.

    The stages and their order are those of earlier ``rows``. ``world_size`` is 0 if unknown.
    """
    counts = stalled.stall
    if counts is None or "outside_steps" in stalled.reasons:
        return None
    if not (groups := list(_groups(stalled, counts, world_size))):
        return None
    named = dict.fromkeys(stage for group in groups for stage in (*group.stages, *counts.sync))
    known = next((tuple(row.advances_s) for row in reversed(rows) if row.advances_s), ())
    stages = known if set(named) <= set(known) else tuple(named)
    if 0 < world_size <= MAX_SINGLE and all(group.ranks for group in groups):
        by_rank = sorted((rank, number) for number, group in enumerate(groups) for rank in group.ranks)
        shown = [(f"rank {rank}", groups[number]) for rank, number in by_rank]
    else:
        shown = [(group.name, group) for group in groups]
    drawn = tuple(StallRow(name, group.state, group.text, tuple(_cells(group, stages))) for name, group in shown)
    return Stall(stalled.first_step, counts.still_s, stalled.time_s, stages, frozenset(counts.sync), drawn)


def _groups(stalled: WindowRow, counts: StallCounts, world_size: int) -> Iterator[_Group]:
    """The missing ranks, then those that wait for them, then all others."""
    text = "not with the others"
    if len(stalled.reasons) == 1:
        text = _MISSING.get(stalled.reasons[0], text)
    named = {rank for suspect in stalled.suspects for rank in suspect.ranks}
    for suspect in stalled.suspects:
        yield _Group(suspect.who, suspect.ranks, "missing", text, tuple(filter(None, (suspect.stage,))))
    if counts.unnamed:
        yield _Group(f"{counts.unnamed:,} more", (), "missing", text)
    rest = tuple(sorted(set(range(world_size)) - named)) if world_size <= MAX_SINGLE else ()
    # (a rank that is missing may be in a sync stage itself, of an earlier step)
    waiting = counts.waiting - sum(len(each.ranks) for each in stalled.suspects if each.stage in counts.sync)
    further = world_size - counts.missing - waiting - counts.unseen
    others: tuple[tuple[int, State, str, tuple[str, ...]], ...] = (
        (waiting, "waiting", "in a sync stage", counts.sync),
        (further, "unknown", "further on", ()),
        (counts.unseen, "unknown", "not recording", ()),
    )
    for number, state, text, stages in others:
        if number > 0:
            name = counted(number, "other rank" if counts.missing else "rank")
            yield _Group(name, rest if len(rest) == number else (), state, text, stages)


def _cells(group: _Group, stages: Sequence[str]) -> Iterator[Cell]:
    reached = [number for number, stage in enumerate(stages) if stage in group.stages]
    for number in range(len(stages)):
        if not reached:
            yield "unknown"
        elif number in reached:
            yield "waiting" if group.state == "waiting" else "missing"
        else:
            yield "passed" if number < reached[0] else "ahead"
