"""What the page about a run and the page about a store have in common: their own files, their events, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from sftriage.errors import CatalogueError, InputError, IntegrityError, StoreError, UsageError
from sftriage.web.access import Access
from sftriage.web.app import application
from sftriage.web.rendering import templates

Source = TypeVar("Source")

POLL_S = 0.5
HEARTBEAT_S = 15.0
MAX_STREAMS = 64

MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Page(ABC, Generic[Source]):
    """What is the same whatever is shown. What reads from disk runs in a thread of its own: nobody waits for another.

    Args:
        source: what is shown.
        access: who may look.
        now_s: seconds since the epoch, for what the page says of how long ago something was.
        stopping: once it is set, event streams end.

    Attributes:
        layout: the template that a refusal is laid out by.
        app: the application.
    """

    layout: str
    root = ""
    """Where its addresses begin."""

    def __init__(
        self,
        source: Source,
        access: Access,
        now_s: Callable[[], float] = time.time,
        stopping: threading.Event | None = None,
    ) -> None:
        self._source, self._now_s, self._stopping = source, now_s, stopping or threading.Event()
        # No path is ever made of what a request says.
        there = files("sftriage.web").joinpath("static").iterdir()
        self._static = {one.name: one.read_bytes() for one in there if PurePath(one.name).suffix in MEDIA_TYPES}
        # The address changes with the content, so that browsers may keep it.
        versions = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in self._static.items()}
        self._templates = templates({name: f"/static/{name}?v={one}" for name, one in versions.items()}, now_s)
        self._streams = 0
        ours = [Route("/events", self.events), Route("/static/{name}", self.static)]
        self.app = application([*self.routes(), *ours], access, self.refused)

    @abstractmethod
    def routes(self) -> Sequence[BaseRoute]:
        """What is answered, beside what every page answers."""

    @abstractmethod
    def change(self) -> Mapping[str, Any]:
        """What there is by now; its ``version`` changes with whatever a page shows."""

    @abstractmethod
    def blank(self) -> object:
        """The view on which a refusal is shown."""

    def html(self, template: str, view: object, status_code: int = 200, **values: Any) -> Response:
        """A page made of a template."""
        around = {"now_s": self._now_s(), "root": self.root, **self.around(view)}
        return HTMLResponse(self._templates.get_template(template).render(view=view, **around, **values), status_code)

    def around(self, view: Any) -> Mapping[str, Any]:
        """What every page shows beside the view: its ``version``, and the ``runs`` that there are to choose from."""
        return {"version": view.version, "runs": None}

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
        name = request.path_params["name"]
        if name not in self._static:
            raise HTTPException(404, "There is no such file.")
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(self._static[name], media_type=MEDIA_TYPES[PurePath(name).suffix], headers=headers)

    def refused(self, request: Request, status: int, detail: str) -> Response:
        """A refusal, as a page of ours; in plain text where a program asks."""
        if request.url.path.removeprefix(self.root).startswith(("/events", "/static", "/heat")):
            return PlainTextResponse(f"{detail}\n", status)
        return self.refusal(self.blank(), status, str(status), detail)

    def refusal(self, view: object, status: int, title: str, detail: str) -> Response:
        """The page that says what is the matter."""
        return self.html("refused.html", view, status, layout=self.layout, title=title, detail=detail)


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
