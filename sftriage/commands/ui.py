"""``sftriage ui``: a read-only web page about a run, or about a store of many."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sftriage.commands.options import CatalogueOption, RunOption, StoreOption
from sftriage.commands.output import print_json, tell, write
from sftriage.errors import UsageError
from sftriage.runs.directory import run_so_far
from sftriage.words import place

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from sftriage.web.browsers import Starter
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
    from sftriage.runs.source import RunSource
    from sftriage.web.access import Access, token_of
    from sftriage.web.run_page import RunPage
    from sftriage.web.store_page import StorePage

    if run is not None and not (store is None and catalogue is None):
        raise UsageError("name a run or a store, and not both")
    if run is not None and not run.is_dir():
        raise UsageError(f"{run}: no such directory")
    given = f"give one with --token-file, or in ${TOKEN_VARIABLE}"
    access = Access.to(host, token_of(token_file, TOKEN_VARIABLE), given, allow_host or ())
    stopping = threading.Event()
    about: dict[str, Any]
    if store is None and catalogue is None:
        source = RunSource(lambda: run_so_far(run))
        app = RunPage(source, access, stopping=stopping).app
        source.view()
        shown = place(source.directory) if source.directory else "waiting for a run"
        about = {"run_dir": source.directory and str(source.directory)}
    else:
        captures = _captures(store, catalogue)
        app = StorePage(captures, access, stopping=stopping).app
        shown, about = captures.place, {"run_dir": None, "store": captures.place}
    serve_page(app, stopping, host, port, lambda _: about, as_json=as_json, shown=shown)


def serve_page(
    app: ASGIApp,
    stopping: threading.Event,
    host: str,
    port: int,
    about: Callable[[str], dict[str, Any]],
    *,
    as_json: bool,
    shown: str = "",
    where: str = "",
    start: Starter | None = None,
) -> None:
    """Say where the page is and what is on it (``shown``), and serve it until Ctrl-C; then ``stopping`` is set.

    ``about`` gives what else is said of its address as JSON; ``start`` shows the link, to the page's part ``where``.

    Raises:
        UsageError: it cannot listen there.
    """
    from sftriage.web.serving import address, listen, serve

    with listen(host, port) as listening:
        link = f"{address(listening)}{where}"
        if as_json:
            print_json({"url": link, **about(link), "pid": os.getpid()})
            sys.stdout.flush()
        else:
            write(link)
            said = f"{shown}{shown and '; '}Ctrl-C ends the page, and nothing else"
            tell(said)
        if start is not None:
            start(link, listening.getsockname()[1])
        with contextlib.suppress(KeyboardInterrupt):
            serve(app, listening, stopping)


def _captures(store: str | None, catalogue: str | None) -> StoreSource:
    """The captures of a store, or of all stores that share a catalogue. Nothing is asked of either yet."""
    from sftriage.runtime.catalogue_urls import catalogue_url
    from sftriage.runtime.catalogues import own_catalogue, store_of
    from sftriage.traces.catalogue import Catalogue
    from sftriage.traces.remote import RemoteStore
    from sftriage.web.store_source import StoreSource

    shared = catalogue_url(catalogue)
    meant = None if store is None else RemoteStore.open(store)
    if shared is None:
        assert meant is not None, "a store or a catalogue is named"
        return StoreSource(Catalogue(own_catalogue(None, meant), meant), meant, store_of)
    return StoreSource(Catalogue(shared, meant), meant, store_of)
