"""``sftriage ui`` and ``mcp``: a read-only web page of runs and stores, and a server for AI assistants."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.base.loops import start_thread
from sftriage.commands.options import CapturesChoice, option
from sftriage.commands.output import ending_on_sigterm, print_json, tell, write
from sftriage.errors import UsageError
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory
from sftriage.words.verdicts import place

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from sftriage.web.serving import Access, Starter
    from sftriage.web.store_page import StoreSource

TOKEN_VARIABLE = "SFTRIAGE_UI_TOKEN"

FOUND_EVERY_S = 1.0
"""How often to check whether another run is shown."""


def ui(
    *,
    choice: CapturesChoice,
    host: str = option(
        "ADDRESS", "Address to listen on. Any non-loopback address requires a token.", default="127.0.0.1"
    ),
    port: int = option("PORT", "Port to listen on; 0 chooses a free port.", min=0, max=65535, default=0),
    token_file: Path | None = option(
        "FILE", f"File with the token that browsers send as password. Or set ${TOKEN_VARIABLE} to the token itself."
    ),
    allow_host: list[str] | None = option("NAME", "Host name by which browsers reach the page. Repeatable."),
    as_json: bool = option("--json", "Print one JSON object with the address of the page."),
) -> None:
    """Show a run as a web page: whether the job is healthy, since when not, the slow stage and rank, what was done.

    The page is read-only, follows the run live, and contacts no other host. It shows the newest run of this machine,
    switches to a newer one, and lists the others; with --run it shows that run, and waits for it if it has not
    started. With --store or --catalogue it shows the captures of many jobs and runs: a list with filters, and a page
    for each capture.
    """
    from sftriage.web.serving import Access, token_of
    from sftriage.web.store_page import StorePage

    run, of_store = choice.run, choice.store is not None or choice.catalogue is not None
    if run is not None and of_store:
        raise UsageError("give either a run or a store")
    if run is not None and run.exists() and not run.is_dir():
        raise UsageError(f"{run}: not a directory")
    advice = f"give one with --token-file, or in ${TOKEN_VARIABLE}"
    access = Access.to(host, token_of(token_file, TOKEN_VARIABLE), advice, allow_host or ())
    stopping, about = threading.Event(), dict[str, Any]()
    name = next(iter(allow_host or ()), None)
    if of_store:
        captures = _captures(choice.store, choice.catalogue)
        about = {"run_dir": None, "store": captures.place}
        app = StorePage(captures, access, stopping=stopping).app
        serve_page(app, stopping, host, port, lambda _: about, as_json=as_json, shown=captures.place, name=name)
        return
    app, found = _runs(access, stopping) if run is None else _run(run, access, stopping)
    shown = found()

    def announce(before: Path | None) -> None:
        while not stopping.wait(FOUND_EVERY_S):
            if (now := found()) is not None and now != before:
                tell(f"now shows {place(now)}" + (", the newest run" if before else ""))
                before = now

    start_thread("shown", announce, shown)
    about = {"run_dir": None if shown is None else str(shown)}
    waiting = "waiting for the first run" if run is None else f"waiting for a run in {run}"
    title = place(shown) if shown else waiting
    try:
        serve_page(app, stopping, host, port, lambda _: about, as_json=as_json, shown=title, name=name)
    finally:
        stopping.set()


def _runs(access: Access, stopping: threading.Event) -> tuple[ASGIApp, Callable[[], Path | None]]:
    from sftriage.runs.source import StartedRuns
    from sftriage.web.run_page import RunsPage

    runs = StartedRuns()

    def found() -> Path | None:
        newest = runs.look().newest
        return None if newest is None else newest.directory

    return RunsPage(runs, access, stopping=stopping).app, found


def _run(path: Path, access: Access, stopping: threading.Event) -> tuple[ASGIApp, Callable[[], Path | None]]:
    from sftriage.runs.source import RunSource
    from sftriage.web.run_page import RunPage

    waiting = f"No run in {path} yet. This page shows it as soon as it starts (sftriage run --out {path})."
    source = RunSource(lambda: RunDirectory(path), waiting)

    def found() -> Path | None:
        source.view()
        return source.directory

    return RunPage(source, access, stopping=stopping).app, found


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
    name: str | None = None,
    start: Starter | None = None,
) -> None:
    """Print where the page is and what it shows, and serve it until Ctrl-C; UsageError if it cannot listen there.

    ``about`` gives what JSON adds to its address; ``start`` opens the link, to the page's part ``where``. Others reach
    this machine by ``name``. At the end, ``stopping`` is set.
    """
    from sftriage.web.serving import BackgroundServer, address, is_loopback, listen, tunnel

    with listen(host, port) as listening:
        link = f"{address(listening, name)}{where}"
        at, port = listening.getsockname()[:2]
        if as_json:
            print_json({"url": link, **about(link), "pid": os.getpid()})
            sys.stdout.flush()
        else:
            write(link)
            tell(f"{shown}{shown and '; '}Ctrl-C stops only the page")
            if start is None and is_loopback(at):
                tell(tunnel(at, port, os.environ))
        if start is not None:
            start(link, port)
        server = BackgroundServer(app, listening)
        server.start()
        try:
            with ending_on_sigterm(), contextlib.suppress(KeyboardInterrupt):
                # (a signal just before a wait without a limit would not end it)
                while not stopping.wait(FOUND_EVERY_S):
                    pass
        finally:
            # (this ends the event streams of open pages)
            stopping.set()
            server.close()


def _captures(store: str | None, catalogue: str | None) -> StoreSource:
    from sftriage.runtime.catalogues import own_catalogue, store_of
    from sftriage.traces.catalogue import Catalogue
    from sftriage.traces.remote import RemoteStore, catalogue_url
    from sftriage.web.store_page import StoreSource

    remote = None if store is None else RemoteStore.open(store)
    at: str | Path | None = catalogue_url(catalogue)
    if at is None:
        assert remote is not None, "the options name a store or a catalogue"
        at = own_catalogue(None, remote)
    return StoreSource(Catalogue(at, remote), remote, store_of)


def mcp(
    runs: Path = option("--runs DIR", "The directory of the runs, or one run directory.", default=Path(DEFAULT_ROOT)),
    store: str | None = option(
        "--store URL",
        "A store of captures to serve as well: s3://, gs:// or az:// with bucket and prefix, or a directory.",
        False,
    ),
) -> None:
    """Serve runs to an AI assistant over the Model Context Protocol, on stdin and stdout, read-only.

    The assistant starts this command (docs/assistants.md shows its configuration). It reads only the runs in --runs
    and the captures in --store; it opens no port, starts no capture and changes no run.
    """
    if not runs.is_dir():
        raise UsageError(f"{runs}: no such directory; --runs is where `sftriage run` keeps its runs")
    from sftriage.assistants.answers import Answers, server

    server(Answers(runs.resolve(), store)).run("stdio")
