"""``sftriage traces open --offline``: a capture on sftriage's own page, which asks no other host."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.commands.browsers import Starter
from sftriage.commands.output import copying, ending_on_sigterm
from sftriage.commands.ui import serve_page
from sftriage.commands.wanted import since_of
from sftriage.errors import IntegrityError, UsageError
from sftriage.runs.directory import RunDirectory
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.files import private
from sftriage.traces.keys import CaptureKey
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
        UsageError: the copy cannot be left there.
        IntegrityError: a file of the capture is not what was put.
        StoreError: the store cannot be reached.
    """
    from sftriage.runs.source import RunSource
    from sftriage.web.access import Access
    from sftriage.web.run_page import run_app
    from sftriage.web.store_page import store_app
    from sftriage.web.store_source import StoreSource
    from sftriage.web.viewer import HOST

    access, stopping = Access.to(HOST, None, ""), threading.Event()
    manifest, condition = store.look(reference)
    if not condition.whole:
        raise IntegrityError(condition.problem)
    name = manifest.artefacts[0].name
    target = None if out is None else destination_of(f"{manifest.capture_id}-{name}", out, force=False)

    def serve(app: ASGIApp, where: str, file: Path) -> None:
        def about(link: str) -> dict[str, str]:
            return {"file_url": f"{link}/files/{name}", "path": str(file)}

        serve_page(app, stopping, HOST, port or 0, about, as_json=as_json, where=where, start=start)

    if isinstance(store, LocalStore):
        directory = RunDirectory(Path(store.place).parent)
        if target is not None:
            store.get(reference, name, target)
        app = run_app(RunSource(lambda: directory), access, stopping=stopping)
        serve(app, f"captures/{manifest.capture_id}", target or store.path(reference, name))
        return
    with _fetched(store, reference, manifest) as (copy, root):
        file = root / CaptureKey.of(manifest).key / name
        if target is not None:
            _keep(file, target)
        source = StoreSource(Catalogue(root / "catalogue.db", copy), copy, lambda _: copy, place=store.place)
        app = store_app(source, access, since_of, stopping=stopping)
        serve(app, f"captures/{CaptureKey.of(manifest).key}", target or file)


@contextlib.contextmanager
def _fetched(store: Store, reference: str, manifest: Manifest) -> Iterator[tuple[Store, Path]]:
    """A store on this machine that has this one capture, each file verified; it is gone after the block."""
    from sftriage.traces.remote import RemoteStore

    with ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="sftriage-open-") as name:
        root = Path(name)
        place = root / CaptureKey.of(manifest).key
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
