"""Artefacts on their way to a browser: piece by piece, wherever they lie, and verified on the way.

The last piece is handed out only once the sum of all of them is right. What is stored may be damaged or somebody
else's; then what the browser has stays a download that was cut short, and is never taken for the trace.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from sftriage.base.files import regular
from sftriage.errors import InputError, IntegrityError, SftriageError
from sftriage.traces.files import chunks, verified
from sftriage.traces.keys import CaptureKey
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.objects import Objects, Patience, checked_url
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store
from sftriage.traces.uploads import read_upload
from sftriage.web.page import reading_stored

log = logging.getLogger("sftriage")

PATIENCE = Patience(connect_s=5.0, idle_s=60.0, retries=2, retry_s=10.0)
"""Somebody waits, and can ask again."""


def pieces_of(store: Store, manifest: Manifest, artefact: Artefact) -> Iterator[bytes]:
    """What is in an artefact: of a run on this host, once it has gone from there, what its verified copy has.

    Raises:
        UsageError: the store cannot be opened.
        StoreError: it cannot be reached.
        IntegrityError: the artefact is missing, or no plain file there.
    """
    if not isinstance(store, LocalStore):
        return _elsewhere(store.place, manifest, artefact)
    directory = Path(store.place) / manifest.capture_id
    upload = read_upload(directory)
    if upload is not None and upload.verified_at is not None and not os.path.lexists(directory / artefact.name):
        return _elsewhere(upload.url, manifest, artefact)
    return _here(directory / artefact.name)


def _here(path: Path) -> Iterator[bytes]:
    with regular(path, IntegrityError) as file:
        yield from chunks(file)


def _elsewhere(url: str, manifest: Manifest, artefact: Artefact) -> Iterator[bytes]:
    """What is in an artefact of a store of many jobs."""
    key = f"{CaptureKey.of(manifest).key}/{artefact.name}"
    objects = Objects.open(url, patience=PATIENCE)
    parts = urlsplit(checked_url(url))
    if parts.scheme == "file":
        # Whoever may write into the directory must not have files shown that lie elsewhere.
        root = Path(unquote(parts.path))
        if (root / key).resolve() != root.resolve() / key:
            raise IntegrityError(f"{objects.place}/{key}: not a plain file of the store")
        yield from _here(root / key)
        return
    try:
        yield from objects.stream(key)
    except FileNotFoundError as error:
        raise IntegrityError(f"{objects.place}/{key}: missing") from error


class Download(StreamingResponse):
    """A file that is verified as it goes."""

    async def stream_response(self, send: Send) -> None:
        """Send it; what turns out to be wrong, or cannot be read on, is cut short."""
        try:
            await super().stream_response(send)
        except SftriageError as error:
            # The answer stays without its end, so the server cuts the connection, and the browser says so.
            log.warning("a download was cut short: %s", error)


def file_of(request: Request, manifest: Manifest, store: Store) -> Response:
    """The file of a capture that is asked for, as it is stored; a refusal, where what is seen of it at once is not."""
    try:
        artefact = manifest.artefact(request.path_params["name"])
    except InputError as error:
        raise HTTPException(404, "The capture has no such file.") from error
    checksum = base64.b64encode(bytes.fromhex(artefact.sha256)).decode()
    headers = {
        "Content-Length": str(artefact.size_bytes),
        # Both are plain file names: see `CAPTURE_ID` and `manifest.FileName`.
        "Content-Disposition": f'attachment; filename="{manifest.capture_id}-{artefact.name}"',
        "Repr-Digest": f"sha-256=:{checksum}:",
    }
    if request.method == "HEAD":
        return Response(media_type="application/octet-stream", headers=headers)
    with reading_stored():
        wrong = f"{artefact.name}: not what its manifest says; it was put as sha256 {artefact.sha256}"
        checked = verified(pieces_of(store, manifest, artefact), artefact, wrong)
        # What is wrong with the beginning is said, rather than cut short.
        first = next(checked)
    return Download(chain((first,), checked), media_type="application/octet-stream", headers=headers)
