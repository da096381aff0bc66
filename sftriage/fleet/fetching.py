"""Captures that are fetched from the hub onto the controller's host, with every byte of them checked."""

from __future__ import annotations

import asyncio
import io
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sftriage.errors import CaptureError, SftriageError
from sftriage.fleet.hub import Hub
from sftriage.records import CaptureResult, Report
from sftriage.traces.manifest import MAX_MANIFEST_BYTES, Manifest
from sftriage.traces.store import FileToStore, LocalStore

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from nats.js.api import ObjectInfo
    from nats.js.object_store import ObjectStore

log = logging.getLogger("sftriage")

PATIENCE_S, AGAIN_S = 900.0, 2.0
MAX_FILES, MAX_FILE_BYTES = 32, 8 << 30

Take = Callable[[bytes, Mapping[str, Path]], int]
"""Takes a capture's manifest and its files, checked; how many bytes they are."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Fetches captures into a ``spool``, from where they are taken."""

    take: Take
    spool: Path

    async def fetched(self, hub: Hub, bucket: str, report: Report) -> Report:
        """What a report of a stored capture comes to: its files are fetched and taken, or it has failed."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        capture_id = report.result.capture_id
        problem: Exception
        while True:
            try:
                with tempfile.TemporaryDirectory(prefix="fetch-", dir=self.spool) as folder:
                    manifest, files = await asyncio.wait_for(
                        _files(hub, bucket, report.result, Path(folder)), PATIENCE_S
                    )
                    stored_bytes = await loop.run_in_executor(None, self.take, manifest, files)
                await _forget(hub, bucket, capture_id, files)
                return replace(report, stored_bytes=stored_bytes)
            except SftriageError as error:
                problem = error
                break
            except Exception as error:
                problem = error
                if _is_for_good(error):
                    break
                log.debug("capture %s was not fetched", capture_id, exc_info=True)
            if loop.time() > deadline_s:
                break
            await asyncio.sleep(AGAIN_S)
        why = f"it is stored on its host, and could not be fetched from there: {str(problem) or type(problem).__name__}"
        return replace(report, result=replace(report.result, state="failed", detail=why))


def taker(store: LocalStore, run: str) -> Take:
    """Who takes fetched captures into the store of a run, whose name its agents do not know."""

    def take(data: bytes, files: Mapping[str, Path]) -> int:
        manifest = Manifest.from_json(data, "the manifest").model_copy(update={"run": run})
        size_bytes = sum(one.size_bytes for one in manifest.artefacts)
        if manifest.capture_id in store.ids():
            # Whoever put it there ended before it could say so.
            return size_bytes
        named = {one.name: one for one in manifest.artefacts}
        if set(named) != set(files):
            raise CaptureError(f"capture {manifest.capture_id}: its files are not those of its manifest")

        def checked(found: tuple[object, ...]) -> Manifest:
            if set(found) != set(manifest.artefacts):
                raise CaptureError(f"capture {manifest.capture_id}: it was damaged on its way")
            return manifest

        some = [FileToStore(files[name], name, one.media_type, compress=False) for name, one in named.items()]
        store.put_files(manifest.capture_id, some, checked)
        return size_bytes

    return take


class _Bounded(io.BufferedIOBase):
    """What is written goes on, as far as it may: how much is sent is not told by what is said of it."""

    def __init__(self, file: BinaryIO, most_bytes: int) -> None:
        self._file, self._left_bytes = file, most_bytes

    def write(self, data: ReadableBuffer, /) -> int:
        self._left_bytes -= memoryview(data).nbytes
        if self._left_bytes < 0:
            raise CaptureError("more comes than its manifest says")
        return self._file.write(data)


def _is_for_good(error: Exception) -> bool:
    """Whether it would be so again: what is there is not as it says."""
    from nats.errors import Error
    from nats.js.errors import BadObjectMetaError, DigestMismatchError

    if isinstance(error, (BadObjectMetaError, DigestMismatchError)):
        return True
    return not isinstance(error, (Error, OSError, asyncio.TimeoutError))


async def _info(traces: ObjectStore, name: str) -> ObjectInfo:
    info = await traces.get_info(name)
    if info.is_link() or info.name != name:
        raise CaptureError("it is kept under another one's name")
    return info


async def _files(hub: Hub, bucket: str, result: CaptureResult, folder: Path) -> tuple[bytes, dict[str, Path]]:
    traces, capture_id = await hub.js.object_store(bucket), result.capture_id
    await _info(traces, f"{capture_id}/")
    buffer = io.BytesIO()
    await traces.get(f"{capture_id}/", writeinto=_Bounded(buffer, MAX_MANIFEST_BYTES))
    data = buffer.getvalue()
    manifest = Manifest.from_json(data, "its manifest")
    if (manifest.capture_id, manifest.capture.rank) != (capture_id, result.rank) or len(manifest.artefacts) > MAX_FILES:
        raise CaptureError("its manifest is another's")
    files = {}
    for number, artefact in enumerate(manifest.artefacts):
        name = f"{capture_id}/{artefact.name}"
        info = await _info(traces, name)
        if info.size != artefact.size_bytes or artefact.size_bytes > MAX_FILE_BYTES:
            raise CaptureError(f"{artefact.name} has {info.size} bytes; its manifest says {artefact.size_bytes}")
        files[artefact.name] = folder / str(number)
        log.info("fetching %s of capture %s: %d bytes", artefact.name, capture_id, artefact.size_bytes)
        with files[artefact.name].open("wb") as file:
            await traces.get(name, writeinto=_Bounded(file, artefact.size_bytes))
    return data, files


async def _forget(hub: Hub, bucket: str, capture_id: str, files: Mapping[str, Path]) -> None:
    """Make room on the hub."""
    try:
        traces = await hub.js.object_store(bucket)
        for name in ("", *files):
            await traces.delete(f"{capture_id}/{name}")
    except Exception as error:
        log.debug("capture %s is still on the hub, and goes by itself: %s", capture_id, error)
