"""What happens to a job, as OpenTelemetry spans: one for the run, in it one a window and one a capture.

All spans of a run are of one trace, whose id follows from the run's. A capture is linked to the window that led to it.
Where spans go, and whether they are sampled, is for the standard variables (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``, ...) to say. Nothing here waits for a receiver.
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
"""A line of a program, as OpenTelemetry's conventions have it."""
SUSPECT = ("scope", "gain_s", "share", "pattern", "stage", "host", "ranks")
REGRESSION = ("since_step", "until_step", "fraction", "scope", "best_step_s", "descheduled_fraction", "stages")
MAX_RANKS = 128
"""Ranks of a suspect that a span lists."""
GRACE_S = 5.0
"""How long after the end of a run spans may take to be handed over."""


class SpanSink(Sink):
    """The spans of a run, from ``started_s`` (since the epoch) to its last event; ``processor`` may start threads."""

    name = "spans"

    def __init__(self, processor: Callable[[], SpanProcessor], job: str, run: str, started_s: float) -> None:
        self._processor = processor
        resource = Resource.create({"sftriage.job": job, "sftriage.run": run})
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "sftriage"}))
        self._provider = TracerProvider(resource=resource, id_generator=_RunIds(run), shutdown_on_exit=False)
        self._tracer = self._provider.get_tracer("sftriage", __version__)
        self._now_s = started_s
        self._seen: events.WindowObserved | None = None
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
                self._seen = event
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
        """The run is over: end what has not ended, and hand over what waits, for at most the grace."""
        end_ns = _ns(self._now_s)
        for span in self._captures.values():
            span.set_status(StatusCode.ERROR, "its outcome is not known")
            span.end(end_ns)
        self._captures.clear()
        self._run.set_attribute("sftriage.windows", self._windows)
        self._run.end(end_ns)
        # A receiver that is away would be waited for by the minute.
        start_thread("spans-end", self._provider.shutdown).join(GRACE_S)

    def _judged(self, verdict: Verdict, decision: Decision) -> None:
        seen = window_of(self._seen, verdict)
        first, last = (None if seen is None else seen.spans.get(getattr(verdict, name)) for name in STEPS)
        if first is not None and last is not None:
            start_ns, end_ns = first.start_ns, last.end_ns
        else:
            # A stall lasts until now, and so does, nearly, a window of which no more is known.
            lasted_s = verdict.exposed_s * (verdict.last_step - verdict.first_step + 1)
            start_ns, end_ns = _ns(decision.time_s - lasted_s), _ns(decision.time_s)
        about: dict[str, Value | None] = {
            **{name: getattr(verdict, name) for name in ("label", "clock", "attempt", *STEPS, "exposed_s")},
            "reasons": list(verdict.reasons),
            **{f"advance_s.{stage}": seconds for stage, seconds in verdict.advances_s.items()},
            **_fields("suspect", verdict.named, SUSPECT),
            **_fields("regression", verdict.regression, REGRESSION),
            **{name: getattr(decision, name) for name in ("outcome", "reason", "rule")},
        }
        kind = "stall" if verdict.label == "stalled" else "window"
        span = self._span(kind, self._run, start_ns, about)
        self._windows += 1
        span.end(end_ns)
        self._begin(decision, span.get_span_context())

    def _captured(self, ended: events.CaptureChanged) -> None:
        result = ended.result
        span = self._captures.pop(result.capture_id, None)
        if span is None:
            return
        about: dict[str, Value | None] = {
            **{name: getattr(result, name) for name in ("state", "detail", "size_bytes", *STEPS)},
            **{f"{name}_s": seconds for name, seconds in result.timings_s.items()},
            "reproduced": None if ended.reproduced is None else ended.reproduced.answer,
        }
        span.set_attributes(_named({f"capture.{name}": value for name, value in about.items()}))
        keep_newest(self._ended, result.capture_id, span.get_span_context())
        if result.state != "stored":
            span.set_status(StatusCode.ERROR, result.detail or result.state)
        span.end(_ns(ended.time_s))

    def _explained(self, found: events.CauseFound) -> None:
        below = self._ended.get(found.capture_id)
        if below is None:
            return
        about: dict[str, Value | None] = {
            "capture.id": found.capture_id,
            **{f"cause.{name}": getattr(found, name) for name in ("code", "sure", "sentence", "compared_with")},
        }
        span = self._span("cause", NonRecordingSpan(below), _ns(found.time_s), about)
        if (place := found.place) is not None:
            span.set_attributes(dict(zip(CODE, (place.function, place.file, place.line), strict=True)))
        span.end(_ns(found.time_s))

    def _begin(self, decision: Decision, window: SpanContext | None) -> None:
        for request in decision.requests:
            about: dict[str, Value | None] = {
                "capture.id": request.capture_id,
                **{f"capture.{name}": getattr(request, name) for name in ("rank", "profiler", "role")},
                "rule": decision.rule or decision.reason,
            }
            links = [] if window is None else [Link(window)]
            self._captures[request.capture_id] = self._span("capture", self._run, _ns(decision.time_s), about, links)

    def _span(
        self, name: str, parent: ApiSpan, start_ns: int, about: Mapping[str, Value | None], links: Sequence[Link] = ()
    ) -> ApiSpan:
        context = set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, attributes=_named(about), links=links, start_time=start_ns)


class Telling(SpanExporter):
    """Logs once that spans do not arrive, and once that they do again; those in between are lost."""

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
    """Gives all spans of a run one trace."""

    def __init__(self, run: str) -> None:
        self._run = run

    def generate_trace_id(self) -> int:
        return trace_id_of(self._run)


def trace_id_of(run: str) -> int:
    """The id of a run's trace: the first 16 bytes of the SHA-256 of its id."""
    return int.from_bytes(hashlib.sha256(run.encode()).digest()[:16], "big") or 1


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _fields(prefix: str, of: Suspect | Regression | None, names: Sequence[str]) -> Mapping[str, Value | None]:
    found = {} if of is None else {f"{prefix}.{name}": getattr(of, name) for name in names}
    return {name: list(value[:MAX_RANKS]) if isinstance(value, tuple) else value for name, value in found.items()}


def _named(about: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"sftriage.{name}": value for name, value in about.items() if value is not None}
