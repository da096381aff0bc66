"""The base of all pages: templates and their filters, static files, the event stream, error pages and downloads.

`run_page` and `store_page` subclass `Page`. Templates escape every value: a stage may have any name. A download is
verified while it is sent; its last piece is withheld unless the checksum is right, so that a browser never takes a
damaged file for a complete one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import chain
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Send

from sftriage import __version__
from sftriage.errors import CatalogueError, InputError, IntegrityError, SftriageError, StoreError, UsageError
from sftriage.runs.hangs import HEADINGS
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Store
from sftriage.web.serving import Access, application
from sftriage.words import run
from sftriage.words.decisions import CONTROL_PART, caused, choice_words, stage_suspected
from sftriage.words.verdicts import ago, clock_time, lasted, moment, size

log = logging.getLogger("sftriage")

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
    """An application with what all pages share. Handlers that read from disk run in threads.

    ``now_s`` returns seconds since the epoch, for ages; ``stopping`` ends event streams once set. ``layout`` is the
    base template of error pages, rendered with the empty view ``blank``, and ``root`` the prefix of its addresses.
    """

    layout: str
    blank: Any
    root = ""

    def __init__(
        self,
        source: Source,
        access: Access,
        now_s: Callable[[], float] = time.time,
        stopping: threading.Event | None = None,
    ) -> None:
        self._source, self._access, self._now_s = source, access, now_s
        self._stopping = stopping or threading.Event()
        # Read once, so that no path is built from a request.
        static = files("sftriage.web").joinpath("static").iterdir()
        self._static = {file.name: file.read_bytes() for file in static if PurePath(file.name).suffix in MEDIA_TYPES}
        # The address changes with the content, so that browsers may cache it forever.
        digests = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in self._static.items()}
        self._templates = templates({name: f"/static/{name}?v={digest}" for name, digest in digests.items()}, now_s)
        self._streams = 0
        common = [Route("/events", self.events), Route("/static/{name}", self.static)]
        self.app = application([*self._routes(), *common], access, self.refused)

    @abstractmethod
    def _routes(self) -> Sequence[BaseRoute]:
        """The routes beside the common ones."""

    @abstractmethod
    def version(self) -> str:
        """A text that changes whenever the page would."""

    def html(self, template: str, view: object, status_code: int = 200, **values: Any) -> Response:
        around = {"now_s": self._now_s(), "root": self.root, **self._around(view)}
        return HTMLResponse(self._templates.get_template(template).render(view=view, **around, **values), status_code)

    def _around(self, view: Any) -> Mapping[str, Any]:
        """The base template's values: the view's ``version``, and the ``runs`` to choose from."""
        return {"version": view.version, "runs": None}

    async def events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._streams >= MAX_STREAMS:
            raise HTTPException(503, "Too many pages are open already.", {"Retry-After": "30"})
        return StreamingResponse(self._changes(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _changes(self) -> AsyncIterator[str]:
        self._streams += 1
        try:
            sent, silent_s = "", 0.0
            yield "retry: 2000\n\n"
            while not self._stopping.is_set():
                version = await run_in_threadpool(self.version)
                if version != sent:
                    sent, silent_s = version, 0.0
                    yield f"event: change\nid: {sent}\ndata: {json.dumps({'version': sent})}\n\n"
                elif silent_s >= HEARTBEAT_S:
                    silent_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(POLL_S)
                silent_s += POLL_S
        finally:
            self._streams -= 1

    def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._static:
            raise HTTPException(404, "There is no such file.")
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(self._static[name], media_type=MEDIA_TYPES[PurePath(name).suffix], headers=headers)

    def refused(self, request: Request, status: int, detail: str) -> Response:
        """The response to an error: a page, or plain text for addresses that scripts fetch."""
        if request.url.path.removeprefix(self.root).startswith(("/events", "/static", "/heat")):
            return PlainTextResponse(f"{detail}\n", status)
        return self.refusal(self.blank, status, str(status), detail)

    def refusal(self, view: object, status: int, title: str, detail: str) -> Response:
        return self.html("refused.html", view, status, layout=self.layout, title=title, detail=detail)


def page_number(request: Request) -> int:
    """The requested page of a list, from 1; 1 if it is no number."""
    number = request.query_params.get("page", "1")
    return int(number) if number.isdecimal() and len(number) < 10 else 1


@contextmanager
def reading_stored() -> Iterator[None]:
    """Turn errors of stored data into HTTP errors."""
    try:
        yield
    except (StoreError, CatalogueError) as error:
        raise HTTPException(503, f"It cannot be reached now: {error}", {"Retry-After": "10"}) from error
    except UsageError as error:
        raise HTTPException(404, str(error)) from error
    except (InputError, IntegrityError) as error:
        raise HTTPException(422, str(error)) from error


COLOURS = 12
"""Number of stage colours; further stages reuse the first."""

OUTCOME_WORDS = {"capture": "captured", "hold": "held", "throttle": "throttled", "ignore": "ignored"}
NOTE_WORDS = {
    "ask": "requested",
    "beside": "after a capture",
    "cost": "cost",
    "cause": "cause",
    "remedy": "remedy",
    "policy": "policy",
    "evidence": "evidence",
    "taken_over": "taken over",
    "disk": "disk",
    "ring": "rank missing",
    "pause": "pause",
    "broken": "departure",
    "differences": "differs",
}
LABEL_WORDS = {"healthy": "healthy", "needs_evidence": "undecided", "suspect": "suspect", "stalled": "stalled"}
STATE_WORDS = {
    "accepted": "is starting",
    "armed": "is starting",
    "running": "is under way",
    "stored": "done",
    "failed": "failed",
    "refused": "was refused",
    "expired": "expired",
}


_LINK = re.compile(r"""\b(href|action|data-heat)="/""")


class _Rooted(PackageLoader):
    """Loads templates and puts a page's root before the absolute links in them."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool] | None]:
        source, name, is_same = super().get_source(environment, template)
        return _LINK.sub(r'\1="{{ root }}/', source), name, is_same


def templates(static: Mapping[str, str], now_s: Callable[[], float]) -> Environment:
    """The templates' environment; ``static`` has the addresses of static files by name."""
    environment = Environment(
        loader=_Rooted("sftriage.web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        milliseconds=milliseconds,
        lasted=lasted,
        signed=lambda seconds: f"{'-' if seconds < 0 else '+'}{milliseconds(abs(seconds))}",
        clock=clock_time,
        stamp=lambda time_s: moment(time_s).isoformat(timespec="seconds"),
        number=lambda value: f"{value:,}",
        percent=percent,
        size=size,
        choice_words=choice_words,
        stage_suspected=stage_suspected,
        caused=caused,
        event_sentence=run.event_sentence,
        below_headline=run.below_headline,
        colour=lambda number: number % COLOURS,
    )
    environment.globals.update(
        static=static,
        sftriage_version=__version__,
        outcome_words=OUTCOME_WORDS,
        note_words=NOTE_WORDS,
        label_words=LABEL_WORDS,
        state_words=STATE_WORDS,
        control_part=CONTROL_PART,
        disk_now=run.disk_now,
        triage_off=run.triage_off,
        questions=run.QUESTIONS,
        hang_headings=HEADINGS,
        time_row_name=run.time_row_name,
        time_row_detail=run.time_row_detail,
        label_meanings=run.LABEL_MEANINGS,
        outcome_meanings=run.OUTCOME_MEANINGS,
        ago=lambda time_s: ago(time_s, now_s()),
    )
    return environment


def milliseconds(seconds: float) -> str:
    """A duration with three significant figures."""
    ms = seconds * 1e3
    if ms >= 1e4:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def percent(fraction: float) -> str:
    """A share in percent."""
    return f"{fraction:.0%}" if fraction >= 0.1 or fraction == 0 else f"{fraction:.1%}"


class Download(StreamingResponse):
    """A file that is verified while it is sent, and cut short if it is damaged."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except SftriageError as error:
            # The response stays incomplete, so the server closes the connection and the browser reports a failure.
            log.warning("a download was cut short: %s", error)


def file_of(request: Request, manifest: Manifest, store: Store) -> Response:
    """The requested file of a capture; an HTTP error if its beginning cannot be read."""
    try:
        artefact = manifest.artefact(request.path_params["name"])
    except InputError as error:
        raise HTTPException(404, "The capture has no such file.") from error
    checksum = base64.b64encode(bytes.fromhex(artefact.sha256)).decode()
    headers = {
        "Content-Length": str(artefact.size_bytes),
        # Both are safe in a header: see `CAPTURE_ID` and `manifest.FileName`.
        "Content-Disposition": f'attachment; filename="{manifest.capture_id}-{artefact.name}"',
        "Repr-Digest": f"sha-256=:{checksum}:",
    }
    if request.method == "HEAD":
        return Response(media_type="application/octet-stream", headers=headers)
    with reading_stored():
        checked = store.content(manifest, artefact)
        # An error in the first piece gets an error page instead of a broken download.
        first = next(checked)
    return Download(chain((first,), checked), media_type="application/octet-stream", headers=headers)
