"""The page about a run: what is answered at which address. Pages are put together from what the other modules give."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.access import Access
from sftriage.errors import InputError
from sftriage.records import CAPTURE_ID
from sftriage.runs.captures import Damaged
from sftriage.runs.lateness import HeatMap
from sftriage.runs.source import Drawing, RunSource, View
from sftriage.runs.span import Span
from sftriage.traces.manifest import Manifest
from sftriage.web.answers import Answers, reading_stored
from sftriage.web.downloads import download, pieces_of
from sftriage.web.pages import Pages
from sftriage.web.static_files import load_static

HEAT_PATIENCE_S = 1.0
"""How long a page waits for its heat map. It is shown without, and brought up to date when the map is there."""


class _RunAnswers(Answers):
    """The addresses of the page. What reads from disk runs in a thread of its own, so that nobody waits for another."""

    def __init__(self, source: RunSource, now_s: Callable[[], float], stopping: threading.Event) -> None:
        static = load_static()
        self._source = source
        self._pages = Pages({name: one.version for name, one in static.items()}, now_s)
        super().__init__(static, self._pages.refused, self._changed, stopping)

    def routes(self) -> list[Route]:
        """What is answered."""
        return [
            Route("/", self.overview),
            Route("/decisions", self.decisions),
            Route("/heat.png", self.heat_picture),
            Route("/heat.bin", self.heat_levels),
            Route("/captures/{capture_id}", self.capture),
            Route("/captures/{capture_id}/files/{name}", self.artefact),
        ]

    def _changed(self) -> dict[str, Any]:
        view = self._source.view()
        return {"version": view.version, "windows": len(view.rows), "captures": len(view.captures)}

    def overview(self, request: Request) -> Response:
        """How the job stands."""
        view, span = self._source.view(), Span.of(request.query_params)
        rows = span.select(view.rows)
        steps = span.heat_steps(rows)
        heat = None if steps is None else self._source.heat(*steps, patience_s=HEAT_PATIENCE_S)
        return HTMLResponse(self._pages.overview(view, span, rows, heat))

    def decisions(self, request: Request) -> Response:
        """All that was decided."""
        outcome = request.query_params.get("outcome", "")
        number = request.query_params.get("page", "1")
        page = int(number) if number.isdecimal() and len(number) < 10 else 1
        return HTMLResponse(self._pages.decisions(self._source.view(), outcome, page))

    def heat_picture(self, request: Request) -> Response:
        """The heat map as a picture."""
        return Response(self._heat(request).png(), media_type="image/png")

    def heat_levels(self, request: Request) -> Response:
        """The heat map's cells, row by row, a byte each."""
        return Response(self._heat(request).levels_GC.tobytes(), media_type="application/octet-stream")

    def _heat(self, request: Request) -> HeatMap:
        view, span = self._source.view(), Span.of(request.query_params)
        steps = span.heat_steps(span.select(view.rows))
        heat = None if steps is None else self._source.heat(*steps)
        if isinstance(heat, Drawing):
            raise HTTPException(503, "Too many maps are asked for.", {"Retry-After": "5"})
        if heat is None:
            raise HTTPException(404, "No step has been recorded yet.")
        return heat

    def capture(self, request: Request) -> Response:
        """One capture."""
        view = self._source.view()
        capture_id, found = self._capture(request, view)
        if isinstance(found, Damaged):
            return HTMLResponse(self._pages.damaged(view, found), 422)
        row = view.asked_by(capture_id)
        if found is None:
            if row is None:
                raise HTTPException(404, "There is no such capture.")
            return HTMLResponse(self._pages.lost(view, capture_id, row))
        attempt = row.attempt if row else 0
        control = next((one.rank for one in row.asked if one.role == "control"), None) if row else None
        if found.findings is not None and found.findings.control is not None and found.findings.beside == "rank":
            control = found.findings.control.rank
        return HTMLResponse(self._pages.capture(view, found, row, self._source.beside(found, attempt, control)))

    def artefact(self, request: Request) -> Response:
        """One file of a capture, as it is stored."""
        _, manifest = self._capture(request, self._source.view())
        if not isinstance(manifest, Manifest):
            raise HTTPException(404 if manifest is None else 422, "There is no such capture, or it is damaged.")
        try:
            artefact = manifest.artefact(request.path_params["name"])
        except InputError as error:
            raise HTTPException(404, "The capture has no such file.") from error
        with reading_stored():
            pieces = pieces_of(self._source.store, manifest, artefact)
            return download(manifest, artefact, pieces, head=request.method == "HEAD")

    def _capture(self, request: Request, view: View) -> tuple[str, Manifest | Damaged | None]:
        capture_id = request.path_params["capture_id"]
        if not CAPTURE_ID.fullmatch(capture_id):
            raise HTTPException(404, "There is no such capture.")
        return capture_id, self._source.capture(capture_id)


def create_app(
    source: RunSource,
    access: Access,
    now_s: Callable[[], float] = time.time,
    stopping: threading.Event | None = None,
) -> ASGIApp:
    """The application for one run.

    Args:
        source: the run.
        access: who may look.
        now_s: seconds since the epoch, for what the page says of how long ago something was.
        stopping: once it is set, event streams end.
    """
    answers = _RunAnswers(source, now_s, stopping or threading.Event())
    return answers.app(answers.routes(), access)
