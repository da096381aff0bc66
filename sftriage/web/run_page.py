"""The pages about one run (`RunPage`) and about all runs of this machine (`RunsPage`), for `sftriage ui`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from sftriage.errors import UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.model.verdicts import Clock
from sftriage.runs.captures import captures_of
from sftriage.runs.decisions import WindowRow, log_of
from sftriage.runs.directory import RunDirectory
from sftriage.runs.hangs import hang_rows_of
from sftriage.runs.lateness import HeatMap, control_of
from sftriage.runs.operations import operations_in
from sftriage.runs.source import STALE_S, Damaged, Drawing, RunSource, StartedRuns, View
from sftriage.runs.summary import RunSummary, captured_words
from sftriage.runs.whatif import HOTTEST, WhatIf, trace_events, whatif_of
from sftriage.stragglers.questions import Question
from sftriage.stragglers.slowdown import MIN_SLOWDOWN
from sftriage.traces.manifest import Manifest
from sftriage.trainer.sampler import FOLDED_NAME
from sftriage.web.charts import CHOICES, Axis, StepRange, Timeline, TimelineColumn, bars_of, timeline
from sftriage.web.flames import StackDownloads
from sftriage.web.page import LABEL_WORDS, NOTE_WORDS, OUTCOME_WORDS, Page, file_of, page_number, reading_stored

HEAT_PATIENCE_S = 1.0
"""How long a page waits for its heat map; it is shown without and updated once the map is ready."""

NEWEST, MAX_RUNNING = 8, 20
"""Decisions, and captures in progress, on the overview."""

MAX_WORKERS, MAX_BOXES = 16, 4000
"""Maximum workers, the slowest, and operations drawn of a step."""

HEAT_LEVELS = 4

LOW_COVERAGE = 0.98
"""A lower coverage of the newest window is reported."""


class RunPage(Page[RunSource]):
    """The page about a run; ``runs`` are all runs to choose from, if any."""

    layout, blank = "base.html", View("none")
    runs: StartedRuns | None = None
    _stacks, _replaying = StackDownloads(), threading.Lock()
    _replay: tuple[str, WhatIf] | None = None

    def _routes(self) -> list[Route]:
        return [
            Route("/", self.overview),
            Route("/decisions", self._decisions),
            Route("/heat.bin", self._heat),
            Route("/whatif", self._whatif),
            Route("/whatif.json", self._whatif_timeline),
            Route("/captures/{capture_id}", self._capture),
            Route(
                "/captures/{capture_id}/files/{name}",
                lambda request: file_of(request, self._stored(request), self._source.store),
            ),
            Route(
                f"/captures/{{capture_id}}/{FOLDED_NAME}",
                lambda request: self._stacks.folded(self._stored(request), self._source.store),
            ),
        ]

    def version(self) -> str:
        return str(self._around(self._source.view())["version"])

    def _around(self, view: View) -> dict[str, Any]:
        if self.runs is None:
            return {"version": view.version, "runs": None}
        runs = self.runs.look()
        states = [(run.directory, run.info.run_id, run.state) for run in (*runs.runs, runs.before) if run is not None]
        return {"version": f"{view.version}-{hashlib.sha256(repr(states).encode()).hexdigest()[:8]}", "runs": runs}

    def overview(self, request: Request) -> Response:
        view, span = self._source.view(), StepRange.of(request.query_params)
        charts = charts_of(self._source, view, span, HEAT_PATIENCE_S)
        chart = charts.timeline
        stored = {capture.capture_id for capture in view.captures}
        n_steps = view.rows[-1].last_step - min(row.first_step for row in view.rows) + 1 if view.rows else 0
        return self.html(
            "overview.html",
            view,
            glance=RunSummary(view),
            span=span,
            choices=[choice for choice in CHOICES if choice < n_steps],
            selected=bool(charts.rows),
            chart=chart,
            chart_data=[] if chart is None else [_column_values(column) for column in chart.columns],
            chart_stages=[] if chart is None else [series.stage for series in chart.series],
            heat=charts.heat,
            heat_at=0 if chart is None else chart.axis.stretches[-1].at,
            drawing=charts.drawing,
            newest=log_of(view.rows, (*view.requests, *view.notes), view.results, size=NEWEST),
            captured={
                found.capture_id: captured_words(found) for found in view.captures if isinstance(found, Manifest)
            },
            stale=self._stale(view),
            low_coverage=LOW_COVERAGE,
            running=[capture for capture in captures_of(view) if capture.capture_id not in stored][:MAX_RUNNING],
        )

    def _decisions(self, request: Request) -> Response:
        view, outcome = self._source.view(), request.query_params.get("outcome", "")
        outcome = outcome if outcome in (*OUTCOME_WORDS, *NOTE_WORDS) else ""
        page = log_of(view.rows, (*view.requests, *view.notes), view.results, outcome, page_number(request))
        return self.html("decisions.html", view, outcome=outcome, page=page)

    def _heat(self, request: Request) -> Response:
        """The heat map's cells, row by row, one byte each, for the page's script."""
        charts = charts_of(self._source, self._source.view(), StepRange.of(request.query_params))
        if charts.drawing:
            raise HTTPException(503, "Too many maps are being drawn.", {"Retry-After": "5"})
        if charts.heat is None:
            raise HTTPException(404, "No step has been recorded yet.")
        return Response(charts.heat.levels_GC.tobytes(), media_type="application/octet-stream")

    def _whatif(self, request: Request) -> Response:
        """How long the run's steps would take without its stragglers, or with the changes of a question."""
        view, replay, chosen = self._source.view(), self._replayed(), request.query_params
        durations, without = (
            tuple(filter(None, map(str.strip, chosen.get(name, "").split(",")))) for name in ("set", "without")
        )
        question = Question(durations, chosen.get("layers") or None, without, chosen.get("steps") or None)
        problem = ""
        if question != Question():
            try:
                replay = whatif_of(replay.operations, question)
            except UsageError as error:
                problem = str(error)
        drawn = replay.timelines(MAX_WORKERS)
        boxes = sum(len(worker.measured) + len(worker.ideal) for worker in drawn.rows)
        return self.html(
            "whatif.html",
            view,
            replay=replay,
            chosen=chosen,
            problem=problem,
            heat=None if replay.answer else replay.heat(),
            heat_level=heat_level,
            drawn=drawn if boxes <= MAX_BOXES else None,
            parts=sorted(replay.found.by_part.items(), key=lambda part: -part[1]),
        )

    def _whatif_timeline(self, request: Request) -> Response:
        name = {"Content-Disposition": 'attachment; filename="without-stragglers.json"'}
        return JSONResponse(trace_events(self._replayed().timelines()), headers=name)

    def _replayed(self) -> WhatIf:
        """The replay of the current steps; the last result is kept."""
        version = self._source.view().version
        directory = self._source.directory
        if directory is None:
            raise HTTPException(404, "There is no run yet.")
        with self._replaying, reading_stored():
            if self._replay is None or self._replay[0] != version:
                self._replay = version, whatif_of(operations_in(directory))
            return self._replay[1]

    def _capture(self, request: Request) -> Response:
        view, capture_id, found = self._found(request)
        if isinstance(found, Damaged):
            return self.refusal(view, 422, "This capture cannot be shown", found.problem)
        row = view.request_behind(capture_id)
        if found is None:
            if row is None:
                raise HTTPException(404, "There is no such capture.")
            status = next(capture for capture in captures_of(view) if capture.capture_id == capture_id)
            return self.html("lost.html", view, status=status, decision=row)
        requests = row.requests if row else ()
        control = next((request.rank for request in requests if request.role == "control"), None)
        if (compared := control_of(found)) is not None:
            control = compared
        stored = ((manifest, self._source.store) for manifest in view.captures if isinstance(manifest, Manifest))
        return self.html(
            "capture.html",
            view,
            layout="base.html",
            address=f"{self.root}/captures/{capture_id}",
            manifest=found,
            bars=bars_of(found.findings),
            decision=row,
            tracks=self._source.beside(found, row.attempt if row else 0, control),
            flames=self._stacks.drawn(found, self._source.store, stored, request.query_params),
            hang=hang_rows_of(self._source.store, found),
            cost=found.cost or view.cost_of(found),
            upload=view.uploads.get(capture_id),
            store=None,
            beside=(),
        )

    def _stored(self, request: Request) -> Manifest:
        _, _, manifest = self._found(request)
        if not isinstance(manifest, Manifest):
            raise HTTPException(404 if manifest is None else 422, "There is no such capture, or it is damaged.")
        return manifest

    def _found(self, request: Request) -> tuple[View, str, Manifest | Damaged | None]:
        capture_id = request.path_params["capture_id"]
        if not CAPTURE_ID.fullmatch(capture_id):
            raise HTTPException(404, "There is no such capture.")
        # The view comes first: it finds the run.
        view = self._source.view()
        return view, capture_id, self._source.capture(capture_id)

    def _stale(self, view: View) -> bool:
        """Whether a watched run has judged nothing for long, other than because it is stalled."""
        if not (view.going and view.watcher.state in ("watched", "taken_over") and view.rows):
            return False
        return view.rows[-1].label != "stalled" and self._now_s() - view.rows[-1].time_s > STALE_S


def heat_level(slowdown: float) -> int:
    """The shade of a worker on the heat map, up to `HEAT_LEVELS`; 0 if it does not count as slow."""
    if slowdown < MIN_SLOWDOWN:
        return 0
    return min(HEAT_LEVELS, 1 + int((slowdown - 1.0) / (HOTTEST - 1.0) * HEAT_LEVELS))


MapSteps = tuple[int, int, int, int, Clock]
"""The attempt, first and last step, steps of a column, and clock of a heat map: see `RunSource.heat`."""

MAX_MAPS = 4
"""Attempts whose step logs are read for one chart, the newest. In earlier ones each window is drawn as its mean."""


def map_steps(axis: Axis | None, rows: Sequence[WindowRow]) -> list[MapSteps]:
    """What heat maps of the newest attempts on the axis cover, oldest first: judged steps, in the axis's columns.

    A stalled step is left out: it is not over, and the source would remember it.
    """
    maps: list[MapSteps] = []
    for stretch in () if axis is None else axis.stretches[-MAX_MAPS:]:
        judged = [row for row in rows if row.attempt == stretch.attempt and row.advances_s]
        last_step = min(stretch.last_step, max((row.last_step for row in judged), default=-1))
        if axis is not None and last_step >= stretch.first_step:
            maps.append((stretch.attempt, stretch.first_step, last_step, axis.column_steps, judged[-1].clock))
    return maps


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of some windows. ``heat`` is of the newest attempt; ``drawing``: it is not ready yet."""

    rows: tuple[WindowRow, ...]
    timeline: Timeline | None
    heat: HeatMap | None
    drawing: bool


def charts_of(source: RunSource, view: View, span: StepRange, patience_s: float | None = None) -> Charts:
    """The charts of the page and of a report; without ``patience_s``, it waits until all maps are ready."""
    rows = span.select(view.rows)
    axis = span.axis(rows)
    steps = map_steps(axis, rows)
    wait_s = None if patience_s is None else patience_s / max(1, len(steps))
    maps = {each[0]: source.heat(*each, patience_s=wait_s) for each in steps}
    newest = None if axis is None else maps.get(axis.stretches[-1].attempt)
    ready = [map_ for map_ in maps.values() if isinstance(map_, HeatMap)]
    chart = timeline(rows, axis, view.results, view.requests, ready)
    return Charts(rows, chart, newest if isinstance(newest, HeatMap) else None, isinstance(newest, Drawing))


def _column_values(column: TimelineColumn) -> list[Any]:
    about = column.at, column.width, column.first_step, column.last_step, LABEL_WORDS[column.label], column.named
    return [*about, round(column.exposed_s, 6), [round(advance_s, 6) for advance_s in column.advances_s]]


MAX_OPEN = 8
"""Runs kept in memory; others are read again when requested."""


class RunsPage(Page[StartedRuns]):
    """The pages of all runs. ``/`` shows the newest, and moves on to a newer one when it begins."""

    layout, blank = "base.html", View("none")

    @cached_property
    def _opened(self) -> Callable[[Path, str], RunPage]:
        return lru_cache(MAX_OPEN)(self._open)

    @cached_property
    def _waiting(self) -> RunPage:
        return self._page_of(RunSource(lambda: None))

    def _routes(self) -> list[BaseRoute]:
        newest = Route("/", lambda request: self._newest().overview(request))
        return [newest, Mount("/runs/{run_id}", app=self._of_run)]

    def version(self) -> str:
        return self._newest().version()

    def _newest(self) -> RunPage:
        newest = self._source.look().newest
        return self._waiting if newest is None else self._opened(newest.directory, newest.info.run_id)

    async def _of_run(self, scope: Scope, receive: Receive, send: Send) -> None:
        def named(run_id: str) -> RunPage:
            run = next((run for run in self._source.look().runs if run.info.run_id == run_id), None)
            if run is None:
                raise HTTPException(404, "There is no such run.")
            return self._opened(run.directory, run_id)

        page = await run_in_threadpool(named, scope["path_params"]["run_id"])
        await page.app(scope, receive, send)

    def _page_of(self, run: RunSource) -> RunPage:
        page = RunPage(run, self._access, self._now_s, self._stopping)
        page.runs = self._source
        return page

    def _open(self, directory: Path, run_id: str) -> RunPage:
        page = self._page_of(RunSource(lambda: RunDirectory(directory)))
        page.root = f"/runs/{quote(run_id, safe='')}"
        return page
