"""The command line: subcommands put together, and errors turned into exit codes. Here and nowhere else."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sftriage import __version__
from sftriage.commands.contents import CONTENTS, Entry, Section
from sftriage.commands.grouping import flattened
from sftriage.errors import InputError, SftriageError, UsageError

# Plain text: at 80 columns a help in boxes leaves half of a line for what is explained.
_MARKUP = None

READER_GONE = 128 + signal.SIGPIPE
"""What a shell says of a command that SIGPIPE ended. The signal itself stays ignored, as Python has it: it would end a
job's triage too when somebody else's connection breaks."""


class ReaderGone(Exception):  # noqa: N818  # not an error: nobody reads the results any more
    """What is left to print is not printed: `head` and `less` go when they have seen enough."""


@contextlib.contextmanager
def told_of() -> Iterator[None]:
    """Say that a reader has gone before typer does, which ends with 1 as if something had failed."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Command(TyperCommand):
    """A subcommand whose module is imported once it is run, or asked for its help."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(name=entry.name, short_help=entry.summary, rich_markup_mode=_MARKUP)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself, which is then what is run."""
        return self._loaded.make_context(info_name, args, parent, **extra)

    @cached_property
    def _loaded(self) -> Any:
        entry = self._entry
        module, _, function = entry.home.partition(":")
        with _uncollected():
            home = import_module(f"sftriage.commands.{module}")
        alone = typer.Typer(add_completion=False, rich_markup_mode=_MARKUP)
        alone.command(
            entry.name,
            epilog="\b\n" + "\n".join(("For example:", *(f"  {example}" for example in entry.examples))),
            context_settings={"allow_interspersed_args": not entry.passes_on},
        )(flattened(getattr(home, function)))
        command: Any = typer.main.get_command(alone)
        for argument in command.params:
            if argument.param_type_name == "argument":
                # Its name says what it is; `CAPTURE <str>` says no more.
                argument.display_type_rich = lambda ctx: None
        return command


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make much that stays and little that goes: looking for it meanwhile is a sixth of their time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class CommandLine(TyperGroup):
    """All of it."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """What is printed meanwhile (help, the version) may meet a reader that has gone."""
        with told_of():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        """The same of what a command prints."""
        with told_of():
            return super().invoke(ctx)


app = typer.Typer(
    cls=CommandLine,
    help="Names the hidden slow rank and stage of a distributed PyTorch job, and captures a trace of just that.",
    no_args_is_help=True,
    rich_markup_mode=_MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sftriage {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the subcommand."""


@cache
def command_line() -> Any:
    """The command line, of which nothing is imported that is not asked for. A process puts it together once."""
    root: Any = typer.main.get_command(app)
    for entry in CONTENTS:
        root.add_command(_group(entry) if isinstance(entry, Section) else Command(entry))
    return root


def _group(section: Section) -> TyperGroup:
    return TyperGroup(
        name=section.name,
        help=section.summary,
        commands={entry.name: Command(entry) for entry in section.entries},
        no_args_is_help=True,
        rich_markup_mode=_MARKUP,
    )


def main() -> None:
    """Run the command line.

    Exit codes: 2 for what the person can mend (usage, input), 1 for what failed, 141 where nobody reads on.
    """
    _open_what_is_closed()
    _print_in_any_encoding()
    # (a job's progress bar may be on the terminal's line)
    fresh = "\r\x1b[K" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
    logging.basicConfig(format=f"{fresh}sftriage: %(message)s", level=logging.WARNING)
    # A turn of the loop that takes longer than its interval is no news: the next one catches up.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    try:
        try:
            command_line()()
        finally:
            # What waits there may be what nobody reads, or what finds no room.
            sys.stdout.flush()
    except SftriageError as error:
        # A policy's mistakes begin with their file and line, which editors look for at the start of a line.
        _end(str(error) if error.is_located else f"sftriage: {error}", _code_of(error))
    except (ReaderGone, BrokenPipeError):
        _end("", READER_GONE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _end(f"sftriage: {error.strerror}", 1)


def kubectl_plugin() -> None:
    """Run `sftriage kube`: kubectl starts what is called `kubectl-sftriage` for `kubectl sftriage`."""
    sys.argv[:1] = ["sftriage", "kube"]
    main()


def _code_of(error: SftriageError) -> int:
    return 2 if isinstance(error, UsageError | InputError) else 1


def _end(said: str, code: int) -> None:
    """End, whoever still listens; what could not be written is not tried again."""
    if said:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{said}\n")
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_what_is_closed() -> None:
    """Whoever was started without an output has nobody who reads it, which is no reason to fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  # for as long as we run


_PLAINER = {"\N{MIDDLE DOT}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MULTIPLICATION SIGN}": "x"}


def _print_in_any_encoding() -> None:
    """Print what the output's encoding lacks as the nearest ASCII, or as ``?``; nothing ends for want of a character.

    Also of UTF-8: a file's name may hold bytes that are no text. (Rich draws tables in ASCII wherever it is not UTF-8.)
    """

    def plainer(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(map(_plainer, error.object[error.start : error.end])), error.end

    codecs.register_error("sftriage.plainer", plainer)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="sftriage.plainer")


def _plainer(one: str) -> str:
    near = _PLAINER.get(one) or unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode()
    return near or "?"
