"""All metrics of a registry as of one moment, with the same labels on every series."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Exposed(Collector):
    """What an exposition collects, in place of the metrics themselves.

    When a series began is left out: as text it would be as many series again.

    Args:
        inner: the metrics.
        labels: what every series bears.
        lock: held by whoever changes several metrics that belong together.
    """

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str], lock: threading.Lock) -> None:
        self._inner, self._labels, self._lock = inner, dict(labels), lock

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        with self._lock:
            found = list(self._inner.collect())
        for metric in found:
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric
