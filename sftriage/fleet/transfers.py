"""Moves captures from hosts (`HostCaptures`) to the controller (`Fetching`), over the hub or by way of a store."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from sftriage.base.files import write_atomically
from sftriage.base.loops import LogOnce
from sftriage.errors import CaptureError, SftriageError, StoreError, UsageError
from sftriage.fleet.hub import Hub
from sftriage.fleet.wire import NO_NAME, RunName
from sftriage.model.captures import CaptureResult, Report
from sftriage.traces.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Artefact, Manifest
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import FileToStore, LocalStore, Upload
from sftriage.traces.uploading import Sender
from sftriage.words.verdicts import size

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer
    from nats.js.api import ObjectInfo
    from nats.js.object_store import ObjectStore

log = logging.getLogger("sftriage")

REPORT_S = 2.0  # period of reports on a transfer

Progress = Callable[[Report], None]


class Transfer:
    """Counts the bytes moved of a capture, and reports ``progress``; ``doing`` is "sending ..." or "fetching ..."."""

    def __init__(self, result: CaptureResult, doing: str, total_bytes: int, progress: Progress) -> None:
        self._capture = result.capture_id, result.rank
        self._doing, self._total_bytes, self._progress = doing, total_bytes, progress
        self._moved_bytes, self._reported_s = 0, time.monotonic()

    def moved(self, more_bytes: int) -> None:
        self._moved_bytes += more_bytes
        if more_bytes and time.monotonic() >= self._reported_s + REPORT_S:
            self.report(f"{self._doing} {size(min(self._moved_bytes, self._total_bytes))} of {size(self._total_bytes)}")

    def report(self, detail: str) -> None:
        self._reported_s = time.monotonic()
        self._progress(Report(CaptureResult(*self._capture, "running", detail)))


class CountedFile(io.BufferedIOBase):
    """A file whose reads and writes a transfer counts; raises CaptureError beyond ``most_bytes``."""

    def __init__(self, file: io.BufferedIOBase, transfer: Transfer | None, most_bytes: int = 1 << 62) -> None:
        self._file, self._transfer, self._left_bytes = file, transfer, most_bytes

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        return self._counted(self._file.readinto(buffer))

    def write(self, data: ReadableBuffer, /) -> int:
        self._left_bytes -= memoryview(data).nbytes
        if self._left_bytes < 0:
            raise CaptureError("more data than its manifest says")
        return self._counted(self._file.write(data))

    def _counted(self, count: int) -> int:
        if self._transfer is not None:
            self._transfer.moved(count)
        return count


class StoredBeforeError(CaptureError):
    """The trace of a capture is in the store alone, under an earlier run of the job."""


class HostCaptures:
    """The captures that a host keeps in its directory, with copies in its run's store if ``url`` is that store.

    With ``drop_local`` traces are removed here once their copy is verified.
    """

    def __init__(self, directory: Path, url: str | None = None, *, drop_local: bool = False) -> None:
        self.directory, self.local, self._url, self._drop_local = directory, LocalStore(directory), url, drop_local
        self._log_once = LogOnce(log)

    def manifest(self, capture_id: str, run: RunName) -> tuple[bytes, dict[str, Path]]:
        """The manifest of a capture, under its run's name (which comes with the first orders), and its files.

        Raises StoredBeforeError for a controller that orders it again because an earlier run was lost.
        """
        manifest = self.local.manifest(capture_id)
        files = {artefact.name: self.local.file(capture_id, artefact.name) for artefact in manifest.artefacts}
        here = {name: path for name, path in files.items() if path.exists()}
        if len(here) < len(files) and "" != run.run_id != manifest.run:
            raise StoredBeforeError(f"its trace is in the store, under the earlier run {manifest.run}")
        named = manifest.model_copy(update={"job": run.job or manifest.job, "run": run.run_id or manifest.run})
        if named != manifest:
            write_atomically(self.local.file(capture_id, MANIFEST_NAME), named.to_json().decode())
        return named.to_json(), here

    def copied(self, capture_id: str, run: RunName, transfer: Transfer) -> bool:
        """Copy a capture to its run's store; False if it has to go through the hub instead."""
        url = self._url
        if url is None:
            return False
        if run.store != url:
            reason = f"keeps them in {run.store}" if run.store else "has no --store"
            self._log_once("captures go through the hub, not to %s: the job's controller %s", url, reason)
            return False
        sent: dict[str, int] = {}

        def count(_capture_id: str, artefact: Artefact, doing: str, done_bytes: int) -> None:
            if doing == "sending":
                transfer.moved(done_bytes - sent.get(artefact.name, 0))
                sent[artefact.name] = done_bytes

        try:
            remote = RemoteStore.open(url, job=run.job, run=run.run_id, create=True)
            sender = Sender(self.local, remote, url, count)
            if not sender.bring(capture_id, datetime.now(timezone.utc)):
                return False
            if self._drop_local:
                self.local.drop(self.local.manifest(capture_id))
        except SftriageError as error:
            self._log_once("captures go through the hub: cannot write to %s from here: %s", url, error)
            return False
        return True


PATIENCE_S, AGAIN_S = 900.0, 2.0
LOST_S = 30.0  # how long to wait for a capture that the hub has lost: its host sends it again
MAX_FILES, MAX_FILE_BYTES = 32, 8 << 30
_FOLDER = "fetch-"  # prefix of the folders of captures in transfer


@dataclass(frozen=True, slots=True)
class Fetching:
    """Fetches captures of a ``run`` into its ``store``, through a ``spool``.

    If its host has put a capture into the run's store elsewhere, only its manifest is taken, with the place of its
    files; the files too, from that store, if it is to be ``near``.
    """

    store: LocalStore
    spool: Path
    run: RunName = NO_NAME
    near: Callable[[Manifest], bool] = lambda _: False

    def sweep(self) -> None:
        """Remove the remains of a controller that was killed while fetching; only the leader may call it."""
        for folder in self.spool.glob(f"{_FOLDER}*"):
            shutil.rmtree(folder, ignore_errors=True)

    async def fetched(
        self, hub: Hub, bucket: str, report: Report, progress: Progress, missing: Callable[[], None] = lambda: None
    ) -> Report:
        """Fetch the files of a stored capture; return its report, of a failure if it could not be fetched.

        ``missing`` is called if the files are not on the hub.
        """
        from nats.errors import Error
        from nats.js.errors import BadObjectMetaError, DigestMismatchError, NotFoundError

        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        capture_id = report.result.capture_id
        problem: Exception
        while True:
            try:
                with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=self.spool) as folder:
                    coming = _files(hub, bucket, report, Path(folder), progress)
                    manifest, files = await asyncio.wait_for(coming, PATIENCE_S)
                    stored_bytes = await loop.run_in_executor(None, self.take, manifest, files, report.elsewhere)
                await _forget(hub, bucket, capture_id, files)
                return replace(report, stored_bytes=stored_bytes)
            except SftriageError as error:
                problem = error
                break
            except NotFoundError as error:
                problem, deadline_s = error, min(deadline_s, loop.time() + LOST_S)
                missing()
            except Exception as error:
                problem = error
                damaged = isinstance(error, (BadObjectMetaError, DigestMismatchError))
                if damaged or not isinstance(error, (Error, OSError, asyncio.TimeoutError)):
                    break
                log.debug("capture %s was not fetched", capture_id, exc_info=True)
            if loop.time() > deadline_s:
                break
            await asyncio.sleep(AGAIN_S)
        why = f"it is stored on its host, but could not be fetched from there: {str(problem) or type(problem).__name__}"
        return replace(report, result=replace(report.result, state="failed", detail=why))

    def take(self, data: bytes, files: Mapping[str, Path], elsewhere: bool = False) -> int:
        """Store a capture, and return its bytes; raises SftriageError if its files do not match its manifest."""
        # (an agent learns the run's id with the first orders)
        manifest = Manifest.from_json(data, "the manifest").model_copy(update={"run": self.run.run_id})
        size_bytes = sum(artefact.size_bytes for artefact in manifest.artefacts)
        if manifest.capture_id in self.store.ids():
            # An earlier controller stored it, but ended before it could report it.
            return size_bytes
        if elsewhere:
            self._take_elsewhere(manifest)
        elif {artefact.name for artefact in manifest.artefacts} != set(files):
            raise CaptureError(f"capture {manifest.capture_id}: its files do not match its manifest")
        else:
            self._put(manifest, files)
        return size_bytes

    def _take_elsewhere(self, manifest: Manifest) -> None:
        capture_id, run = manifest.capture_id, self.run
        if not run.store:
            raise CaptureError(f"capture {capture_id} is reported in a store, but its run has none")
        with tempfile.TemporaryDirectory(prefix="near-") as folder:
            files: dict[str, Path] = {}
            try:
                remote = RemoteStore.open(run.store, job=run.job, run=run.run_id)
                there, condition = remote.look(capture_id)
                if not condition.whole or there.artefacts != manifest.artefacts:
                    why = f"is not in {run.store} as its host reports: {condition.problem}"
                    raise CaptureError(f"capture {capture_id} {why}")
                for artefact in manifest.artefacts if self.near(manifest) else ():
                    files[artefact.name] = remote.get(capture_id, artefact.name, Path(folder) / artefact.name)
            except (StoreError, UsageError) as error:
                # (its host has verified the copy; a later reader may be able to read that store)
                log.warning("capture %s is in %s, but could not be read from here: %s", capture_id, run.store, error)
                files.clear()
            sha256 = hashlib.sha256(manifest.to_json()).hexdigest()
            now = datetime.now(timezone.utc)
            self._put(manifest, files, Upload(url=run.store, state="stored", verified_at=now, manifest_sha256=sha256))

    def _put(self, manifest: Manifest, files: Mapping[str, Path], upload: Upload | None = None) -> None:
        def checked(found: tuple[Artefact, ...]) -> Manifest:
            if not set(found) <= set(manifest.artefacts):
                raise CaptureError(f"capture {manifest.capture_id}: it was damaged in transit")
            return manifest

        named = [(artefact, files[artefact.name]) for artefact in manifest.artefacts if artefact.name in files]
        some = [FileToStore(path, artefact.name, artefact.media_type, compress=False) for artefact, path in named]
        self.store.put_files(manifest.capture_id, some, checked, upload)


async def _info(traces: ObjectStore, name: str) -> ObjectInfo:
    info = await traces.get_info(name)
    if info.is_link() or info.name != name:
        raise CaptureError("it is kept under another name")
    return info


async def _files(hub: Hub, bucket: str, report: Report, folder: Path, on: Progress) -> tuple[bytes, dict[str, Path]]:
    traces, capture_id = await hub.js.object_store(bucket), report.result.capture_id
    await _info(traces, f"{capture_id}/")
    buffer = io.BytesIO()
    await traces.get(f"{capture_id}/", writeinto=CountedFile(buffer, None, MAX_MANIFEST_BYTES))
    data = buffer.getvalue()
    manifest = Manifest.from_json(data, "its manifest")
    matches = (manifest.capture_id, manifest.capture.rank) == (capture_id, report.result.rank)
    if not matches or len(manifest.artefacts) > MAX_FILES:
        raise CaptureError("its manifest is of another capture")
    files: dict[str, Path] = {}
    if report.elsewhere:
        return data, files
    total_bytes = sum(artefact.size_bytes for artefact in manifest.artefacts)
    transfer = Transfer(report.result, f"fetching from {manifest.capture.host}:", total_bytes, on)
    for number, artefact in enumerate(manifest.artefacts):
        name = f"{capture_id}/{artefact.name}"
        info = await _info(traces, name)
        if info.size != artefact.size_bytes or artefact.size_bytes > MAX_FILE_BYTES:
            raise CaptureError(f"{artefact.name} has {info.size} bytes; its manifest says {artefact.size_bytes}")
        files[artefact.name] = folder / str(number)
        log.info("fetching %s of capture %s: %d bytes", artefact.name, capture_id, artefact.size_bytes)
        with files[artefact.name].open("wb") as file:
            await traces.get(name, writeinto=CountedFile(file, transfer, artefact.size_bytes))
    return data, files


async def _forget(hub: Hub, bucket: str, capture_id: str, files: Mapping[str, Path]) -> None:
    try:
        traces = await hub.js.object_store(bucket)
        for name in ("", *files):
            await traces.delete(f"{capture_id}/{name}")
    except Exception as error:
        log.debug("capture %s is still on the hub, which will drop it: %s", capture_id, error)
