"""Metrics that have a rank as a label. A job of ten thousand ranks has as many series of each: they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from sftriage.records import CaptureResult, JobStatus, Suspect


class PerRank:
    """Series of single ranks: as many as the job has ranks, and those of its suspects' stages."""

    def __init__(self, inner: CollectorRegistry) -> None:
        self._suspected = Counter(
            "sftriage_rank_suspect_verdicts",
            "Verdicts whose suspect is this rank, or holds it.",
            ["rank", "stage"],
            registry=inner,
        )
        self._gain = Gauge(
            "sftriage_rank_suspect_gain_seconds",
            "What mending the newest verdict's suspect would save in each step, for each rank of it. Absent while "
            "nobody is suspected.",
            ["rank", "stage"],
            registry=inner,
        )
        self._captures = Counter(
            "sftriage_rank_captures", "Captures of a rank that have ended.", ["rank"], registry=inner
        )
        self._step = Gauge("sftriage_rank_step", "The number of the step that a rank is in.", ["rank"], registry=inner)
        self._alive = Gauge(
            "sftriage_rank_alive",
            "1 while a rank's process is there, NaN where that cannot be told.",
            ["rank"],
            registry=inner,
        )

    def suspected(self, suspects: tuple[Suspect, ...], label_of: Callable[[str | None], str]) -> None:
        """These are suspected now."""
        self._gain.clear()
        for suspect in suspects:
            for rank in suspect.ranks:
                self._suspected.labels(str(rank), label_of(suspect.stage)).inc()
                self._gain.labels(str(rank), label_of(suspect.stage)).set(suspect.gain_s)

    def captured(self, result: CaptureResult) -> None:
        """A capture has ended."""
        self._captures.labels(str(result.rank)).inc()

    def looked(self, job: JobStatus) -> None:
        """What the ranks are doing."""
        for one in job.ranks:
            self._step.labels(str(one.rank)).set(one.step)
            self._alive.labels(str(one.rank)).set(math.nan if one.alive is None else one.alive)
