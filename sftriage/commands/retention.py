"""``sftriage traces pin``, ``unpin`` and ``prune``: what is kept."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from sftriage.commands.decisions import RunOption
from sftriage.commands.output import notices, print_json, results
from sftriage.commands.runs import find_run
from sftriage.commands.traces import CaptureArgument, JsonOption
from sftriage.errors import UsageError
from sftriage.policy import quantities
from sftriage.traces import Catalogue, LocalStore
from sftriage.traces.retention import Retention, due, remove
from sftriage.words import size


def pin_trace(capture_id: CaptureArgument, run: RunOption = None) -> None:
    """Keep a capture, whatever the policy's retention says."""
    LocalStore(find_run(run).path).pin(capture_id)
    results().print(f"{capture_id} is pinned", markup=False)


def unpin_trace(capture_id: CaptureArgument, run: RunOption = None) -> None:
    """Leave a capture to retention again."""
    LocalStore(find_run(run).path).unpin(capture_id)
    results().print(f"{capture_id} is not pinned", markup=False)


def prune_traces(
    run: RunOption = None,
    age: Annotated[str | None, typer.Option(help="Remove captures older than this, such as 14d.")] = None,
    total: Annotated[
        str | None, typer.Option("--bytes", help="Remove the oldest captures beyond this size together, such as 50Gi.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old captures, oldest first: trace, manifest and row as one. Pinned ones stay."""
    try:
        retention = Retention(
            quantities.seconds(age) if age is not None else None,
            quantities.size_bytes(total) if total is not None else None,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if retention.unlimited:
        raise UsageError("say what may go: --age, --bytes, or both")
    directory = find_run(run)
    store = LocalStore(directory.path)
    captures, problem = due(store, retention, time.time()), None
    if not dry_run:
        captures, problem = remove(store, Catalogue(directory.catalogue, store), captures)
    if as_json:
        print_json({"removed": not dry_run, "captures": captures})
    else:
        for one in captures:
            results().print(f"{one.capture_id}  {size(one.size_bytes)}", soft_wrap=True, markup=False)
        if not captures:
            notices().print("Nothing to remove.")
    if problem is not None:
        raise UsageError(problem)
