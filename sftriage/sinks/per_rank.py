"""Prometheus metrics of single ranks, which a run has where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from prometheus_client import Counter, Gauge

from sftriage.decisions import CaptureResult, Suspect
from sftriage.records import JobStatus

Counters: TypeAlias = "partial[Counter]"
Gauges: TypeAlias = "partial[Gauge]"
"""Make a family of metrics of a name, a help text and the names of its labels."""


class PerRank:
    """Series of single ranks: as many as the job has ranks, and those of its suspects' stages. They are asked for."""

    def __init__(self, counter: Counters, gauge: Gauges) -> None:
        self._suspected = counter(
            "sftriage_rank_suspect_verdicts", "Verdicts whose suspect is this rank, or holds it.", ["rank", "stage"]
        )
        self._gain = gauge(
            "sftriage_rank_suspect_gain_seconds",
            "What mending the newest verdict's suspect would save in each step, for each rank of it. Absent while "
            "nobody is suspected.",
            ["rank", "stage"],
        )
        self._captures = counter("sftriage_rank_captures", "Captures of a rank that have ended.", ["rank"])
        self._step = gauge("sftriage_rank_step", "The number of the step that a rank is in.", ["rank"])
        self._alive = gauge(
            "sftriage_rank_alive", "1 while a rank's process is there, NaN where that cannot be told.", ["rank"]
        )

    def suspected(self, named: Suspect | None, label_of: Callable[[str | None], str]) -> None:
        """This one is suspected now, or nobody."""
        self._gain.clear()
        if named is None:
            return
        for rank in named.ranks:
            self._suspected.labels(str(rank), label_of(named.stage)).inc()
            self._gain.labels(str(rank), label_of(named.stage)).set(named.gain_s)

    def captured(self, result: CaptureResult) -> None:
        """A capture has ended."""
        self._captures.labels(str(result.rank)).inc()

    def looked(self, job: JobStatus) -> None:
        """What the ranks are doing."""
        for one in job.ranks:
            self._step.labels(str(one.rank)).set(one.step)
            self._alive.labels(str(one.rank)).set(math.nan if one.alive is None else one.alive)
