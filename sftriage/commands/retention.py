"""``sftriage traces pin``, ``unpin``, ``prune`` and ``reindex``: what is kept, and what the catalogue knows of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from sftriage.commands.options import CapturesChoice, JsonOption, meant, option
from sftriage.commands.output import counting, notices, print_json, say, tell, write
from sftriage.commands.traces import CaptureArgument, captures_of
from sftriage.errors import CatalogueError, UsageError
from sftriage.model.windows import plain
from sftriage.policy import quantities
from sftriage.runtime.catalogue_urls import catalogue_url
from sftriage.runtime.catalogues import own_catalogue, whole_store
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.stores import Kept, RetentionLimits, outlook, remove
from sftriage.words.amounts import size


def pin_trace(capture_id: CaptureArgument, *, of: CapturesChoice) -> None:
    """Keep a capture, whatever the policy's retention says."""
    its_store, reference = captures_of(of).one(capture_id)
    its_store.pin(reference)
    write(f"{reference} is pinned")


def unpin_trace(capture_id: CaptureArgument, *, of: CapturesChoice) -> None:
    """Leave a capture to retention again."""
    its_store, reference = captures_of(of).one(capture_id)
    its_store.pin(reference, pinned=False)
    write(f"{reference} is not pinned")


def prune_traces(
    *,
    of: CapturesChoice,
    age: Annotated[str | None, option("DURATION", "Remove captures older than this, such as 14d.")] = None,
    total: Annotated[
        str | None, option("--bytes SIZE", "Remove the oldest captures beyond this size together, such as 50Gi.")
    ] = None,
    damaged: Annotated[
        bool, option("--damaged", "Remove captures whose trace or manifest is gone, or another than was put.")
    ] = False,
    dry_run: Annotated[bool, option("--dry-run", "Say what would go, and remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old captures, oldest first: trace, manifest and row as one.

    Pinned ones stay, and without --damaged those that are damaged. What is left alone is said, and why.
    """
    age_s = None if age is None else meant("--age", quantities.seconds, age)
    retention = RetentionLimits(age_s, None if total is None else meant("--bytes", quantities.size_bytes, total))
    if retention.unlimited and not damaged:
        raise UsageError("say what may go: --age, --bytes or --damaged")
    directory, its_store = whole_store(of.run, of.store)
    found = outlook(its_store, retention, time.time(), unfit=damaged)
    captures, problem = found.captures, None
    if not dry_run:
        if shared := catalogue_url(of.catalogue):
            _forget(Catalogue(shared, its_store), captures)
        captures, problem = remove(its_store, Catalogue(own_catalogue(directory, its_store), its_store), captures)
    say(*(f"left alone: {name}: {why}" for name, why in found.left_alone.items()))
    if as_json:
        left_alone = [{"capture_id": name, "reason": why} for name, why in found.left_alone.items()]
        print_json({"removed": not dry_run, "captures": captures, "left_alone": left_alone})
    else:
        for one in captures:
            what = size(one.size_bytes) if one.size_bytes else "damaged"
            write(f"{one.capture_id}  {what}")
        if not captures and problem is None:
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


def reindex_traces(*, of: CapturesChoice, as_json: JsonOption = False) -> None:
    """Build the catalogue of a run or store again from its manifests, and say what in it is none.

    In a catalogue that others share, nothing of theirs is touched.
    """
    directory, meant = whole_store(of.run, of.store)
    built = Catalogue(catalogue_url(of.catalogue) or own_catalogue(directory, meant), meant)
    with counting("Reading manifests") as progress:
        found = built.reindex(progress)
    say(*found.problems)
    if as_json:
        print_json({"store": meant.place, "catalogue": built.name, **plain(found)})
    else:
        captures = "1 capture" if found.captures == 1 else f"{found.captures} captures"
        odd = f", and {len(found.problems)} that cannot be used" if found.problems else ""
        tell(f"Indexed {captures} of {meant.place}{odd}.")
