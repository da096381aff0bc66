"""Where captures are kept: what every store of them does, and the store in a run's directory.

A capture's id is unique in its run. A store knows a capture by its *reference*: the id in the store of one run,
``job/run/id`` in one of many jobs. There a bare id serves too, as long as only one capture has it. A run's directory
has one directory for each capture::

    ROOT/captures/.lock                    shared while something is being put, exclusive while leftovers are swept
    ROOT/captures/.uploader                held by whoever uploads this run's captures
    ROOT/captures/.tmp-<capture id>-xxxx/  being written, or left by a crash
    ROOT/captures/.removing-xxxx/<capture id>/     removed here, and still to be removed elsewhere
    ROOT/captures/<capture id>/trace.json.gz       or trace.nsys-rep, trace.sqlite, stacks.json, ...
    ROOT/captures/<capture id>/manifest.json
    ROOT/captures/<capture id>/upload.json         where a copy goes, if one is kept elsewhere too, and how far it is

A capture is written and synced in a hidden directory that one rename publishes: it is there whole or not at all,
whenever the process or the machine stops. Once a verified copy is elsewhere, its artefacts may go; the manifest stays.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import AwareDatetime, ValidationError

from sftriage.base.files import private, refusing, regular, replacing, sync, sync_directory, write_atomically
from sftriage.base.process import is_locked, locked
from sftriage.errors import CaptureError, InputError, IntegrityError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import (
    CONTROL,
    MANIFEST_NAME,
    Artefact,
    DocumentModel,
    Manifest,
    Noted,
    Sentence,
    Sha256,
    UnknownVersionError,
    are_beside,
    first_problem,
    text,
)

log = logging.getLogger("sftriage")

TRACE_NAME, UPLOAD_NAME = "trace.json.gz", "upload.json"
PIN_NAME = "pinned"  # an empty file of this name beside a capture's manifest: retention leaves it alone
_TEMPORARY, _REMOVING = ".tmp-", ".removing-"
_LOCK_S = 0.1  # (another process may only be testing it)
CHUNK_BYTES = 1 << 20

Progress = Callable[[int], None]  # takes the number of bytes copied so far


def shown(text: str) -> str:
    """Text of others, short and safe to print."""
    return CONTROL.sub("?", text.encode("utf-8", "replace").decode()[:300])


def chunks(source: BinaryIO) -> Iterator[bytes]:
    """What is in a file, to its end."""
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def gzipped(source: Iterable[bytes]) -> Iterator[bytes]:
    """The same, compressed. No name and no time go in, so that one trace always gives the same bytes."""
    # Level 1: the host's cores belong to the training job.
    stream = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
    for chunk in source:
        yield stream.compress(chunk)
    yield stream.flush()


def copy(source: Iterable[bytes], target: BinaryIO | None, progress: Progress | None = None) -> tuple[int, str]:
    """Copy to the end, or only sum where there is no target; the size and sha256 of what was read."""
    digest, size = hashlib.sha256(), 0
    for chunk in source:
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
        if progress is not None:
            progress(size)
    return size, digest.hexdigest()


def copy_verified(
    source: Iterable[bytes], copy_to: Path, wanted: Artefact, name: str, progress: Progress | None = None
) -> None:
    """Copy an artefact to a file that appears once its sum is right; raises IntegrityError, or OSError."""
    with replacing(copy_to) as target:
        size, sha256 = copy(source, target, progress)
        if (size, sha256) != (wanted.size_bytes, wanted.sha256):
            put = f"it was put as sha256 {wanted.sha256}, {wanted.size_bytes} bytes"
            raise IntegrityError(f"{name}: sha256 {sha256}, {size} bytes; {put}")


State = Literal["whole", "missing", "damaged", "unreadable"]
_WORDS: Mapping[State, str] = {
    "whole": "is whole",
    "missing": "is not all there",
    "damaged": "is damaged",
    "unreadable": "cannot be read",
}


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """Whether a capture is there as it was put, as far as names and sizes tell; ``problem`` says what is wrong.

    It is ``missing`` if a file of it is gone, ``damaged`` if a file differs from what was put or its manifest is none,
    ``unreadable`` if its owner does not let others read it or its manifest is of another version.
    """

    state: State = "whole"
    problem: str = ""

    @property
    def whole(self) -> bool:
        return self.state == "whole"

    @property
    def words(self) -> str:
        """The same as the end of a sentence about it."""
        return f"{_WORDS[self.state]}: {self.problem}" if self.problem else _WORDS[self.state]

    @property
    def beyond_repair(self) -> bool:
        """Nobody gets the trace from it any more."""
        return self.state in ("missing", "damaged")

    @classmethod
    def after(cls, error: InputError | IntegrityError | UsageError | OSError) -> StoreCondition:
        """What an attempt to read a capture has come to."""
        cause = error if isinstance(error, OSError) else error.__cause__
        state: State = "damaged"
        if isinstance(error, UnknownVersionError) or isinstance(cause, PermissionError):
            state = "unreadable"
        elif isinstance(error, UsageError) or isinstance(cause, FileNotFoundError):
            state = "missing"
        return cls(state, str(error))


WHOLE = StoreCondition()


@dataclass(frozen=True, slots=True)
class Listing:
    """The captures of a store, and by reference what else lies there and why it is not one."""

    manifests: tuple[Manifest, ...]
    unfit: Mapping[str, StoreCondition]

    @classmethod
    def of(cls, found: Iterable[tuple[str, tuple[Manifest | None, StoreCondition] | None]]) -> Listing:
        """Of what lies under each reference: a manifest, where it can be read, and its condition; or nothing."""
        manifests, unfit = [], {}
        for reference, (manifest, condition) in ((reference, one) for reference, one in found if one is not None):
            if manifest is not None and condition.whole:
                manifests.append(manifest)
            else:
                unfit[reference] = condition
        return cls(tuple(manifests), unfit)


class Store(ABC):
    """Captures, each its artefacts and its manifest.

    Methods that take a reference raise UsageError where there is no such capture, InputError where what lies there is
    none; those that write, UsageError where the store cannot be written; all of them, StoreError where it cannot be
    reached.
    """

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is: a directory, or a URL."""

    @abstractmethod
    def reference(self, manifest: Manifest) -> str:
        """What this store knows a capture by; `ids` holds it, and every method takes it."""

    def manifest(self, capture_id: str) -> Manifest:
        """The manifest of a whole capture; raises IntegrityError if an artefact is missing or of another size."""
        manifest, condition = self.look(capture_id)
        if not condition.whole:
            raise IntegrityError(condition.problem)
        return manifest

    @abstractmethod
    def look(self, capture_id: str) -> tuple[Manifest, StoreCondition]:
        """The manifest of a capture, and whether its artefacts are there in the right size."""

    def seen(self, capture_id: str) -> tuple[Manifest | None, StoreCondition]:
        """What `look` finds, without a manifest where that cannot be read. Raises StoreError alone."""
        try:
            return self.look(capture_id)
        except (InputError, UsageError, OSError) as error:
            return None, StoreCondition.after(error)

    def manifests(self) -> Listing:
        """Every capture of the store, and every problem found on the way. Never raises for what lies there."""
        return Listing.of((name, self.seen(name)) for name in sorted(self.ids()))

    @abstractmethod
    def ids(self) -> frozenset[str]:
        """The references of all captures that are there, whole or damaged; read without opening one."""

    def leftovers(self) -> tuple[str, ...]:
        """What lies there, belongs to no capture and is never swept, in words; it is listed nowhere else."""
        return ()

    def copy_elsewhere(self, capture_id: str) -> str | None:
        """The store elsewhere that has a verified copy of a capture, if one has."""
        return None

    @abstractmethod
    def get(
        self,
        capture_id: str,
        artefact: str,
        destination: str | os.PathLike[str],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """Copy an artefact out of the store, verified. Into a directory it goes under its own name.

        Raises UsageError where the destination exists (without ``force``) or cannot be written, InputError where there
        is no such artefact, IntegrityError, leaving nothing, where it is not what was put.
        """

    def note(self, capture_id: str, noted: Noted) -> Manifest:
        """Put a finding into a capture's manifest, over an earlier one; raises IntegrityError as `manifest` does."""
        manifest = self.manifest(capture_id).noting(noted)
        self.put_manifest(manifest)
        return manifest

    @abstractmethod
    def put_manifest(self, manifest: Manifest) -> None:
        """Put the manifest of a capture in place of the one that is there."""

    @abstractmethod
    def remove(self, capture_id: str) -> None:
        """Remove a capture, artefacts and manifest as one: from then on it is not listed, whatever happens."""

    @abstractmethod
    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        """Keep a capture whatever retention says, or no longer so. To do so again changes nothing."""

    @abstractmethod
    def pinned(self) -> frozenset[str]:
        """The references of the captures that are pinned."""


def beside(store: Store, reference: str, manifest: Manifest) -> list[tuple[str, Manifest]]:
    """The captures of the other role, with the same trigger, of some of the same steps; raises SftriageError."""
    window = manifest.trigger.window
    begins = f"{reference.removesuffix(manifest.capture_id)}w{window.first_step}-{window.last_step}-r"
    others = ((one, store.manifest(one)) for one in sorted(store.ids()) if one.startswith(begins))
    return [(one, other) for one, other in others if are_beside(manifest, other)]


def check_id(capture_id: str) -> str:
    """An id that is safe to put into a path or a key; UsageError where it is not."""
    if not CAPTURE_ID.fullmatch(capture_id):
        raise UsageError(f"{capture_id!r} is not a capture id")
    return capture_id


def destination_of(name: str, destination: str | os.PathLike[str], *, force: bool) -> Path:
    """The file to copy an artefact to; raises UsageError if it exists (without ``force``), or is a device or a pipe."""
    target = Path(destination)
    if target.is_dir():
        target = target / name
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: not a file that a trace can take the place of")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already")
    return target


UploadState = Literal["waiting", "uploading", "stored", "failed"]


class Upload(DocumentModel):
    """How far a capture is on its way to the store at ``url``; what has failed is retried.

    ``verified_at`` is when all of it was read back and found right; ``manifest_sha256`` and ``pinned`` are as it is
    there.
    """

    version: Literal[1] = 1
    url: Annotated[str, text(4000)]
    state: UploadState
    reason: Sentence = ""
    verified_at: AwareDatetime | None = None
    manifest_sha256: Sha256 | None = None
    pinned: bool = False

    def failed(self, reason: str) -> Upload:
        return self.model_copy(update={"state": "failed", "reason": CONTROL.sub(" ", reason)[:2000]})


def read_upload(directory: Path) -> Upload | None:
    """How far the capture in a directory is; None where nothing has begun, or what is noted makes no sense."""
    try:
        return Upload.model_validate_json((directory / UPLOAD_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


@dataclass(frozen=True, slots=True)
class FileToStore:
    """A file that a capture has left."""

    path: Path
    name: str = TRACE_NAME
    media_type: str = "application/gzip"
    compress: bool = True


class LocalStore(Store):
    """Captures in a run directory of this host, private; calls ``changed`` when a copy elsewhere has to follow."""

    def __init__(self, root: str | os.PathLike[str], changed: Callable[[], None] | None = None) -> None:
        self._root = Path(root)
        self._captures = self._root / "captures"
        self._changed = changed or (lambda: None)

    @property
    def place(self) -> str:
        return str(self._captures)

    def reference(self, manifest: Manifest) -> str:
        return manifest.capture_id

    def put(self, capture_id: str, source: str | os.PathLike[str], build: Callable[[Artefact], Manifest]) -> Manifest:
        """Store a plain JSON trace, compressed, with its manifest: see `put_files`."""
        return self.put_files(capture_id, [FileToStore(Path(source))], lambda artefacts: build(artefacts[0]))

    def put_files(
        self,
        capture_id: str,
        files: Sequence[FileToStore],
        build: Callable[[tuple[Artefact, ...]], Manifest],
        upload: Upload | None = None,
    ) -> Manifest:
        """Store copies of the files of a capture, the main one first, with its manifest.

        ``build`` makes the manifest from the artefacts as written. If ``upload`` says that a verified copy is
        elsewhere, files may be missing. Raises CaptureError, and keeps nothing, where a file is empty or unreadable,
        the capture is there already, or the disk is full.
        """
        check_id(capture_id)
        final = self._captures / capture_id
        try:
            with self._lock():
                if final.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                staging = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{capture_id}-", dir=self._captures))
                try:
                    artefacts = tuple(_take(file, staging / file.name) for file in files)
                    manifest = build(artefacts)
                    if manifest.capture_id != capture_id or not set(artefacts) <= set(manifest.artefacts):
                        raise ValueError("the manifest is not that of this capture")
                    with private(staging / MANIFEST_NAME) as file:
                        file.write(manifest.to_json())
                        sync(file)
                    if upload is not None:
                        write_atomically(staging / UPLOAD_NAME, upload.model_dump_json() + "\n")
                    sync_directory(staging)
                    staging.rename(final)
                except BaseException:
                    shutil.rmtree(staging, ignore_errors=True)
                    raise
                sync_directory(self._captures)
                return manifest
        except ValidationError as error:
            raise CaptureError(f"capture {capture_id} has no valid manifest: {first_problem(error)}") from error
        except OSError as error:
            # Renaming a directory onto one that is not empty.
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            reason = "it is stored already" if taken else error.strerror
            raise CaptureError(f"capture {capture_id} could not be stored: {reason}") from error

    def look(self, capture_id: str) -> tuple[Manifest, StoreCondition]:
        """See `Store.look`. Artefacts of which a verified copy is elsewhere may be there alone."""
        directory = self._directory(capture_id)
        path = directory / MANIFEST_NAME
        with regular(path, InputError) as file:
            manifest = Manifest.from_json(file.read(), str(path))
        if manifest.capture_id != capture_id:
            raise InputError(f"{path}: is the manifest of {manifest.capture_id}")
        for artefact in manifest.artefacts:
            if self._elsewhere(capture_id, artefact) is not None:
                continue
            path = directory / artefact.name
            try:
                with regular(path, IntegrityError) as file:
                    size = os.fstat(file.fileno()).st_size
            except IntegrityError as error:
                return manifest, StoreCondition.after(error)
            if size != artefact.size_bytes:
                return manifest, StoreCondition("damaged", f"{path}: {size} bytes; it had {artefact.size_bytes}")
        return manifest, WHOLE

    def copy_elsewhere(self, capture_id: str) -> str | None:
        upload = self.noted_upload(check_id(capture_id))
        return None if upload is None or upload.verified_at is None else upload.url

    def put_manifest(self, manifest: Manifest) -> None:
        path = self.file(manifest.capture_id, MANIFEST_NAME)
        with refusing(f"{path} cannot be written"), self._lock():
            write_atomically(path, manifest.to_json())
        self._changed()

    def ids(self) -> frozenset[str]:
        return frozenset(name for name in self._names() if not name.startswith("."))

    def file(self, capture_id: str, name: str) -> Path:
        """Where a file of a capture lies, if it is here."""
        return self._captures / capture_id / name

    def path(self, capture_id: str, artefact: str) -> Path:
        """Where an artefact lies, in its right size, unverified; raises UsageError where it lies elsewhere."""
        wanted = self.manifest(capture_id).artefact(artefact)
        if (url := self._elsewhere(capture_id, wanted)) is not None:
            raise UsageError(f"{wanted.name} of capture {capture_id} is in {url}: sftriage traces get {capture_id}")
        return self._captures / capture_id / wanted.name

    def get(
        self,
        capture_id: str,
        artefact: str,
        destination: str | os.PathLike[str],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """See `Store.get`. What is damaged here, or is only elsewhere, is copied from there."""
        manifest, _ = self.look(capture_id)
        wanted = manifest.artefact(artefact)
        if self._elsewhere(capture_id, wanted) is None:
            target = destination_of(wanted.name, destination, force=force)
            source = self._captures / capture_id / wanted.name
            try:
                with refusing(f"{target} cannot be written"), regular(source, IntegrityError) as stored:
                    copy_verified(chunks(stored), target, wanted, str(source), progress)
                return target
            except IntegrityError as error:
                if (url := self.copy_elsewhere(capture_id)) is None:
                    raise
                log.warning("%s; taken from %s", error, url)
        from sftriage.traces.remote import RemoteStore

        remote = RemoteStore.open(self.copy_elsewhere(capture_id) or "", job=manifest.job, run=manifest.run)
        return remote.get(capture_id, artefact, destination, force=force, progress=progress)

    def remove(self, capture_id: str) -> None:
        """See `Store.remove`: one rename hides it. If a copy may be elsewhere, a note for the uploader stays."""
        directory = self._directory(capture_id)
        with refusing(f"capture {capture_id} cannot be removed"), self._lock():
            try:
                hidden = Path(tempfile.mkdtemp(prefix=_REMOVING, dir=self._captures))
                its = hidden / capture_id
            except OSError:
                if (directory / UPLOAD_NAME).exists():
                    raise
                # A disk without room for another directory lets this one have another name.
                its = hidden = self._captures / f"{_REMOVING}{capture_id}"
            directory.rename(its)
            sync_directory(self._captures)
            if its is hidden or not (its / UPLOAD_NAME).exists():
                shutil.rmtree(hidden)
            else:
                for path in its.iterdir():
                    if path.name not in (UPLOAD_NAME, MANIFEST_NAME):
                        path.unlink()
                sync_directory(its)
        self._changed()

    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        directory = self._directory(capture_id)
        with refusing(f"capture {capture_id} cannot be {'' if pinned else 'un'}pinned"):
            if not pinned:
                (directory / PIN_NAME).unlink(missing_ok=True)
            elif not (directory / PIN_NAME).exists():
                (directory / PIN_NAME).touch(0o600)
                sync_directory(directory)
        self._changed()

    def pinned(self) -> frozenset[str]:
        return frozenset(name for name in self.ids() if (self._captures / name / PIN_NAME).exists())

    def sweep(self) -> int:
        """Remove leftovers of crashes, unless a put is in progress; their number. Raises UsageError."""
        if not self._captures.is_dir():
            return 0
        refused, busy = refusing(f"{self._captures} cannot be swept"), contextlib.suppress(BlockingIOError)
        with refused, busy, self._lock(sweeping=True):
            hidden = [self._captures / name for name in self._names() if name.startswith((_TEMPORARY, _REMOVING))]
            # (a capture that is still to be removed elsewhere is no leftover)
            leftovers = [path for path in hidden if not any(path.glob(f"*/{UPLOAD_NAME}"))]
            for path in leftovers:
                shutil.rmtree(path)
            return len(leftovers)
        return 0

    def noted_upload(self, capture_id: str) -> Upload | None:
        """How far a capture is on its way elsewhere, as noted; None where nothing has begun."""
        return read_upload(self._captures / capture_id)

    def upload(self, capture_id: str) -> Upload | None:
        """The same, for readers: what was on its way when its sender died is waiting."""
        upload = self.noted_upload(capture_id)
        if upload is not None and upload.state == "uploading" and not self.busy:
            return upload.model_copy(update={"state": "waiting"})
        return upload

    def note_upload(self, capture_id: str, upload: Upload) -> bool:
        """Write down how far a capture is. False where it was removed meanwhile."""
        with refusing(f"{self._captures / capture_id} cannot be written"), contextlib.suppress(FileNotFoundError):
            write_atomically(self.file(capture_id, UPLOAD_NAME), upload.model_dump_json() + "\n")
            return True
        return False

    def drop(self, manifest: Manifest) -> None:
        """Remove a capture's artefacts here; its manifest stays, and says where they are."""
        if self.copy_elsewhere(manifest.capture_id) is None:
            raise ValueError(f"capture {manifest.capture_id} is nowhere else")
        for artefact in manifest.artefacts:
            self.file(manifest.capture_id, artefact.name).unlink(missing_ok=True)

    def removals(self) -> list[Path]:
        """The directories, by id, of captures that were removed here and may still be in the store elsewhere."""
        return [
            one.parent
            for one in sorted(self._captures.glob(f"{_REMOVING}*/*/{UPLOAD_NAME}"))
            if read_upload(one.parent)
        ]

    def signature(self, capture_id: str, *names: str) -> tuple[object, ...]:
        """What changes whenever a capture's files of these names do."""
        return tuple(_about(self.file(capture_id, name)) for name in names)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[bool]:
        """Be the process that uploads this run's captures; False where another is. A lock ends with its process."""
        self._captures.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            ours = None
            with contextlib.suppress(BlockingIOError):
                ours = held.enter_context(locked(self._captures / ".uploader", wait_s=_LOCK_S))
            yield ours is not None

    @property
    def busy(self) -> bool:
        return is_locked(self._captures / ".uploader")

    def _elsewhere(self, capture_id: str, artefact: Artefact) -> str | None:
        if os.path.lexists(self._captures / capture_id / artefact.name):
            return None
        return self.copy_elsewhere(capture_id)

    def _directory(self, capture_id: str) -> Path:
        directory = self._captures / check_id(capture_id)
        if not directory.is_dir() or directory.is_symlink():
            raise UsageError(f"no capture {capture_id} in {self._captures}")
        return directory

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self._captures.iterdir())
        except FileNotFoundError:
            return []

    def _lock(self, *, sweeping: bool = False) -> contextlib.AbstractContextManager[object]:
        if not self._captures.is_dir():
            # One by one: the mode is not that of the parents that `parents` makes.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._captures.mkdir(mode=0o700, exist_ok=True)
            sync_directory(self._root)
        return locked(self._captures / ".lock", shared=not sweeping, wait_s=0.0 if sweeping else None)


def _take(source: FileToStore, target: Path) -> Artefact:
    with regular(source.path, CaptureError) as plain, private(target) as file:
        if os.fstat(plain.fileno()).st_size == 0:
            raise CaptureError(f"{source.path}: the trace is empty")
        size_bytes, sha256 = copy(gzipped(chunks(plain)) if source.compress else chunks(plain), file)
        sync(file)
    return Artefact(name=target.name, role="trace", media_type=source.media_type, size_bytes=size_bytes, sha256=sha256)


def _about(path: Path) -> object:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
