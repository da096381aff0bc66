"""Metrics and spans of a run, for the tools that people have: asked for by options, fed by triage, never in its way.

What is asked for is made ready before the job starts, so that a port that is taken or a library that is missing is said
then; no thread is started before the job is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage import __version__
from sftriage.access import Access, read_token
from sftriage.errors import UsageError
from sftriage.records import CaptureResult, Decision, Window
from sftriage.runs.directory import RunInfo
from sftriage.windows.times import Span

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from sftriage.agent.agent import Agent
    from sftriage.controller.controller import Controller, Judged
    from sftriage.controller.resuming import Left
    from sftriage.sinks.metrics import Metrics
    from sftriage.sinks.scraping import Endpoint, TextFile
    from sftriage.sinks.spans import Spans
    from sftriage.traces.manifest import Manifest

log = logging.getLogger("sftriage")

TOKEN_VARIABLE = "SFTRIAGE_METRICS_TOKEN"
LOOK_S = 1.0
"""How often what the ranks are doing is looked at for metrics."""
SPANS_GRACE_S = 5.0
"""How long after the end of a run spans may take to be handed over."""
_MULTIPROCESS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for by options."""

    port: int | None = None
    host: str = "127.0.0.1"
    token_file: Path | None = None
    file: Path | None = None
    per_rank: bool = False
    otel: bool = False
    otel_steps: bool = False


class Meter:
    """Is told what triage sees and does. This one does nothing.

    Attributes:
        url: where metrics are served, if they are.
    """

    url: str | None = None

    def start(self, info: RunInfo, agent: Agent, controller: Controller, left: Left | None = None) -> None:
        """Triage begins; with what an earlier one has left."""

    def learnt(self, window: Window) -> None:
        """A window has come that was decided before."""

    def judged(self, judged: Judged, window: Window | None = None) -> None:
        """A window has been decided; without one, the job stalls."""

    def asked(self, decision: Decision) -> None:
        """It has been decided about captures that no window led to."""

    def captured(self, result: CaptureResult, manifest: Manifest | None) -> None:
        """A capture has ended; with a manifest, it is in the store."""

    def looked(self, *, ended: bool = False) -> None:
        """A turn of triage is over."""

    def close(self) -> None:
        """Triage is over."""


class Metering(Meter):
    """Feeds metrics and spans. Whatever fails in here is said once and changes nothing else.

    Raises:
        UsageError: what is asked for cannot be: a library is missing, a port taken, a file not to be written.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._endpoint: Endpoint | None = None
        self._file: TextFile | None = None
        self._exporter: OTLPSpanExporter | None = None
        self._metrics: Metrics | None = None
        self._spans: Spans | None = None
        self._agent: Agent | None = None
        self._controller: Controller | None = None
        self._looked_s = 0.0
        self._failed: set[str] = set()
        if wanted.otel:
            self._exporter = _exporter()
        if wanted.port is not None or wanted.file is not None:
            _need("prometheus_client", "metrics need prometheus-client; install sftriage[metrics]")
            with _single_process():
                from sftriage.sinks.scraping import Endpoint, TextFile
            self._file = None if wanted.file is None else TextFile(wanted.file)
            if wanted.port is not None:
                advice = f"give one with --metrics-token-file, or in {TOKEN_VARIABLE}"
                access = Access.to(wanted.host, _token(wanted.token_file), advice)
                self._endpoint = Endpoint(wanted.host, wanted.port, access)
                self.url = self._endpoint.url

    def start(self, info: RunInfo, agent: Agent, controller: Controller, left: Left | None = None) -> None:
        """Triage begins; the job has been started, and so may threads be."""
        with self._kept_apart("start"):
            self._agent, self._controller = agent, controller
            now_s = time.time()
            if self._endpoint is not None or self._file is not None:
                self._serve(info, now_s)
            if self._metrics is not None and left is not None:
                self._metrics.requested(request for request, _ in left.unended.values())
            if self._exporter is not None:
                self._send(self._exporter, info, now_s)

    def _serve(self, info: RunInfo, now_s: float) -> None:
        from sftriage.sinks.metrics import Metrics

        self._metrics = Metrics(
            info.job, info.run_id, version=__version__, started_s=now_s, per_rank=self._wanted.per_rank
        )
        for way in (self._endpoint, self._file):
            if way is not None:
                way.serve(self._metrics.registry)

    def _send(self, exporter: OTLPSpanExporter, info: RunInfo, now_s: float) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from sftriage.sinks.spans import Spans, Telling

        self._spans = Spans(
            BatchSpanProcessor(Telling(exporter)),
            job=info.job,
            run=info.run_id,
            version=__version__,
            start_ns=round(now_s * 1e9),
            steps=self._wanted.otel_steps,
        )
        # Of every attempt that fails it says so; that spans do not arrive is said once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def learnt(self, window: Window) -> None:
        """A window has come that was decided before."""
        with self._kept_apart("learnt"):
            if self._metrics is not None:
                self._metrics.learnt(window)

    def judged(self, judged: Judged, window: Window | None = None) -> None:
        """A window has been decided; without one, the job stalls."""
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        verdict = judged.verdict
        if self._metrics is not None:
            with self._kept_apart("metrics of a verdict"):
                ended = (
                    self._times(verdict.attempt, verdict.last_step, verdict.last_step) if window is not None else None
                )
                self._metrics.judged(judged, window, None if ended is None else (now_ns - ended.end_ns) / 1e9)
        if self._spans is not None:
            with self._kept_apart("span of a verdict"):
                was = (
                    self._times(verdict.attempt, verdict.first_step, verdict.last_step) if window is not None else None
                )
                if was is None:
                    # A stall lasts until now, and so did a window of which no more is known, as good as.
                    steps = verdict.last_step - verdict.first_step + 1
                    was = Span(now_ns - round(verdict.exposed_s * steps * 1e9), now_ns)
                offset_ns = wall_ns - now_ns
                self._spans.judged(judged, _moved(was, offset_ns), window, self._walls(verdict.attempt, offset_ns))

    def asked(self, decision: Decision) -> None:
        """It has been decided about captures that no window led to."""
        if self._metrics is not None:
            with self._kept_apart("metrics of a decision"):
                self._metrics.asked(decision)
        if self._spans is not None:
            with self._kept_apart("spans of a decision"):
                self._spans.asked(decision)

    def captured(self, result: CaptureResult, manifest: Manifest | None) -> None:
        """A capture has ended; with a manifest, it is in the store."""
        if self._metrics is not None:
            with self._kept_apart("metrics of a capture"):
                self._metrics.captured(result, manifest)
        if self._spans is not None:
            with self._kept_apart("span of a capture"):
                self._spans.captured(result, time.time_ns(), manifest)

    def looked(self, *, ended: bool = False) -> None:
        """A turn of triage is over; now and then that is when the job is looked at for metrics."""
        now_s = time.monotonic()
        if self._metrics is None or (now_s < self._looked_s + LOOK_S and not ended):
            return
        self._looked_s = now_s
        with self._kept_apart("looked"):
            self._look(self._metrics, ended=ended)

    def _look(self, metrics: Metrics, *, ended: bool) -> None:
        from sftriage.sinks.metrics import Received

        if self._agent is None or self._controller is None:
            return
        got = self._agent.telemetry
        received = Received(got.steps, got.missed, got.torn, len(got.problems))
        now_s = time.time()
        job = None if ended else self._agent.statuses()
        metrics.looked(received, job, now_s, self._controller.budget(now_s))

    def close(self) -> None:
        """Triage is over: the last values go out, and nothing listens any more."""
        with self._kept_apart("end"):
            if self._metrics is not None:
                self._metrics.ended(time.time())
            for way in (self._file, self._endpoint):
                if way is not None:
                    way.close()
            if self._spans is not None:
                self._spans.close(time.time_ns(), SPANS_GRACE_S)

    def _times(self, attempt: int, first_step: int, last_step: int) -> Span | None:
        return None if self._agent is None else self._agent.times.of(attempt, first_step, last_step)

    def _walls(self, attempt: int, offset_ns: int) -> Callable[[int], Span | None]:
        def wall(step: int) -> Span | None:
            was = self._times(attempt, step, step)
            return None if was is None else _moved(was, offset_ns)

        return wall

    @contextlib.contextmanager
    def _kept_apart(self, what: str) -> Iterator[None]:
        """Triage goes on whatever happens in here."""
        try:
            yield
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                log.exception("metrics or spans failed (%s); triage goes on without them", what)


def meter_of(wanted: Wanted) -> Meter:
    """What was asked for, made ready; nothing where nothing was.

    Raises:
        UsageError: it cannot be, or makes no sense.
    """
    if wanted.port is None and (wanted.token_file is not None or wanted.host != Wanted().host):
        raise UsageError("nothing is served without --metrics-port")
    if wanted.per_rank and wanted.port is None and wanted.file is None:
        raise UsageError("--metrics-per-rank is about metrics: give --metrics-port or --metrics-file")
    if wanted.otel_steps and not wanted.otel:
        raise UsageError("--otel-steps is about spans: give --otel")
    return Metering(wanted) if wanted.otel or wanted.port is not None or wanted.file is not None else Meter()


def _moved(span: Span, offset_ns: int) -> Span:
    return Span(span.start_ns + offset_ns, span.end_ns + offset_ns)


def _token(token_file: Path | None) -> str | None:
    return read_token(token_file) if token_file is not None else os.environ.get(TOKEN_VARIABLE) or None


def _exporter() -> OTLPSpanExporter:
    _need("opentelemetry.exporter.otlp.proto.http", "spans need OpenTelemetry; install sftriage[otel]")
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise UsageError(f"spans go out over http/protobuf, and OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol}")
    try:
        # The library reads its variables when it is imported and when its parts are made: all of that before the job.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import SpanLimits

        SpanLimits()
        return OTLPSpanExporter()
    except (ValueError, OSError) as error:
        raise UsageError(f"OpenTelemetry cannot be set up from its OTEL_* variables: {error}") from error


def _need(module: str, advice: str) -> None:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(advice)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """prometheus-client, imported as what it is here: the metrics of one process.

    A training script may gather its own from many processes in a directory, which is named in the environment.
    """
    kept = {name: os.environ.pop(name) for name in _MULTIPROCESS if name in os.environ}
    try:
        import prometheus_client  # noqa: F401

        yield
    finally:
        os.environ.update(kept)
