"""What a run's captures and its report are as objects of a cluster, and what people ask for there. Pure.

All of it is made of the run as it is now, and never of an event: what could not be written is made again.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sftriage.kube.captures import Body, KnownCapture, capture_status
from sftriage.kube.fields import status_of
from sftriage.kube.jobs import JOB_ID_ANNOTATION, JOB_LABEL, JobRef, System
from sftriage.kube.objects import API_VERSION, GROUP, CaptureTrigger, Requester, TraceCaptureSpec, capture_of
from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest, Trigger
from sftriage.model.verdicts import NAMING
from sftriage.policy.fields import in_capture
from sftriage.runs.following import RequestRow, WindowRow
from sftriage.runs.source import View
from sftriage.traces.manifest import CONTROL, Manifest
from sftriage.traces.stores import CaptureKey
from sftriage.words.kube import CAPTURES

CAPTURE_ANNOTATION, RUN_ANNOTATION = f"{GROUP}/capture-id", f"{GROUP}/run"
"""On a TraceCapture that a job's controller made: which capture of which of its runs it is."""
MAX_OBJECTS = 512
"""So many captures of a run become objects; its report counts those beyond."""
_ASKED = "k8s-"
_MAX_TEXT = 500
_UNENDED = ("accepted", "armed", "running")


def job_named(job_id: str) -> JobRef:
    """The job of an id.

    Raises:
        ValueError: it is none.
    """
    namespace, _, rest = job_id.partition("/")
    system, _, name = rest.partition("/")
    if not (namespace and name) or system not in get_args(System):
        raise ValueError(f"{job_id}: not NAMESPACE/SYSTEM/NAME")
    return JobRef(system, name, namespace)  # type: ignore[arg-type]  # (it is one of them)


def metadata_of(job: JobRef, **about: Any) -> dict[str, Any]:
    """The metadata of an object of a job."""
    annotations = {JOB_ID_ANNOTATION: job.job_id, **about.pop("annotations", {})}
    labels = {JOB_LABEL: job.object_name, **about.pop("labels", {})}
    found = {"name": job.object_name, "namespace": job.namespace, "labels": labels, "annotations": annotations}
    return {**found, **about}


def report_body(job: JobRef, owners: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The report of a job, before anybody has said anything in it."""
    found = metadata_of(job, **({"ownerReferences": list(owners)} if owners else {}))
    return {"apiVersion": API_VERSION, "kind": "TriageReport", "metadata": found, "spec": {"job": job.name}}


@dataclass(frozen=True, slots=True)
class Mirrored:
    """One run of a job, as it is to be seen in a cluster."""

    job: JobRef
    view: View

    @property
    def run_id(self) -> str:
        """The run's id; "" before there is one."""
        return "" if self.view.info is None else self.view.info.run_id

    def new(self, known: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The captures that are to become objects, each with its id: those of ``known`` have been.

        What a person asked for by an object is that object. One that was deleted is not made again.
        """
        asked = ((row, one) for row in self._rows() for one in row.asked)
        for count, (row, one) in enumerate(asked):
            if count < MAX_OBJECTS and one.capture_id not in known:
                yield one.capture_id, self._body(row, one)

    def statuses(self, bodies: Iterable[Body], now_s: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The objects whose status says something else than is so, each with what it is to say."""
        for body in bodies:
            seen = None if "deletionTimestamp" in body["metadata"] else self._seen(body)
            if seen is None:
                continue
            status = capture_status(body, seen, now_s).plain()
            if status != dict(status_of(body)):
                yield dict(body), status

    def requests(self, bodies: Iterable[Body]) -> Iterator[ManualRequest]:
        """What people ask for by objects that this run has not answered yet."""
        answered = {row.request_id for row in self.view.asks}
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
        yield from (row for row in self.view.asks if not row.request_id.startswith(_ASKED))

    def _body(self, row: WindowRow | RequestRow, one: CaptureRequest) -> dict[str, Any]:
        name = re.sub(r"[^a-z0-9]+", "-", one.capture_id.lower()).strip("-")
        digest = hashlib.sha256(f"{self.run_id}/{one.capture_id}".encode()).hexdigest()[:6]
        annotations = {CAPTURE_ANNOTATION: one.capture_id, RUN_ANNOTATION: self.run_id}
        found = metadata_of(self.job, name=f"{self.job.object_name}-{name}-{digest}", annotations=annotations)
        spec = _spec(self.job.name, row, one)
        return {"apiVersion": API_VERSION, "kind": "TraceCapture", "metadata": found, "spec": spec}

    def _seen(self, body: Body) -> KnownCapture | None:
        capture_id, unended = _capture_id(body), status_of(body).get("state") in _UNENDED
        if capture_id:
            if body["metadata"]["annotations"].get(RUN_ANNOTATION) == self.run_id:
                return self._of(capture_id, int(body.get("spec", {}).get("rank", 0)))
            # (one that nobody has said a word of was made in the last moment of its controller)
            lost = unended or not status_of(body)
        else:
            row = next((row for row in reversed(self.view.asks) if row.request_id == _request_id(body)), None)
            if row is not None and row.asked:
                return self._of(row.asked[0].capture_id, row.asked[0].rank)
            if row is not None:
                return KnownCapture(CaptureResult("", 0, "refused", f"{row.words}. {row.resolves}".strip()))
            lost = unended
        return KnownCapture(CaptureResult(capture_id, 0, "failed", CAPTURES["lost"])) if lost else None

    def _of(self, capture_id: str, rank: int) -> KnownCapture:
        view = self.view
        result = view.states.get(capture_id) or CaptureResult(capture_id, rank, "accepted")
        manifest = next((one for one in view.captures if one.capture_id == capture_id), None)
        if not isinstance(manifest, Manifest):
            return KnownCapture(result)
        upload, info = view.uploads.get(capture_id), view.info
        if upload is None or upload.state != "stored" or info is None or info.store is None:
            return KnownCapture(result, manifest)
        return KnownCapture(result, manifest, info.store, CaptureKey.of(manifest).key)


def _capture_id(body: Body) -> str:
    return str((body["metadata"].get("annotations") or {}).get(CAPTURE_ANNOTATION, ""))


def _request_id(body: Body) -> str:
    return f"{_ASKED}{body['metadata'].get('uid', '')}"


def _request(spec: TraceCaptureSpec, request_id: str) -> ManualRequest:
    said = {of: getattr(spec, of).model_dump(exclude_unset=True) for of in ("torch", "nsys", "stacks")}
    return ManualRequest(
        request_id=request_id,
        ranks=(spec.rank,),
        who=_line("somebody" if spec.requested_by is None else spec.requested_by.username),
        reason=_line(spec.reason),
        profiler=spec.profiler,
        steps=spec.steps,
        warmup_steps=spec.warmup_steps,
        max_seconds=float(spec.max_seconds),
        max_bytes=spec.max_trace_bytes,
        samples_per_second=spec.samples_per_second,
        options={of: options for of, options in said.items() if options},
    )


def _line(text: str) -> str:
    return CONTROL.sub(" ", " ".join(text.split()))[:_MAX_TEXT] or "(nothing)"


def _spec(job: str, row: WindowRow | RequestRow, one: CaptureRequest) -> dict[str, Any]:
    why, by = row.triggers.get(one.capture_id), row.by if isinstance(row, RequestRow) else ""
    trigger = _trigger(why)
    spec: dict[str, Any] = {
        "job": job,
        "rank": one.rank,
        "reason": ("" if why is None else why.why) or row.words or row.reason,
        "profiler": one.profiler,
        "steps": min(max(one.steps, 1), 1000),
        "warmup_steps": min(max(one.warmup_steps, 0), 100),
        "max_seconds": min(max(math.ceil(one.max_seconds), 1), 3600),
        "max_bytes": f"{min(max(one.max_bytes // 2**20, 1), 2**16)}Mi",
    }
    if trigger is not None:
        spec["trigger"] = trigger.model_dump(mode="json", exclude_none=True)
    elif by:
        spec["requested_by"] = Requester(username=by[:1024]).model_dump(mode="json", exclude_unset=True)
    spec["reason"] = spec["reason"][:2000]
    stalled = trigger is not None and trigger.label == "stalled"
    # (of a rank that stands still, stacks are taken once: nobody would have said how many steps)
    idle = {where[-1] for where, _ in in_capture(spec, stalled=stalled)}
    return {word: value for word, value in spec.items() if word not in idle}


def _trigger(why: Trigger | None) -> CaptureTrigger | None:
    if why is None or not why.rule or not why.policy or why.label not in NAMING:
        return None
    return CaptureTrigger(
        policy=why.policy,
        rule=why.rule,
        label=why.label,
        stage=why.stage,
        first_step=max(0, why.first_step),
        last_step=max(0, why.last_step),
        gain_s=why.gain_s,
    )
