"""Mirrors a job's run into its cluster: captures and report as objects, news as events; takes up what people ask for.

In threads of its own, and level-triggered: an event of the run, or a change in the cluster, says only that there is
something to look at. A cluster that is away, refuses or is slow holds nothing up; what it lacks then is written later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftriage.base.loops import Backoff, Loop
from sftriage.base.notes import Note
from sftriage.errors import ClusterError, SftriageError, UsageError
from sftriage.kube.client import (
    NOT_FOUND,
    STALE,
    AnsweredError,
    ClusterObjects,
    ObjectWatch,
    ask_unless,
    get_or_create,
    path_of,
)
from sftriage.kube.fields import status_of
from sftriage.kube.jobs import JOB_LABEL, JobRef
from sftriage.kube.mirrored import Mirrored, report_body
from sftriage.kube.objects import API_VERSION, CAPTURES, REPORTS
from sftriage.kube.reports import EVERY_S, ReportNews, event_body, event_name, news, report_status
from sftriage.model.events import (
    CaptureChanged,
    CauseFound,
    Event,
    FollowUpDecided,
    ManualRequestDecided,
    Sight,
    WindowJudged,
)
from sftriage.runs.directory import RunDirectory
from sftriage.runs.requests import leave
from sftriage.runs.source import RunSource, View
from sftriage.sinks.stream import Sink

log = logging.getLogger(__name__)

MANAGER = "sftriage-controller"
LOOK_S, AT_LEAST_S = 1.0, 10.0
"""How often is looked at most and at least."""
REPORT_S = 30.0
"""How often a report is written of which only the counts are others."""
SHARE = 0.1
"""Of a very long run it is looked at less often, such that this takes no more of the time."""
_LONGEST_PAUSE_S = 20.0
_TELLING = (WindowJudged, CaptureChanged, ManualRequestDecided, FollowUpDecided, CauseFound)


class Mirror(Sink):
    """Mirrors the runs of a job into a cluster, one after another; a sink of each. ``now`` is since the epoch."""

    name = "cluster"

    def __init__(self, objects: ClusterObjects, job: JobRef, now: Callable[[], float] = time.time) -> None:
        self._objects, self._job, self._now = objects, job, now
        self._done = threading.Condition()
        self._wanted = self._looked = 0
        self._source = self._next = RunSource(lambda: None)
        self._left: set[str] = set()
        self._known: tuple[Path | None, set[str]] = (None, set())
        self._written: tuple[Any, float] = (None, 0.0)
        self._told: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._news: dict[str, ReportNews] = {}
        path = path_of(API_VERSION, CAPTURES.plural, job.namespace)
        about = {"apiVersion": API_VERSION, "kind": CAPTURES.kind}
        selector = {"labelSelector": f"{JOB_LABEL}={job.object_name}"}
        self._captures: ObjectWatch[dict[str, Any]] = ObjectWatch(
            objects, path, lambda body: about | body, lambda before, now: self._loop.wake(), query=selector
        )
        self._loop = Loop(
            *("mirror", self._turn, AT_LEAST_S),
            failing="the cluster lacks some of the job",
            expected=(SftriageError, OSError),
            backoff=Backoff(LOOK_S, _LONGEST_PAUSE_S),
        )

    def begin(self) -> None:
        """Begin, in threads of its own."""
        self._captures.start()
        self._loop.start()

    def follow(self, directory: RunDirectory) -> None:
        """Show this run from now on; the one before it until there is something of this one to be seen."""
        self._next = RunSource(lambda: directory)
        self._loop.wake()

    def take(self, seen: Event | Sight) -> None:
        """Something has happened that may be to be seen."""
        if isinstance(seen, _TELLING):
            self._loop.wake()

    def finish(self, patience_s: float) -> bool:
        """Show what there is to be shown, and end; whether that was done in time."""
        with self._done:
            self._wanted = wanted = self._looked + 1
            self._loop.wake()
            # (a look may be under way that has not seen all of it)
            done = self._done.wait_for(lambda: self._looked > wanted, patience_s)
        self._captures.end()
        self._loop.stop(0.0)
        return done

    def _turn(self) -> None:
        began_s = time.thread_time()
        self._look()
        # (what comes meanwhile is seen with the next look)
        self._loop.least_s = max(LOOK_S, (time.thread_time() - began_s) / SHARE)
        with self._done:
            self._looked += 1
            self._done.notify_all()
            if self._looked <= self._wanted:
                self._loop.wake()

    def _look(self) -> None:
        self._captures.listed.wait(AT_LEAST_S)
        if self._next is not self._source:
            view = self._next.view()
            if self._source.directory is None or view.rows or view.telemetry.ranks:
                self._source, self._written = self._next, (None, 0.0)
        view, directory = self._source.view(), self._source.directory
        run, problems = Mirrored(self._job, view), list[ClusterError]()
        if directory is not None and self._captures.listed.is_set():
            bodies = self._captures.kept()
            if view.going and view.telemetry.ranks:
                self._ask(run, bodies, RunDirectory(directory))
            self._make(run, directory, problems)
            for body, status in run.statuses(bodies, self._now()):
                self._put(body, status, problems)
        self._report(view, problems)
        for problem in problems[:1]:
            raise problem

    def _ask(self, run: Mirrored, bodies: list[dict[str, Any]], directory: RunDirectory) -> None:
        for request in run.requests(bodies):
            # (what was left is taken up once; until then, its answer is not to be seen)
            if request.request_id in self._left:
                continue
            self._left.add(request.request_id)
            try:
                leave(directory, request)
            except UsageError as error:
                log.warning("what %s asks for cannot be asked of the run: %s", request.who, error)

    def _make(self, run: Mirrored, directory: Path, problems: list[ClusterError]) -> None:
        note = Note(directory / "cluster.json", list[str])
        if self._known[0] != directory:
            self._known = directory, set(note.get() or ())
        known = self._known[1]
        for capture_id, body in list(run.new(known)):
            try:
                self._objects.ask("POST", path_of(API_VERSION, CAPTURES.plural, self._job.namespace), body)
            except AnsweredError as error:
                if error.status != STALE:
                    problems.append(error)
                    continue
            known.add(capture_id)
            note.save(sorted(known))

    def _put(self, body: dict[str, Any], status: dict[str, Any], problems: list[ClusterError]) -> None:
        try:
            self._objects.put_status(CAPTURES, body, status)
        except AnsweredError as error:
            # (whoever changed it is heard of by the watch, and it is looked at again)
            if error.status not in (NOT_FOUND, STALE):
                problems.append(error)

    def _report(self, view: View, problems: list[ClusterError]) -> None:
        now_s = self._now()
        body = report_body(self._job)
        found = report_status(body, view, now_s)
        what = (found.run, found.health, found.suspect, found.captures, found.captures_total, view.going)
        due = self._written[1] + REPORT_S <= now_s or self._wanted >= self._looked
        if what != self._written[0] or due:
            try:
                served = self._served_report(body)
                before, status = dict(status_of(served)), report_status(served, view, now_s).plain()
                if before != status:
                    self._objects.put_status(REPORTS, served, status)
                self._written = what, now_s
                self._hear(before, status)
            except AnsweredError as error:
                if error.status not in (NOT_FOUND, STALE):
                    problems.append(error)
                self._loop.wake()
        self._tell(now_s, problems)

    def _served_report(self, body: dict[str, Any]) -> dict[str, Any]:
        return get_or_create(self._objects, path_of(API_VERSION, REPORTS.plural, self._job.namespace), body)

    def _hear(self, before: dict[str, Any], status: dict[str, Any]) -> None:
        for one in news(before, status):
            self._news[one.reason] = one
            self._waiting[one.reason] += 1

    def _tell(self, now_s: float, problems: list[ClusterError]) -> None:
        """Write events, each reason once in a while."""
        for reason, one in list(self._news.items()):
            if self._told.get(reason, 0.0) + EVERY_S > now_s:
                continue
            try:
                self._put_event(one, now_s)
                self._told[reason] = now_s
            except AnsweredError as error:
                problems.append(error)
            del self._news[reason], self._waiting[reason]

    def _put_event(self, one: ReportNews, now_s: float) -> None:
        report = self._served_report(report_body(self._job))
        path = path_of("v1", "events", self._job.namespace, event_name(self._job, one.reason))
        before = ask_unless(self._objects, NOT_FOUND, "GET", path) or {}
        body = event_body(self._job, report, one, before, self._waiting[one.reason], now_s)
        self._objects.apply(body, MANAGER)
