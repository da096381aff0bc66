"""``sftriage traces pin``, ``unpin`` and ``prune``: what is kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from sftriage.commands.catalogues import CatalogueOption, captures_of, catalogue_url, own_catalogue, say, whole_store
from sftriage.commands.decisions import RunOption
from sftriage.commands.output import notices, print_json, results
from sftriage.commands.stores import StoreOption
from sftriage.commands.traces import CaptureArgument, JsonOption
from sftriage.errors import CatalogueError, UsageError
from sftriage.policy import quantities
from sftriage.traces import Catalogue, LocalStore
from sftriage.traces.retention import Kept, Retention, due, remove
from sftriage.words import size


def pin_trace(
    capture_id: CaptureArgument, run: RunOption = None, store: StoreOption = None, catalogue: CatalogueOption = None
) -> None:
    """Keep a capture, whatever the policy's retention says."""
    its_store, reference = captures_of(run, store, catalogue).one(capture_id)
    its_store.pin(reference)
    results().print(f"{reference} is pinned", soft_wrap=True, markup=False)


def unpin_trace(
    capture_id: CaptureArgument, run: RunOption = None, store: StoreOption = None, catalogue: CatalogueOption = None
) -> None:
    """Leave a capture to retention again."""
    its_store, reference = captures_of(run, store, catalogue).one(capture_id)
    its_store.unpin(reference)
    results().print(f"{reference} is not pinned", soft_wrap=True, markup=False)


def prune_traces(
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
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
    directory, its_store = whole_store(run, store)
    captures, problem = due(its_store, retention, time.time()), None
    if not dry_run:
        if shared := catalogue_url(catalogue):
            _forget(Catalogue(shared, its_store), captures)
        captures, problem = remove(its_store, Catalogue(own_catalogue(directory, its_store), its_store), captures)
    for damaged in its_store.manifests().problems if isinstance(its_store, LocalStore) else ():
        notices().print(f"sftriage: left alone: {damaged}", soft_wrap=True, markup=False)
    if as_json:
        print_json({"removed": not dry_run, "captures": captures})
    else:
        for one in captures:
            results().print(f"{one.capture_id}  {size(one.size_bytes)}", soft_wrap=True, markup=False)
        if not captures:
            notices().print("Nothing to remove.")
    if problem is not None:
        raise UsageError(problem)


def _forget(shared: Catalogue, captures: Sequence[Kept]) -> None:
    """Take captures out of a shared catalogue. One that is away is told when it is next compared with the store."""
    try:
        for one in captures:
            shared.drop(one.capture_id)
    except CatalogueError as error:
        say(f"{error}; `sftriage traces reindex` brings it up to date")
