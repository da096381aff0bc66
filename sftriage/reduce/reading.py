"""The traces of a file, whatever wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sftriage.reduce.events import Trace
from sftriage.reduce.kineto import read_kineto
from sftriage.reduce.nsys import read_nsys
from sftriage.reduce.sources import format_of


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces of a file, whatever it is: one, or as many as an archive or an export holds.

    Raises:
        InputError: it cannot be read; the message says what it is, where and why.
    """
    return read_nsys(path) if format_of(path) == "sqlite" else read_kineto(path)
