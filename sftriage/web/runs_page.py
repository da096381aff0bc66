"""The pages about the runs of this machine: ``/`` shows the newest, and ``/runs/ID/`` has the page about each."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from sftriage.runs.directory import RunDirectory
from sftriage.runs.source import RunSource, StartedRun, StartedRuns, View
from sftriage.web.access import Access
from sftriage.web.page import Page
from sftriage.web.run_page import RunPage

MAX_OPEN = 8
"""Runs that are kept in memory; any other is read again when somebody looks."""


class RunsPage(Page[StartedRuns]):
    """The pages about runs. Whoever looks at ``/`` is shown a newer run as soon as there is one."""

    layout = "base.html"

    def __init__(
        self,
        source: StartedRuns,
        access: Access,
        now_s: Callable[[], float] = time.time,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(source, access, now_s, stopping)
        self._access, self._opening = access, threading.Lock()
        self._open: OrderedDict[tuple[str, str], RunPage] = OrderedDict()
        self._waiting = RunPage(RunSource(lambda: None), access, now_s, self._stopping, runs=source)

    def routes(self) -> list[BaseRoute]:
        """What is answered."""
        return [Route("/", self.newest), Mount("/runs/{run_id}", app=self._of_run)]

    def change(self) -> dict[str, Any]:
        """How much there is by now of the newest run."""
        return self._newest().change()

    def blank(self) -> View:
        """The view on which a refusal is shown."""
        return View("none")

    def newest(self, request: Request) -> Response:
        """How the job of the newest run stands."""
        return self._newest().overview(request)

    def _newest(self) -> RunPage:
        newest = self._source.look().newest
        return self._waiting if newest is None else self._page(newest)

    async def _of_run(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = await run_in_threadpool(self._named, scope["path_params"]["run_id"])
        await page.app(scope, receive, send)

    def _named(self, run_id: str) -> RunPage:
        run = self._source.named(run_id)
        if run is None:
            raise HTTPException(404, "There is no such run.")
        return self._page(run)

    def _page(self, run: StartedRun) -> RunPage:
        """The page about a run, which is read from the beginning if nobody has looked at it lately."""
        key = str(run.directory), run.info.run_id
        with self._opening:
            page = self._open.pop(key, None)
            if page is None:
                directory = RunDirectory(run.directory)
                root = f"/runs/{quote(run.info.run_id, safe='')}"
                page = RunPage(
                    RunSource(lambda: directory),
                    self._access,
                    self._now_s,
                    self._stopping,
                    root=root,
                    runs=self._source,
                )
            self._open[key] = page
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return page
