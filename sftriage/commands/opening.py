"""``sftriage traces open``: a capture in the program that shows it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sftriage.commands.browsers import Starter, browser_starter
from sftriage.commands.catalogues import captures_of, say
from sftriage.commands.options import CatalogueOption, RunOption, StoreOption
from sftriage.commands.output import copying, ending_on_sigterm, print_json, results
from sftriage.commands.traces import CaptureArgument
from sftriage.errors import UsageError
from sftriage.records import Profiler
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store, destination_of

if TYPE_CHECKING:
    from sftriage.web.viewer import ServedTrace

PATIENCE_S = 600.0
GRACE_S = 30
"""How long the last bytes of a file may take to be received."""
HINT_S = 20.0
"""After so long without a request it is said what may be in the way."""

Program = Literal["perfetto", "nsys-ui", "sqlite3", "text", "none"]


def open_trace(
    capture_id: CaptureArgument,
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
    artefact: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which file of it.", show_default="the trace itself")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Start a browser, or print the link.")] = True,
    offline: Annotated[
        bool, typer.Option("--offline", help="Open sftriage's own page at the capture: it asks no other host.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=1, max=65535, help="Port to serve on.", show_default="9001"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Leave a copy of the trace in this file or directory.", show_default=False),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long the file waits to be fetched.")
    ] = PATIENCE_S,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout: where what is.")] = False,
) -> None:
    """Open a capture's trace in Perfetto's viewer, which fetches it from this machine; nothing is uploaded.

    The verified file is served on 127.0.0.1 alone, at an address that cannot be guessed, until the viewer has fetched
    it. What Perfetto does not show (an Nsight Systems report, stacks) is said how to open, or printed.
    """
    start = browser_starter(browser)
    captures = captures_of(run, store, catalogue)
    found, reference = captures.one(capture_id)
    if offline:
        if artefact is not None:
            raise UsageError("--offline opens the page of the capture, with all of its files: leave --artefact out")
        from sftriage.commands.own_page import show

        show(found, reference, port=port, out=out, start=start, as_json=as_json)
        return
    manifest, _ = found.look(reference)
    wanted = manifest.artefacts[0] if artefact is None else manifest.artefact(artefact)
    program = program_for(wanted.name, manifest.capture.profiler)
    trace = _Trace(found, reference, manifest, wanted, out)
    if program == "perfetto":
        _hand_over(trace, port, wait, start, as_json)
    elif program == "text":
        _print_text(trace, as_json)
    else:
        _name_program(trace, program, as_json)


def program_for(name: str, profiler: Profiler) -> Program:
    """What shows a file of a capture."""
    if profiler == "torch" and name.endswith((".json", ".json.gz")):
        return "perfetto"
    suffix = Path(name).suffix
    by_suffix: Mapping[str, Program] = {".nsys-rep": "nsys-ui", ".sqlite": "sqlite3", ".json": "text"}
    return by_suffix.get(suffix, "none")


@dataclass(frozen=True, slots=True)
class _Trace:
    """A file of a capture, where it is stored, and where a copy of it is to be left."""

    store: Store
    reference: str
    manifest: Manifest
    artefact: Artefact
    out: Path | None = None

    @property
    def name(self) -> str:
        """The file's name outside the store: its capture is said in it."""
        return f"{self.manifest.capture_id}-{self.artefact.name}"

    @property
    def here(self) -> Path | None:
        """Where it lies, if it is on this machine."""
        if not isinstance(self.store, LocalStore):
            return None
        try:
            return self.store.path(self.reference, self.artefact.name)
        except UsageError:
            # It was uploaded, and is there alone.
            return None

    @contextlib.contextmanager
    def verified(self) -> Iterator[Path]:
        """A copy of it, as its manifest says it is: in a private directory that is gone after the block, or left."""
        if self.out is not None:
            yield self._copied(destination_of(self.name, self.out, force=False))
            return
        with tempfile.TemporaryDirectory(prefix="sftriage-open-") as directory:
            yield self._copied(Path(directory) / self.name)

    def _copied(self, target: Path) -> Path:
        with copying(self.artefact.name, self.artefact.size_bytes) as progress:
            return self.store.get(self.reference, self.artefact.name, target, progress=progress)


def _hand_over(trace: _Trace, wanted_port: int | None, wait_s: float, start: Starter, as_json: bool) -> None:
    """Serve a trace until the viewer has it."""
    from sftriage.web.serving import BackgroundServer
    from sftriage.web.viewer import VIEWER, VIEWER_PORT, ServedTrace

    port = wanted_port or VIEWER_PORT
    try:
        with ending_on_sigterm(), _listening(port) as listening, trace.verified() as file:
            served = ServedTrace(file, trace.name, port)
            with BackgroundServer(served.app(), listening, grace_s=GRACE_S):
                if as_json:
                    path = str(trace.here or file)
                    print_json({"url": served.link, "file_url": served.url, "path": path, "pid": os.getpid()})
                    sys.stdout.flush()
                else:
                    results().print(served.link, soft_wrap=True, markup=False)
                say(f"served to this machine alone: until it is fetched, for {wait_s:.0f} s, or until Ctrl-C")
                if port != VIEWER_PORT:
                    say(
                        f"{VIEWER} asks this machine on port {VIEWER_PORT} alone (its own rules): "
                        f"on port {port} only other programs reach the file"
                    )
                start(served.link, port)
                if not _fetched(served, wait_s):
                    say(f"nobody has fetched {trace.artefact.name} within {wait_s:.0f} s")
                    raise typer.Exit(1)
    except KeyboardInterrupt:
        return
    say("fetched")


def _fetched(served: ServedTrace, wait_s: float) -> bool:
    """Wait until the file has been fetched, and say after a while what may be in the way."""
    if served.fetched.wait(min(wait_s, HINT_S)):
        return True
    if wait_s <= HINT_S:
        return False
    if not served.asked.is_set():
        say(
            "nothing has asked for it yet: the browser has to be online, and to let the page ask this machine (Chrome "
            "and Edge ask you; Safari never does). `sftriage traces open --offline` needs neither"
        )
    return served.fetched.wait(wait_s - HINT_S)


def _listening(port: int) -> socket.socket:
    """A socket for the viewer to ask on.

    Raises:
        UsageError: it cannot be had, with what to do about it where the port is taken.
    """
    from sftriage.web.serving import listen
    from sftriage.web.viewer import HOST, VIEWER_PORT

    try:
        return listen(HOST, port)
    except UsageError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        what = (
            f"end what listens there (`ss -ltnp 'sport = :{port}'` says what; often a trace_processor, or another "
            "`traces open`), or use --offline: the viewer's own rules let it ask this machine on no other port"
            if port == VIEWER_PORT
            else "take another"
        )
        raise UsageError(f"port {port} of {HOST} is taken: {what}") from error


def _print_text(trace: _Trace, as_json: bool) -> None:
    """Print a document that people read as it is."""
    with trace.verified() as file:
        text = file.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if as_json:
        print_json({"path": None if trace.here is None else str(trace.here), "opens_with": "text", "content": document})
    elif document is not None:
        results().print(json.dumps(document, indent=2), soft_wrap=True, markup=False)
    else:
        from sftriage.commands.watch_lines import clean

        for line in text.splitlines():
            results().print(clean(line), soft_wrap=True, markup=False)


def _name_program(trace: _Trace, program: Program, as_json: bool) -> None:
    """Say what opens a file that no web page shows."""
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
        results().print(file, soft_wrap=True, markup=False)
    else:
        results().print(f"{program} {file}", soft_wrap=True, markup=False)
