"""Which captures are meant: those of a run, or those of a store that many runs share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from sftriage.runs.directory import RunDirectory, find_run, read_info
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store


def open_store(run: Path | None, store: str | None) -> Store:
    """The store that is meant: a run's own by default, else that of a URL; with both, the run's captures in that URL.

    Raises:
        UsageError: there is no such run, or the URL is none that can be opened.
        InputError: the run's record cannot be read.
        StoreError: the store cannot be reached.
    """
    if store is None:
        directory = find_run(run)
        return LocalStore(directory.path, changed=_pushing(directory))
    from sftriage.traces.remote import RemoteStore

    if run is None:
        return RemoteStore.open(store)
    about = read_info(find_run(run))
    return RemoteStore.open(store, job=about.job, run=about.run_id)


def _pushing(directory: RunDirectory) -> Callable[[], None]:
    """What brings a run's copies up to date, once something was changed."""

    @cache
    def push() -> Callable[[], None]:
        from sftriage.runtime.uploads import pusher

        return pusher(directory) or (lambda: None)

    return lambda: push()()
