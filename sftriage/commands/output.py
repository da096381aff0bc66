"""Where commands write: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sftriage.commands.cli import ReaderGone
from sftriage.model.windows import plain
from sftriage.words.verdicts import counted, place

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from sftriage.runs.directory import RunDirectory, RunInfo
    from sftriage.runtime.local import WatchedRun
    from sftriage.sinks.metering import Metering
    from sftriage.sinks.stream import Sink
    from sftriage.traces.uploading import UploadProgress

PIPE_COLUMNS = 250
"""Width of a table without a terminal."""


def say(*problems: str) -> None:
    """Print problems on stderr."""
    for problem in problems:
        tell(f"sftriage: {problem}")


def tell(*lines: str) -> None:
    """Print notices on stderr, unchanged."""
    for line in lines:
        notices().print(line, soft_wrap=True)


def write(*lines: str) -> None:
    """Print results on stdout, unchanged."""
    for line in lines:
        results().print(line, soft_wrap=True)


class _Plain(Console):
    """Prints text unchanged: source code, file names and run ids are neither markup nor emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # (notices without a reader do not stop the work)
        if not self.stderr:
            raise ReaderGone


def results() -> Console:
    """The console for results."""
    return _Plain()


def lists() -> Console:
    """The console for long tables: without a known width, they are not squeezed into 80 characters."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return _Plain(width=wide)


def notices() -> Console:
    """The console for progress and notices."""
    return _Plain(stderr=True)


def table(titles: Sequence[str], rows: Iterable[Iterable[Any]], right: Sequence[str] = (), **options: Any) -> Table:
    """A table of these rows, in which the columns of ``right`` are numbers."""
    columns = (Column(title, justify="right" if title in right else "left") for title in titles)
    filled = Table(*columns, **options)
    for row in rows:
        filled.add_row(*row)
    return filled


def bare_table(rows: Iterable[Iterable[Any]]) -> Table:
    """A table without titles and lines."""
    return table((), rows, box=None, show_header=False, padding=(0, 2, 0, 0))


_STYLES = {"ok": "green", "limited": "yellow", "unknown": "yellow", "missing": "red", "wrong": "red"}


def print_findings(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Print the results of checks: of each its name, its state in a color, the detail, and what to do ("": nothing)."""
    cells = (
        (name, Text(state, _STYLES[state]), Text.assemble(detail, *(("\n", ("do:", "bold"), f" {do}") if do else ())))
        for name, state, detail, do in rows
    )
    results().print(bare_table(cells))


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")


@contextmanager
def counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress in items on a terminal, until the block ends."""
    from rich.progress import MofNCompleteColumn

    with _bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def copying(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress in bytes on a terminal, until the block ends."""
    with _byte_bar() as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)


def _byte_bar() -> Progress:
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return _bar(DownloadColumn(binary_units=True), TransferSpeedColumn())


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    console, text = notices(), TextColumn("{task.description}", markup=False)
    return Progress(text, BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal)


_DOING = {"sending": "Sending", "checking": "Reading back"}


@contextmanager
def uploading() -> Iterator[Callable[[UploadProgress], None]]:
    """Show the progress of uploads on a terminal, until the block ends."""
    with _byte_bar() as bar:
        task = bar.add_task("Waiting for the store", total=None)

        def show(progress: UploadProgress) -> None:
            current = progress.current
            if current is not None:
                title = f"{_DOING[current.doing]} {current.capture_id}"
                bar.update(task, description=title, completed=current.done_bytes, total=current.total_bytes)
            elif failed := sum(bool(reason) for reason in progress.left.values()):
                bar.update(task, description=f"Waiting for the store ({failed} failed, retrying)")

        yield show


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exit that runs `finally` blocks, which remove unfinished copies of traces."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class JobOutput:
    """Prints the events of a job, and sends them to its other sinks: metrics, spans, a store, a ``catalogue``."""

    def __init__(self, metering: Metering, *more: Sink, catalogue: str | None = None, why: str | None = None) -> None:
        from sftriage.sinks.terminal import Reporter

        self._reporter, self._metering, self._more = Reporter(notices()), metering, more
        self._catalogue, self._why = catalogue, why
        self.say = self._reporter.say

    def sinks(self, directory: RunDirectory, info: RunInfo) -> list[Sink]:
        from sftriage.runs.source import RunSource
        from sftriage.runtime.copies import RunUploads, SharedIndexing

        self._uploads = RunUploads(directory, info) if info.store is not None else None
        self._indexing = SharedIndexing(directory.path, self._catalogue) if self._catalogue is not None else None
        copies = [sink for sink in (self._uploads, self._indexing) if sink is not None]
        source = RunSource(lambda: directory)

        def times() -> dict[str, float]:
            found = source.view().times
            return {} if found is None else found.by_code

        metering = self._metering.sinks(info.job, info.run_id, time.time(), times)
        return [self._reporter, *self._more, *metering, *copies]

    def say_begun(self, how: str, watched: WatchedRun) -> None:
        """Print the policies of a job, its run directory, and the address of its metrics."""
        names = ", ".join(policy.policy.metadata.name for policy in watched.files.current.loaded)
        self.say(f"{how} under policy {names}; run directory {place(watched.directory.path)}")
        if self._metering.url is not None:
            self.say(f"metrics are at {self._metering.url}")

    def say_summary(self, watched: WatchedRun) -> None:
        """Print the number of windows and captures, and the command that explains them."""
        self._reporter.finish()
        windows, captures = counted(self._reporter.windows, "window"), counted(self._reporter.captures, "capture")
        why = self._why or f"why: sftriage decisions --run {place(watched.directory.path)}"
        self.say(f"{windows} judged, {captures} stored; {why}")
        if self._reporter.hang:
            self.say(self._reporter.hang)

    def finish(
        self, watched: WatchedRun, left_s: Callable[[], float] = lambda: float("inf"), *, summary: bool = True
    ) -> None:
        """Print a summary, wait for uploads and the catalogue for at most ``left_s``, and print what is left."""
        if summary:
            self.say_summary(watched)
        if self._uploads is not None:
            with uploading() as show:
                self._uploads.finish(self.say, show, left_s)
        if self._indexing is not None:
            self._indexing.finish(self.say, left_s)
        self.end()

    def end(self) -> None:
        """Print the last lines of a job that ended early, once."""
        self._reporter.end()
