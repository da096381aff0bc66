"""What a what-if replay says, as data and in words, for whoever shows it: the terminal, the page, an assistant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sftriage.whatif.graph import AnyFloat, timeline
from sftriage.whatif.kinds import Kind, kinds_of
from sftriage.whatif.operations import Operations
from sftriage.whatif.slowdown import Slowdown, slowdown_of
from sftriage.words.amounts import some_ranks
from sftriage.words.whatif import (
    BEHIND,
    NO_KIND,
    OF_PLACES,
    ONE_RANK,
    REMEDIES,
    cost_sentence,
    fidelity_sentence,
    kind_sentence,
    named_sentence,
    worker,
)

MAX_STAGES, MAX_DP = 16, 12
"""So many stages and data-parallel ranks of a heat map are shown, the slowest ones."""
MIN_UNEXPLAINED = 0.05
"""A replay that is further off than this says so first."""
HOTTEST = 1.5
"""From here on a worker is as red as it gets, as in the paper's maps."""


def whatif_values(operations: Operations, found: Slowdown, kinds: Sequence[Kind]) -> dict[str, Any]:
    """All figures as JSON values; None for what is not shared out, as S is too small."""
    by_worker = found.by_worker()
    return {
        "S": found.s,
        "M_W": None if found.m_w is None else found.m_w.share,
        "M_S": None if found.m_s is None else found.m_s.share,
        "step_s": float(found.replayed_N.mean()),
        "ideal_step_s": found.ideal_s,
        "measured_step_s": float(found.measured_N.mean()),
        "unexplained": found.unexplained,
        "steps": [
            {"step": number, "measured_s": float(measured_s), "replayed_s": float(replayed_s), "slowdown": slowdown}
            for number, measured_s, replayed_s in zip(found.steps, found.measured_N, found.replayed_N, strict=True)
            for slowdown in [float(replayed_s) / found.ideal_s]
        ],
        "workers": [
            {"dp": dp, "pp": pp, "rank": operations.ranks.get((dp, pp)), "slowdown": by_worker.get((dp, pp))}
            for pp in operations.pp_ranks
            for dp in operations.dp_ranks
        ],
        "worst_workers": [{"dp": dp, "pp": pp} for dp, pp in found.worst],
        "dp_ranks": [{"dp": dp, "slowdown": slowdown} for dp, slowdown in found.by_dp.items()],
        "stages": [{"pp": pp, "slowdown": slowdown} for pp, slowdown in found.by_pp.items()],
        "operations": [{"type": part, "slowdown": slowdown} for part, slowdown in found.by_part.items()],
        "kinds": [
            {
                "kind": kind.code,
                "share": kind.share,
                "saves_s": _saves_s(operations, found, kind),
                "numbers": dict(kind.numbers),
                "workers": [{"dp": dp, "pp": pp} for dp, pp in kind.workers],
                "hidden_by": list(kind.hidden_by),
                "operation": kind.part or None,
                "says": _sentence(operations, found, kind),
                "remedy": REMEDIES[kind.code],
            }
            for kind in kinds
        ],
        "notes": list(operations.notes),
    }


def _saves_s(operations: Operations, found: Slowdown, kind: Kind) -> float:
    """What mending a kind would save in a step: of whom a verdict names, what that says."""
    named = operations.named if kind.code == "slow_worker" else None
    return kind.share * found.lost_s if named is None else named.saves_s


def _sentence(operations: Operations, found: Slowdown, kind: Kind) -> str:
    who = [worker(dp, pp, operations.ranks.get((dp, pp))) for dp, pp in kind.workers]
    saves_s = _saves_s(operations, found, kind)
    said = kind_sentence(kind.code, kind.share, saves_s, kind.numbers, who, kind.part)
    if kind.code in OF_PLACES and len(operations.dp_ranks) == 1 and len(operations.pp_ranks) > 1:
        said = f"{said} {ONE_RANK}"
    return f"{BEHIND} {said}" if kind.hidden_by else said


def whatif_lines(operations: Operations, found: Slowdown, kinds: Sequence[Kind]) -> Iterator[str]:
    """What a person reads first."""
    shared_out, named = found.m_w is not None, operations.named
    if named is not None:
        ranks = some_ranks([operations.ranks[worker] for worker in named.workers])
        yield named_sentence(ranks, named.part, named.saves_s, named.step_s)
    yield cost_sentence(
        found.s, float(found.replayed_N.mean()), found.ideal_s, shared_out=shared_out, named=named is not None
    )
    if abs(found.unexplained) >= MIN_UNEXPLAINED:
        yield fidelity_sentence(found.unexplained)
    for kind in kinds:
        yield _sentence(operations, found, kind)
        yield f"  {REMEDIES[kind.code]}"
    if shared_out and not kinds:
        yield NO_KIND


@dataclass(frozen=True, slots=True)
class HeatRow:
    """A stage of the heat map: the slowdown of each of its workers, by data-parallel rank."""

    pp: int
    slowdowns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WorkerHeat:
    """Whose the slowdown is: S_w of the slowest stages and data-parallel ranks, of so many workers (``there``)."""

    dps: tuple[int, ...]
    rows: tuple[HeatRow, ...]
    there: int

    @property
    def shown(self) -> int:
        """How many workers it has."""
        return len(self.dps) * len(self.rows)


def heat_of(operations: Operations, found: Slowdown) -> WorkerHeat | None:
    """The heat map; None where there is no slowdown to share out."""
    if found.m_w is None:
        return None
    by_worker = found.by_worker()
    dps, pps = _slowest(found.by_dp, MAX_DP), _slowest(found.by_pp, MAX_STAGES)
    rows = tuple(HeatRow(pp, tuple(by_worker[dp, pp] for dp in dps)) for pp in pps)
    return WorkerHeat(tuple(dps), rows, len(operations.dp_ranks) * len(operations.pp_ranks))


def _slowest(slowdowns: dict[int, float], most: int) -> list[int]:
    return sorted(sorted(slowdowns, key=lambda one: -slowdowns[one])[:most])


@dataclass(frozen=True, slots=True)
class TimelineBox:
    """An operation of a step, or the waiting before it: the place of its part, from when to when in seconds."""

    part: int
    start_s: float
    end_s: float
    waits: bool = False


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """A worker's step, as it was measured and as it would be without stragglers."""

    name: str
    measured: tuple[TimelineBox, ...]
    ideal: tuple[TimelineBox, ...]


@dataclass(frozen=True, slots=True)
class StepTimelines:
    """One ``step``, replayed as measured and without stragglers; ``parts`` names what its operations are."""

    step: int
    measured_s: float
    ideal_s: float
    parts: tuple[str, ...]
    lanes: tuple[TimelineLane, ...]


def timelines_of(operations: Operations, found: Slowdown, most_workers: int | None = None) -> StepTimelines:
    """The step whose slowdown is nearest to the mean one, worker by worker; of many workers the slowest."""
    n = int(np.abs(found.replayed_N - found.replayed_N.mean()).argmin())
    work_TW = operations.work_TNW[:, n]
    parts = tuple(dict.fromkeys(one.part for one in operations.types))
    both = [
        _boxes(operations, parts, work_T1W)
        for work_T1W in (work_TW, np.broadcast_to(operations.ideal_T[:, None], work_TW.shape))
    ]
    workers = [(dp, pp) for pp in operations.pp_ranks for dp in operations.dp_ranks]
    slowdowns = found.by_worker() if found.m_w is not None else {}
    shown = sorted(workers, key=lambda one: -slowdowns.get(one, 0.0))[:most_workers]
    lanes = tuple(
        TimelineLane(worker(*one, operations.ranks.get(one)), *(tuple(boxes[one]) for boxes in both))
        for one in workers
        if one in shown
    )
    return StepTimelines(operations.steps[n], float(found.replayed_N[n]), found.ideal_s, parts, lanes)


def _boxes(operations: Operations, parts: Sequence[str], work_TW: AnyFloat) -> dict[tuple[int, int], list[TimelineBox]]:
    """The operations of one step by worker, in order. What one waits for after its predecessors is a box of its own."""
    start_TW, end_TW = (times_T1W[:, 0] for times_T1W in timeline(operations.graph, work_TW[:, None]))
    dp_TW, pp_TW = (np.broadcast_to(of_TW, work_TW.shape) for of_TW in (operations.dp_TW, operations.pp_TW))
    part_T = [parts.index(operations.types[index].part) for index in operations.type_T]
    boxes: dict[tuple[int, int], list[TimelineBox]] = {}
    for (t, w), start_s in np.ndenumerate(start_TW):
        own = boxes.setdefault((int(dp_TW[t, w]), int(pp_TW[t, w])), [])
        end_s = float(end_TW[t, w])
        begins_s = max(float(start_s), end_s - float(work_TW[t, w]))
        if begins_s - start_s > 1e-9:
            own.append(TimelineBox(part_T[t], float(start_s), begins_s, waits=True))
        if end_s > begins_s:
            own.append(TimelineBox(part_T[t], begins_s, end_s))
    return {one: sorted(found, key=lambda box: box.start_s) for one, found in boxes.items()}


def trace_events(shown: StepTimelines) -> dict[str, Any]:
    """Both timelines as Chrome's trace events, which Perfetto shows: a process as measured, one without stragglers."""
    events: list[dict[str, Any]] = []
    for pid, name in enumerate((f"step {shown.step} as measured", "without stragglers"), start=1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for tid, lane in enumerate(shown.lanes):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane.name}})
            for box in lane.measured if pid == 1 else lane.ideal:
                what = f"waits: {shown.parts[box.part]}" if box.waits else shown.parts[box.part]
                times = {"ts": 1e6 * box.start_s, "dur": 1e6 * (box.end_s - box.start_s)}
                events.append({"ph": "X", "pid": pid, "tid": tid, "name": what, **times})
    return {"displayTimeUnit": "ms", "traceEvents": events}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """All of it: what is replayed, its figures, and the kinds of stragglers."""

    operations: Operations
    found: Slowdown
    kinds: tuple[Kind, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """What a person reads first."""
        return tuple(whatif_lines(self.operations, self.found, self.kinds))


def whatif_of(operations: Operations) -> WhatIf:
    """Replay some operations.

    Raises:
        InputError: they take no time.
    """
    found = slowdown_of(operations)
    return WhatIf(operations, found, kinds_of(operations, found))
