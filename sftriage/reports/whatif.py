"""How a what-if replay is shown: as JSON values, and in a terminal as sentences, a heat map and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sftriage.reports.tables import titled
from sftriage.whatif.kinds import Kind
from sftriage.whatif.operations import Operations
from sftriage.whatif.slowdown import MIN_SLOWDOWN, Slowdown
from sftriage.words.whatif import (
    BEHIND,
    NO_KIND,
    OF_PLACES,
    ONE_RANK,
    REMEDIES,
    cost_sentence,
    fidelity_sentence,
    kind_sentence,
    step,
    worker,
)

MAX_STAGES, MAX_DP = 16, 12
"""So many stages and data-parallel ranks of a heat map are shown, the slowest ones."""
MAX_PARTS = 5
HOTTEST = 1.5
"""From here on a worker is as red as it gets, as in the paper's maps."""
MIN_UNEXPLAINED = 0.05
"""A replay that is further off than this says so first."""


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
                "numbers": dict(kind.numbers),
                "workers": [{"dp": dp, "pp": pp} for dp, pp in kind.workers],
                "hidden_by": list(kind.hidden_by),
                "operation": kind.part or None,
                "says": _sentence(operations, kind),
                "remedy": REMEDIES[kind.code],
            }
            for kind in kinds
        ],
        "notes": list(operations.notes),
    }


def _sentence(operations: Operations, kind: Kind) -> str:
    who = [worker(dp, pp, operations.ranks.get((dp, pp))) for dp, pp in kind.workers]
    said = kind_sentence(kind.code, kind.share, kind.numbers, who, kind.part)
    if kind.code in OF_PLACES and len(operations.dp_ranks) == 1 and len(operations.pp_ranks) > 1:
        said = f"{said} {ONE_RANK}"
    return f"{BEHIND} {said}" if kind.hidden_by else said


def whatif_lines(operations: Operations, found: Slowdown, kinds: Sequence[Kind]) -> Iterator[str]:
    """What a person reads first."""
    shared_out = found.m_w is not None
    yield cost_sentence(found.s, float(found.replayed_N.mean()), found.ideal_s, shared_out=shared_out)
    if abs(found.unexplained) >= MIN_UNEXPLAINED:
        yield fidelity_sentence(found.unexplained)
    for kind in kinds:
        yield _sentence(operations, kind)
        yield f"  {REMEDIES[kind.code]}"
    if shared_out and not kinds:
        yield NO_KIND


def whatif_tables(operations: Operations, found: Slowdown) -> Iterator[Table]:
    """Whose the slowdown is: by worker, and by type of operation. None where there is none to share out."""
    if found.m_w is None:
        return
    yield _heat_map(operations, found)
    slowest = sorted(found.by_part.items(), key=lambda one: -one[1])[:MAX_PARTS]
    table = titled("Slowdown by operation, all others at their ideal", ["operations"], ["slowdown", "a step"])
    for part, slowdown in slowest:
        table.add_row(escape(part), f"{slowdown:.3f}", step(slowdown * found.ideal_s))
    table.add_section()
    table.add_row("all", f"{found.s:.3f}", step(found.s * found.ideal_s))
    yield table


def _heat_map(operations: Operations, found: Slowdown) -> Table:
    dps, pps = _slowest(found.by_dp, MAX_DP), _slowest(found.by_pp, MAX_STAGES)
    shown, there = len(dps) * len(pps), len(operations.dp_ranks) * len(operations.pp_ranks)
    title = "Slowdown by worker" + (f", the slowest {shown} of {there}" if shown < there else "")
    table = titled(title, ["stage"], [f"dp {dp}" for dp in dps])
    by_worker = found.by_worker()
    for pp in pps:
        table.add_row(f"pp {pp}", *(_cell(by_worker[dp, pp]) for dp in dps))
    return table


def _slowest(slowdowns: dict[int, float], most: int) -> list[int]:
    return sorted(sorted(slowdowns, key=lambda one: -slowdowns[one])[:most])


def _cell(slowdown: float) -> Text:
    """The redder, the slower; plain where it is under what counts as slow."""
    if slowdown < MIN_SLOWDOWN:
        return Text(f"{slowdown:.2f}")
    heat = min(1.0, (slowdown - 1.0) / (HOTTEST - 1.0))
    fade = round(200 * (1.0 - heat))
    return Text(
        f"{slowdown:.2f}",
        style=f"black on rgb(255,{fade},{fade})" if heat < 0.6 else f"bold white on rgb(200,{fade // 2},{fade // 2})",
    )
