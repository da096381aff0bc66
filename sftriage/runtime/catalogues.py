"""The captures that options select, and their catalogue: of a run, of a store, or shared by many jobs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sftriage.errors import CatalogueError, StoreError, UsageError
from sftriage.runs.captures import StoredState
from sftriage.runs.directory import RunDirectory, find_run, read_info
from sftriage.traces.catalogue import CaptureQuery, CaptureRow, Catalogue, directory_here, on_one_host, on_this_host
from sftriage.traces.objects import shown
from sftriage.traces.remote import RemoteStore, catalogue_url, written
from sftriage.traces.store import LocalStore, Store, StoreCondition

MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class CatalogueCaptures:
    """The captures that the options select.

    ``store`` is None if they may be in any store of a shared catalogue, ``run`` is None unless they are of one local
    run. ``of`` has the conditions that they all meet, ``problems`` a sentence for each problem of store or catalogue.
    """

    catalogue: Catalogue
    store: Store | None
    run: RunDirectory | None
    of: CaptureQuery
    problems: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return self.catalogue.name if self.store is None else self.store.place

    def find(self, query: CaptureQuery) -> list[CaptureRow]:
        """The captures that match, oldest first."""
        both = {name: getattr(self.of, name) for name in ("job", "run") if getattr(self.of, name) is not None}
        if any(getattr(query, name) not in (None, value) for name, value in both.items()):
            return []
        return self.catalogue.find(replace(query, **both))

    def resolve(self, name: str) -> tuple[Store, str]:
        """The store and reference of the one capture of an id, its beginning, or ``job/run/id``."""
        job_and_run, _, capture_id = name.rpartition("/")
        rows = self.find(CaptureQuery(prefix=capture_id)) if capture_id else []
        if job_and_run:
            rows = [row for row in rows if job_and_run in (f"{row.job}/{row.run}", _run_of(row))]
        rows = [row for row in rows if row.capture_id == capture_id] or rows
        if len(rows) > 1:
            one_run = len({(row.job, row.run) for row in rows}) == 1
            names = [row.capture_id if one_run else f"{_run_of(row)}/{row.capture_id}" for row in rows]
            some = ", ".join(names[:MAX_NAMED] + ["..."] * (len(names) > MAX_NAMED))
            raise UsageError(f"{len(rows)} captures match {shown(name)}: {some}")
        if rows:
            return self.store or store_of(rows[0]), rows[0].reference
        if self.store is None:
            raise UsageError(f"no capture {shown(name)} in {self.place}")
        # It may be damaged, and so not in the catalogue: the store reports the damage.
        if self.of.job is not None and self.of.run is not None:
            name = f"{written(self.of.job)}/{written(self.of.run)}/{capture_id}"
        else:
            matches = [id_ for id_ in self.store.ids() if name and id_.rpartition("/")[2].startswith(name)]
            name = matches[0] if len(matches) == 1 else name
        self.store.look(name)
        return self.store, name

    def state(self, row: CaptureRow) -> StoredState:
        """A capture's manifest and condition; None for what only a fetch would show."""
        if isinstance(self.store, LocalStore):
            return self.store.state(row.reference)
        if self.store is not None or not on_this_host(row.store):
            return None, None
        if (directory := directory_here(row.store)) is None:
            return None, StoreCondition("missing", f"{shown(row.store)}: no such directory")
        return LocalStore(directory.parent).state(row.reference)

    def damage(self, rows: Sequence[CaptureRow], conditions: Sequence[StoreCondition | None]) -> Iterator[str]:
        """The damage of some captures, and what to do about it, a sentence each."""
        found = [(row, state) for row, state in zip(rows, conditions, strict=True) if state is not None]
        unfit = [(row, state) for row, state in found if not state.whole]
        for row, state in unfit[:MAX_NAMED]:
            yield f"capture {row.capture_id} {state.words}"
        if len(unfit) > MAX_NAMED:
            yield f"and {len(unfit) - MAX_NAMED} more captures are missing or damaged"
        if self.store is not None and any(state.beyond_repair for _, state in unfit):
            yield "remove them with `sftriage traces prune --damaged`"


def _run_of(row: CaptureRow) -> str:
    return f"{written(row.job)}/{written(row.run)}"


def captures_of(
    run: Path | None, store: str | None, catalogue: str | None, progress: Callable[[int, int], None]
) -> CatalogueCaptures:
    """The captures that the options select: of a run (by default the newest), of a store, or of a catalogue.

    Indexes first what the store has and the catalogue does not know; ``progress`` gets the manifests read and their
    total. A catalogue of its own that cannot be written is made in memory. Raises UsageError if there is no such run,
    or a URL is invalid, and CatalogueError or StoreError if the shared catalogue, or a store that no catalogue knows,
    cannot be reached.
    """
    shared = catalogue_url(catalogue, from_environment=run is None)
    if shared is not None and run is None and store is None:
        return CatalogueCaptures(Catalogue(shared, None), None, None, CaptureQuery())
    of_directory, meant = whole_store(run if store is None else None, store)
    directory, of = of_directory, CaptureQuery()
    if run is not None and store is not None:
        # (to select one run's captures, all of the store is indexed: a catalogue covers a whole store)
        directory = find_run(run)
        about = read_info(directory)
        of = CaptureQuery(job=about.job, run=about.run_id)
    if shared is not None:
        indexed, problems = _refreshed(shared, meant, progress)
    else:
        try:
            indexed, problems = _refreshed(own_catalogue(of_directory, meant), meant, progress)
        except (CatalogueError, UsageError):
            # (on a full or read-only disk, index in memory)
            indexed, problems = _refreshed(None, meant, progress)
    return CatalogueCaptures(indexed, meant, directory, of, problems)


def _refreshed(
    at: str | Path | None, store: Store, progress: Callable[[int, int], None]
) -> tuple[Catalogue, tuple[str, ...]]:
    """A catalogue that is up to date with its store, and the problems found."""
    indexed = Catalogue(at, store)
    try:
        return indexed, tuple(indexed.refresh(progress))
    except StoreError as error:
        if not indexed.is_indexed():
            raise
        return indexed, (f"{error}; showing what its catalogue has",)


def whole_store(run: Path | None, store: str | None) -> tuple[RunDirectory | None, Store]:
    """The store that a URL names, or a run's (by default of the newest), and that run."""
    if store is None:
        directory = find_run(run)
        return directory, run_store(directory)
    if run is not None:
        raise UsageError("give either a run or a store")
    return None, RemoteStore.open(store)


def run_store(directory: RunDirectory) -> LocalStore:
    """A run's local captures; changes are pushed to their copies."""

    def push() -> None:
        from sftriage.runtime.copies import push

        push(directory.path)

    return LocalStore(directory.path, changed=push)


def own_catalogue(directory: RunDirectory | None, store: Store) -> Path:
    """The path of the catalogue of a run or a remote store; that of a read-only run is in the user's cache, too."""
    if directory is not None:
        path = directory.catalogue
        # (SQLite needs a journal beside it)
        if os.access(path.parent, os.W_OK) and (not path.exists() or os.access(path, os.W_OK)):
            return path
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(caches) / "sftriage" / "catalogues"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; set XDG_CACHE_HOME to another place for catalogues") from error
    place = store.place if directory is None else str(directory.path.resolve())
    return folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.db"


def store_of(row: CaptureRow) -> Store:
    """The store that a shared catalogue's row names; UsageError if it is not on this machine."""
    if not on_one_host(row.store):
        return RemoteStore.open(row.store)
    if (directory := directory_here(row.store)) is None:
        raise UsageError(f"capture {row.capture_id} is in {shown(row.store)}, which is not on this machine")
    # The place of a run's store is the directory of its captures.
    return run_store(find_run(directory.parent))
