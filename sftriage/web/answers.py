"""What every page of ours answers: its own files, its events, and refusals, as long as it is asked nicely."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.access import Access
from sftriage.errors import CatalogueError, InputError, IntegrityError, StoreError, UsageError
from sftriage.web.guard import Guard
from sftriage.web.static_files import StaticFile

POLL_S = 0.5
HEARTBEAT_S = 15.0
MAX_STREAMS = 64

Refusal = Callable[[int, str], str]
"""Makes the page that says a status, and what is the matter."""


@dataclass(slots=True)
class _Streams:
    """How many pages listen for events."""

    open: int = 0


class Answers:
    """What is the same whatever is shown.

    Args:
        static: the page's own files.
        refused: see `Refusal`.
        change: what has changed: its ``version`` is another one each time. It is called in a thread of its own.
        stopping: once it is set, event streams end.
    """

    def __init__(
        self,
        static: Mapping[str, StaticFile],
        refused: Refusal,
        change: Callable[[], Mapping[str, Any]],
        stopping: threading.Event,
    ) -> None:
        self._static = static
        self._refused = refused
        self._change = change
        self._stopping = stopping
        self._streams = _Streams()

    def app(self, routes: list[Route], access: Access) -> ASGIApp:
        """The application that answers at these addresses, and at those that are everybody's."""
        handlers: dict[Any, Any] = {HTTPException: self.failed, Exception: self.failed}
        ours = [Route("/events", self.events), Route("/static/{name}", self.static)]
        app = Starlette(routes=[*routes, *ours], exception_handlers=handlers)
        app.router.redirect_slashes = False
        return Guard(app, access)

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
                change = await run_in_threadpool(self._change)
                if change["version"] != said:
                    said, silent_s = change["version"], 0.0
                    yield f"event: change\nid: {said}\ndata: {json.dumps(change)}\n\n"
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

    def failed(self, request: Request, error: Exception) -> Response:
        """A refusal, as a page of ours."""
        status, detail, headers = 500, "The page could not be made.", None
        if isinstance(error, HTTPException):
            status, detail, headers = error.status_code, error.detail, error.headers
        if request.url.path.startswith(("/events", "/static", "/heat")):
            return PlainTextResponse(f"{detail}\n", status, dict(headers or {}))
        return HTMLResponse(self._refused(status, detail), status, dict(headers or {}))


@contextmanager
def reading_stored() -> Iterator[None]:
    """What is wrong with something stored, or keeps it from being read, as the refusal that it is."""
    try:
        yield
    except (StoreError, CatalogueError) as error:
        raise HTTPException(503, f"It cannot be reached now: {error}", {"Retry-After": "10"}) from error
    except UsageError as error:
        raise HTTPException(404, str(error)) from error
    except (InputError, IntegrityError) as error:
        raise HTTPException(422, str(error)) from error
