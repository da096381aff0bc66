"""``sftriage traces``: find, look at and fetch what was captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from sftriage.commands.catalogues import CatalogueCaptures, captures_of
from sftriage.commands.options import CatalogueOption, JsonOption, RunOption, StoreOption
from sftriage.commands.output import lists, notices, print_json
from sftriage.commands.tables import captures_table
from sftriage.commands.wanted import (
    HostOption,
    JobOption,
    ProfilerOption,
    RankOption,
    ReproducedOption,
    RunIdOption,
    SinceOption,
    StageOption,
    StepOption,
    since_of,
    steps_of,
)
from sftriage.errors import SftriageError
from sftriage.records import plain
from sftriage.runs.captures import upload_values
from sftriage.runs.directory import RunDirectory, find_run
from sftriage.traces.manifest import Manifest
from sftriage.traces.rows import CaptureQuery, CaptureRow
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Condition
from sftriage.words import place


def complete_capture(context: typer.Context, incomplete: str) -> Iterable[str]:
    """The captures of the run that is meant, for a shell that completes a command line."""
    try:
        if not context.params.get("store") and not context.params.get("catalogue"):
            ids = LocalStore(find_run(context.params.get("run")).path).ids()
            return sorted(one for one in ids if one.startswith(incomplete))
    except (SftriageError, OSError):
        pass  # a shell that asks what could come next wants no errors
    return ()


CaptureArgument = Annotated[
    str,
    typer.Argument(
        metavar="CAPTURE",
        help="Capture id, as `sftriage traces list` shows it, or its beginning.",
        autocompletion=complete_capture,
    ),
]


def list_traces(
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
    job: JobOption = None,
    run_id: RunIdOption = None,
    rank: RankOption = None,
    stage: StageOption = None,
    step: StepOption = None,
    since: SinceOption = None,
    reproduced: ReproducedOption = None,
    profiler: ProfilerOption = None,
    host: HostOption = None,
    as_json: JsonOption = False,
) -> None:
    """List captures, oldest first: those of a run, of a store, or of a catalogue that many jobs share."""
    wanted = CaptureQuery(
        job=job,
        run=run_id,
        rank=rank,
        stage=stage,
        profiler=profiler,
        host=host,
        reproduced=reproduced,
        steps=None if step is None else steps_of(step),
        since=None if since is None else since_of(since, datetime.now(timezone.utc)),
    )
    captures = captures_of(run, store, catalogue)
    rows = captures.find(wanted)
    conditions = captures.conditions(rows)
    if as_json:
        print_json(described(rows, conditions, captures.run if store is None else None))
    elif rows:
        console = lists()
        console.print(captures_table(rows, conditions, console.width))
    else:
        notices().print(_none(captures, wanted), soft_wrap=True, markup=False)


def described(
    rows: Sequence[CaptureRow], conditions: Sequence[Condition | None], directory: RunDirectory | None
) -> list[dict[str, Any]]:
    """Captures as JSON values, each with its condition and how far its upload is; None where that cannot be told."""
    return [
        {**plain(row), **condition_values(condition), "upload": upload_values(directory, row.capture_id)}
        for row, condition in zip(rows, conditions, strict=True)
    ]


def condition_values(condition: Condition | None) -> dict[str, Any]:
    """Whether a capture is there as it was put, as JSON values."""
    return {"state": condition and condition.state, "problem": (condition and condition.problem) or None}


def _none(captures: CatalogueCaptures, wanted: CaptureQuery) -> str:
    """Why a list is empty."""
    if wanted != CaptureQuery() and (others := len(captures.find(CaptureQuery()))):
        return f"No such capture among the {others} in {captures.place}."
    if captures.store is not None and captures.store.ids():
        return f"No capture in {captures.place} can be used."
    why = f"; `sftriage decisions --run {place(captures.run.path)}` says why" if captures.run is not None else ""
    return f"No capture in {captures.place}{why}."


def manifest_values(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON values."""
    return manifest.model_dump(mode="json")


def open_command(manifest: Manifest, directory: RunDirectory) -> str:
    """The command that opens a capture's trace in a viewer."""
    return f"sftriage traces open {manifest.capture_id} --run {place(directory.path)}"


def fetch_command(manifest: Manifest, directory: RunDirectory) -> str:
    """The command that fetches a capture's trace, for whoever wants to open it."""
    return f"sftriage traces get {manifest.capture_id} --run {place(directory.path)}"
