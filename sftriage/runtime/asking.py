"""The captures that people ask for, taken up where a job is triaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sftriage.decisions import ManualRequest
from sftriage.records import JobStatus
from sftriage.runs.asks import left
from sftriage.runs.directory import RunDirectory
from sftriage.traces.disk import Do

STARTING_S = 10.0
"""How long a request waits for a rank that the job has, and that shows nothing yet: it may be about to start."""


class Asks:
    """The requests that are left in a run directory.

    Args:
        directory: the run.
        do: who reads and writes there, one thing after the other.
    """

    def __init__(self, directory: RunDirectory, do: Do) -> None:
        self._directory, self._do = directory, do
        self._found: deque[tuple[Path, ManualRequest]] = deque()
        # Since when those wait whose ranks are not there yet, by id.
        self._waits_s: dict[str, float] = {}

    def due(
        self, statuses: Callable[[], JobStatus | None], now_s: float, *, ended: bool
    ) -> Iterator[tuple[ManualRequest, JobStatus | None]]:
        """Those to be decided now, oldest first, with what the ranks are doing; one that was taken is gone.

        Args:
            statuses: what the ranks are doing now; asked only where there are requests.
            now_s: on a clock that only goes on.
            ended: whether the job has ended: no rank starts any more.
        """
        self._do(self._find, latest=True)
        while self._found:
            path, ask = self._found.popleft()
            job = statuses()
            since_s = self._waits_s.setdefault(ask.request_id, now_s)
            if not ended and _may_start(ask, job) and now_s < since_s + STARTING_S:
                continue  # (its file stays, and is found again)
            yield ask, job
            self._waits_s.pop(ask.request_id)
            # In the lane in which others are looked for: none is found twice.
            self._do(partial(path.unlink, missing_ok=True))

    def _find(self) -> None:
        if not self._found:
            self._found += left(self._directory)


def _may_start(ask: ManualRequest, job: JobStatus | None) -> bool:
    """Whether a rank that is asked for shows nothing yet, though the job has it, as far as is known."""
    if job is None:
        return True
    missing = set(ask.ranks).difference(job.rank_R.tolist())
    return bool(missing) and max(missing) < job.world_size
