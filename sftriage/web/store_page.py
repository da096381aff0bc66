"""The page about a store of many jobs and runs: what is answered at which address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sftriage.errors import InputError, SftriageError, UsageError
from sftriage.runs.captures import since_of
from sftriage.runs.lanes import lanes_of
from sftriage.sampling.sampler import FOLDED_NAME
from sftriage.traces.databases import CaptureQuery, CaptureRow
from sftriage.traces.manifest import Manifest
from sftriage.traces.stores import CaptureKey, Store
from sftriage.web.charts import bars_of
from sftriage.web.downloads import StackDownloads, file_of
from sftriage.web.page import Page, page_number, reading_stored
from sftriage.web.store_source import StoreSource, StoreView

NAMES = ("job", "run", "rank", "stage", "since", "reproduced", "profiler")
ANSWERS = ("yes", "partly", "no")
PROFILERS = ("torch", "nsys", "stacks")
MAX_TEXT = 300

PAGE_SIZE = 50
MAX_OFFERED = 200
"""Jobs, runs and stages that a field offers."""

MAX_BESIDE = 12
"""Other captures of a run that its captures' pages lead to."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What was typed, by name, without what was left empty; what is ``wanted`` by it; and ``problems`` in words.

    A text with a problem means nothing, and is passed over.
    """

    texts: Mapping[str, str]
    wanted: CaptureQuery
    problems: Mapping[str, str]

    @property
    def query(self) -> str:
        """The filter as part of an address."""
        return urlencode(self.texts)


def filter_of(query: Mapping[str, str], now: datetime) -> Filter:
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
    wanted = CaptureQuery(
        **{name: text for name, text in said.items() if name not in problems},  # type: ignore[arg-type]  # all text
        rank=int(rank) if rank and "rank" not in problems else None,
        since=since,
    )
    return Filter(texts, wanted, problems)


class StorePage(Page[StoreSource]):
    """The page about a store. A capture's address is its key: job and run as they are written there, and its id."""

    layout = "store_base.html"

    @cached_property
    def _stacks(self) -> StackDownloads:
        return StackDownloads()

    def routes(self) -> list[Route]:
        """What is answered."""
        return [
            Route("/", self.captures),
            Route("/captures/{job}/{run}/{capture_id}", self.capture),
            Route("/captures/{job}/{run}/{capture_id}/files/{name}", self.artefact),
            Route(f"/captures/{{job}}/{{run}}/{{capture_id}}/{FOLDED_NAME}", self.folded),
        ]

    def change(self) -> dict[str, Any]:
        """How much there is by now."""
        view = self._source.view()
        return {"version": view.version, "captures": len(view.rows)}

    def blank(self) -> StoreView:
        """The view on which a refusal is shown."""
        return StoreView(self._source.place)

    def captures(self, request: Request) -> Response:
        """A page of the captures that are asked for; a number past the end is the last page."""
        view = self._source.view()
        asked = filter_of(request.query_params, datetime.fromtimestamp(self._now_s(), timezone.utc))
        with reading_stored():
            rows = self._source.find(asked.wanted)
        pages = max(1, -(-len(rows) // PAGE_SIZE))
        number = min(max(page_number(request), 1), pages)
        return self.html(
            "store.html",
            view,
            asked=asked,
            rows=[(_link(row), row) for row in rows[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]],
            found=len(rows),
            number=number,
            pages=pages,
            offered={name: view.names(name)[:MAX_OFFERED] for name in ("job", "run", "stage")},
            answers=ANSWERS,
            profilers=PROFILERS,
        )

    def capture(self, request: Request) -> Response:
        """One capture."""
        with reading_stored():
            manifest, store = self._found(request)
            of_run = self._source.find(CaptureQuery(job=manifest.job, run=manifest.run))
        others = [(_link(row), row) for row in of_run if row.capture_id != manifest.capture_id]
        return self.html(
            "capture.html",
            self._source.view(),
            layout="store_base.html",
            address=_address(CaptureKey.of(manifest)),
            manifest=manifest,
            bars=bars_of(manifest.findings),
            asked=None,
            lanes=lanes_of(manifest.recorded),
            flames=self._stacks.drawn(manifest, store, self._asked_with(manifest, of_run), request.query_params),
            cost=manifest.cost,
            upload=None,
            store=store.place if self._source.shared else self._source.place,
            beside=others[:MAX_BESIDE],
        )

    def artefact(self, request: Request) -> Response:
        """One file of a capture, as it is stored."""
        with reading_stored():
            manifest, store = self._found(request)
        return file_of(request, manifest, store)

    def folded(self, request: Request) -> Response:
        """The stacks of a capture, collapsed."""
        with reading_stored():
            manifest, store = self._found(request)
        return self._stacks.folded(manifest, store)

    def _asked_with(self, manifest: Manifest, of_run: Sequence[CaptureRow]) -> Iterator[tuple[Manifest, Store]]:
        """The captures of a run that the same window led to, other than one: read as they are asked for."""
        window = manifest.trigger.window
        for row in of_run:
            of_window = (row.window_first_step, row.window_last_step) == (window.first_step, window.last_step)
            if of_window and row.capture_id != manifest.capture_id:
                with suppress(SftriageError):
                    yield self._source.capture(CaptureKey(row.job, row.run, row.capture_id))

    def _found(self, request: Request) -> tuple[Manifest, Store]:
        names = request.path_params
        try:
            place = CaptureKey.parse(f"{names['job']}/{names['run']}/{names['capture_id']}")
        except InputError as error:
            raise HTTPException(404, "There is no such capture.") from error
        return self._source.capture(place)


def _address(place: CaptureKey) -> str:
    """Where the page of a capture is: its key, whose own escapes are escaped once more."""
    return f"/captures/{quote(place.key)}"


def _link(row: CaptureRow) -> str:
    try:
        return _address(CaptureKey(row.job, row.run, row.capture_id))
    except InputError:
        return "/"
