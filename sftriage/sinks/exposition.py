"""How metrics get out: as of one moment, with the same labels on every series, and into a file."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sftriage.base.loops import Backoff, Loop
from sftriage.errors import UsageError

log = logging.getLogger("sftriage")

WRITE_EVERY_S = 5.0
CLOSE_GRACE_S = 2.0
SUFFIX = ".prom"


class Exposition(Protocol):
    """A way on which metrics go out."""

    def serve(self, registry: CollectorRegistry) -> None:
        """Begin; threads may be started from here on."""

    def close(self) -> None:
        """Let them go out once more, and end."""


class Exposed(Collector):
    """What an exposition collects, in place of the metrics themselves: with labels that every series bears.

    When a series began is left out: as text it would be as many series again. Whoever changes several metrics that
    belong together holds the ``lock``.
    """

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str], lock: threading.Lock) -> None:
        self._inner, self._labels, self._lock = inner, dict(labels), lock

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        with self._lock:
            found = list(self._inner.collect())
        for metric in found:
            kept = (sample for sample in metric.samples if not sample.name.endswith("_created"))
            metric.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in kept]
            yield metric


class TextFile:
    """Writes the metrics into a file for node_exporter's textfile collector, every few seconds, in a thread.

    A disk that hangs holds up nobody.

    Raises:
        UsageError: no file can be made there, or not one that is read.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != SUFFIX:
            raise UsageError(f"{path}: node_exporter reads files that end in {SUFFIX}")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{path}: no directory that can be written to; see --metrics-file")
        if path.is_dir():
            raise UsageError(f"{path}: is a directory")
        self._path = path
        self._loop: Loop | None = None

    def serve(self, registry: CollectorRegistry) -> None:
        """Write now and from now on."""
        self._loop = Loop(
            *("metrics-file", partial(write_to_textfile, str(self._path), registry), WRITE_EVERY_S),
            failing=f"metrics: {self._path} cannot be written",
            expected=(OSError,),
            backoff=Backoff(WRITE_EVERY_S, WRITE_EVERY_S),
        )
        self._loop.start()

    def close(self) -> None:
        """Write once more, how it ended."""
        if self._loop is not None:
            self._loop.stop(CLOSE_GRACE_S, last_turn=True)
