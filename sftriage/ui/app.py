"""The web application: what is answered at which address. Pages are put together from what the other modules give."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.errors import InputError, IntegrityError
from sftriage.records import CAPTURE_ID
from sftriage.traces import Manifest
from sftriage.ui.captures import Damaged
from sftriage.ui.guard import Access, Guard
from sftriage.ui.lateness import HeatMap
from sftriage.ui.pages import Pages
from sftriage.ui.source import Drawing, RunSource, View
from sftriage.ui.span import Span
from sftriage.ui.static_files import load_static

POLL_S = 0.5
HEARTBEAT_S = 15.0
MAX_STREAMS = 64
HEAT_PATIENCE_S = 1.0
"""How long a page waits for its heat map. It is shown without, and brought up to date when the map is there."""

_CHUNK_BYTES = 1 << 18


@dataclass(slots=True)
class _Streams:
    """How many pages listen for events."""

    open: int = 0


class _Answers:
    """The addresses of the page. What reads from disk runs in a thread of its own, so that nobody waits for another."""

    def __init__(self, source: RunSource, now_s: Callable[[], float], stopping: threading.Event) -> None:
        self._source = source
        self._stopping = stopping
        self._static = load_static()
        self._pages = Pages({name: one.version for name, one in self._static.items()}, now_s)
        self._streams = _Streams()

    def routes(self) -> list[Route]:
        """What is answered."""
        return [
            Route("/", self.overview),
            Route("/decisions", self.decisions),
            Route("/heat.png", self.heat_picture),
            Route("/heat.bin", self.heat_levels),
            Route("/captures/{capture_id}", self.capture),
            Route("/captures/{capture_id}/files/{name}", self.artefact),
            Route("/events", self.events),
            Route("/static/{name}", self.static),
        ]

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
        control = next((one.rank for one in row.asked if one.role == "control"), None) if row else None
        if found.findings is not None and found.findings.control is not None:
            control = found.findings.control.rank
        lanes = self._source.beside(found, row.attempt if row else 0, control)
        return HTMLResponse(self._pages.capture(view, found, row, lanes))

    def artefact(self, request: Request) -> Response:
        """One file of a capture, as it is stored."""
        _, manifest = self._capture(request, self._source.view())
        if not isinstance(manifest, Manifest):
            raise HTTPException(404 if manifest is None else 422, "There is no such capture, or it is damaged.")
        name = request.path_params["name"]
        try:
            file = self._source.shelf.open(manifest, name)
        except InputError as error:
            raise HTTPException(404, "The capture has no such file.") from error
        except IntegrityError as error:
            raise HTTPException(422, "The file is missing, or not what the manifest says.") from error
        artefact = manifest.artefact(name)
        digest = base64.b64encode(bytes.fromhex(artefact.sha256)).decode()
        headers = {
            "Content-Length": str(artefact.size_bytes),
            # Both are plain file names: see `CAPTURE_ID` and `manifest.FileName`.
            "Content-Disposition": f'attachment; filename="{manifest.capture_id}-{artefact.name}"',
            "Repr-Digest": f"sha-256=:{digest}:",
        }
        if request.method == "HEAD":
            file.close()
            return Response(media_type="application/octet-stream", headers=headers)
        return StreamingResponse(
            _chunks(file, artefact.size_bytes), media_type="application/octet-stream", headers=headers
        )

    async def events(self, request: Request) -> Response:
        """Says whenever something has changed, as long as the page listens."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._streams.open >= MAX_STREAMS:
            raise HTTPException(503, "Too many pages listen already.", {"Retry-After": "30"})
        return StreamingResponse(self._changes(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _changes(self) -> AsyncIterator[str]:
        self._streams.open += 1
        try:
            said, silent_s = "", 0.0
            yield "retry: 2000\n\n"
            while not self._stopping.is_set():
                view = await run_in_threadpool(self._source.view)
                if view.version != said:
                    said, silent_s = view.version, 0.0
                    body = {"version": view.version, "windows": len(view.rows), "captures": len(view.captures)}
                    yield f"event: change\nid: {view.version}\ndata: {json.dumps(body)}\n\n"
                elif silent_s >= HEARTBEAT_S:
                    silent_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(POLL_S)
                silent_s += POLL_S
        finally:
            self._streams.open -= 1

    def static(self, request: Request) -> Response:
        """One of the page's own files."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "There is no such file.")
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(found.content, media_type=found.media_type, headers=headers)

    def _capture(self, request: Request, view: View) -> tuple[str, Manifest | Damaged | None]:
        capture_id = request.path_params["capture_id"]
        if not CAPTURE_ID.fullmatch(capture_id):
            raise HTTPException(404, "There is no such capture.")
        return capture_id, self._source.capture(capture_id)

    def failed(self, request: Request, error: Exception) -> Response:
        """A refusal, as a page of ours."""
        status, detail, headers = 500, "The page could not be made.", None
        if isinstance(error, HTTPException):
            status, detail, headers = error.status_code, error.detail, error.headers
        if request.url.path.startswith(("/events", "/static", "/heat")):
            return PlainTextResponse(f"{detail}\n", status, dict(headers or {}))
        return HTMLResponse(self._pages.refused(status, detail), status, dict(headers or {}))


def _chunks(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """What was promised of a file, and no more should it grow."""
    with file:
        while size_bytes and (chunk := file.read(min(_CHUNK_BYTES, size_bytes))):
            size_bytes -= len(chunk)
            yield chunk


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
    answers = _Answers(source, now_s, stopping or threading.Event())
    handlers: dict[Any, Any] = {HTTPException: answers.failed, Exception: answers.failed}
    app = Starlette(routes=answers.routes(), exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, access)
