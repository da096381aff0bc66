"""``sftriage traces open``: a capture in the program that shows it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.options import CapturesChoice, option
from sftriage.commands.output import copying, ending_on_sigterm, print_json, say, write
from sftriage.commands.traces import CaptureArgument, captures_of
from sftriage.commands.ui import serve_page
from sftriage.errors import UsageError
from sftriage.reduce.opening import Program, StoredFile, for_viewer, program_for
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store
from sftriage.web.serving import Starter, browser_starter, has_browser

PATIENCE_S = 600.0
GRACE_S = 30
"""How long the last bytes of a file may take to be received."""


@dataclass(frozen=True, slots=True)
class Showing:
    """How a capture is shown.

    Raises:
        UsageError: the options contradict one another.
    """

    artefact: Annotated[str | None, option("--artefact NAME", "Which file of it.", "the trace itself")] = None
    browser: Annotated[bool, option("--browser/--no-browser", "Start a browser, or print the link.")] = True
    offline: Annotated[bool, option("--offline", "Open sftriage's own page at the capture: it asks no other host.")] = (
        False
    )
    port: Annotated[int | None, option("--port PORT", "Port to serve on.", "9001", min=1, max=65535)] = None
    out: Annotated[Path | None, option("--out PATH", "Leave a copy of the trace in this file or directory.", False)] = (
        None
    )
    wait: Annotated[float, option("--wait SECONDS", "How long the file waits to be fetched.", min=1.0)] = PATIENCE_S
    as_json: Annotated[bool, option("--json", "One object on stdout: where what is.")] = False

    def __post_init__(self) -> None:
        """Say so before anything is looked for."""
        if self.offline and self.artefact is not None:
            raise UsageError("--offline opens the page of the capture, with all of its files: leave --artefact out")


def open_trace(capture_id: CaptureArgument, *, of: CapturesChoice, how: Showing) -> None:
    """Open a capture's trace in Perfetto's viewer, which fetches it from this machine; nothing is uploaded.

    The verified file is served on 127.0.0.1 alone, at an address that cannot be guessed, until the viewer has fetched
    it. What Perfetto does not show (an Nsight Systems report, stacks) is said how to open, or printed.
    """
    found, reference = captures_of(of).one(capture_id)
    shown_in_program(found, reference, how)


def shown_in_program(found: Store, reference: str, how: Showing) -> None:
    """Show a capture of a store as the options of ``sftriage traces open`` say."""
    start = browser_starter(how.browser, say)
    if how.offline:
        _show_page(found, reference, how, start)
        return
    manifest, _ = found.look(reference)
    wanted = manifest.artefacts[0] if how.artefact is None else manifest.artefact(how.artefact)
    program = program_for(wanted.name, manifest.capture.profiler)
    trace = StoredFile(found, reference, manifest, wanted, how.out, copying)
    if program == "perfetto":
        _hand_over(trace, how, start)
    elif program == "text":
        _print_text(trace, how.as_json)
    else:
        _name_program(trace, program, how.as_json)


def _show_page(store: Store, reference: str, how: Showing, start: Starter) -> None:
    from sftriage.web.store_page import capture_page
    from sftriage.web.viewer import HOST

    # A run's own captures are not copied: nothing is left behind.
    ending = contextlib.nullcontext() if isinstance(store, LocalStore) else ending_on_sigterm()
    with ending, capture_page(store, reference, how.out, copying) as page:

        def about(link: str) -> dict[str, str]:
            return {"file_url": f"{link}/files/{page.trace}", "path": str(page.file)}

        serve_page(
            page.app, page.stopping, HOST, how.port or 0, about, as_json=how.as_json, where=page.where, start=start
        )


def _hand_over(trace: StoredFile, how: Showing, start: Starter) -> None:
    from sftriage.web.serving import BackgroundServer
    from sftriage.web.viewer import VIEWER, VIEWER_PORT, ServedTrace, listen_for_viewer, unreachable

    port, wait_s = how.port or VIEWER_PORT, how.wait
    started = how.browser and has_browser(os.environ, sys.platform)
    try:
        with (
            ending_on_sigterm(),
            listen_for_viewer(port) as listening,
            for_viewer(trace) as (file, shown, spot),
        ):
            served = ServedTrace(shown, trace.name, port, "" if spot is None else spot.parameters)
            with BackgroundServer(served.app(), listening, grace_s=GRACE_S):
                if how.as_json:
                    path = str(trace.here or file)
                    print_json({"url": served.link, "file_url": served.url, "path": path, "pid": os.getpid()})
                    sys.stdout.flush()
                else:
                    write(served.link)
                say(f"served to this machine alone: until it is fetched, for {wait_s:.0f} s, or until Ctrl-C")
                if port != VIEWER_PORT:
                    say(
                        f"{VIEWER} asks this machine on port {VIEWER_PORT} alone (its own rules): "
                        f"on port {port} only other programs reach the file"
                    )
                start(served.link, port)
                if not served.wait(wait_s, say, started=started, away=unreachable):
                    say(f"nobody has fetched {trace.artefact.name} within {wait_s:.0f} s")
                    raise typer.Exit(1)
    except KeyboardInterrupt:
        return
    say("fetched")


def _print_text(trace: StoredFile, as_json: bool) -> None:
    with trace.verified() as file:
        text = file.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if as_json:
        print_json({"path": None if trace.here is None else str(trace.here), "opens_with": "text", "content": document})
    elif document is not None:
        write(json.dumps(document, indent=2))
    else:
        from sftriage.reports.watch_lines import clean

        for line in text.splitlines():
            write(clean(line))


def _name_program(trace: StoredFile, program: Program, as_json: bool) -> None:
    if trace.out is None:
        here = trace.here
    else:
        with trace.verified() as here:
            pass
    if as_json:
        print_json({"path": None if here is None else str(here), "opens_with": None if program == "none" else program})
        return
    if here is None:
        where = "" if isinstance(trace.store, LocalStore) else f" --store {trace.store.place}"
        say(f"fetch it first: sftriage traces get {trace.reference} --artefact {trace.artefact.name}{where}")
    file = trace.name if here is None else str(here)
    if program == "none":
        say("sftriage knows no program that shows this file; open a pickle only if you trust the job")
        write(file)
    else:
        write(f"{program} {file}")
