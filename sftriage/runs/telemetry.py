"""Whether all ranks of a job are heard of: seen from the names of their logs, so that it costs nothing to ask."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sftriage.errors import RingError
from sftriage.windows.logs import LOG_NAME, LogReader

MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Telemetry:
    """How many ranks of an attempt have recorded steps, of how many, and the first few that have not."""

    ranks: int = 0
    world_size: int = 0
    missing: tuple[int, ...] = ()

    @property
    def lacking(self) -> int:
        """Ranks of which nothing is known."""
        return max(0, self.world_size - self.ranks)


@dataclass(slots=True)
class TelemetryLook:
    """Looks at the logs in a directory, whenever one has come."""

    directory: Path
    _seen: tuple[int, int | None] | None = None
    _found: Telemetry = field(default_factory=Telemetry)

    def at(self, attempt: int | None) -> Telemetry:
        """The ranks of one attempt, or of the newest there is."""
        try:
            seen = (self.directory.stat().st_mtime_ns, attempt)
            if seen != self._seen:
                self._found, self._seen = telemetry_of(self.directory, attempt), seen
        except OSError:
            return Telemetry()
        return self._found


def telemetry_of(directory: Path, attempt: int | None) -> Telemetry:
    """The ranks of one attempt, or of the newest there is, as their logs are named; one says how many there should be.

    Raises:
        OSError: the directory cannot be read.
    """
    attempts: dict[int, set[int]] = {}
    for entry in os.scandir(directory):
        if (named := LOG_NAME.fullmatch(entry.name)) is not None:
            attempts.setdefault(int(named[2]), set()).add(int(named[1]))
    attempt = max(attempts, default=0) if attempt is None else attempt
    ranks = attempts.get(attempt, set())
    if not ranks:
        return Telemetry()
    try:
        world_size = LogReader(directory / f"rank-{min(ranks)}.{attempt}.steps").info.world_size
    except RingError:
        return Telemetry(len(ranks))
    absent = (rank for rank in range(world_size) if rank not in ranks)
    return Telemetry(len(ranks), world_size, tuple(islice(absent, MAX_NAMED)))
