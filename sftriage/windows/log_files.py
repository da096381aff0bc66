"""The files of logs on disk, by their names. Without numpy, so that commands that only list files start quickly.

A log is ``rank-<rank>.<attempt>.<kind>`` and, once that is full, ``rank-<rank>.<attempt>.<first>.<kind>``: segments in
the order of ``first``, the first word of their first record.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"rank-(\d{1,9})\.(\d{1,9})(?:\.(\d{1,19}))?\.([a-z-]+)")


class SegmentName(NamedTuple):
    """The parts of a segment's name. ``first`` is 0 in the first segment of a log, whatever its first record is."""

    rank: int
    attempt: int
    kind: str
    first: int


def segment_name(file_name: str) -> SegmentName | None:
    """Parse a file name; None if it is not a segment of a log."""
    found = _NAME.fullmatch(file_name)
    return None if found is None else SegmentName(int(found[1]), int(found[2]), found[4], int(found[3] or 0))


def find_segments(directory: Path, ranks: Collection[int] | None = None) -> list[tuple[SegmentName, Path]]:
    """The files in a directory whose names are those of segments, of all ranks or some, sorted by name.

    Raises OSError if the directory cannot be read.
    """
    # (a large job has many files)
    beginning = "rank-" if ranks is None else tuple(f"rank-{rank}." for rank in ranks)
    entries = (entry for entry in os.scandir(directory) if entry.name.startswith(beginning))
    named = [(name, entry.path) for entry in entries if (name := segment_name(entry.name)) is not None]
    return [(name, Path(path)) for name, path in sorted(named)]


def thinned_kind(kind: str) -> str:
    """The kind of logs with the thinned, older steps."""
    return f"thinned-{kind}"


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The segments of one rank's log, oldest first; the first ``n_thinned`` keep only some steps.

    ``oldest_seq`` is the sequence number at which the oldest one begins, or 0 for a log's very first one.
    """

    rank: int
    attempt: int
    segments: tuple[Path, ...]
    n_thinned: int = 0
    oldest_seq: int = 0

    @property
    def all_there(self) -> bool:
        return self.n_thinned == 0 and self.oldest_seq == 0

    @property
    def newest(self) -> Path:
        return self.segments[-1]


def find_logs(directory: Path, kind: str = "steps", ranks: Collection[int] | None = None) -> list[LogFiles]:
    """The logs in a directory, of all ranks or some, by attempt and rank.

    Raises OSError if the directory cannot be read.
    """
    found: defaultdict[tuple[str, int, int], list[tuple[int, Path]]] = defaultdict(list)
    for name, path in find_segments(directory, ranks):
        found[name.kind, name.attempt, name.rank].append((name.first, path))
    logs = []
    for attempt, rank in sorted((attempt, rank) for of, attempt, rank in found if of == kind):
        older = found.get((thinned_kind(kind), attempt, rank), [])
        segments = [*older, *found[kind, attempt, rank]]
        logs.append(LogFiles(rank, attempt, tuple(path for _, path in segments), len(older), segments[0][0]))
    return logs
