"""A job that goes on without whoever watched it, taken over where they left it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sftriage.controller.policies import PolicyFiles
from sftriage.controller.resuming import resume_state
from sftriage.errors import UsageError
from sftriage.runs.directory import RunDirectory, RunInfo, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.liveness import launcher_of
from sftriage.runtime.indexing import indexing_of
from sftriage.runtime.nsys_launch import place_in, remove_place
from sftriage.runtime.rings import own, remove_rings_directory
from sftriage.runtime.triage import POLL_S, Triage, this_host
from sftriage.runtime.uploads import uploads_of
from sftriage.sinks.stream import Sink

RESTART_S = 60.0
"""Where nobody knows what started the trainers: how long none of them may be there before the job counts as over."""


class TakeOver:
    """The triage of a running job, from where it was left, for as long as the ``with`` block lasts.

    ``policies`` are files that are watched for other ones, by default those the run started with; ``sinks`` makes who
    is told what happens.

    Raises:
        UsageError: the job has ended, or something of this cannot be used.
    """

    def __init__(
        self,
        directory: RunDirectory,
        policies: Sequence[Path],
        sinks: Callable[[RunInfo], Sequence[Sink]],
        catalogue: str | None = None,
    ) -> None:
        info = read_info(directory)
        self._rings = Path(info.rings)
        if not self._rings.is_dir():
            raise UsageError(f"{directory.path}: the job has ended; its steps and captures are there to be looked at")
        self.files = PolicyFiles(policies or directory.policy_files())
        self.uploads = uploads_of(directory, info)
        self.indexing = indexing_of(directory.path, catalogue)
        kept = [sink for sink in (self.uploads, self.indexing) if sink is not None]
        self._nsys = place_in(directory)
        left = resume_state(read_journal(directory.decisions))
        fleet = this_host(directory, info, self._nsys)
        self._triage = Triage(directory, info, self.files, fleet, [*sinks(info), *kept], left)
        own(self._rings)

    def __enter__(self) -> TakeOver:
        return self

    def __exit__(self, *_: object) -> None:
        self._triage.close()
        remove_rings_directory(self._rings)
        if self._nsys is not None and not self._rings.exists():
            remove_place(self._nsys)

    def watch(self) -> None:
        """Triage the job to its end: that of what started its trainers, or else of the trainers themselves."""
        self._triage.start()
        known = launcher_of(self._rings) is not None
        seen_s = time.monotonic()
        while True:
            time.sleep(POLL_S)
            if known and launcher_of(self._rings) is None:
                break
            if self._triage.trainers_alive:
                seen_s = time.monotonic()
            elif not known and time.monotonic() - seen_s > RESTART_S:
                break
        self._triage.finish()
