"""What all pages have in common: templates, their own files, events and refusals.

Templates escape every value: a stage may be called anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from sftriage import __version__
from sftriage.errors import CatalogueError, InputError, IntegrityError, StoreError, UsageError
from sftriage.web.access import Access
from sftriage.web.app import application
from sftriage.words.advice import remedy_told
from sftriage.words.amounts import ago, clock_time, lasted, moment, size
from sftriage.words.captures import CONTROL_PART, caused, choice_words, stage_suspected
from sftriage.words.glance import LABEL_MEANINGS, OUTCOME_MEANINGS, QUESTIONS
from sftriage.words.keeping import disk_now, disk_sentence, pause_sentence, ring_sentence, triage_off

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


COLOURS = 12
"""Stages have so many colours; the next ones begin again."""

OUTCOME_WORDS = {"capture": "captured", "hold": "held", "throttle": "throttled", "ignore": "ignored"}
NOTE_WORDS = {
    "ask": "asked for",
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
    "accepted": "is about to begin",
    "armed": "is about to begin",
    "running": "is under way",
    "stored": "done",
    "failed": "failed",
    "refused": "was refused",
    "expired": "was given up",
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
        remedy_told=remedy_told,
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
        disk_now=disk_now,
        disk_sentence=disk_sentence,
        ring_sentence=ring_sentence,
        pause_sentence=pause_sentence,
        triage_off=triage_off,
        questions=QUESTIONS,
        label_meanings=LABEL_MEANINGS,
        outcome_meanings=OUTCOME_MEANINGS,
        ago=lambda time_s: ago(time_s, now_s()),
    )
    return environment


def milliseconds(seconds: float) -> str:
    """A duration, with three figures that count."""
    ms = seconds * 1e3
    if ms >= 1e4:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def percent(fraction: float) -> str:
    """A share."""
    return f"{fraction:.0%}" if fraction >= 0.1 or fraction == 0 else f"{fraction:.1%}"
