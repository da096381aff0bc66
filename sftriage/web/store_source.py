"""A store of many jobs and runs, as the page sees it: what its catalogue knows, kept up to date beside the page.

Nobody who looks waits for the store to be read: that goes on in a thread, as long as somebody looks, and what was known
is shown meanwhile. A store or catalogue that is away is said to be, and asked again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from sftriage.errors import InputError, SftriageError, StoreError, UsageError
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.databases import CaptureQuery, CaptureRow
from sftriage.traces.manifest import Manifest
from sftriage.traces.stores import CaptureKey, Store

REFRESH_S = 15.0
"""How often a store is listed while somebody looks: each time costs requests, which are charged for."""
RETRY_S = 5.0
"""The same while it is away."""

_TOLD_EVERY = 20

log = logging.getLogger("sftriage")


@dataclass(frozen=True, slots=True)
class StoreView:
    """What is known of a store at one moment.

    Attributes:
        place: where it is; nothing in it is secret.
        version: changes whenever something that a page shows does.
        rows: its captures, oldest first; once it is ``known``, what is not among them is not there.
        problems: what lies there and is no capture, and why.
        away: why it cannot be reached; "" while it can.
        read: manifests that have been read so far, and of how many, the first time.
        as_of_s: when it was last seen, seconds since the epoch.
    """

    place: str
    version: str = "none"
    rows: tuple[CaptureRow, ...] = ()
    known: bool = False
    problems: tuple[str, ...] = ()
    away: str = ""
    read: tuple[int, int] = (0, 0)
    as_of_s: float | None = None

    def names(self, field: str) -> tuple[str, ...]:
        """The values that a field of its captures has: jobs, runs, stages."""
        return tuple(dict.fromkeys(value for row in reversed(self.rows) if (value := getattr(row, field))))


class StoreSource:
    """The captures of a store, or of all stores that share a catalogue.

    Its methods may be called from any thread. ``shared`` says that they may be in any store that shares the catalogue.

    Args:
        catalogue: who is asked.
        store: where they are; None of what is shared.
        store_of: opens the store that a row of a shared catalogue names.
        place: where they are said to be, if not where the store is.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        store: Store | None,
        store_of: Callable[[CaptureRow], Store],
        place: str | None = None,
    ) -> None:
        self._catalogue, self._store, self._store_of = catalogue, store, store_of
        self.shared = store is None
        self._lock = threading.Lock()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._busy = False
        self._due_s = float("-inf")
        self._view = StoreView(place or (catalogue.name if store is None else store.place))

    @property
    def place(self) -> str:
        """Where they are."""
        return self._view.place

    def view(self) -> StoreView:
        """The store as it was last seen. If that is some time ago, it is looked at again, beside."""
        with self._lock:
            if not self._busy and time.monotonic() >= self._due_s:
                self._busy = True
                self._reading.submit(self._read)
            return self._view

    def find(self, wanted: CaptureQuery) -> Sequence[CaptureRow]:
        """The captures that are wanted, newest first; none as long as nothing is known.

        Raises:
            CatalogueError: the catalogue cannot be reached.
        """
        view = self._view
        if not view.known:
            return ()
        return (view.rows if wanted == CaptureQuery() else self._catalogue.find(wanted))[::-1]

    def capture(self, place: CaptureKey) -> tuple[Manifest, Store]:
        """A capture, and the store that it lies in.

        Raises:
            UsageError: there is none.
            InputError, IntegrityError: what lies there is none.
            StoreError, CatalogueError: where it is cannot be reached.
        """
        if self._store is not None:
            return self._store.manifest(place.key), self._store
        wanted = CaptureQuery(job=place.job, run=place.run, prefix=place.capture_id)
        row = next((row for row in self._catalogue.find(wanted) if row.capture_id == place.capture_id), None)
        if row is None:
            raise UsageError(f"no capture {place.key} in {self.place}")
        store = self._store_of(row)
        manifest = store.manifest(row.reference)
        if CaptureKey.of(manifest) != place:
            raise InputError(f"{row.reference} in {store.place} is the manifest of {CaptureKey.of(manifest).key}")
        return manifest, store

    def _read(self) -> None:
        try:
            found = self._looked()
        except (SftriageError, OSError) as error:
            found = replace(self._view, away=str(error))
        except Exception:
            log.exception("the store could not be read; trying again")
            found = replace(self._view, away="it could not be read")
        with self._lock:
            self._view = replace(found, version=_version(found))
            self._busy = False
            self._due_s = time.monotonic() + (RETRY_S if found.away else REFRESH_S)

    def _looked(self) -> StoreView:
        problems: tuple[str, ...] = ()
        away = ""
        if self._store is not None:
            try:
                problems = self._catalogue.refresh(self._told)
            except StoreError as error:
                # What its catalogue knows is better than nothing.
                if not self._catalogue.is_indexed():
                    raise
                problems, away = self._view.problems, str(error)
        rows = tuple(self._catalogue.find())
        seen_s = self._view.as_of_s if away else time.time()
        return replace(self._view, rows=rows, known=True, problems=problems, away=away, read=(0, 0), as_of_s=seen_s)

    def _told(self, done: int, total: int) -> None:
        if not self._view.known and (done % _TOLD_EVERY == 0 or done == total):
            with self._lock:
                self._view = replace(self._view, read=(done, total), version=f"reading-{done}-{total}")


def _version(view: StoreView) -> str:
    seen = [(row.store, row.reference, row.sha256, row.reproduced) for row in view.rows]
    # A message may say how long it took to fail, which is another time each time.
    about = (view.known, view.problems, re.sub(r"[0-9.]+", "", view.away), seen)
    return hashlib.sha256(repr(about).encode(errors="surrogatepass")).hexdigest()[:16]
