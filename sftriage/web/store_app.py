"""The page about a store of many jobs and runs: what is answered at which address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.access import Access
from sftriage.errors import InputError
from sftriage.traces.keys import Place
from sftriage.traces.manifest import Manifest
from sftriage.traces.rows import Wanted
from sftriage.traces.stores import Store
from sftriage.web.answers import Answers, reading_stored
from sftriage.web.downloads import download, pieces_of
from sftriage.web.filters import SinceOf, filter_of
from sftriage.web.static_files import load_static
from sftriage.web.store_pages import StorePages
from sftriage.web.store_source import StoreSource


class _StoreAnswers(Answers):
    """The addresses of the page. A capture's is its key: job and run as they are written there, and its id."""

    def __init__(
        self, source: StoreSource, since_of: SinceOf, now_s: Callable[[], float], stopping: threading.Event
    ) -> None:
        static = load_static()
        self._source, self._since_of, self._now_s = source, since_of, now_s
        self._pages = StorePages({name: one.version for name, one in static.items()}, source.place, now_s)
        super().__init__(static, self._pages.refused, self._changed, stopping)

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
        number = request.query_params.get("page", "1")
        page = int(number) if number.isdecimal() and len(number) < 10 else 1
        with reading_stored():
            rows = self._source.find(asked.wanted)
        return HTMLResponse(self._pages.captures(view, asked, rows, page))

    def capture(self, request: Request) -> Response:
        """One capture."""
        with reading_stored():
            manifest, store = self._found(request)
            of_run = self._source.find(Wanted(job=manifest.job, run=manifest.run))
        return HTMLResponse(self._pages.capture(self._source.view(), manifest, self._source.place_of(store), of_run))

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


def create_store_app(
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
    answers = _StoreAnswers(source, since_of, now_s, stopping or threading.Event())
    return answers.app(answers.routes(), access)
