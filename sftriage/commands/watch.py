"""``sftriage watch``: a running job, live in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sftriage.commands.options import RunOption
from sftriage.commands.output import print_json, results
from sftriage.commands.watch_changes import Told, all_of, closing, events, news, opening
from sftriage.commands.watch_lines import Room, picture_lines
from sftriage.commands.watch_screen import Screen
from sftriage.errors import InputError, UsageError
from sftriage.runs.directory import RunDirectory, find_run, run_so_far
from sftriage.runs.picture import MAX_CAPTURES, Picture, Recorders, picture, picture_values
from sftriage.runs.source import RunSource, View
from sftriage.traces.uploads import Outbox, Upload
from sftriage.windows.logs import StepLogs
from sftriage.words import place

POLL_S = 0.5
TERMINATED = 128 + 15
"""What a shell says of a command that SIGTERM ended."""

FOOTER = "Ctrl-C or q ends only the watching"


def watch(
    run: RunOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show how the run stands now, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object a line: every window, and every capture that has ended.")
    ] = False,
) -> None:
    """Watch a job: whether it is healthy and since when, where its time goes, who is at fault, and what was done.

    A run that has not begun is waited for; when it ends, so does this. Nothing is changed by watching, and what has
    been read is not read again. Without a terminal, a line is printed whenever something changes.
    """
    # A name that this terminal has no characters for is no reason to end.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if run is not None and run.exists() and not run.is_dir():
        raise UsageError(f"{run}: not a directory")
    made = run is not None and (RunDirectory(run).info_file.exists() or RunDirectory(run).steps.is_dir())
    if run is not None and run.is_dir() and not made and any(run.iterdir()):
        raise UsageError(f"{run} is not a run directory: it has no run.json")
    watched = Watched(run)
    if once:
        find_run(run)
        _once(watched, as_json)
        return
    console = results()
    try:
        if as_json:
            _stream(watched)
        elif sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
            _on_screen(watched, console)
        else:
            _in_lines(watched, console)
    except KeyboardInterrupt:
        return


class Watched:
    """A run that is looked at again and again, or one that is waited for."""

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._source = RunSource(lambda: run_so_far(run))
        self._logs: StepLogs | None = None
        self._uploads: dict[str, Upload] = {}
        self._last: tuple[View, Recorders, dict[str, Upload]] | None = None
        self._picture = Picture("waiting", self.place)

    @property
    def place(self) -> str:
        """Where the run is, or is waited for."""
        found = self._source.directory or self._run
        return "the first on this machine" if found is None else place(found)

    def look(self) -> View:
        """The run as it is now.

        Raises:
            InputError: what is there is no run, or a newer sftriage's, or cannot be read.
        """
        try:
            view = self._source.view()
            if _ended(view):
                # What was written between the look at its journal and its end.
                view = self._source.view()
        except OSError as error:
            raise InputError(f"{self.place}: {error.strerror or error}") from error
        if view.problem:
            raise InputError(view.problem)
        return view

    def picture(self, view: View) -> Picture:
        """What there is to show; made anew only where something has changed."""
        recorders, uploads = self._recorders(view), self._look_at_uploads(view)
        if self._last is None or self._last[0] is not view or self._last[1:] != (recorders, uploads):
            self._last = (view, recorders, uploads)
            self._picture = picture(view, recorders, self.place, uploads)
        return self._picture

    def _look_at_uploads(self, view: View) -> dict[str, Upload]:
        """How far the newest captures are on their way elsewhere. What has arrived is not looked at again."""
        if self._source.directory is None:
            return {}
        outbox, found = Outbox(self._source.directory), {}
        for one in view.captures[:MAX_CAPTURES]:
            known = self._uploads.get(one.capture_id)
            upload = known if known is not None and known.state == "stored" else outbox.upload(one.capture_id)
            if upload is not None:
                found[one.capture_id] = upload
        self._uploads = found
        return found

    def _recorders(self, view: View) -> Recorders:
        if self._source.directory is None:
            return Recorders()
        if self._logs is None:
            self._logs = StepLogs(self._source.directory / "steps")
        self._logs.look()
        attempt = view.rows[-1].attempt if view.rows else max(self._logs.attempts, default=0)
        ranks = self._logs.attempts.get(attempt, {})
        return Recorders(len(ranks), max((one.info.world_size for one in ranks.values()), default=0))


def _ended(view: View) -> bool:
    return view.info is not None and not view.going


def _once(watched: Watched, as_json: bool) -> None:
    shown = watched.picture(watched.look())
    if as_json:
        print_json(picture_values(shown))
    else:
        _print(results(), shown)


def _print(console: Console, shown: Picture) -> None:
    """The picture, as long as it is."""
    for line in picture_lines(shown, Room(console.width, blocks=_blocks(console)), time.time()):
        console.print(line, soft_wrap=True)


def _blocks(console: Console) -> bool:
    """Whether the terminal has the characters that bars are made of."""
    return console.encoding.startswith("utf")


def _stream(watched: Watched) -> None:
    told = Told()
    while True:
        view = watched.look()
        told, values = events(told, view)
        for value in values:
            print_json(value)
        if _ended(view):
            print_json({"type": "ended", "windows": len(view.rows), "captures": len(told.ended)})
        sys.stdout.flush()
        if _ended(view):
            return
        time.sleep(POLL_S)


def _in_lines(watched: Watched, console: Console) -> None:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    view = watched.look()
    if _ended(view):
        _print(console, watched.picture(view))
        return
    said = view.info is not None
    say(opening(view, watched.place))
    told = all_of(view)
    while not _ended(view):
        time.sleep(POLL_S)
        view = watched.look()
        if view.info is not None and not said:
            said = True
            say(opening(view, watched.place))
            told = Told()
        told, lines = news(told, view, time.time())
        for line in lines:
            say(line)
    say(closing(view))


def _on_screen(watched: Watched, console: Console) -> None:
    view, blocks = watched.look(), _blocks(console)

    def lines(width: int, height: int) -> list[Text]:
        return picture_lines(watched.picture(view), Room(width, height, blocks, FOOTER), time.time())

    if _ended(view):
        _print(console, watched.picture(view))
        return
    screen = Screen(console, lines)
    # Ctrl-C ends the drawing; the last picture stays.
    with contextlib.suppress(KeyboardInterrupt), screen:
        while not _ended(view) and not screen.wait(POLL_S):
            view = watched.look()
    if screen.terminated:
        raise typer.Exit(TERMINATED)
    _print(console, watched.picture(view))
