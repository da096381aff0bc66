"""Metrics and spans of a run, by options: ready before the job starts, where a port is taken or a library missing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
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
    """The outlets of metrics and spans, made ready: a port is bound, libraries are there, and no thread runs.

    ``listen`` makes what serves the metrics in a registry, at ``url``.

    Raises:
        UsageError: one of them is not possible.
    """

    def __init__(
        self,
        listen: Callable[[CollectorRegistry], tuple[Exposition, str]] | None = None,
        file: Path | None = None,
        per_rank: bool = False,
        otel: bool = False,
    ) -> None:
        self._per_rank = per_rank
        self._ways: list[Exposition] = []
        self._exporter = _exporter() if otel else None
        self.url: str | None = None
        if listen is not None or file is not None:
            _need("prometheus_client", "metrics need prometheus-client; install sftriage[metrics]")
            with _single_process():
                from prometheus_client import CollectorRegistry

                from sftriage.sinks.metrics import TextFile
            self._registry = CollectorRegistry()
            if file is not None:
                self._ways.append(TextFile(file, self._registry))
            if listen is not None:
                server, self.url = listen(self._registry)
                self._ways.append(server)

    def sinks(self, job: str, run: str, started_s: float) -> list[Sink]:
        """The sinks of a run that begins now, ``started_s`` seconds since the epoch; none where none is configured."""
        made: list[Sink] = []
        if self._ways:
            from sftriage.sinks.metrics import Metrics

            made.append(Metrics(job, run, started_s, self._ways, self._per_rank, self._registry))
        if (exporter := self._exporter) is not None:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from sftriage.sinks.spans import SpanSink, Telling

            made.append(SpanSink(lambda: BatchSpanProcessor(Telling(exporter)), job, run, started_s))
            # The library logs each attempt that fails; we log once that spans do not arrive.
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        return made


def _exporter() -> OTLPSpanExporter:
    _need("opentelemetry.exporter.otlp.proto.http", "spans need OpenTelemetry; install sftriage[otel]")
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise UsageError(f"spans are sent as http/protobuf only; OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}")
    try:
        # The library reads its variables when it is imported and when its parts are made: all of that before the job.
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
    """prometheus-client, imported as what it is here: the metrics of one process.

    A training script may gather its own from many processes in a directory, which is named in the environment.
    """
    kept = {name: os.environ.pop(name) for name in _MULTIPROCESS if name in os.environ}
    try:
        import prometheus_client  # noqa: F401

        yield
    finally:
        os.environ.update(kept)
