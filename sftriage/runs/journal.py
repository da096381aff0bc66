"""The journal of a run: a line of JSON for every event, in the order in which they happened.

A line is written whole, or is cut short by a crash and passed over when read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sftriage.errors import InputError
from sftriage.events import VERSION, Event, decode, encode, from_values, kind_of
from sftriage.runs.version1 import upgraded


class Journal:
    """Appends to ``decisions.jsonl``; every event is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size_bytes = os.fstat(self._descriptor).st_size
        # A line that a crash cut short must not swallow the next one.
        if size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def append(self, event: Event) -> None:
        """Put an event on record.

        Raises:
            OSError: it is not on disk.
        """
        os.write(self._descriptor, encode(event) + b"\n")
        os.fsync(self._descriptor)

    def events(self) -> Iterator[Event]:
        """What is on record, in order: see `read_journal`."""
        return read_journal(self._path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def event_of(line: bytes) -> Event | None:
    """The event on a line of a journal of this version or the one before; None where it is of a type unknown here.

    Raises:
        ValueError: the line holds no event.
    """
    version, known = kind_of(line)
    if version == VERSION:
        return decode(line) if known else None
    values = upgraded(msgspec.json.decode(line)) if version < VERSION else None
    return None if values is None else from_values(values)


def read_journal(path: Path, damaged: list[bytes] | None = None) -> Iterator[Event]:
    """The journal's events in order. Lines that hold none are passed over, and ``damaged`` gets them; none is empty.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    event = event_of(line)
                except (ValueError, RecursionError):
                    if damaged is not None:
                        damaged.append(line)
                    continue
                if event is not None:
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
