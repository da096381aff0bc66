"""One capture on sftriage's own page, which asks no other host."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from sftriage.base.files import private
from sftriage.errors import IntegrityError
from sftriage.reduce.opening import Copying
from sftriage.runs.directory import RunDirectory
from sftriage.runs.source import RunSource
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.manifest import MANIFEST_NAME, Manifest
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import CaptureKey, Store, destination_of
from sftriage.web.access import Access
from sftriage.web.run_page import RunPage
from sftriage.web.store_page import StorePage
from sftriage.web.store_source import StoreSource
from sftriage.web.viewer import HOST


@dataclass(frozen=True, slots=True)
class CapturePage:
    """A page that shows a capture.

    Attributes:
        app: what answers, on this machine alone.
        stopping: is set at the end.
        where: the capture's part of the page.
        trace: the name of its trace.
        file: the trace, verified.
    """

    app: ASGIApp
    stopping: threading.Event
    where: str
    trace: str
    file: Path


@contextlib.contextmanager
def capture_page(store: Store, reference: str, out: Path | None, copying: Copying) -> Iterator[CapturePage]:
    """A page of a capture. One of a store elsewhere is fetched first, and verified; it is gone after the block.

    A copy of its trace is left at ``out``.

    Raises:
        IntegrityError: a file of the capture is not what was put.
        StoreError: the store cannot be reached.
    """
    access, stopping = Access.to(HOST, None, ""), threading.Event()
    manifest, condition = store.look(reference)
    if not condition.whole:
        raise IntegrityError(condition.problem)
    key, name = CaptureKey.of(manifest).key, manifest.artefacts[0].name
    target = None if out is None else destination_of(f"{manifest.capture_id}-{name}", out, force=False)
    if isinstance(store, LocalStore):
        if target is not None:
            store.get(reference, name, target)
        directory = RunDirectory(Path(store.place).parent)
        app = RunPage(RunSource(lambda: directory), access, stopping=stopping).app
        file = target or store.path(reference, name)
        yield CapturePage(app, stopping, f"captures/{manifest.capture_id}", name, file)
        return
    with _fetched(store, reference, manifest, copying) as (copy, root):
        if target is not None:
            copy.get(key, name, target)
        source = StoreSource(Catalogue(root / "catalogue.db", copy), copy, lambda _: copy, place=store.place)
        app = StorePage(source, access, stopping=stopping).app
        yield CapturePage(app, stopping, f"captures/{key}", name, target or root / key / name)


@contextlib.contextmanager
def _fetched(store: Store, reference: str, manifest: Manifest, copying: Copying) -> Iterator[tuple[Store, Path]]:
    """A store on this machine that has this one capture, each file verified; it is gone after the block."""
    from sftriage.traces.remote import RemoteStore

    with tempfile.TemporaryDirectory(prefix="sftriage-open-") as name:
        root = Path(name)
        place = root / CaptureKey.of(manifest).key
        place.mkdir(parents=True, mode=0o700)
        for artefact in manifest.artefacts:
            with copying(artefact.name, artefact.size_bytes) as progress:
                store.get(reference, artefact.name, place / artefact.name, progress=progress)
        with private(place / MANIFEST_NAME) as file:
            file.write(manifest.to_json())
        yield RemoteStore.open(root.as_uri()), root
