"""Where commands write: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from sftriage.records import plain

PIPE_COLUMNS = 250
"""How wide a table may be where no terminal says so."""


def results() -> Console:
    """The console for results."""
    return Console(highlight=False)


def lists() -> Console:
    """The console for long tables: where nobody says how wide a line is, they are not squeezed into 80 characters."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(highlight=False, width=wide)


def notices() -> Console:
    """The console for progress and notices."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of how many are done, where a person looks on; nothing of it stays."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=notices(), transient=True, disable=not notices().is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextmanager
def copying(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes have been copied, where a person looks on; nothing of it stays."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=notices(), transient=True, disable=not notices().is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
