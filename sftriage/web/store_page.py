"""The page about a store of many jobs and runs: what is answered at which address, and its HTML."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.errors import InputError, UsageError
from sftriage.traces.keys import Place
from sftriage.traces.manifest import Manifest
from sftriage.traces.rows import CaptureRow, Wanted
from sftriage.traces.stores import Store
from sftriage.web.access import Access
from sftriage.web.charts import bars_of
from sftriage.web.downloads import download, pieces_of
from sftriage.web.page import Page, load_static, page_number, reading_stored
from sftriage.web.rendering import Templates
from sftriage.web.store_source import StoreSource, StoreView

NAMES = ("job", "run", "rank", "stage", "since", "reproduced", "profiler")
ANSWERS = ("yes", "partly", "no")
PROFILERS = ("torch", "nsys", "stacks")
MAX_TEXT = 300

SinceOf = Callable[[str, datetime], datetime]
"""The moment that a person means by ``2h`` or ``2026-11-20``; raises UsageError if it is none."""

PAGE_SIZE = 50
MAX_OFFERED = 200
"""Jobs, runs and stages that a field offers."""

MAX_BESIDE = 12
"""Other captures of a run that its captures' pages lead to."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What is asked for.

    Attributes:
        texts: what was typed, by name; what was left empty is not among them.
        wanted: what it means.
        problems: what means nothing, in words, by name. It is passed over.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=Wanted)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def query(self) -> str:
        """The filter as part of an address."""
        return urlencode(self.texts)


def filter_of(query: Mapping[str, str], since_of: SinceOf, now: datetime) -> Filter:
    """What an address asks for."""
    texts = {name: text for name in NAMES if (text := query.get(name, "").strip()[:MAX_TEXT])}
    problems: dict[str, str] = {}
    rank = texts.get("rank", "")
    if rank and not (rank.isascii() and rank.isdecimal() and int(rank) < 2**31):
        problems["rank"] = "a rank is a whole number"
    for name, known in (("reproduced", ANSWERS), ("profiler", PROFILERS)):
        if texts.get(name, known[0]) not in known:
            problems[name] = f"{name} is one of {', '.join(known)}"
    since = None
    if "since" in texts:
        try:
            since = since_of(texts["since"], now)
        except UsageError as error:
            problems["since"] = str(error).removeprefix("--")
    said = {name: texts[name] for name in ("job", "run", "stage", "reproduced", "profiler") if name in texts}
    wanted = Wanted(
        **{name: text for name, text in said.items() if name not in problems},  # type: ignore[arg-type]  # all text
        rank=int(rank) if rank and "rank" not in problems else None,
        since=since,
    )
    return Filter(texts, wanted, problems)


class StoreHtml:
    """Makes the pages about a store.

    Args:
        static: see `Templates`.
        place: where the store is.
        now_s: see `Templates`.
    """

    def __init__(self, static: Mapping[str, str], place: str, now_s: Callable[[], float]) -> None:
        self._templates, self._place = Templates(static, now_s), place

    def captures(self, view: StoreView, asked: Filter, rows: Sequence[CaptureRow], number: int) -> str:
        """A page of the captures that are asked for; a number past the end is the last page."""
        pages = max(1, -(-len(rows) // PAGE_SIZE))
        number = min(max(number, 1), pages)
        shown = rows[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        return self._made(
            "store.html",
            view,
            asked=asked,
            rows=[(_link(row), row) for row in shown],
            found=len(rows),
            number=number,
            pages=pages,
            jobs=view.names("job")[:MAX_OFFERED],
            runs=view.names("run")[:MAX_OFFERED],
            stages=view.names("stage")[:MAX_OFFERED],
            answers=ANSWERS,
            profilers=PROFILERS,
        )

    def capture(self, view: StoreView, manifest: Manifest, store: str, of_run: Sequence[CaptureRow]) -> str:
        """One capture; ``store`` is where it lies, and ``of_run`` the captures of its run."""
        others = [(_link(row), row) for row in of_run if row.capture_id != manifest.capture_id]
        return self._made(
            "capture.html",
            view,
            layout="store_base.html",
            address=address_of(Place.of(manifest)),
            manifest=manifest,
            bars=bars_of(manifest.findings),
            asked=None,
            lanes=None,
            cost=manifest.cost,
            upload=None,
            store=store,
            beside=others[:MAX_BESIDE],
        )

    def refused(self, status: int, detail: str) -> str:
        """A request that is not answered."""
        view = StoreView(self._place)
        return self._made("refused.html", view, layout="store_base.html", title=f"{status}", detail=detail)

    def _made(self, template: str, view: StoreView, **values: Any) -> str:
        return self._templates.made(template, view=view, **values)


def address_of(place: Place) -> str:
    """Where the page of a capture is: its key, whose own escapes are escaped once more."""
    return f"/captures/{quote(place.key)}"


def _link(row: CaptureRow) -> str:
    try:
        return address_of(Place(row.job, row.run, row.capture_id))
    except InputError:
        return "/"


class _StorePage(Page):
    """The addresses of the page. A capture's is its key: job and run as they are written there, and its id."""

    def __init__(
        self, source: StoreSource, since_of: SinceOf, now_s: Callable[[], float], stopping: threading.Event
    ) -> None:
        static = load_static()
        self._source, self._since_of, self._now_s = source, since_of, now_s
        self._html = StoreHtml({name: one.version for name, one in static.items()}, source.place, now_s)
        super().__init__(static, self._html.refused, self._changed, stopping)

    def routes(self) -> list[Route]:
        """What is answered."""
        return [
            Route("/", self.captures),
            Route("/captures/{job}/{run}/{capture_id}", self.capture),
            Route("/captures/{job}/{run}/{capture_id}/files/{name}", self.artefact),
        ]

    def _changed(self) -> dict[str, Any]:
        view = self._source.view()
        return {"version": view.version, "captures": len(view.rows)}

    def captures(self, request: Request) -> Response:
        """The captures that are asked for."""
        view = self._source.view()
        asked = filter_of(request.query_params, self._since_of, datetime.fromtimestamp(self._now_s(), timezone.utc))
        with reading_stored():
            rows = self._source.find(asked.wanted)
        return HTMLResponse(self._html.captures(view, asked, rows, page_number(request)))

    def capture(self, request: Request) -> Response:
        """One capture."""
        with reading_stored():
            manifest, store = self._found(request)
            of_run = self._source.find(Wanted(job=manifest.job, run=manifest.run))
        return HTMLResponse(self._html.capture(self._source.view(), manifest, self._source.place_of(store), of_run))

    def artefact(self, request: Request) -> Response:
        """One file of a capture, as it is stored."""
        with reading_stored():
            manifest, store = self._found(request)
            try:
                artefact = manifest.artefact(request.path_params["name"])
            except InputError as error:
                raise HTTPException(404, "The capture has no such file.") from error
            return download(manifest, artefact, pieces_of(store, manifest, artefact), head=request.method == "HEAD")

    def _found(self, request: Request) -> tuple[Manifest, Store]:
        names = request.path_params
        try:
            place = Place.parse(f"{names['job']}/{names['run']}/{names['capture_id']}")
        except InputError as error:
            raise HTTPException(404, "There is no such capture.") from error
        return self._source.capture(place)


def store_app(
    source: StoreSource,
    access: Access,
    since_of: SinceOf,
    now_s: Callable[[], float] = time.time,
    stopping: threading.Event | None = None,
) -> ASGIApp:
    """The application for a store of many jobs and runs.

    Args:
        source: the store.
        access: who may look.
        since_of: what a person means by a moment.
        now_s: seconds since the epoch.
        stopping: once it is set, event streams end.
    """
    page = _StorePage(source, since_of, now_s, stopping or threading.Event())
    return page.app(page.routes(), access)
