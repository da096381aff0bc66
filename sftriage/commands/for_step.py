"""``sftriage traces for-step``: from "step 1042 was slow" to its trace, or to why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sftriage.commands.catalogues import captures_of
from sftriage.commands.options import CatalogueOption, JsonOption, RunOption, StoreOption
from sftriage.commands.output import lists, notices, print_json
from sftriage.commands.tables import captures_table, decisions_table
from sftriage.commands.traces import described
from sftriage.commands.wanted import JobOption, RunIdOption
from sftriage.runs.decisions import decisions_of, why_none
from sftriage.traces.rows import CaptureQuery, CaptureRow

MAX_DECISIONS = 8


def traces_for_step(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="A step of the job.")],
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
    job: JobOption = None,
    run_id: RunIdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the captures of a step, or nearest to it, and what was decided about it.

    A capture is of a step that it recorded, or that lies in the window that led to it. Where there is none, the
    decisions say why; they are kept where the run is, so of a store or catalogue only the captures are told.
    """
    captures = captures_of(run, store, catalogue)
    rows = captures.find(CaptureQuery(job=job, run=run_id))
    holding = [row for row in rows if distance(row, step) == 0]
    nearest = min(rows, key=lambda row: (distance(row, step), row.first_step), default=None)
    shown = holding or ([] if nearest is None else [nearest])
    conditions = captures.conditions(shown)
    about = None if captures.run is None else decided_about(decisions_of(captures.run), step)
    if as_json:
        why = None if about or captures.run is None else why_none(captures.run, step)
        values = described(shown, conditions, captures.run if store is None else None)
        found = {"captures": values if holding else [], "nearest": next((one for one in values), None)}
        print_json({"step": step, **found, "decisions": about or [], "reason": why})
        return
    console = lists()
    if holding:
        console.print(captures_table(holding, conditions, console.width))
    elif nearest is not None:
        where = f"steps {nearest.first_step} to {nearest.last_step} of rank {nearest.rank}"
        notices().print(
            f"No capture of step {step}; the nearest is {nearest.capture_id}, {where}.", soft_wrap=True, markup=False
        )
    else:
        notices().print(f"No capture in {captures.place}.", soft_wrap=True, markup=False)
    if about:
        console.print(decisions_table(about))
    elif captures.run is not None:
        why = why_none(captures.run, step)
        notices().print(f"No window that holds step {step} was decided: {why}.", soft_wrap=True, markup=False)


def distance(row: CaptureRow, step: int) -> int:
    """How many steps a capture is from a step; 0 where it recorded it, or its window holds it."""
    spans = ((row.first_step, row.last_step), (row.window_first_step, row.window_last_step))
    return min(max(first - step, step - last, 0) for first, last in spans)


def decided_about(decisions: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The decisions on windows that hold a step, the newest of them."""
    return [one for one in decisions if one["first_step"] <= step <= one["last_step"]][-MAX_DECISIONS:]
