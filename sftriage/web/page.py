"""What the page about a run and the page about a store have in common: their own files, their events, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.errors import CatalogueError, InputError, IntegrityError, StoreError, UsageError
from sftriage.traces.manifest import Manifest
from sftriage.traces.stores import Store
from sftriage.web.access import Access
from sftriage.web.app import application
from sftriage.web.downloads import download, pieces_of
from sftriage.web.rendering import Templates

POLL_S = 0.5
HEARTBEAT_S = 15.0
MAX_STREAMS = 64

MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One of the page's own files. ``version`` changes with its content, so that browsers may keep it."""

    content: bytes
    media_type: str
    version: str


def load_static() -> dict[str, StaticFile]:
    """The files under ``static/`` of a known kind, by name. No path is ever made of what a request says."""
    found = {}
    for entry in files("sftriage.web").joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            content = entry.read_bytes()
            found[entry.name] = StaticFile(content, MEDIA_TYPES[suffix], hashlib.sha256(content).hexdigest()[:12])
    return found


class Page(ABC):
    """What is the same whatever is shown. What reads from disk runs in a thread of its own: nobody waits for another.

    Args:
        layout: the template that a refusal is laid out by.
        now_s: seconds since the epoch.
        stopping: once it is set, event streams end.
    """

    def __init__(self, layout: str, now_s: Callable[[], float], stopping: threading.Event) -> None:
        self._static, self._layout, self._stopping = load_static(), layout, stopping
        self._templates = Templates({name: one.version for name, one in self._static.items()}, now_s)
        self._streams = 0

    @abstractmethod
    def change(self) -> Mapping[str, Any]:
        """What there is by now; its ``version`` changes with whatever a page shows."""

    @abstractmethod
    def blank(self) -> object:
        """The view on which a refusal is shown."""

    def app(self, routes: list[Route], access: Access) -> ASGIApp:
        """The application that answers at these addresses, and at those that are every page's."""
        ours = [Route("/events", self.events), Route("/static/{name}", self.static)]
        return application([*routes, *ours], access, self.refused)

    def html(self, template: str, view: object, status_code: int = 200, **values: Any) -> Response:
        """A page made of a template."""
        return HTMLResponse(self._templates.made(template, view=view, **values), status_code)

    async def events(self, request: Request) -> Response:
        """Says whenever something has changed, as long as the page listens."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._streams >= MAX_STREAMS:
            raise HTTPException(503, "Too many pages listen already.", {"Retry-After": "30"})
        return StreamingResponse(self._changes(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _changes(self) -> AsyncIterator[str]:
        self._streams += 1
        try:
            said, silent_s = "", 0.0
            yield "retry: 2000\n\n"
            while not self._stopping.is_set():
                change = await run_in_threadpool(self.change)
                if change["version"] != said:
                    said, silent_s = change["version"], 0.0
                    yield f"event: change\nid: {said}\ndata: {json.dumps(change)}\n\n"
                elif silent_s >= HEARTBEAT_S:
                    silent_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(POLL_S)
                silent_s += POLL_S
        finally:
            self._streams -= 1

    def static(self, request: Request) -> Response:
        """One of the page's own files."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "There is no such file.")
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(found.content, media_type=found.media_type, headers=headers)

    def refused(self, request: Request, status: int, detail: str) -> Response:
        """A refusal, as a page of ours; in plain text where a program asks."""
        if request.url.path.startswith(("/events", "/static", "/heat")):
            return PlainTextResponse(f"{detail}\n", status)
        return self.refusal(self.blank(), status, f"{status}", detail)

    def refusal(self, view: object, status: int, title: str, detail: str) -> Response:
        """The page that says what is the matter."""
        return self.html("refused.html", view, status, layout=self._layout, title=title, detail=detail)


def page_number(request: Request) -> int:
    """Which page of a list is asked for, from 1 on; what is no number is the first."""
    number = request.query_params.get("page", "1")
    return int(number) if number.isdecimal() and len(number) < 10 else 1


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


def file_of(request: Request, manifest: Manifest, store: Store) -> Response:
    """The file of a capture that is asked for, as it is stored."""
    try:
        artefact = manifest.artefact(request.path_params["name"])
    except InputError as error:
        raise HTTPException(404, "The capture has no such file.") from error
    with reading_stored():
        return download(manifest, artefact, pieces_of(store, manifest, artefact), head=request.method == "HEAD")
