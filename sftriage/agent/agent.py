"""One host of a job: reads its rings, carries out captures on its ranks, and stores what they bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sftriage.agent.captures import Captures
from sftriage.agent.executors import Places
from sftriage.agent.reading import RankRings
from sftriage.capture.nsys import NsysPlace
from sftriage.recorder import RingInfo
from sftriage.records import JobStatus, Report, WantedCapture
from sftriage.traces.store import LocalStore
from sftriage.windows.shipped import ReadCounts, Rows


class Agent:
    """What a controller needs of one host. Nothing here waits: it is asked again and again by whoever owns the loop.

    Args:
        rings: directory of the trainers' rings and mailboxes.
        steps: directory where every step is kept.
        spool: directory where trainers leave traces.
        store: where traces are kept.
        job: the job's name.
        run: the run's id.
        nsys: how the trainers were launched under nsys, if they were.
        clock: the time on a clock that only goes on, in seconds.
    """

    def __init__(
        self,
        rings: Path,
        steps: Path,
        spool: Path,
        store: LocalStore,
        *,
        job: str,
        run: str,
        nsys: NsysPlace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rings = RankRings(rings, steps)
        self._captures = Captures(self._rings, Places(rings, spool, nsys), store, job=job, run=run)
        self._clock = clock

    def rows(self) -> list[Rows]:
        """The steps that have come since the last call."""
        return self._rings.rows()

    def statuses(self) -> JobStatus | None:
        """What the host's ranks are doing now; None before there is one."""
        return self._rings.statuses()

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """All captures that are wanted of the host now. Told again, nothing happens again."""
        self._rings.look()
        self._captures.want(wanted, self._clock())

    def reports(self) -> list[Report]:
        """What there is to say of captures since the last call."""
        return self._captures.go_on(self._clock())

    def give_up(self) -> None:
        """Wait for no capture any more: the job has ended."""
        for capture_id in self._captures.running:
            self._captures.give_up(capture_id, "no answer long past its time-box")

    @property
    def running(self) -> tuple[str, ...]:
        """Captures that have not ended."""
        return self._captures.running

    @property
    def telemetry(self) -> ReadCounts:
        """What has come in so far."""
        return self._rings.telemetry

    @property
    def ranks(self) -> dict[int, RingInfo]:
        """The newest ring of each rank of the host."""
        return self._rings.ranks

    def writers_alive(self) -> bool:
        """Whether any trainer is still there."""
        return self._rings.alive()

    def close(self) -> None:
        """Close every file, and end what has not ended."""
        self._captures.close()
        self._rings.close()
