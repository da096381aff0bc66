"""``sftriage traces open --offline``: a capture on sftriage's own page, which asks no other host."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.access import Access
from sftriage.commands.browsers import Starter
from sftriage.commands.catalogues import say
from sftriage.commands.loopback import HOST, ending_on_sigterm
from sftriage.commands.output import copying, print_json, results
from sftriage.commands.ui import need_page
from sftriage.commands.wanted import since_of
from sftriage.errors import IntegrityError, UsageError
from sftriage.runs.directory import RunDirectory
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.files import private
from sftriage.traces.keys import Place
from sftriage.traces.manifest import MANIFEST_NAME, Manifest
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store, destination_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def show(
    store: Store,
    reference: str,
    *,
    port: int | None,
    out: Path | None,
    start: Starter,
    as_json: bool,
) -> None:
    """Show a capture on our own page, until Ctrl-C. One of a store elsewhere is fetched first, and verified.

    Args:
        store: where it is.
        reference: what it is called there.
        port: where the page is served; any that is free by default.
        out: where a copy of its trace is left.
        start: shows the link.
        as_json: say on stdout as JSON where what is.

    Raises:
        UsageError: what serves the page is not installed, or the copy cannot be left there.
        IntegrityError: a file of the capture is not what was put.
        StoreError: the store cannot be reached.
    """
    need_page()
    from sftriage.runs.source import RunSource
    from sftriage.web.app import create_app
    from sftriage.web.store_app import create_store_app
    from sftriage.web.store_source import StoreSource

    access, stopping = Access.to(HOST, None, ""), threading.Event()
    manifest, condition = store.look(reference)
    if not condition.whole:
        raise IntegrityError(condition.problem)
    name = manifest.artefacts[0].name
    target = None if out is None else destination_of(f"{manifest.capture_id}-{name}", out, force=False)
    page = _Page(port, start, as_json, stopping)
    if isinstance(store, LocalStore):
        directory = RunDirectory(Path(store.place).parent)
        if target is not None:
            store.get(reference, name, target)
        app = create_app(RunSource(lambda: directory), access, stopping=stopping)
        page.serve(app, f"captures/{manifest.capture_id}", name, target or store.path(reference, name))
        return
    with _fetched(store, reference, manifest) as (copy, root):
        file = root / Place.of(manifest).key / name
        if target is not None:
            _keep(file, target)
        source = StoreSource(Catalogue(root / "catalogue.db", copy), copy, lambda _: copy, place=store.place)
        app = create_store_app(source, access, since_of, stopping=stopping)
        page.serve(app, f"captures/{Place.of(manifest).key}", name, target or file)


@contextlib.contextmanager
def _fetched(store: Store, reference: str, manifest: Manifest) -> Iterator[tuple[Store, Path]]:
    """A store on this machine that has this one capture, each file verified; it is gone after the block."""
    from sftriage.traces.remote import RemoteStore

    with ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="sftriage-open-") as name:
        root = Path(name)
        place = root / Place.of(manifest).key
        place.mkdir(parents=True, mode=0o700)
        for artefact in manifest.artefacts:
            with copying(artefact.name, artefact.size_bytes) as progress:
                store.get(reference, artefact.name, place / artefact.name, progress=progress)
        with private(place / MANIFEST_NAME) as file:
            file.write(manifest.to_json())
        yield RemoteStore.open(root.as_uri()), root


def _keep(file: Path, target: Path) -> None:
    """Leave a file where it was asked for."""
    try:
        try:
            os.link(file, target)
        except OSError:
            # Another file system, or one without links.
            shutil.copyfile(file, target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


class _Page:
    """Our own page, served on this machine alone."""

    def __init__(self, port: int | None, start: Starter, as_json: bool, stopping: threading.Event) -> None:
        self._port, self._start, self._as_json, self._stopping = port, start, as_json, stopping

    def serve(self, app: ASGIApp, where: str, name: str, file: Path) -> None:
        """Say where it is, show it, and serve it until Ctrl-C.

        Args:
            app: what answers.
            where: the capture's address there.
            name: its trace's name there.
            file: where that lies.
        """
        from sftriage.web.serving import address, listen, serve

        with listen(HOST, self._port or 0) as listening:
            link = f"{address(listening)}{where}"
            if self._as_json:
                print_json({"url": link, "file_url": f"{link}/files/{name}", "path": str(file), "pid": os.getpid()})
                sys.stdout.flush()
            else:
                results().print(link, soft_wrap=True, markup=False)
            say("Ctrl-C ends the page, and nothing else")
            self._start(link, listening.getsockname()[1])
            with contextlib.suppress(KeyboardInterrupt):
                serve(app, listening, self._stopping)
