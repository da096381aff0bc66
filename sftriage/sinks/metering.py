"""Builds the sinks for metrics and spans from a command's options, before the job starts.

So a taken port or a missing library ends the command, not the job. `sftriage.commands` makes a `Metering`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.errors import UsageError
from sftriage.sinks.stream import Sink

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from prometheus_client import CollectorRegistry

    from sftriage.sinks.metrics import Exposition

_MULTIPROCESS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Metering:
    """Binds the port and imports the libraries of metrics and spans; starts no thread.

    ``listen`` binds a server for a registry and returns it with its URL, which becomes ``url``. Raises UsageError if
    the port is taken, the file cannot be created, or a library or an OTEL_* variable is wrong.
    """

    def __init__(
        self,
        listen: Callable[[CollectorRegistry], tuple[Exposition, str]] | None = None,
        file: Path | None = None,
        per_rank: bool = False,
        otel: bool = False,
    ) -> None:
        self._per_rank = per_rank
        self._expositions: list[Exposition] = []
        self._exporter = _exporter() if otel else None
        self.url: str | None = None
        if listen is not None or file is not None:
            _need("prometheus_client", "metrics need prometheus-client: pip install 'sftriage[metrics]'")
            with _single_process():
                from prometheus_client import CollectorRegistry

                from sftriage.sinks.metrics import TextFile
            self._registry = CollectorRegistry()
            if file is not None:
                self._expositions.append(TextFile(file, self._registry))
            if listen is not None:
                server, self.url = listen(self._registry)
                self._expositions.append(server)

    def sinks(
        self, job: str, run: str, started_s: float, times: Callable[[], Mapping[str, float]] = dict
    ) -> list[Sink]:
        """The configured sinks of a run that begins now, ``started_s`` seconds since the epoch.

        ``times`` reads where its time went, in seconds by part.
        """
        made: list[Sink] = []
        if self._expositions:
            from sftriage.sinks.metrics import Metrics

            made.append(Metrics(job, run, started_s, self._expositions, self._per_rank, self._registry, times))
        if (exporter := self._exporter) is not None:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from sftriage.sinks.spans import LoggedExporter, SpanSink

            made.append(SpanSink(lambda: BatchSpanProcessor(LoggedExporter(exporter)), job, run, started_s))
            # The library logs every failed attempt; `LoggedExporter` logs the first.
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        return made


def _exporter() -> OTLPSpanExporter:
    _need("opentelemetry.exporter.otlp.proto.http", "spans need OpenTelemetry: pip install 'sftriage[otel]'")
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise UsageError(f"spans are sent as http/protobuf only; OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}")
    try:
        # The library reads its variables on import and in its constructors: do both before the job starts.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import SpanLimits

        SpanLimits()
        return OTLPSpanExporter()
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot set up OpenTelemetry from its OTEL_* variables: {error}") from error


def _need(module: str, advice: str) -> None:
    with contextlib.suppress(ModuleNotFoundError):
        if find_spec(module) is not None:
            return
    raise UsageError(advice)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """Import prometheus-client in single-process mode, whatever the training script sets for its own metrics."""
    kept = {name: os.environ.pop(name) for name in _MULTIPROCESS if name in os.environ}
    try:
        import prometheus_client  # noqa: F401

        yield
    finally:
        os.environ.update(kept)
