"""What a controller sees, as OpenTelemetry spans: one for the run, in it one a window and one a capture.

All spans of a run are of one trace, whose id follows from the run's. A capture is linked to the window that led to it.
Steps have spans only in windows with a suspect, and only if that was asked for: a job takes millions of them.
Where spans go, and whether they are sampled, is for the standard variables (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``, ...) to say. Nothing here waits for a receiver.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, SpanContext, StatusCode, set_span_in_context
from opentelemetry.trace import Span as ApiSpan

from sftriage.controller.controller import Judged
from sftriage.frontier import by_step
from sftriage.records import CaptureRequest, CaptureResult, Decision, Suspect, Window
from sftriage.sinks.tally import on_clock
from sftriage.traces.manifest import Manifest

log = logging.getLogger("sftriage")

Value: TypeAlias = "str | int | float | bool | Sequence[str] | Sequence[int]"
Wall: TypeAlias = "tuple[int, int]"
"""From when to when, nanoseconds since the epoch."""

MAX_RANKS = 128
"""Ranks of a suspect that a span lists."""


class Spans:
    """The spans of one run.

    Args:
        processor: where they go once they have ended.
        job: the job's name.
        run: the run's id.
        version: of sftriage.
        start_ns: when the run began, nanoseconds since the epoch.
        steps: whether the steps of windows with a suspect have spans.
    """

    def __init__(
        self, processor: SpanProcessor, *, job: str, run: str, version: str, start_ns: int, steps: bool = False
    ) -> None:
        self._provider = TracerProvider(resource=_resource(job, run), id_generator=_RunIds(run), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sftriage", version)
        self._steps = steps
        self._done = (-1, -1)
        self._windows = 0
        self._captures: dict[str, ApiSpan] = {}
        self._run = self._tracer.start_span("run", Context(), start_time=start_ns)

    def judged(
        self,
        judged: Judged,
        wall: Wall,
        window: Window | None = None,
        times: Callable[[int], Wall | None] | None = None,
    ) -> None:
        """A window has been decided, or the job stalls.

        Args:
            judged: the verdict and the decision.
            wall: from when to when the window was; of a stall, since when, and now.
            window: the window; a stall has none.
            times: from when to when a step was, by its number; None where that is not known.
        """
        verdict = judged.verdict
        span = self._tracer.start_span(
            "stall" if window is None else "window",
            set_span_in_context(self._run, Context()),
            attributes={
                "sftriage.label": verdict.label,
                "sftriage.clock": verdict.clock,
                "sftriage.reasons": list(verdict.reasons),
                "sftriage.attempt": verdict.attempt,
                "sftriage.first_step": verdict.first_step,
                "sftriage.last_step": verdict.last_step,
                "sftriage.exposed_s": verdict.exposed_s,
                **{f"sftriage.advance_s.{stage}": seconds for stage, seconds in verdict.advances_s.items()},
                **(_of_suspect(verdict.suspects[0]) if verdict.suspects else {}),
                **_of_decision(judged.decision),
            },
            start_time=wall[0],
        )
        self._windows += 1
        if self._steps and window is not None and times is not None and verdict.label == "suspect":
            self._of_steps(on_clock(window, verdict.clock), times, span)
        span.end(wall[1])
        self._begin(judged.decision, span.get_span_context())

    def asked(self, decision: Decision) -> None:
        """It has been decided about a capture that a person asked for, or that another capture led to."""
        self._begin(decision, None)

    def captured(self, result: CaptureResult, end_ns: int, manifest: Manifest | None = None) -> None:
        """A capture has ended; with a manifest, it is in the store. One that nobody knows has no span."""
        span = self._captures.pop(result.capture_id, None)
        if span is None:
            return
        span.set_attributes(
            {
                "sftriage.capture.state": result.state,
                "sftriage.capture.detail": result.detail,
                "sftriage.capture.size_bytes": result.size_bytes,
                **{f"sftriage.capture.{name}_s": seconds for name, seconds in result.timings_s.items()},
            }
        )
        if result.first_step is not None and result.last_step is not None:
            span.set_attributes(
                {"sftriage.capture.first_step": result.first_step, "sftriage.capture.last_step": result.last_step}
            )
        if manifest is not None and manifest.reproduced is not None:
            span.set_attribute("sftriage.capture.reproduced", manifest.reproduced.answer)
        if result.state != "done":
            span.set_status(StatusCode.ERROR, result.detail or result.state)
        span.end(end_ns)

    def close(self, end_ns: int, grace_s: float) -> None:
        """The run is over: end what has not ended, and hand over what waits, for at most so long."""
        for span in self._captures.values():
            span.set_status(StatusCode.ERROR, "what became of it is not known")
            span.end(end_ns)
        self._captures.clear()
        self._run.set_attribute("sftriage.windows", self._windows)
        self._run.end(end_ns)
        # A receiver that is away would be waited for by the minute.
        last = threading.Thread(target=self._provider.shutdown, name="sftriage-spans", daemon=True)
        last.start()
        last.join(grace_s)

    def _begin(self, decision: Decision, window: SpanContext | None) -> None:
        for request in decision.requests:
            self._captures[request.capture_id] = self._tracer.start_span(
                "capture",
                set_span_in_context(self._run, Context()),
                attributes={**_of_request(request), "sftriage.rule": decision.rule or decision.reason},
                links=[] if window is None else [Link(window)],
                start_time=round(decision.time_s * 1e9),
            )

    def _of_steps(self, window: Window, times: Callable[[int], Wall | None], parent: ApiSpan) -> None:
        """A span for each step of the window that has none yet."""
        context = set_span_in_context(parent, Context())
        advances_NS, complete_N = by_step(window)
        for n, advances_s in enumerate(advances_NS.tolist()):
            step = window.first_step + n
            wall = times(step) if complete_N[n] and (window.attempt, step) > self._done else None
            if wall is None:
                continue
            self._done = (window.attempt, step)
            stages = dict(zip(window.schema.stages, advances_s, strict=True))
            span = self._tracer.start_span(
                "step",
                context,
                attributes={
                    "sftriage.step": step,
                    "sftriage.attempt": window.attempt,
                    "sftriage.exposed_s": sum(advances_s),
                    **{f"sftriage.advance_s.{stage}": seconds for stage, seconds in stages.items()},
                },
                start_time=wall[0],
            )
            span.end(wall[1])


class Telling(SpanExporter):
    """Says once that spans do not arrive, and once that they do again; they are lost, and nothing else is."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Hand spans over; called in the processor's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            log.debug("spans: %s", error)
            result = SpanExportResult.FAILURE
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            log.warning("OpenTelemetry: spans cannot be delivered and are lost; see OTEL_EXPORTER_OTLP_ENDPOINT")
        elif self._failing and not failing:
            log.warning("OpenTelemetry: spans are delivered again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        """Hand over no more."""
        self._exporter.shutdown()


class _RunIds(RandomIdGenerator):
    """All traces have the run's id: it is one trace, and whoever knows the run finds it."""

    def __init__(self, run: str) -> None:
        self._trace_id = trace_id_of(run)

    def generate_trace_id(self) -> int:
        """The run's."""
        return self._trace_id


def trace_id_of(run: str) -> int:
    """The id of a run's trace: the first 16 bytes of the SHA-256 of its id."""
    return int.from_bytes(hashlib.sha256(run.encode()).digest()[:16], "big") or 1


def _resource(job: str, run: str) -> Resource:
    """Who speaks: what the environment says, and what it does not."""
    resource = Resource.create({"sftriage.job": job, "sftriage.run": run})
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "sftriage"}))
    return resource


def _of_suspect(suspect: Suspect) -> Mapping[str, Value]:
    return {
        "sftriage.suspect.scope": suspect.scope,
        "sftriage.suspect.ranks": list(suspect.ranks[:MAX_RANKS]),
        "sftriage.suspect.gain_s": suspect.gain_s,
        "sftriage.suspect.share": suspect.share,
        "sftriage.suspect.pattern": suspect.pattern,
        **({} if suspect.stage is None else {"sftriage.suspect.stage": suspect.stage}),
        **({} if suspect.host is None else {"sftriage.suspect.host": suspect.host}),
    }


def _of_decision(decision: Decision) -> Mapping[str, Value]:
    rule = {} if decision.rule is None else {"sftriage.rule": decision.rule}
    return {"sftriage.outcome": decision.outcome, "sftriage.reason": decision.reason, **rule}


def _of_request(request: CaptureRequest) -> Mapping[str, Value]:
    return {
        "sftriage.capture.id": request.capture_id,
        "sftriage.capture.rank": request.rank,
        "sftriage.capture.profiler": request.profiler,
        "sftriage.capture.role": request.role,
    }
