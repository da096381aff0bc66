"""What all pages have in common: templates, their own files, events, refusals, and downloads.

Templates escape every value: a stage may be called anything. A download is verified on its way, piece by piece, and its
last piece is handed out only once the sum of all is right: what is stored may be damaged, and then what the browser
has stays a download that was cut short, and is never taken for the trace.
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
from sftriage.runs.summary import RunSummary
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
    """What is the same whatever is shown. What reads from disk runs in a thread of its own: nobody waits for another.

    Args:
        source: what is shown.
        access: who may look.
        now_s: seconds since the epoch, for what the page says of how long ago something was.
        stopping: once it is set, event streams end.

    Attributes:
        layout: the template that a refusal is laid out by, on the view that is ``blank``.
        root: where its addresses begin.
        app: the application.
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
        # No path is ever made of what a request says.
        there = files("sftriage.web").joinpath("static").iterdir()
        self._static = {one.name: one.read_bytes() for one in there if PurePath(one.name).suffix in MEDIA_TYPES}
        # The address changes with the content, so that browsers may keep it.
        versions = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in self._static.items()}
        self._templates = templates({name: f"/static/{name}?v={one}" for name, one in versions.items()}, now_s)
        self._streams = 0
        ours = [Route("/events", self.events), Route("/static/{name}", self.static)]
        self.app = application([*self._routes(), *ours], access, self.refused)

    @abstractmethod
    def _routes(self) -> Sequence[BaseRoute]:
        """What is answered, beside what every page answers."""

    @abstractmethod
    def version(self) -> str:
        """What changes with whatever a page shows."""

    def html(self, template: str, view: object, status_code: int = 200, **values: Any) -> Response:
        around = {"now_s": self._now_s(), "root": self.root, **self._around(view)}
        return HTMLResponse(self._templates.get_template(template).render(view=view, **around, **values), status_code)

    def _around(self, view: Any) -> Mapping[str, Any]:
        """What every page shows beside the view: its ``version``, and the ``runs`` that there are to choose from."""
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
        """A refusal, as a page of ours; in plain text where a program asks."""
        if request.url.path.removeprefix(self.root).startswith(("/events", "/static", "/heat")):
            return PlainTextResponse(f"{detail}\n", status)
        return self.refusal(self.blank, status, str(status), detail)

    def refusal(self, view: object, status: int, title: str, detail: str) -> Response:
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


COLOURS = 12
"""Colours of stages; further stages begin again with the first."""

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
    """The templates as they lie there: as if their page were the only one. Its links begin where its addresses do."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool] | None]:
        source, name, is_same = super().get_source(environment, template)
        return _LINK.sub(r'\1="{{ root }}/', source), name, is_same


def templates(static: Mapping[str, str], now_s: Callable[[], float]) -> Environment:
    """The templates, with the filters and names that they use.

    Args:
        static: the addresses of the page's own files, by name.
        now_s: seconds since the epoch.
    """
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
        sentence=sentence,
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
        label_meanings=run.LABEL_MEANINGS,
        outcome_meanings=run.OUTCOME_MEANINGS,
        ago=lambda time_s: ago(time_s, now_s()),
    )
    return environment


def sentence(summary: RunSummary) -> str:
    """The sentence of a run below its headline, without the headline's word at its beginning."""
    words = summary.sentence.removeprefix(f"{summary.headline}: ")
    return words[:1].upper() + words[1:]


def milliseconds(seconds: float) -> str:
    """A duration with three significant figures."""
    ms = seconds * 1e3
    if ms >= 1e4:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def percent(fraction: float) -> str:
    """A share."""
    return f"{fraction:.0%}" if fraction >= 0.1 or fraction == 0 else f"{fraction:.1%}"


class Download(StreamingResponse):
    """A file that is verified as it goes."""

    async def stream_response(self, send: Send) -> None:
        """Send it; what turns out to be wrong, or cannot be read on, is cut short."""
        try:
            await super().stream_response(send)
        except SftriageError as error:
            # The answer stays without its end, so the server cuts the connection, and the browser says so.
            log.warning("a download was cut short: %s", error)


def file_of(request: Request, manifest: Manifest, store: Store) -> Response:
    """The requested file of a capture, as it is stored; a refusal, if its beginning cannot be read."""
    try:
        artefact = manifest.artefact(request.path_params["name"])
    except InputError as error:
        raise HTTPException(404, "The capture has no such file.") from error
    checksum = base64.b64encode(bytes.fromhex(artefact.sha256)).decode()
    headers = {
        "Content-Length": str(artefact.size_bytes),
        # Both are plain file names: see `CAPTURE_ID` and `manifest.FileName`.
        "Content-Disposition": f'attachment; filename="{manifest.capture_id}-{artefact.name}"',
        "Repr-Digest": f"sha-256=:{checksum}:",
    }
    if request.method == "HEAD":
        return Response(media_type="application/octet-stream", headers=headers)
    with reading_stored():
        checked = store.content(manifest, artefact)
        # A fault in the beginning gets a refusal, not a download that is cut short.
        first = next(checked)
    return Download(chain((first,), checked), media_type="application/octet-stream", headers=headers)
