"""The page about a store of captures, for `sftriage ui --store`, and about one capture, for `sftriage traces open`.

No request waits for the store: while there are requests, a thread refreshes the store's catalogue, and the page shows
what was known before. It says when the store or its catalogue is unreachable, and retries.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.base.files import private
from sftriage.errors import InputError, IntegrityError, SftriageError, StoreError, UsageError
from sftriage.reduce.opening import Copying
from sftriage.runs.captures import since_of
from sftriage.runs.directory import RunDirectory
from sftriage.runs.hangs import hang_rows_of
from sftriage.runs.lateness import tracks_of
from sftriage.runs.source import RunSource
from sftriage.traces.catalogue import CaptureQuery, CaptureRow, Catalogue
from sftriage.traces.manifest import MANIFEST_NAME, Manifest
from sftriage.traces.objects import destination_of
from sftriage.traces.remote import CaptureKey
from sftriage.traces.store import LocalStore, Store
from sftriage.trainer.sampler import FOLDED_NAME
from sftriage.web.charts import bars_of
from sftriage.web.flames import StackDownloads
from sftriage.web.page import Page, file_of, page_number, reading_stored
from sftriage.web.run_page import RunPage
from sftriage.web.serving import HOST, Access

REFRESH_S = 15.0
"""How often a store is listed while there are requests: object stores charge for listing."""
RETRY_S = 5.0
"""The same while it is unreachable."""

_PROGRESS_EVERY = 20

log = logging.getLogger("sftriage")


@dataclass(frozen=True, slots=True)
class StoreView:
    """A store at one moment.

    Attributes:
        place: where it is, without secrets.
        version: changes whenever a page would.
        rows: its captures, oldest first; complete once ``known``.
        problems: why other objects in it are no captures.
        away: why it is unreachable, or "".
        read: on the first reading, the manifests read so far and in all.
        as_of_s: when it was last reached, seconds since the epoch.
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
        return tuple(dict.fromkeys(value for row in reversed(self.rows) if (value := getattr(row, field))))


class StoreSource:
    """The captures of a store, or without one, of all stores that share a catalogue. Its methods are thread-safe.

    ``store_of`` opens the store of a row of a shared catalogue; ``place`` is displayed, by default the store's.
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
        return self._view.place

    def view(self) -> StoreView:
        """The store as last read. If that is some time ago, it is read again in the background."""
        with self._lock:
            if not self._busy and time.monotonic() >= self._due_s:
                self._busy = True
                self._reading.submit(self._read)
            return self._view

    def find(self, query: CaptureQuery) -> Sequence[CaptureRow]:
        """The matching captures, newest first; none until the store was read. Raises CatalogueError."""
        view = self._view
        if not view.known:
            return ()
        return (view.rows if query == CaptureQuery() else self._catalogue.find(query))[::-1]

    def capture(self, place: CaptureKey) -> tuple[Manifest, Store]:
        """A capture and its store.

        Raises UsageError if there is no such capture, InputError or IntegrityError if it is damaged or another capture,
        and StoreError or CatalogueError if the store or catalogue is unreachable.
        """
        if self._store is not None:
            return self._store.manifest(place.key), self._store
        query = CaptureQuery(job=place.job, run=place.run, prefix=place.capture_id)
        row = next((row for row in self._catalogue.find(query) if row.capture_id == place.capture_id), None)
        if row is None:
            raise UsageError(f"no capture {place.key} in {self.place}")
        store = self._store_of(row)
        manifest = store.manifest(row.reference)
        if CaptureKey.of(manifest) != place:
            raise InputError(f"{row.reference} in {store.place} is the manifest of {CaptureKey.of(manifest).key}")
        return manifest, store

    def _read(self) -> None:
        try:
            found = self._refreshed()
        except (SftriageError, OSError) as error:
            found = replace(self._view, away=str(error))
        except Exception:
            log.exception("the store could not be read; trying again")
            found = replace(self._view, away="it could not be read")
        with self._lock:
            rows = [(row.store, row.reference, row.sha256, row.reproduced) for row in found.rows]
            # Without numbers: an error may say how long it took to fail, which differs each time.
            about = repr((found.known, found.problems, re.sub(r"[0-9.]+", "", found.away), rows))
            version = hashlib.sha256(about.encode(errors="surrogatepass")).hexdigest()[:16]
            self._view = replace(found, version=version)
            self._busy = False
            self._due_s = time.monotonic() + (RETRY_S if found.away else REFRESH_S)

    def _refreshed(self) -> StoreView:
        problems, away = tuple[str, ...](), ""
        if self._store is not None:
            try:
                problems = self._catalogue.refresh(self._progress)
            except StoreError as error:
                if not self._catalogue.is_indexed():
                    raise
                problems, away = self._view.problems, str(error)
        rows = tuple(self._catalogue.find())
        as_of_s = self._view.as_of_s if away else time.time()
        return replace(self._view, rows=rows, known=True, problems=problems, away=away, read=(0, 0), as_of_s=as_of_s)

    def _progress(self, done: int, total: int) -> None:
        if not self._view.known and (done % _PROGRESS_EVERY == 0 or done == total):
            with self._lock:
                self._view = replace(self._view, read=(done, total), version=f"reading-{done}-{total}")


NAMES = ("job", "run", "rank", "stage", "since", "reproduced", "profiler")
ANSWERS = ("yes", "partly", "no")
PROFILERS = ("torch", "nsys", "stacks")
MAX_TEXT = 300

PAGE_SIZE = 50
MAX_SUGGESTED = 200
"""Jobs, runs and stages suggested by each field."""
MAX_BESIDE = 12
"""Other captures of its run that a capture's page links."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The filter of an address: its non-empty ``texts`` by field, their query, and why some are ignored."""

    texts: Mapping[str, str]
    captures: CaptureQuery
    problems: Mapping[str, str]

    @property
    def query(self) -> str:
        return urlencode(self.texts)


def filter_of(query: Mapping[str, str], now: datetime) -> Filter:
    """The filter of an address's query."""
    texts = {name: text for name in NAMES if (text := query.get(name, "").strip()[:MAX_TEXT])}
    problems: dict[str, str] = {}
    rank = texts.get("rank", "")
    if rank and not (rank.isascii() and rank.isdecimal() and int(rank) < 2**31):
        problems["rank"] = "rank must be a whole number"
    for name, known in (("reproduced", ANSWERS), ("profiler", PROFILERS)):
        if texts.get(name, known[0]) not in known:
            problems[name] = f"{name} must be one of {', '.join(known)}"
    since = None
    if "since" in texts:
        try:
            since = since_of(texts["since"], now)
        except UsageError as error:
            problems["since"] = str(error).removeprefix("--")
    valid = {name: text for name, text in texts.items() if name not in (*problems, "rank", "since")}
    captures = CaptureQuery(
        **valid,  # type: ignore[arg-type]  # all text
        rank=int(rank) if rank and "rank" not in problems else None,
        since=since,
    )
    return Filter(texts, captures, problems)


class StorePage(Page[StoreSource]):
    """The page about a store. A capture's address is its key: job, run and id."""

    layout = "store_base.html"
    _stacks = StackDownloads()

    def _routes(self) -> list[Route]:
        return [
            Route("/", self._captures),
            Route("/captures/{job}/{run}/{capture_id}", self._capture),
            Route(
                "/captures/{job}/{run}/{capture_id}/files/{name}",
                lambda request: file_of(request, *self._found(request)),
            ),
            Route(
                f"/captures/{{job}}/{{run}}/{{capture_id}}/{FOLDED_NAME}",
                lambda request: self._stacks.folded(*self._found(request)),
            ),
        ]

    def version(self) -> str:
        return self._source.view().version

    @property
    def blank(self) -> StoreView:
        return StoreView(self._source.place)

    def _captures(self, request: Request) -> Response:
        view = self._source.view()
        chosen = filter_of(request.query_params, datetime.fromtimestamp(self._now_s(), timezone.utc))
        with reading_stored():
            rows = self._source.find(chosen.captures)
        pages = max(1, -(-len(rows) // PAGE_SIZE))
        number = min(max(page_number(request), 1), pages)
        return self.html(
            "store.html",
            view,
            chosen=chosen,
            rows=[(_link(row), row) for row in rows[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]],
            found=len(rows),
            number=number,
            pages=pages,
            suggested={name: view.names(name)[:MAX_SUGGESTED] for name in ("job", "run", "stage")},
            answers=ANSWERS,
            profilers=PROFILERS,
        )

    def _capture(self, request: Request) -> Response:
        manifest, store = self._found(request)
        with reading_stored():
            of_run = self._source.find(CaptureQuery(job=manifest.job, run=manifest.run))
        others = [(_link(row), row) for row in of_run if row.capture_id != manifest.capture_id]
        return self.html(
            "capture.html",
            self._source.view(),
            layout="store_base.html",
            address=_address(CaptureKey.of(manifest)),
            manifest=manifest,
            bars=bars_of(manifest.findings),
            decision=None,
            tracks=tracks_of(manifest.recorded),
            flames=self._stacks.drawn(manifest, store, self._captured_with(manifest, of_run), request.query_params),
            hang=hang_rows_of(store, manifest),
            cost=manifest.cost,
            upload=None,
            store=store.place if self._source.shared else self._source.place,
            beside=others[:MAX_BESIDE],
        )

    def _captured_with(self, manifest: Manifest, of_run: Sequence[CaptureRow]) -> Iterator[tuple[Manifest, Store]]:
        """The other captures that the same window led to, each read when it is needed."""
        window = manifest.trigger.window
        for row in of_run:
            of_window = (row.window_first_step, row.window_last_step) == (window.first_step, window.last_step)
            if of_window and row.capture_id != manifest.capture_id:
                with contextlib.suppress(SftriageError):
                    yield self._source.capture(CaptureKey(row.job, row.run, row.capture_id))

    def _found(self, request: Request) -> tuple[Manifest, Store]:
        names = request.path_params
        try:
            place = CaptureKey.parse(f"{names['job']}/{names['run']}/{names['capture_id']}")
        except InputError as error:
            raise HTTPException(404, "There is no such capture.") from error
        with reading_stored():
            return self._source.capture(place)


def _address(place: CaptureKey) -> str:
    return f"/captures/{quote(place.key)}"


def _link(row: CaptureRow) -> str:
    try:
        return _address(CaptureKey(row.job, row.run, row.capture_id))
    except InputError:
        return "/"


@contextlib.contextmanager
def capture_page(
    store: Store, reference: str, out: Path | None, stopping: threading.Event, copying: Copying
) -> Iterator[tuple[ASGIApp, str, str, Path]]:
    """An application about one capture, the capture's address in it, its trace's name, and the verified trace.

    A capture of a remote store is fetched first, for the duration of the block. A copy of its trace is left at ``out``.
    ``stopping`` ends event streams. Raises IntegrityError if a file of the capture is damaged, and StoreError.
    """
    access = Access.to(HOST, None, "")
    manifest, condition = store.look(reference)
    if not condition.whole:
        raise IntegrityError(condition.problem)
    key, name = CaptureKey.of(manifest).key, manifest.artefacts[0].name
    target = None if out is None else destination_of(f"{manifest.capture_id}-{name}", out, force=False)
    if isinstance(store, LocalStore):
        if target is not None:
            store.get(reference, name, target)
        directory = RunDirectory(Path(store.place).parent)
        app = RunPage(RunSource(lambda: directory), access, stopping=stopping).app
        yield app, f"captures/{manifest.capture_id}", name, target or store.path(reference, name)
        return
    with _fetched(store, reference, manifest, copying) as (copy, root):
        if target is not None:
            copy.get(key, name, target)
        source = StoreSource(Catalogue(root / "catalogue.db", copy), copy, lambda _: copy, place=store.place)
        app = StorePage(source, access, stopping=stopping).app
        yield app, f"captures/{key}", name, target or root / key / name


@contextlib.contextmanager
def _fetched(store: Store, reference: str, manifest: Manifest, copying: Copying) -> Iterator[tuple[Store, Path]]:
    """A temporary local store with a verified copy of a capture."""
    from sftriage.traces.remote import RemoteStore

    with tempfile.TemporaryDirectory(prefix="sftriage-open-") as name:
        root = Path(name)
        place = root / CaptureKey.of(manifest).key
        place.mkdir(parents=True, mode=0o700)
        for artefact in manifest.artefacts:
            with copying(artefact.name, artefact.size_bytes) as progress:
                store.get(reference, artefact.name, place / artefact.name, progress=progress)
        with private(place / MANIFEST_NAME) as file:
            file.write(manifest.to_json())
        yield RemoteStore.open(root.as_uri()), root
