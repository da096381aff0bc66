"""``sftriage traces open``: a capture in the program that shows it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from sftriage.commands.catalogues import CatalogueOption, captures_of, say
from sftriage.commands.decisions import RunOption
from sftriage.commands.loopback import HOST, Door, FileServer
from sftriage.commands.output import copying, print_json, results
from sftriage.commands.stores import StoreOption
from sftriage.commands.traces import CaptureArgument
from sftriage.commands.ui import need_page
from sftriage.commands.watch_lines import clean
from sftriage.errors import UsageError
from sftriage.records import Profiler
from sftriage.traces import Artefact, LocalStore, Manifest
from sftriage.traces.rundir import RunDirectory
from sftriage.traces.stores import Store

VIEWER = "https://ui.perfetto.dev"
VIEWER_PORT = 9001
"""The one port of this machine that the viewer's own rules (its Content-Security-Policy) let it ask."""

PATIENCE_S = 600.0
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
        int | None, typer.Option(min=1, max=65535, help="Port to serve on.", show_default=str(VIEWER_PORT))
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
    if offline and (store is not None or catalogue is not None):
        raise UsageError("--offline shows a run on this machine; `sftriage traces get` fetches what is elsewhere")
    start = _browser_starter(browser)
    captures = captures_of(run, store, catalogue)
    found, reference = captures.one(capture_id)
    manifest = found.manifest(reference)
    if offline:
        _own_page(manifest, captures.run, found, port, start, as_json)
        return
    wanted = manifest.artefacts[0] if artefact is None else manifest.artefact(artefact)
    program = program_for(wanted.name, manifest.capture.profiler)
    trace = _Trace(found, reference, manifest, wanted)
    if program == "perfetto":
        _hand_over(trace, port or VIEWER_PORT, wait, start, as_json)
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


def has_browser(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser can be shown here: not over SSH, nor in a container."""
    if platform in ("darwin", "win32"):
        return True
    return any(environment.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def viewer_link(url: str) -> str:
    """The viewer's documented deep link to a file."""
    return f"{VIEWER}/#!/?url={url}"


@dataclass(frozen=True, slots=True)
class _Trace:
    """A file of a capture, where it is stored."""

    store: Store
    reference: str
    manifest: Manifest
    artefact: Artefact

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
        """A copy of it in a private directory, as its manifest says it is; it is gone after the block."""
        with tempfile.TemporaryDirectory(prefix="sftriage-open-") as directory:
            with copying(self.artefact.name, self.artefact.size_bytes) as progress:
                copy = self.store.get(
                    self.reference, self.artefact.name, Path(directory) / self.name, progress=progress
                )
            yield copy


def _hand_over(trace: _Trace, port: int, wait_s: float, start: Callable[[str], None], as_json: bool) -> None:
    """Serve a trace until the viewer has it."""
    try:
        with _ending_on_sigterm(), trace.verified() as file:
            door = Door(trace.name, VIEWER, port)
            with _listening(file, door).serving() as server:
                link = viewer_link(door.url)
                if as_json:
                    path = str(trace.here or file)
                    print_json({"url": link, "file_url": door.url, "path": path, "pid": os.getpid()})
                    sys.stdout.flush()
                else:
                    results().print(link, soft_wrap=True, markup=False)
                say(f"served to this machine alone: until it is fetched, for {wait_s:.0f} s, or until Ctrl-C")
                if port != VIEWER_PORT:
                    say(
                        f"{VIEWER} asks this machine on port {VIEWER_PORT} alone (its own rules): "
                        f"on port {port} only other programs reach the file"
                    )
                start(link)
                fetched = _wait(server, wait_s)
    except KeyboardInterrupt:
        return
    if not fetched:
        say(f"nobody has fetched {trace.artefact.name} within {wait_s:.0f} s")
        raise typer.Exit(1)
    say("fetched")


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Leave no copy of a trace behind when somebody else ends us."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(server: FileServer, wait_s: float) -> bool:
    """Wait until the file has been fetched, and say after a while what may be in the way."""
    if server.fetched.wait(min(wait_s, HINT_S)):
        return True
    if wait_s <= HINT_S:
        return False
    if not server.asked.is_set():
        say(
            "nothing has asked for it yet: the browser has to be online, and to let the page ask this machine (Chrome "
            "and Edge ask you; Safari never does). `sftriage traces open --offline` needs neither"
        )
    return server.fetched.wait(wait_s - HINT_S)


def _listening(file: Path, door: Door) -> FileServer:
    """A server for a file.

    Raises:
        UsageError: it cannot listen there.
    """
    try:
        return FileServer(file, door)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"cannot listen on {HOST} port {door.port}: {error.strerror or error}") from error
        what = (
            f"end what listens there (`ss -ltnp 'sport = :{door.port}'` says what; often a trace_processor, or another "
            "`traces open`), or use --offline: the viewer's own rules let it ask this machine on no other port"
            if door.port == VIEWER_PORT
            else "take another"
        )
        raise UsageError(f"port {door.port} of {HOST} is taken: {what}") from error


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
        for line in text.splitlines():
            results().print(clean(line), soft_wrap=True, markup=False)


def _name_program(trace: _Trace, program: Program, as_json: bool) -> None:
    """Say what opens a file that no web page shows."""
    here = trace.here
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


def _own_page(
    manifest: Manifest,
    directory: RunDirectory | None,
    store: Store,
    port: int | None,
    start: Callable[[str], None],
    as_json: bool,
) -> None:
    """Open sftriage's own page at a capture, until Ctrl-C."""
    if directory is None or not isinstance(store, LocalStore):
        raise UsageError("--offline shows a run on this machine; name one with --run")
    need_page()
    from sftriage.ui import Access, RunSource, create_app
    from sftriage.ui.serving import address, listen, serve

    stopping = threading.Event()
    app = create_app(RunSource(lambda: directory), Access.to(HOST, None, ""), stopping=stopping)
    with listen(HOST, port or 0) as listening:
        link = f"{address(listening)}captures/{manifest.capture_id}"
        if as_json:
            name = manifest.artefacts[0].name
            here = str(store.path(manifest.capture_id, name))
            print_json({"url": link, "file_url": f"{link}/files/{name}", "path": here, "pid": os.getpid()})
            sys.stdout.flush()
        else:
            results().print(link, soft_wrap=True, markup=False)
        say("Ctrl-C ends the page, and nothing else")
        start(link)
        with contextlib.suppress(KeyboardInterrupt):
            serve(app, listening, stopping)


def _browser_starter(wanted: bool) -> Callable[[str], None]:
    """What opens a link for whoever is at this machine, or says that they have to."""

    def start(link: str) -> None:
        if not wanted:
            return
        if not has_browser(os.environ, sys.platform):
            say("no browser can be shown here: open the link in one of yours")
            if os.environ.get("SSH_CONNECTION"):
                say(
                    f"from the machine you sit at: ssh -L {VIEWER_PORT}:{HOST}:{VIEWER_PORT} to here, and open it there"
                )
            return
        # One that runs in the terminal returns when it is left; the file is served meanwhile.
        threading.Thread(target=_start, args=(link,), name="browser", daemon=True).start()

    return start


def _start(link: str) -> None:
    try:
        started = webbrowser.open(link)
    except webbrowser.Error:
        started = False
    if not started:
        say("no browser could be started: open the link in one of yours")
