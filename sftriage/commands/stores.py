"""Which captures are meant: those of a run, or those of a store that many runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.runs import find_run
from sftriage.commands.uploads import pusher
from sftriage.traces.remote import RemoteStore
from sftriage.traces.rundir import read_info
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Captures of a store rather than of a run on this machine: s3://, gs:// or az:// with bucket and prefix, "
        "or a directory. Credentials come from the environment.",
        show_default=False,
    ),
]


def open_store(run: Path | None, store: str | None) -> Store:
    """The store that is meant: a run's own by default, else that of a URL; with both, the run's captures in that URL.

    Raises:
        UsageError: there is no such run, or the URL is none that can be opened.
        InputError: the run's record cannot be read.
        StoreError: the store cannot be reached.
    """
    if store is None:
        directory = find_run(run)
        return LocalStore(directory.path, changed=pusher(directory))
    if run is None:
        return RemoteStore.open(store)
    about = read_info(find_run(run))
    return RemoteStore.open(store, job=about.job, run=about.run_id)
