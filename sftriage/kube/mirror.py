"""Mirrors a job's run into its cluster: captures, report, news as events; forwards requests.

Runs in its own threads, and is level-triggered: an event of the run, or a change in the cluster, only starts a pass.
All objects follow from the run as it is now. An unreachable, refusing or slow cluster delays nothing; what it lacks is
written later.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftriage.base.files import Note
from sftriage.base.loops import Backoff, Loop
from sftriage.errors import ClusterError, SftriageError, UsageError
from sftriage.fleet.hub import PORT
from sftriage.kube import client, statuses
from sftriage.kube.client import AnsweredError, ClusterObjects, ObjectWatch, get_or_create, path_of
from sftriage.kube.jobs import COMPONENT_LABEL, CONTROLLER, JOB_LABEL, JobRef
from sftriage.kube.objects import (
    API_VERSION,
    CAPTURES,
    GROUP,
    REPORTS,
    Body,
    CaptureTrigger,
    Requester,
    TraceCaptureSpec,
    capture_of,
    status_of,
)
from sftriage.kube.statuses import KnownCapture, ReportNews, capture_status, pod_trouble, report_status
from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest
from sftriage.model.events import (
    CaptureChanged,
    CauseFound,
    Event,
    FollowUpDecided,
    ManualRequestDecided,
    Observation,
    WindowJudged,
)
from sftriage.model.verdicts import NAMING
from sftriage.policy.parsing import in_capture
from sftriage.runs.decisions import RequestRow, WindowRow
from sftriage.runs.directory import RunDirectory
from sftriage.runs.requests import leave
from sftriage.runs.source import RunSource, View
from sftriage.sinks.stream import Sink
from sftriage.traces.manifest import CONTROL, Manifest
from sftriage.traces.remote import CaptureKey
from sftriage.words.kube import CAPTURES as CAPTURE_WORDS
from sftriage.words.kube import REPORTS as REPORT_WORDS

CAPTURE_ANNOTATION, RUN_ANNOTATION = f"{GROUP}/capture-id", f"{GROUP}/run"
"""On a TraceCapture made by a job's controller: its capture id and run."""
MAX_OBJECTS = 512
"""Maximum captures of a run that become objects; the report counts all."""
_REQUEST = "k8s-"
_MAX_TEXT = 500
_UNENDED = ("accepted", "armed", "running")


@dataclass(frozen=True, slots=True)
class Mirrored:
    """One run of a job as objects of a cluster, and the requests of people there. Pure."""

    job: JobRef
    view: View

    @property
    def run_id(self) -> str:
        """The run's id; "" before there is one."""
        return "" if self.view.info is None else self.view.info.run_id

    def new(self, known: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The captures to create objects for, each with its id; those in ``known`` had theirs.

        A person's request is the object of its capture. A capture that was deleted does not come back.
        """
        requested = ((row, capture) for row in self._rows() for capture in row.requests)
        for count, (row, capture) in enumerate(requested):
            if count < MAX_OBJECTS and capture.capture_id not in known:
                yield capture.capture_id, self._body(row, capture)

    def statuses(self, bodies: Iterable[Body], now_s: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The objects whose status is out of date, each with its status now."""
        for body in bodies:
            known = None if "deletionTimestamp" in body["metadata"] else self._known(body)
            if known is None:
                continue
            status = capture_status(body, known, now_s).plain()
            if status != dict(status_of(body)):
                yield dict(body), status

    def requests(self, bodies: Iterable[Body]) -> Iterator[ManualRequest]:
        """People's requests that this run has not answered yet."""
        answered = {row.request_id for row in self.view.requests}
        for body in bodies:
            if _capture_id(body) or "deletionTimestamp" in body["metadata"]:
                continue
            if status_of(body).get("state", "requested") != "requested" or _request_id(body) in answered:
                continue
            spec, _ = capture_of(dict(body))
            if spec is not None:
                yield _request(spec, _request_id(body))

    def _rows(self) -> Iterator[WindowRow | RequestRow]:
        yield from self.view.rows
        yield from (row for row in self.view.requests if not row.request_id.startswith(_REQUEST))

    def _body(self, row: WindowRow | RequestRow, request: CaptureRequest) -> dict[str, Any]:
        name = re.sub(r"[^a-z0-9]+", "-", request.capture_id.lower()).strip("-")
        digest = hashlib.sha256(f"{self.run_id}/{request.capture_id}".encode()).hexdigest()[:6]
        annotations = {CAPTURE_ANNOTATION: request.capture_id, RUN_ANNOTATION: self.run_id}
        about = self.job.metadata(name=f"{self.job.object_name}-{name}-{digest}", annotations=annotations)
        spec = _spec(self.job.name, row, request)
        return {"apiVersion": API_VERSION, "kind": CAPTURES.kind, "metadata": about, "spec": spec}

    def _known(self, body: Body) -> KnownCapture | None:
        capture_id, unended = _capture_id(body), status_of(body).get("state") in _UNENDED
        if capture_id:
            if body["metadata"]["annotations"].get(RUN_ANNOTATION) == self.run_id:
                return self._of(capture_id, int(body.get("spec", {}).get("rank", 0)))
            # (without a status, it was made in the last moment of its controller)
            lost = unended or not status_of(body)
        else:
            row = next((row for row in reversed(self.view.requests) if row.request_id == _request_id(body)), None)
            if row is not None and row.requests:
                return self._of(row.requests[0].capture_id, row.requests[0].rank)
            if row is not None:
                return KnownCapture(CaptureResult("", 0, "refused", f"{row.words}. {row.resolves}".strip()))
            lost = unended
        return KnownCapture(CaptureResult(capture_id, 0, "failed", CAPTURE_WORDS["lost"])) if lost else None

    def _of(self, capture_id: str, rank: int) -> KnownCapture:
        view = self.view
        result = view.states.get(capture_id) or CaptureResult(capture_id, rank, "accepted")
        manifest = next((stored for stored in view.captures if stored.capture_id == capture_id), None)
        if not isinstance(manifest, Manifest):
            return KnownCapture(result)
        upload, info = view.uploads.get(capture_id), view.info
        if upload is None or upload.state != "stored" or info is None or info.store is None:
            return KnownCapture(result, manifest)
        return KnownCapture(result, manifest, info.store, CaptureKey.of(manifest).key)


def _capture_id(body: Body) -> str:
    return str((body["metadata"].get("annotations") or {}).get(CAPTURE_ANNOTATION, ""))


def _request_id(body: Body) -> str:
    return f"{_REQUEST}{body['metadata'].get('uid', '')}"


def _request(spec: TraceCaptureSpec, request_id: str) -> ManualRequest:
    options = {of: getattr(spec, of).model_dump(exclude_unset=True) for of in ("torch", "nsys", "stacks")}
    return ManualRequest(
        request_id=request_id,
        ranks=(spec.rank,),
        who=_line("unknown" if spec.requested_by is None else spec.requested_by.username),
        reason=_line(spec.reason),
        max_seconds=float(spec.max_seconds),
        max_bytes=spec.max_trace_bytes,
        options={of: chosen for of, chosen in options.items() if chosen},
        **spec.model_dump(include={"profiler", "steps", "warmup_steps", "samples_per_second"}),
    )


def _line(text: str) -> str:
    return CONTROL.sub(" ", " ".join(text.split()))[:_MAX_TEXT] or "(empty)"


def _spec(job: str, row: WindowRow | RequestRow, request: CaptureRequest) -> dict[str, Any]:
    why, by = row.triggers.get(request.capture_id), row.by if isinstance(row, RequestRow) else ""
    fired = why if why is not None and why.rule and why.policy and why.label in NAMING else None
    spec: dict[str, Any] = {
        "job": job,
        "rank": request.rank,
        "reason": ("" if why is None else why.why) or row.words or row.reason,
        "profiler": request.profiler,
        "steps": min(max(request.steps, 1), 1000),
        "warmup_steps": min(max(request.warmup_steps, 0), 100),
        "max_seconds": min(max(math.ceil(request.max_seconds), 1), 3600),
        "max_bytes": f"{min(max(request.max_bytes // 2**20, 1), 2**16)}Mi",
    }
    if fired is not None:
        trigger = CaptureTrigger.model_validate(fired, from_attributes=True)
        spec["trigger"] = trigger.model_dump(mode="json", exclude_none=True)
    elif by:
        spec["requested_by"] = Requester(username=by[:1024]).model_dump(mode="json", exclude_unset=True)
    spec["reason"] = spec["reason"][:2000]
    # (of a stalled rank, stacks are taken once: a number of steps has no meaning)
    idle = {where[-1] for where, _ in in_capture(spec, stalled=fired is not None and fired.label == "stalled")}
    return {word: value for word, value in spec.items() if word not in idle}


log = logging.getLogger(__name__)

MANAGER = "sftriage-controller"
PASS_S, AT_LEAST_S = 1.0, 10.0
"""Shortest and longest time between two passes."""
REPORT_S = 30.0
"""How often a report is written if only its counts differ."""
TROUBLED, MAX_TROUBLES, CONNECTS_S = 50, 2, 60.0
"""Pods to look at if steps do not arrive, troubles to show, and how long after its start an agent has connected."""
EVENT_S = 60.0
"""Time between two events of one reason; the second counts the occurrences since the first."""
SHARE = 0.1
"""Maximum share of time for passes: the pauses grow with the run."""
_LONGEST_PAUSE_S = 20.0
_CHANGES = (WindowJudged, CaptureChanged, ManualRequestDecided, FollowUpDecided, CauseFound)


class Mirror(Sink):
    """Mirrors the runs of a job into a cluster, one after another; a sink of each."""

    name = "cluster"

    def __init__(self, objects: ClusterObjects, job: JobRef) -> None:
        self._objects, self._job = objects, job
        self._source = self._next = RunSource(lambda: None)
        self._left: set[str] = set()
        self._known: tuple[Path | None, set[str]] = (None, set())
        self._written: tuple[Any, float] = (None, 0.0)
        self._event_s: dict[str, float] = {}
        self._news: dict[str, list[ReportNews]] = {}
        self._problems: list[ClusterError] = []
        self._overtaken = False
        self._captures_path = path_of(API_VERSION, CAPTURES.plural, job.namespace)
        about = {"apiVersion": API_VERSION, "kind": CAPTURES.kind}
        selector = {"labelSelector": f"{JOB_LABEL}={job.object_name}"}
        self._captures: ObjectWatch[dict[str, Any]] = ObjectWatch(
            objects,
            self._captures_path,
            lambda body: about | body,
            lambda before, now: self._loop.wake(),
            query=selector,
        )
        self._loop = Loop(
            *("mirror", self._turn, AT_LEAST_S),
            failing="cannot update all objects of the job in the cluster",
            expected=(SftriageError, OSError),
            backoff=Backoff(PASS_S, _LONGEST_PAUSE_S),
        )

    def begin(self) -> None:
        self._captures.start()
        self._loop.start()

    def follow(self, directory: RunDirectory) -> None:
        """Show this run from now on, once it has something to show."""
        self._next = RunSource(lambda: directory)
        self._loop.wake()

    def take(self, event: Event | Observation) -> None:
        """Start a pass soon, if there may be something new to show."""
        if isinstance(event, _CHANGES):
            self._loop.wake()

    def finish(self, patience_s: float) -> bool:
        """Show the end of the run, and stop; return whether that was in time."""
        done = self._loop.stop(patience_s, last_turn=True) and not self._loop.problem
        self._captures.end()
        return done

    def _turn(self) -> None:
        began_s = time.thread_time()
        self._pass()
        if self._overtaken and self._loop.stopping.is_set():
            # (this is the last pass; by then the watch has what was written meanwhile)
            time.sleep(PASS_S)
            self._pass()
        # (changes meanwhile are for the next pass)
        self._loop.least_s = max(PASS_S, (time.thread_time() - began_s) / SHARE)

    def _pass(self) -> None:
        self._captures.listed.wait(AT_LEAST_S)
        if self._next is not self._source:
            view = self._next.view()
            if self._source.directory is None or view.rows or view.telemetry.ranks:
                self._source, self._written = self._next, (None, 0.0)
        view, directory = self._source.view(), self._source.directory
        run, self._problems, self._overtaken = Mirrored(self._job, view), [], False
        if directory is not None and self._captures.listed.is_set():
            bodies = self._captures.kept()
            if view.going and view.telemetry.ranks:
                self._forward(run.requests(bodies), RunDirectory(directory))
            self._make(run, directory)
            for body, status in run.statuses(bodies, time.time()):
                # (the watch reports a change by others, and the next pass starts from that)
                with self._noting(client.NOT_FOUND, client.STALE):
                    self._objects.put_status(CAPTURES, body, status)
        self._report(view)
        self._write_events()
        for problem in self._problems[:1]:
            raise problem

    @contextlib.contextmanager
    def _noting(self, *expected: int) -> Iterator[None]:
        """Continue after a refusal, and keep it for the end of the pass unless its status is expected."""
        try:
            yield
        except AnsweredError as error:
            self._overtaken |= error.status == client.STALE
            if error.status not in expected:
                self._problems.append(error)

    def _forward(self, requests: Iterable[ManualRequest], directory: RunDirectory) -> None:
        for request in requests:
            # (the run accepts a request once; until then, there is no answer)
            if request.request_id in self._left:
                continue
            self._left.add(request.request_id)
            try:
                leave(directory, request)
            except UsageError as error:
                log.warning("could not forward the request of %s to the run: %s", request.who, error)

    def _make(self, run: Mirrored, directory: Path) -> None:
        note = Note(directory / "cluster.json", list[str])
        if self._known[0] != directory:
            self._known = directory, set(note.get() or ())
        known = self._known[1]
        for capture_id, body in list(run.new(known)):
            with self._noting():
                self._objects.request("POST", self._captures_path, body, tolerate=client.STALE)
                known.add(capture_id)
                note.save(sorted(known))

    def _report(self, view: View) -> None:
        now_s = time.time()
        found = report_status(self._job.report(), view, now_s)
        captures = found.captures, found.captures_total
        state = (found.run, found.health, found.suspect, captures, view.going, view.unheard, view.disk)
        if state == self._written[0] and now_s < self._written[1] + REPORT_S and not self._loop.stopping.is_set():
            return
        with self._noting(client.NOT_FOUND, client.STALE):
            served = self._served_report()
            before = dict(status_of(served))
            pods = self._pods_on(statuses.suspect_nodes(view))
            status = report_status(served, view, now_s, pods, self._trouble(view)).plain()
            if before != status:
                self._objects.put_status(REPORTS, served, status)
            self._written = state, now_s
            for change in statuses.news(before, status, self._job):
                self._news.setdefault(change.reason, []).append(change)
        if self._written != (state, now_s):
            self._loop.wake()

    def _pods_on(self, nodes: Iterable[str]) -> str:
        """The job's own pods on some nodes."""
        found = (pod for node in nodes for pod in self._pods(statuses.MAX_NODES, f"spec.nodeName={node}"))
        return ", ".join(pod["metadata"]["name"] for pod in found)

    def _pods(self, limit: int, fields: str) -> list[dict[str, Any]]:
        """Some of the job's own pods; none if the controller may not list them."""
        selector = f"{JOB_LABEL}={self._job.object_name},{COMPONENT_LABEL}!={CONTROLLER}"
        path, found = path_of("v1", "pods", self._job.namespace), dict[str, Any]()
        with self._noting(client.FORBIDDEN):
            found = self._objects.request("GET", path, labelSelector=selector, fieldSelector=fields, limit=limit)
        return list(found.get("items", ()))

    def _trouble(self, view: View) -> str:
        """Why steps of the job's pods do not arrive; "" if they do, or if its pods are starting or over."""
        if view.unwatched or (view.telemetry.ranks and not (view.going and view.unheard)):
            return ""
        pods = self._pods(TROUBLED, "status.phase!=Succeeded")
        troubles = [trouble.words for trouble in filter(None, map(pod_trouble, pods))][:MAX_TROUBLES]
        running = (pod["metadata"]["name"] for pod in pods if statuses.running_s(pod, time.time()) > CONNECTS_S)
        name = next((name for name in running if not view.telemetry.ranks or name in view.unheard), None)
        if not troubles and name is not None:
            about = {"name": name, "namespace": self._job.namespace, "port": PORT}
            troubles = [REPORT_WORDS["not_connected"].format(**about)]
        return ". ".join(filter(None, (view.unheard, " ".join(troubles))))

    def _served_report(self) -> dict[str, Any]:
        path = path_of(API_VERSION, REPORTS.plural, self._job.namespace)
        return get_or_create(self._objects, path, self._job.report())

    def _write_events(self) -> None:
        now_s = time.time()
        for reason, several in list(self._news.items()):
            if self._event_s.get(reason, 0.0) + EVENT_S > now_s:
                continue
            with self._noting():
                report = self._served_report()
                path = path_of("v1", "events", self._job.namespace, statuses.event_name(self._job, reason))
                before = self._objects.request("GET", path, tolerate=client.NOT_FOUND)
                self._objects.apply(
                    statuses.event_body(self._job, report, several[-1], before, len(several), now_s), MANAGER
                )
                self._event_s[reason] = now_s
            del self._news[reason]
