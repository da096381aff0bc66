"""``sftriage ui``: a read-only web page about a run."""

from __future__ import annotations

import contextlib
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.output import notices, print_json, results
from sftriage.commands.runs import find_run
from sftriage.commands.words import place
from sftriage.errors import UsageError
from sftriage.traces.rundir import RunDirectory

TOKEN_VARIABLE = "SFTRIAGE_UI_TOKEN"
MAX_TOKEN_BYTES = 4096


def ui(
    run: Annotated[Path | None, typer.Option("--run", help="Run directory.", show_default="the newest run")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Any but this machine's own wants a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any that is free.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token that a browser gives as password. ${TOKEN_VARIABLE} holds the token itself."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name under which browsers reach the page. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout: where the page is.")] = False,
) -> None:
    """Show a run as a web page: is the job healthy, since when not, which stage and rank, and what was done.

    The page changes nothing, follows the run while it goes on, and asks no other host for anything. Without a run yet,
    it waits for the first one.
    """
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "jinja2")):
        raise UsageError("the page needs starlette, uvicorn and jinja2; install sftriage[ui]")
    from sftriage.ui import Access, RunSource, create_app
    from sftriage.ui.serving import address, listen, serve

    if run is not None and not run.is_dir():
        raise UsageError(f"{run}: no such directory")
    access = Access.to(host, _token(token_file), allow_host or ())
    source = RunSource(lambda: _found(run))
    stopping = threading.Event()
    app = create_app(source, access, stopping=stopping)
    with listen(host, port) as listening:
        where = address(listening)
        source.view()
        if as_json:
            print_json({"url": where, "run_dir": source.directory and str(source.directory), "pid": os.getpid()})
        else:
            results().print(where, soft_wrap=True, markup=False)
            shown = place(source.directory) if source.directory else "waiting for a run"
            notices().print(f"{shown}; Ctrl-C ends the page, and nothing else", soft_wrap=True, markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            serve(app, listening, stopping)


def _found(run: Path | None) -> RunDirectory | None:
    """The run to look at, or None as long as there is none."""
    if run is not None:
        return RunDirectory(run)
    try:
        return find_run(None)
    except UsageError:
        return None


def _token(token_file: Path | None) -> str | None:
    """The token, from a file or from the environment: a command line can be read by everybody on the machine.

    Raises:
        UsageError: the file cannot be read, or is no token's.
    """
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        with token_file.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{token_file}: {error.strerror}") from error
    try:
        return token.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{token_file}: a token is printable ASCII characters") from error
