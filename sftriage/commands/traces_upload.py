"""``sftriage traces upload``: bring a run's captures to a store elsewhere, or finish what was begun."""

from __future__ import annotations

from typing import Annotated

from sftriage.commands.options import RunOption, option
from sftriage.commands.output import ending_on_sigterm, print_json, tell, uploading, write
from sftriage.errors import StoreError, UsageError
from sftriage.runs.directory import find_run, read_info
from sftriage.runtime.uploads import follow, uploader_of, what_is_left, with_store

TRIES = 3
_FOR_EVER_S = 10.0 * 365 * 86400


def upload_traces(
    run: RunOption = None,
    store: Annotated[
        str | None,
        option(
            "--store URL",
            "Where to: s3://, gs:// or az:// with bucket and prefix, or a directory. Credentials come from the "
            "environment. The run keeps it in mind.",
            "the run's own",
        ),
    ] = None,
    drop_local: Annotated[bool, option("--drop-local", "Remove traces here once they are verified there.")] = False,
    as_json: Annotated[bool, option("--json", "JSON on stdout.")] = False,
) -> None:
    """Upload the captures of a run that are not in its store yet, each verified by reading it back.

    What is there already and right is not sent again. Findings, pins and removals since the last time follow too.
    """
    directory = find_run(run)
    info = with_store(directory, read_info(directory), store)
    uploader = uploader_of(directory, info, keep_local=not (drop_local or info.drop_local), tries=TRIES)
    uploader.release_all()
    uploader.start()
    # Ended by somebody else, it gives up what is under way: a bucket charges for parts that nobody gives up.
    with ending_on_sigterm(), uploading() as show:
        try:
            standing = follow(uploader, _FOR_EVER_S, _FOR_EVER_S, show)
        finally:
            uploader.close(5.0)
    if as_json:
        left = [{"capture_id": name, "reason": reason} for name, reason in standing.left.items()]
        removals = [{"capture_id": name, "reason": reason} for name, reason in standing.removals.items()]
        about = {"store": info.store, "stored": standing.stored, "left": left, "removals": removals}
        print_json({**about, "done": standing.done})
    elif standing.stored:
        write(f"{standing.stored} of {standing.stored + len(standing.left)} captures are in {info.store}")
    elif standing.done:
        tell(f"No capture in {directory.path}.")
    if standing.taken:
        raise UsageError(f"{what_is_left(standing)}; `sftriage traces show` says how far each is")
    if not standing.done:
        raise StoreError(what_is_left(standing))
