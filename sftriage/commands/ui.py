"""``sftriage ui``: a read-only web page about a run, or about a store of many."""

from __future__ import annotations

import contextlib
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sftriage.access import Access, read_token
from sftriage.commands.options import CatalogueOption, RunOption, StoreOption
from sftriage.commands.output import notices, print_json, results
from sftriage.commands.wanted import since_of
from sftriage.errors import UsageError
from sftriage.runs.finding import run_so_far
from sftriage.words import place

if TYPE_CHECKING:
    from sftriage.web.store_source import StoreSource

TOKEN_VARIABLE = "SFTRIAGE_UI_TOKEN"


def ui(
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on. Any but this machine's own wants a token.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 is any that is free.")
    ] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File with the token that a browser gives as password. ${TOKEN_VARIABLE} holds the token itself.",
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
    it waits for the first one. With --store or --catalogue it is about the captures of many jobs and runs: a list with
    filters, and a page for each.
    """
    need_page()
    from sftriage.runs.source import RunSource
    from sftriage.web.app import create_app
    from sftriage.web.serving import address, listen, serve
    from sftriage.web.store_app import create_store_app

    if run is not None and not (store is None and catalogue is None):
        raise UsageError("name a run or a store, and not both")
    if run is not None and not run.is_dir():
        raise UsageError(f"{run}: no such directory")
    given = f"give one with --token-file, or in ${TOKEN_VARIABLE}"
    access = Access.to(host, _token(token_file), given, allow_host or ())
    stopping = threading.Event()
    about: dict[str, Any]
    if store is None and catalogue is None:
        source = RunSource(lambda: run_so_far(run))
        app = create_app(source, access, stopping=stopping)
        source.view()
        shown = place(source.directory) if source.directory else "waiting for a run"
        about = {"run_dir": source.directory and str(source.directory)}
    else:
        captures = _captures(store, catalogue)
        app = create_store_app(captures, access, since_of, stopping=stopping)
        shown, about = captures.place, {"run_dir": None, "store": captures.place}
    with listen(host, port) as listening:
        where = address(listening)
        if as_json:
            print_json({"url": where, **about, "pid": os.getpid()})
        else:
            results().print(where, soft_wrap=True, markup=False)
            notices().print(f"{shown}; Ctrl-C ends the page, and nothing else", soft_wrap=True, markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            serve(app, listening, stopping)


def _captures(store: str | None, catalogue: str | None) -> StoreSource:
    """The captures of a store, or of all stores that share a catalogue. Nothing is asked of either yet.

    Raises:
        UsageError: a URL is none, or what is needed to talk to it is not installed.
    """
    from sftriage.commands.catalogues import own_catalogue, store_of
    from sftriage.runtime.catalogue_urls import catalogue_url
    from sftriage.runtime.stores import open_store
    from sftriage.traces.catalogue import Catalogue
    from sftriage.web.store_source import StoreSource

    shared = catalogue_url(catalogue)
    meant = None if store is None else open_store(None, store)
    if shared is not None:
        return StoreSource(Catalogue(shared, meant), meant, store_of)
    assert meant is not None
    return StoreSource(Catalogue(own_catalogue(None, meant), meant), meant, store_of)


def need_page() -> None:
    """Make sure that the page can be served.

    Raises:
        UsageError: what it needs is not installed.
    """
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "jinja2")):
        raise UsageError("the page needs starlette, uvicorn and jinja2; install sftriage[ui]")


def _token(token_file: Path | None) -> str | None:
    """The token, from a file or from the environment.

    Raises:
        UsageError: the file cannot be read, or is no token's.
    """
    return (os.environ.get(TOKEN_VARIABLE) or None) if token_file is None else read_token(token_file)
