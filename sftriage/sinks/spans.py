"""A run as OpenTelemetry spans: one for the run, with one for each window, stall, capture and cause below it.

All spans of a run share one trace, whose id follows from the run's. A capture links to the window that requested it.
The standard ``OTEL_*`` variables set the receiver, the sampling and the service name. Nothing waits for the receiver.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, StatusCode, set_span_in_context
from opentelemetry.trace import Span as ApiSpan

from sftriage import __version__
from sftriage.base.loops import start_thread
from sftriage.model import events
from sftriage.model.captures import ENDED, Decision
from sftriage.model.verdicts import Regression, Suspect, Verdict
from sftriage.sinks.stream import Sink, keep_newest, window_of

log = logging.getLogger("sftriage")

Value: TypeAlias = "str | int | float | bool | Sequence[str] | Sequence[int]"
STEPS = ("first_step", "last_step")
CODE = ("code.function.name", "code.file.path", "code.line.number")
"""Attributes of a source line, by OpenTelemetry's semantic conventions."""
SUSPECT = ("scope", "gain_s", "share", "pattern", "stage", "host", "ranks")
REGRESSION = ("since_step", "until_step", "fraction", "scope", "best_step_s", "descheduled_fraction", "stages")
MAX_RANKS = 128
"""Maximum ranks that a span lists."""
GRACE_S = 5.0
"""Maximum time for the last export after the end of a run."""


class SpanSink(Sink):
    """Makes the spans of a run, from ``started_s`` (since the epoch) to its last event.

    ``processor`` is called in the sink's thread, since processors start threads.
    """

    name = "spans"

    def __init__(self, processor: Callable[[], SpanProcessor], job: str, run: str, started_s: float) -> None:
        self._processor = processor
        resource = Resource.create({"sftriage.job": job, "sftriage.run": run})
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "sftriage"}))
        self._provider = TracerProvider(resource=resource, id_generator=_RunIds(run), shutdown_on_exit=False)
        self._tracer = self._provider.get_tracer("sftriage", __version__)
        self._now_s = started_s
        self._window: events.WindowObserved | None = None
        self._windows = 0
        self._captures: dict[str, ApiSpan] = {}
        self._ended: dict[str, SpanContext] = {}

    def start(self) -> None:
        self._provider.add_span_processor(self._processor())
        self._run = self._tracer.start_span("run", Context(), start_time=_ns(self._now_s))

    def take(self, event: events.Event | events.Observation) -> None:
        if isinstance(event, events.CaptureChanged | events.CauseFound | events.JobObserved):
            self._now_s = max(self._now_s, event.time_s)
        match event:
            case events.WindowObserved():
                self._window = event
            case events.WindowJudged():
                self._now_s = max(self._now_s, event.decision.time_s)
                self._judged(event.verdict, event.decision)
            case events.ManualRequestDecided() | events.FollowUpDecided():
                self._begin(event.decision, None)
            case events.CaptureChanged() if event.result.state in ENDED:
                self._captured(event)
            case events.CauseFound():
                self._explained(event)

    def close(self) -> None:
        """End all open spans, and export what is queued within `GRACE_S`."""
        end_ns = _ns(self._now_s)
        for span in self._captures.values():
            span.set_status(StatusCode.ERROR, "its outcome is not known")
            span.end(end_ns)
        self._captures.clear()
        self._run.set_attribute("sftriage.windows", self._windows)
        self._run.end(end_ns)
        # With an unreachable receiver, shutdown takes minutes.
        start_thread("spans-end", self._provider.shutdown).join(GRACE_S)

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        observed = window_of(self._window, verdict)
        first, last = (None if observed is None else observed.spans.get(getattr(verdict, name)) for name in STEPS)
        if first is not None and last is not None:
            start_ns, end_ns = first.start_ns, last.end_ns
        else:
            # A stall lasts until now; a window whose times are unknown has just ended.
            lasted_s = verdict.exposed_s * (verdict.last_step - verdict.first_step + 1)
            start_ns, end_ns = _ns(decision.time_s - lasted_s), _ns(decision.time_s)
        attributes: dict[str, Value | None] = {
            **{name: getattr(verdict, name) for name in ("label", "clock", "attempt", *STEPS, "exposed_s")},
            "reasons": list(verdict.reasons),
            **{f"advance_s.{stage}": seconds for stage, seconds in verdict.advances_s.items()},
            **_fields("suspect", verdict.named, SUSPECT),
            **_fields("regression", verdict.regression, REGRESSION),
            **{name: getattr(decision, name) for name in ("outcome", "reason", "rule")},
        }
        kind = "stall" if verdict.label == "stalled" else "window"
        span = self._span(kind, self._run, start_ns, attributes)
        self._windows += 1
        span.end(end_ns)
        self._begin(decision, span.get_span_context())

    def _captured(self, ended: events.CaptureChanged) -> None:
        result = ended.result
        span = self._captures.pop(result.capture_id, None)
        if span is None:
            return
        attributes: dict[str, Value | None] = {
            **{name: getattr(result, name) for name in ("state", "detail", "size_bytes", *STEPS)},
            **{f"{name}_s": seconds for name, seconds in result.timings_s.items()},
            "reproduced": None if ended.reproduced is None else ended.reproduced.answer,
        }
        span.set_attributes(_attributes({f"capture.{name}": value for name, value in attributes.items()}))
        keep_newest(self._ended, result.capture_id, span.get_span_context())
        if result.state != "stored":
            span.set_status(StatusCode.ERROR, result.detail or result.state)
        span.end(_ns(ended.time_s))

    def _explained(self, found: events.CauseFound) -> None:
        below = self._ended.get(found.capture_id)
        if (running := self._captures.get(found.capture_id)) is not None:
            below = running.get_span_context()
        if below is None:
            return
        attributes: dict[str, Value | None] = {
            "capture.id": found.capture_id,
            **{f"cause.{name}": getattr(found, name) for name in ("code", "sure", "sentence", "compared_with")},
        }
        span = self._span("cause", NonRecordingSpan(below), _ns(found.time_s), attributes)
        if (place := found.place) is not None:
            span.set_attributes(dict(zip(CODE, (place.function, place.file, place.line), strict=True)))
        span.end(_ns(found.time_s))

    def _begin(self, decision: Decision, window: SpanContext | None) -> None:
        for request in decision.requests:
            attributes: dict[str, Value | None] = {
                "capture.id": request.capture_id,
                **{f"capture.{name}": getattr(request, name) for name in ("rank", "profiler", "role")},
                "rule": decision.rule or decision.reason,
            }
            links = [] if window is None else [Link(window)]
            self._captures[request.capture_id] = self._span(
                "capture", self._run, _ns(decision.time_s), attributes, links
            )

    def _span(
        self,
        name: str,
        parent: ApiSpan,
        start_ns: int,
        attributes: Mapping[str, Value | None],
        links: Sequence[Link] = (),
    ) -> ApiSpan:
        context = set_span_in_context(parent, Context())
        return self._tracer.start_span(
            name, context, attributes=_attributes(attributes), links=links, start_time=start_ns
        )


class LoggedExporter(SpanExporter):
    """Logs once when exports begin to fail, and once when they work again; spans in between are lost."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            log.debug("spans: %s", error)
            result = SpanExportResult.FAILURE
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            log.warning("OpenTelemetry: cannot deliver spans, they are lost; see OTEL_EXPORTER_OTLP_ENDPOINT")
        elif self._failing and not failing:
            log.warning("OpenTelemetry: spans are delivered again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _RunIds(RandomIdGenerator):
    """Generates one trace id for all spans of a run."""

    def __init__(self, run: str) -> None:
        self._run = run

    def generate_trace_id(self) -> int:
        return trace_id_of(self._run)


def trace_id_of(run: str) -> int:
    """A run's trace id: the first 16 bytes of the SHA-256 of the run id."""
    return int.from_bytes(hashlib.sha256(run.encode()).digest()[:16], "big") or 1


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _fields(prefix: str, of: Suspect | Regression | None, names: Sequence[str]) -> Mapping[str, Value | None]:
    found = {} if of is None else {f"{prefix}.{name}": getattr(of, name) for name in names}
    return {name: list(value[:MAX_RANKS]) if isinstance(value, tuple) else value for name, value in found.items()}


def _attributes(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"sftriage.{name}": value for name, value in attributes.items() if value is not None}
