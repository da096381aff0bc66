"""``sftriage traces``: find, look at and fetch what was captured."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from sftriage.commands.catalogues import Captures, CatalogueOption, captures_of
from sftriage.commands.decisions import RunOption
from sftriage.commands.output import lists, notices, print_json
from sftriage.commands.runs import find_run
from sftriage.commands.stores import StoreOption
from sftriage.commands.tables import captures_table
from sftriage.commands.uploads import with_uploads
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
from sftriage.commands.words import place
from sftriage.errors import SftriageError
from sftriage.traces import LocalStore, Manifest, Wanted
from sftriage.traces.rundir import RunDirectory

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


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
        help="Capture id, as `sftriage traces list` shows it, or its beginning.", autocompletion=complete_capture
    ),
]

traces = typer.Typer(help="Find, look at and fetch the traces that were captured.", no_args_is_help=True)


@traces.command("list")
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
    wanted = Wanted(
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
    if as_json:
        print_json(with_uploads(rows, captures.run if store is None else None))
    elif rows:
        console = lists()
        console.print(captures_table(rows, console.width))
    else:
        notices().print(_none(captures, wanted), soft_wrap=True, markup=False)


def _none(captures: Captures, wanted: Wanted) -> str:
    """Why a list is empty."""
    if wanted != Wanted() and (others := len(captures.find(Wanted()))):
        return f"No such capture among the {others} in {captures.place}."
    why = "; `sftriage decisions` says why" if captures.run is not None else ""
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
