"""Artefacts and sampled stacks on their way to a browser: piece by piece, wherever they lie, and verified on the way.

The last piece is handed out only once the sum of all of them is right. What is stored may be damaged or somebody
else's; then what the browser has stays a download that was cut short, and is never taken for the trace.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Send

from sftriage.base.files import regular
from sftriage.errors import InputError, IntegrityError, SftriageError
from sftriage.reduce.samples import StackSamples, collapsed, samples_in
from sftriage.sampling.sampler import FOLDED_NAME, NAME
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.remote import Objects, Patience, checked_url
from sftriage.traces.store import LocalStore, read_upload
from sftriage.traces.stores import CaptureKey, Store, are_beside, chunks, verified
from sftriage.web.flames import FlameGraph, Sampled, flame_graph
from sftriage.web.page import reading_stored
from sftriage.words.amounts import size

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


KEPT = 8
MOST_BYTES = 8 * 2**20
"""Of a file that a page draws: of four threads, a minute."""


class StackDownloads:
    """What reads them. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, StackSamples] = OrderedDict()

    def drawn(
        self, manifest: Manifest, store: Store, others: Iterable[tuple[Manifest, Store]], query: Mapping[str, str]
    ) -> FlameGraph | str | None:
        """The flame graph of a capture; in words why there is none; None where no stacks were sampled.

        Args:
            manifest: the capture.
            store: where it is.
            others: those among which the one to compare it with is.
            query: see `flame_graph`.
        """
        if (artefact := stacks_of(manifest)) is None:
            return None
        if artefact.size_bytes > MOST_BYTES:
            return f"{size(artefact.size_bytes)} are too many for a page; the file can be downloaded"
        try:
            beside = next((one for one in others if are_beside(manifest, one[0]) and stacks_of(one[0])), None)
            pair = [(manifest, store), beside] if beside is not None else [(manifest, store)]
            # Of a control's capture, too, the suspect is drawn first.
            pair.sort(key=lambda one: one[0].capture.role != "suspect")
            its, *control = (Sampled(one, self.read(one, where)) for one, where in pair)
            return flame_graph(its, next(iter(control), None), query)
        except SftriageError as error:
            return str(error)

    def read(self, manifest: Manifest, store: Store) -> StackSamples:
        """The samples of a capture that has some.

        Raises:
            SftriageError: they cannot be read, or are not what was stored.
        """
        artefact = manifest.artefact(NAME)
        with self._lock:
            known = self._kept.get(artefact.sha256)
        if known is None:
            wrong = f"{NAME}: not what its manifest says; it was put as sha256 {artefact.sha256}"
            known = samples_in(b"".join(verified(pieces_of(store, manifest, artefact), artefact, wrong)), NAME)
        with self._lock:
            self._kept[artefact.sha256] = known
            self._kept.move_to_end(artefact.sha256)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return known

    def folded(self, manifest: Manifest, store: Store) -> Response:
        """The stacks of a capture as a file of collapsed stacks."""
        if stacks_of(manifest) is None:
            raise HTTPException(404, "In this capture no stacks were sampled.")
        with reading_stored():
            text = "".join(f"{line}\n" for line in collapsed(self.read(manifest, store)))
        headers = {"Content-Disposition": f'attachment; filename="{manifest.capture_id}-{FOLDED_NAME}"'}
        return PlainTextResponse(text, headers=headers)


def stacks_of(manifest: Manifest) -> Artefact | None:
    """The file of the stacks that were sampled in a capture, if they were."""
    return next((one for one in manifest.artefacts if one.name == NAME), None)
