"""``sftriage traces get`` and ``open``: fetch a capture's trace from its store, or show it in a program."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sftriage.base.files import refusing, replacing
from sftriage.commands.options import CapturesChoice, ClusterCapture, JsonOption, option
from sftriage.commands.output import copying, ending_on_sigterm, print_json, say, write
from sftriage.commands.traces import AnyCaptureArgument, captures_of
from sftriage.commands.ui import serve_page
from sftriage.errors import UsageError
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.objects import destination_of
from sftriage.traces.store import LocalStore, Store
from sftriage.trainer.sampler import FOLDED_NAME
from sftriage.trainer.sampler import NAME as STACKS_NAME

if TYPE_CHECKING:
    from sftriage.kube.listing import TraceRow
    from sftriage.reduce.opening import Program, StoredFile
    from sftriage.web.serving import Starter


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Which files of a capture to copy, and where to."""

    out: str = option("--out PATH", "File or directory to copy to; for several files, a directory.", default=".")
    artefact: list[str] | None = option(
        "--artefact NAME",
        "File to copy instead of the main one. Repeatable. stacks.folded: the sampled stacks, collapsed.",
    )
    every: bool = option("--all", "Copy every file of the capture.")
    force: bool = option("--force", "Overwrite an existing file.")

    def __post_init__(self) -> None:
        if self.every and self.artefact:
            raise UsageError("give either --all or --artefact")
        if self.out.endswith("/") and not Path(self.out).is_dir():
            raise UsageError(f"{self.out}: no such directory")


def _chosen(
    capture_id: str | None, choice: CapturesChoice, cluster: ClusterCapture
) -> tuple[Store, str, TraceRow | None]:
    """The store and reference of the selected capture; in a cluster also the row of its TraceCapture."""
    cluster.exclude(run=choice.run, catalogue=choice.catalogue)
    if cluster.cluster:
        if (capture_id is None) == (cluster.job is None):
            raise UsageError("give either a capture or --job")
        from sftriage.commands.cluster import stored_capture

        return stored_capture(capture_id, cluster, choice.store)
    if capture_id is None:
        raise UsageError("give a capture; list them with `sftriage traces list`")
    return *captures_of(choice).resolve(capture_id), None


def get_trace(
    capture_id: AnyCaptureArgument = None,
    *,
    choice: CapturesChoice,
    cluster: ClusterCapture,
    options: CopyOptions,
    as_json: JsonOption = False,
) -> None:
    """Copy a capture's trace out of the store, verified against its manifest.

    With --cluster, the store is the one that the TraceCapture names, or --store, if this machine reaches it by another
    URL; the files must also match the TraceCapture.
    """
    store, reference, row = _chosen(capture_id, choice, cluster)
    # (if one file is damaged, the others are still copied)
    manifest, _ = store.look(reference)
    files = _copy(store, reference, manifest, options)
    if as_json:
        print_json({**files[0], "files": files, **({} if row is None else {"capture": row})})
        return
    write(*(file["path"] for file in files))


def _copy(store: Store, reference: str, manifest: Manifest, options: CopyOptions) -> list[dict[str, Any]]:
    """Copy the chosen files, verified; return each path, size and checksum."""
    names = [file.name for file in manifest.artefacts]
    if not options.every:
        names = list(dict.fromkeys(options.artefact or names[:1]))
    # (collapsed stacks are made from the sampled ones)
    artefacts = [manifest.artefact(STACKS_NAME if name == FOLDED_NAME else name) for name in names]
    out = Path(options.out)
    if len(names) > 1 and not out.is_dir():
        with refusing(f"{len(names)} files need a directory; cannot create {out}"):
            out.mkdir()
    targets = [out / f"{manifest.capture_id}-{name}" if out.is_dir() else out for name in names]
    if not options.force and (existing := [target for target in targets if target.exists()]):
        raise UsageError(f"{existing[0]} exists already; --force overwrites it")
    files = []
    for name, artefact, target in zip(names, artefacts, targets, strict=True):
        fetch = _fetch_folded if name == FOLDED_NAME else _fetch
        path = fetch(store, reference, artefact, target, force=options.force)
        size_bytes, sha256 = artefact.size_bytes, artefact.sha256
        if name == FOLDED_NAME:
            size_bytes, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        files.append({"path": str(path), "size_bytes": size_bytes, "sha256": sha256})
    return files


def _fetch(store: Store, reference: str, artefact: Artefact, target: Path, *, force: bool) -> Path:
    with copying(artefact.name, artefact.size_bytes) as progress:
        return store.get(reference, artefact.name, target, force=force, progress=progress)


def _fetch_folded(store: Store, reference: str, stacks: Artefact, target: Path, *, force: bool) -> Path:
    from sftriage.reduce.samples import collapsed, read_samples

    target = destination_of(FOLDED_NAME, target, force=force)
    with tempfile.TemporaryDirectory() as folder:
        sampled = read_samples(_fetch(store, reference, stacks, Path(folder) / stacks.name, force=False))
    with refusing(f"cannot write {target}"), replacing(target) as file:
        file.writelines(f"{line}\n".encode(errors="replace") for line in collapsed(sampled))
    return target


PATIENCE_S = 600.0
GRACE_S = 30
"""Time for a client to receive the last bytes of a file."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to show a capture."""

    artefact: str | None = option("--artefact NAME", "File to open.", "the trace itself")
    browser: bool = option("--browser/--no-browser", "Start a browser, or print the link.", default=True)
    offline: bool = option("--offline", "Open sftriage's own page instead, which contacts no other host.")
    port: int | None = option("--port PORT", "Port to serve on.", "9001", min=1, max=65535)
    out: Path | None = option("--out PATH", "Also save the trace to this file or directory.", False)
    wait: float = option("--wait SECONDS", "How long to serve the file.", min=1.0, default=PATIENCE_S)
    as_json: bool = option("--json", "Print one JSON object with links and paths.")

    def __post_init__(self) -> None:
        if self.offline and self.artefact is not None:
            raise UsageError("--offline shows all files of the capture; leave out --artefact")


def open_trace(
    capture_id: AnyCaptureArgument = None, *, choice: CapturesChoice, cluster: ClusterCapture, options: OpenOptions
) -> None:
    """Open a capture's trace in Perfetto's viewer, which fetches it from this machine; nothing is uploaded.

    The verified file is served only on 127.0.0.1, at a secret address, until the viewer has fetched it. For a file
    that Perfetto cannot show, this prints its text (stacks) or the program that opens it (an Nsight Systems report).
    """
    from sftriage.reduce.opening import StoredFile, program_for
    from sftriage.web.serving import browser_starter

    store, reference, _ = _chosen(capture_id, choice, cluster)
    start = browser_starter(options.browser, say)
    if options.offline:
        _show_page(store, reference, options, start)
        return
    manifest, _ = store.look(reference)
    artefact = manifest.artefacts[0] if options.artefact is None else manifest.artefact(options.artefact)
    program = program_for(artefact.name, manifest.capture.profiler)
    trace = StoredFile(store, reference, manifest, artefact, options.out, copying)
    if program == "perfetto":
        _hand_over(trace, options, start)
    elif program == "text":
        _print_text(trace, options.as_json)
    else:
        _name_program(trace, program, options.as_json)


def _show_page(store: Store, reference: str, options: OpenOptions, start: Starter) -> None:
    from sftriage.web.serving import HOST
    from sftriage.web.store_page import capture_page

    # (captures of a run are not copied, so there is no copy to remove)
    ending = contextlib.nullcontext() if isinstance(store, LocalStore) else ending_on_sigterm()
    stopping = threading.Event()
    with ending, capture_page(store, reference, options.out, stopping, copying) as (app, where, name, trace):

        def about(link: str) -> dict[str, str]:
            return {"file_url": f"{link}/files/{name}", "path": str(trace)}

        serve_page(app, stopping, HOST, options.port or 0, about, as_json=options.as_json, where=where, start=start)


def _hand_over(trace: StoredFile, options: OpenOptions, start: Starter) -> None:
    from sftriage.reduce.opening import for_viewer
    from sftriage.web import serving

    port, wait_s = options.port or serving.VIEWER_PORT, options.wait
    started = options.browser and serving.has_browser(os.environ, sys.platform)
    try:
        with ending_on_sigterm(), serving.listen_for_viewer(port) as listener, for_viewer(trace) as (file, shown, spot):
            served = serving.ServedTrace(shown, trace.name, port, "" if spot is None else spot.parameters)
            with serving.BackgroundServer(served.app(), listener, grace_s=GRACE_S):
                if options.as_json:
                    path = str(trace.here or file)
                    print_json({"url": served.link, "file_url": served.url, "path": path, "pid": os.getpid()})
                    sys.stdout.flush()
                else:
                    write(served.link)
                say(f"served to this machine only, until it is fetched, for at most {wait_s:.0f} s (Ctrl-C to stop)")
                if port != serving.VIEWER_PORT:
                    say(
                        f"{serving.VIEWER} can connect only to port {serving.VIEWER_PORT} of this machine; "
                        f"on port {port} only other programs can fetch the file"
                    )
                start(served.link, port)
                if not served.wait(wait_s, say, started=started, away=serving.unreachable):
                    say(f"{trace.artefact.name} was not fetched within {wait_s:.0f} s")
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

        write(*map(clean, text.splitlines()))


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
        say("no known program shows this file; open a pickle only if you trust the job")
        write(file)
    else:
        write(f"{program} {file}")
