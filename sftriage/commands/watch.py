"""``sftriage watch``: a running job, live in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time

import typer
from rich.console import Console
from rich.text import Text

from sftriage.commands.options import RunOption, option
from sftriage.commands.output import print_json, results, say, write
from sftriage.errors import UsageError
from sftriage.reports.watch import FollowedRun, RunNews, closing, opening, picture_values
from sftriage.reports.watch_lines import Screen, picture_lines
from sftriage.runs.directory import RunDirectory, find_run
from sftriage.runs.source import View
from sftriage.runs.summary import RunSummary

POLL_S = 0.5
TERMINATED = 128 + 15
"""Exit status of a command that SIGTERM ended."""

FOOTER = "Ctrl-C or q stops only the watching"


def watch(
    run: RunOption = None,
    once: bool = option("--once", "Show the current state of the run, and exit."),
    as_json: bool = option("--json", "Print one JSON object per line: every window, and every capture that has ended."),
) -> None:
    """Watch a job live: whether it is healthy and since when, where its time goes, the suspect, and what was done.

    This waits for a run that has not started, exits when the run ends, and changes nothing. Without a terminal, it
    prints a line for every change.
    """
    if run is not None and run.exists() and not run.is_dir():
        raise UsageError(f"{run}: not a directory")
    is_run = run is not None and (RunDirectory(run).info_file.exists() or RunDirectory(run).steps.is_dir())
    if run is not None and run.is_dir() and not is_run and any(run.iterdir()):
        raise UsageError(f"{run} is not a run directory: it has no run.json")
    watched = FollowedRun(run)
    if once:
        find_run(run)
        view = watched.look()
        if as_json:
            print_json(picture_values(RunSummary(view), watched.place))
        else:
            _print(results(), watched, view)
        return
    if run is None:
        try:
            find_run(None)
        except UsageError as error:
            say(str(error))
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


def _print(console: Console, watched: FollowedRun, view: View) -> None:
    shown, blocks = watched.summary(view), console.encoding.startswith("utf")
    for line in picture_lines(shown, watched.place, time.time(), console.width, blocks=blocks):
        console.print(line, soft_wrap=True)


def _stream(watched: FollowedRun) -> None:
    news = RunNews()
    while True:
        view = watched.look()
        for value in news.values(view):
            print_json(value)
        if view.has_ended():
            print_json({"type": "ended", "windows": len(view.rows), "captures": len(news.ended)})
        sys.stdout.flush()
        if view.has_ended():
            return
        time.sleep(POLL_S)


def _in_lines(watched: FollowedRun, console: Console) -> None:
    view = watched.look()
    if view.has_ended():
        _print(console, watched, view)
        return
    has_begun = view.info is not None
    write(opening(view, watched.place))
    news = RunNews(view)
    while not view.has_ended():
        time.sleep(POLL_S)
        view = watched.look()
        if view.info is not None and not has_begun:
            has_begun = True
            write(opening(view, watched.place))
            news = RunNews()
        write(*news.lines(view, time.time()))
    write(closing(view))


def _on_screen(watched: FollowedRun, console: Console) -> None:
    view, blocks = watched.look(), console.encoding.startswith("utf")

    def lines(width: int, height: int) -> list[Text]:
        shown = watched.summary(view)
        return picture_lines(shown, watched.place, time.time(), width, height, blocks=blocks, footer=FOOTER)

    if view.has_ended():
        _print(console, watched, view)
        return
    screen = Screen(console, lines)
    # Ctrl-C stops drawing; the last screen stays.
    with contextlib.suppress(KeyboardInterrupt), screen:
        while not view.has_ended() and not screen.wait(POLL_S):
            view = watched.look()
    if screen.terminated:
        raise typer.Exit(TERMINATED)
    _print(console, watched, view)
