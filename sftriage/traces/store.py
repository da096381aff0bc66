"""Stores of captures: the interface of every store, and the store in a run's directory.

A capture's id is unique in its run. A store identifies a capture by its *reference*: the id in the store of one run,
``job/run/id`` in a store of many jobs, which also accepts a unique id. A run's directory has one directory for each
capture::

    ROOT/captures/.lock                    shared while a capture is put, exclusive while leftovers are swept
    ROOT/captures/.uploader                locked by the process that uploads this run's captures
    ROOT/captures/.tmp-<capture id>-xxxx/  being written, or left by a crash
    ROOT/captures/.removing-xxxx/<capture id>/     removed here, and still to be removed elsewhere
    ROOT/captures/<capture id>/trace.json.gz       or trace.nsys-rep, trace.sqlite, stacks.json, ...
    ROOT/captures/<capture id>/manifest.json
    ROOT/captures/<capture id>/upload.json         the state of its copy elsewhere, if it has one

A capture is written and synced in a hidden directory, which one rename publishes: it appears whole or not at all,
whenever the process or the machine stops. Once a verified copy is elsewhere, its artefacts may be removed here; the
manifest stays.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, ValidationError

from sftriage.base.files import private, refusing, replacing, sync, sync_directory, write_atomically
from sftriage.base.process import is_locked, locked
from sftriage.errors import CaptureError, InputError, IntegrityError, StoreError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import (
    CONTROL,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
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
from sftriage.traces.objects import Directory, Objects, Progress, destination_of, pack, shown, verified

log = logging.getLogger("sftriage")

TRACE_NAME, UPLOAD_NAME = "trace.json.gz", "upload.json"
PIN_NAME = "pinned"  # an empty file beside the manifest of a capture that retention must keep
_TEMPORARY, _REMOVING = ".tmp-", ".removing-"
_LOCK_S = 0.1  # (another process may hold it for a moment, to test it)
_READERS = 16

Names = dict[str, int]  # the files of a capture: name and size in bytes


State = Literal["whole", "missing", "damaged", "unreadable"]
_WORDS: Mapping[State, str] = {
    "whole": "is whole",
    "missing": "is incomplete",
    "damaged": "is damaged",
    "unreadable": "cannot be read",
}


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """Whether a capture is as it was stored, by names and sizes; ``problem`` says what is wrong.

    It is ``missing`` if one of its files is gone, ``damaged`` if a file has changed or its manifest is invalid, and
    ``unreadable`` if this user may not read it or its manifest is of another version.
    """

    state: State = "whole"
    problem: str = ""

    @property
    def whole(self) -> bool:
        return self.state == "whole"

    @property
    def words(self) -> str:
        """The condition as the end of a sentence about the capture."""
        return f"{_WORDS[self.state]}: {self.problem}" if self.problem else _WORDS[self.state]

    @property
    def beyond_repair(self) -> bool:
        """Whether the trace is lost for good."""
        return self.state in ("missing", "damaged")

    @classmethod
    def after(cls, error: InputError | UsageError) -> StoreCondition:
        """The condition of a capture that could not be read because of an error."""
        state: State = "damaged"
        if isinstance(error, UnknownVersionError) or isinstance(error.__cause__, PermissionError):
            state = "unreadable"
        elif isinstance(error, UsageError) or isinstance(error.__cause__, FileNotFoundError):
            state = "missing"
        return cls(state, str(error))


WHOLE = StoreCondition()


@dataclass(frozen=True, slots=True)
class Listing:
    """The whole captures of a store, and the condition of others by reference."""

    manifests: tuple[Manifest, ...]
    unfit: Mapping[str, StoreCondition]


class Store(ABC):
    """Captures, each with artefacts and a manifest, as objects ``<key of the capture>/<name>``.

    Methods with a reference raise UsageError if there is no such capture, and InputError if it is invalid; methods that
    write raise SftriageError if the store cannot be written; all methods of a remote store raise StoreError if it
    cannot be reached.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def place(self) -> str:
        """The directory or URL of the store."""
        return self._objects.place

    @abstractmethod
    def key_of(self, manifest: Manifest) -> str:
        """The key of a capture; raises InputError if the capture does not belong in this store."""

    @abstractmethod
    def ids(self) -> frozenset[str]:
        """The references of all captures, whole or damaged; opens none of them."""

    def reference(self, manifest: Manifest) -> str:
        """The reference of a capture in this store."""
        return self._reference(self.key_of(manifest))

    def manifest(self, capture_id: str) -> Manifest:
        """The manifest of a whole capture; raises IntegrityError if an artefact is missing or of another size."""
        manifest, condition = self.look(capture_id)
        if not condition.whole:
            raise IntegrityError(condition.problem)
        return manifest

    def look(self, capture_id: str) -> tuple[Manifest, StoreCondition]:
        """The manifest of a capture, and its condition by the names and sizes of its artefacts."""
        key = self._key(capture_id)
        return self._look(key, self._names(key))

    def state(self, capture_id: str) -> tuple[Manifest | None, StoreCondition]:
        """As `look`, but None for a manifest that cannot be read. Raises only StoreError."""
        try:
            return self.look(capture_id)
        except (InputError, UsageError) as error:
            return None, StoreCondition.after(error)

    def manifests(self, references: Collection[str] | None = None, progress: Progress = lambda _: None) -> Listing:
        """The captures of the store (some or all), and the condition of unfit ones; ``progress`` gets their count."""
        listed = sorted(self._listed().items())
        listed = [(key, names) for key, names in listed if references is None or self._reference(key) in references]
        manifests: list[Manifest] = []
        unfit: dict[str, StoreCondition] = {}
        with ThreadPoolExecutor(_READERS) as readers:
            states = zip(listed, readers.map(lambda at: self._state(*at), listed), strict=True)
            for done, ((key, _), (manifest, condition)) in enumerate(states, start=1):
                if manifest is not None and condition == WHOLE:
                    manifests.append(manifest)
                elif condition is not None:
                    unfit[self._reference(key)] = condition
                progress(done)
        return Listing(tuple(manifests), unfit)

    def leftovers(self) -> tuple[str, ...]:
        """Descriptions of objects that belong to no capture and are never swept."""
        return ()

    def copy_elsewhere(self, capture_id: str) -> str | None:
        """The store elsewhere with a verified copy of a capture, if there is one."""
        return None

    def _store_elsewhere(self, manifest: Manifest) -> Store | None:
        return None

    def get(
        self,
        capture_id: str,
        artefact: str,
        destination: str | os.PathLike[str],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """Copy an artefact out of the store, verified; into a directory under its own name.

        An artefact that is damaged here, or only in another store, is copied from there. Raises UsageError if the
        destination exists (without ``force``) or cannot be written, InputError if there is no such artefact, and
        IntegrityError, without leaving a file, if it is damaged.
        """
        manifest, _ = self.look(capture_id)
        chosen = manifest.artefact(artefact)
        target = destination_of(chosen.name, destination, force=force)
        key = f"{self.key_of(manifest)}/{chosen.name}"
        try:
            with refusing(f"{target} cannot be written"), replacing(target) as file:
                file.writelines(verified(self._objects.stream(key), chosen, f"{self._objects.place}/{key}", progress))
        except (IntegrityError, InputError) as error:
            if (elsewhere := self._store_elsewhere(manifest)) is None:
                raise
            if not isinstance(error.__cause__, FileNotFoundError):
                log.warning("%s; using the copy in %s", error, elsewhere.place)
            elsewhere.get(capture_id, artefact, target, force=force, progress=progress)
        return target

    def content(self, manifest: Manifest, artefact: Artefact) -> Iterator[bytes]:
        """The content of an artefact, verified before its last piece; raises IntegrityError also for a link."""
        key = f"{self.key_of(manifest)}/{artefact.name}"
        if not self._objects.is_plain(key):
            raise IntegrityError(f"{self._objects.place}/{key}: not a plain file of the store")
        return verified(self._objects.stream(key), artefact, artefact.name)

    def note(self, capture_id: str, noted: Noted) -> Manifest:
        """Write a finding into a capture's manifest, replacing an earlier one; raises IntegrityError as `manifest`."""
        manifest = self.manifest(capture_id).noting(noted)
        self.put_manifest(manifest)
        return manifest

    def put_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a capture, replacing an earlier one; raises StoreError if it reads back differently."""
        key, content = f"{self.key_of(manifest)}/{MANIFEST_NAME}", manifest.to_json()
        self._objects.put(key, content)
        if self._objects.read(key, MAX_MANIFEST_BYTES) != content:
            raise StoreError(f"{self._objects.place}/{key}: not what was stored there")

    @abstractmethod
    def remove(self, capture_id: str) -> None:
        """Remove a capture atomically: it is no longer listed, even if the removal is interrupted."""

    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        """Protect a capture from retention, or no longer so; repeating it changes nothing."""
        self._names(self._key(capture_id))
        self.mark_pinned(capture_id, pinned=pinned)

    def mark_pinned(self, capture_id: str, *, pinned: bool) -> None:
        """Write or remove the pin of a capture, with or without a manifest."""
        key = f"{self._key(capture_id)}/{PIN_NAME}"
        if pinned:
            self._objects.put(key, b"")
        else:
            self._objects.delete(key)

    def pinned(self) -> frozenset[str]:
        """The references of the captures that are pinned."""
        return frozenset(self._reference(key) for key, names in self._listed().items() if PIN_NAME in names)

    @abstractmethod
    def _key(self, reference: str) -> str:
        """The key of a reference."""

    @abstractmethod
    def _reference(self, key: str) -> str:
        """The reference of a key."""

    @abstractmethod
    def _listed(self) -> dict[str, Names]:
        """The files of each capture, by key."""

    def _names_at(self, key: str) -> Names:
        """The files directly below a key, not deeper: a link in a directory may lead anywhere."""
        names = {path.removeprefix(f"{key}/"): size for path, size in self._objects.sizes(key).items()}
        return {name: size for name, size in names.items() if "/" not in name}

    def _names(self, key: str) -> Names:
        names = self._names_at(key)
        if MANIFEST_NAME not in names:
            raise self._no_capture(key)
        return names

    def _no_capture(self, key: str) -> UsageError:
        return UsageError(f"no capture {shown(key.rpartition('/')[2])} in {self.place}")

    def _look(self, key: str, names: Names) -> tuple[Manifest, StoreCondition]:
        where = f"{self._objects.place}/{key}"
        source = f"{where}/{MANIFEST_NAME}"
        if MANIFEST_NAME not in names:
            raise InputError(f"{source}: missing") from FileNotFoundError()
        if names[MANIFEST_NAME] > MAX_MANIFEST_BYTES:
            raise InputError(f"{source}: larger than {MAX_MANIFEST_BYTES // 2**20} MiB, so it is not a manifest")
        data = self._objects.read(f"{key}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
        if data is None:
            raise self._no_capture(key)
        manifest = Manifest.from_json(data, source)
        if self.key_of(manifest) != key:
            raise InputError(f"{source}: is the manifest of {self.key_of(manifest)}")
        for artefact in manifest.artefacts:
            size = names.get(artefact.name)
            if size is None and self.copy_elsewhere(self._reference(key)) is None:
                return manifest, StoreCondition("missing", f"{where}/{artefact.name}: missing")
            if size not in (None, artefact.size_bytes):
                problem = f"{where}/{artefact.name}: {size} bytes; expected {artefact.size_bytes}"
                return manifest, StoreCondition("damaged", problem)
        return manifest, WHOLE

    def _state(self, key: str, names: Names) -> tuple[Manifest | None, StoreCondition | None]:
        try:
            return self._look(key, names)
        except UsageError:
            return None, None  # (removed meanwhile)
        except InputError as error:
            return None, StoreCondition.after(error)


def beside(store: Store, reference: str, manifest: Manifest) -> list[tuple[str, Manifest]]:
    """The captures of the other role with the same trigger and some of the same steps; raises SftriageError."""
    window = manifest.trigger.window
    begins = f"{reference.removesuffix(manifest.capture_id)}w{window.first_step}-{window.last_step}-r"
    others = ((found, store.manifest(found)) for found in sorted(store.ids()) if found.startswith(begins))
    return [(found, other) for found, other in others if are_beside(manifest, other)]


def check_id(capture_id: str) -> str:
    """Return the id if it is safe in a path and a key; raises UsageError if it is not."""
    if not CAPTURE_ID.fullmatch(capture_id):
        raise UsageError(f"{capture_id!r} is not a capture id")
    return capture_id


UploadState = Literal["waiting", "uploading", "stored", "failed", "removed"]


class Upload(DocumentModel):
    """The state of a capture's copy in the store at ``url``; a failed upload is retried, a removed copy stays away.

    ``verified_at`` is when all of the copy was read back and verified; ``manifest_sha256`` and ``pinned`` describe the
    copy.
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
    """The noted upload of the capture in a directory; None if there is no valid note."""
    try:
        return Upload.model_validate_json((directory / UPLOAD_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


@dataclass(frozen=True, slots=True)
class FileToStore:
    """A file of a capture, to be stored."""

    path: Path
    name: str = TRACE_NAME
    media_type: str = "application/gzip"
    compress: bool = True


class LocalStore(Store):
    """The private captures of a run directory on this host; calls ``changed`` when copies elsewhere need an update."""

    def __init__(self, root: str | os.PathLike[str], changed: Callable[[], None] | None = None) -> None:
        self._root = Path(root)
        self._captures = self._root / "captures"
        super().__init__(Directory(str(self._captures), self._captures, private=True))
        self._changed = changed or (lambda: None)

    def key_of(self, manifest: Manifest) -> str:
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

        ``build`` makes the manifest from the stored artefacts. If ``upload`` says that a verified copy is elsewhere,
        files may be missing. Raises CaptureError, and keeps nothing, if a file is empty or unreadable, the capture
        exists already, or the disk is full.
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
                        raise ValueError("the manifest is of another capture")
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
            # (errors of a rename onto a directory that is not empty)
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            reason = "it is already stored" if taken else error.strerror
            raise CaptureError(f"capture {capture_id} could not be stored: {reason}") from error

    def copy_elsewhere(self, capture_id: str) -> str | None:
        upload = self.noted_upload(capture_id)
        return None if upload is None or upload.verified_at is None else upload.url

    def put_manifest(self, manifest: Manifest) -> None:
        with refusing(f"{self._captures} cannot be written"), self._lock():
            super().put_manifest(manifest)
        self._changed()

    def ids(self) -> frozenset[str]:
        with contextlib.suppress(FileNotFoundError):
            return frozenset(path.name for path in self._captures.iterdir() if not path.name.startswith("."))
        return frozenset()

    def file(self, capture_id: str, name: str) -> Path:
        """The path of a file of a capture, which may not exist."""
        return self._captures / capture_id / name

    def path(self, capture_id: str, artefact: str) -> Path:
        """The path of an artefact, whose size is checked, but not its content; UsageError if it is only elsewhere."""
        chosen = self.manifest(capture_id).artefact(artefact)
        path = self.file(capture_id, chosen.name)
        if not path.exists():
            url = self.copy_elsewhere(capture_id)
            raise UsageError(f"{chosen.name} of capture {capture_id} is in {url}: sftriage traces get {capture_id}")
        return path

    def _store_elsewhere(self, manifest: Manifest) -> Store | None:
        from sftriage.traces.remote import RemoteStore

        url = self.copy_elsewhere(manifest.capture_id)
        return None if url is None else RemoteStore.open(url, job=manifest.job, run=manifest.run)

    def content(self, manifest: Manifest, artefact: Artefact) -> Iterator[bytes]:
        here = os.path.lexists(self.file(manifest.capture_id, artefact.name))
        elsewhere = None if here else self._store_elsewhere(manifest)
        return super().content(manifest, artefact) if elsewhere is None else elsewhere.content(manifest, artefact)

    def remove(self, capture_id: str) -> None:
        """See `Store.remove`: one rename hides it. If there may be a copy elsewhere, a note for the uploader stays."""
        self._names(self._key(capture_id))
        directory = self._captures / capture_id
        with refusing(f"capture {capture_id} cannot be removed"), self._lock():
            try:
                hidden = Path(tempfile.mkdtemp(prefix=_REMOVING, dir=self._captures))
                renamed = hidden / capture_id
            except OSError:
                if (directory / UPLOAD_NAME).exists():
                    raise
                # (a full disk may have no space for a directory, but still allows a rename)
                renamed = hidden = self._captures / f"{_REMOVING}{capture_id}"
            directory.rename(renamed)
            sync_directory(self._captures)
            if renamed is hidden or not (renamed / UPLOAD_NAME).exists():
                shutil.rmtree(hidden)
            else:
                for path in renamed.iterdir():
                    if path.name not in (UPLOAD_NAME, MANIFEST_NAME):
                        path.unlink()
                sync_directory(renamed)
        self._changed()

    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        super().pin(capture_id, pinned=pinned)
        self._changed()

    def sweep(self) -> int:
        """Remove leftovers of crashes, unless a put is in progress; return their number. Raises UsageError."""
        if not self._captures.is_dir():
            return 0
        refused, busy = refusing(f"{self._captures} cannot be cleaned up"), contextlib.suppress(BlockingIOError)
        with refused, busy, self._lock(sweeping=True):
            hidden = [path for path in self._captures.iterdir() if path.name.startswith((_TEMPORARY, _REMOVING))]
            # (keep the notes of captures that are still to be removed elsewhere)
            leftovers = [path for path in hidden if not any(path.glob(f"*/{UPLOAD_NAME}"))]
            for path in leftovers:
                shutil.rmtree(path)
            return len(leftovers)
        return 0

    def noted_upload(self, capture_id: str) -> Upload | None:
        """The noted upload of a capture; None if none has begun."""
        return read_upload(self._captures / capture_id)

    def upload(self, capture_id: str) -> Upload | None:
        """As `noted_upload`, but waiting if its uploader died during the upload."""
        upload = self.noted_upload(capture_id)
        if upload is not None and upload.state == "uploading" and not self.busy:
            return upload.model_copy(update={"state": "waiting"})
        return upload

    def note_upload(self, capture_id: str, upload: Upload) -> bool:
        """Note the state of a capture's upload; return False if the capture was removed meanwhile."""
        with refusing(f"{self._captures / capture_id} cannot be written"), contextlib.suppress(FileNotFoundError):
            write_atomically(self.file(capture_id, UPLOAD_NAME), upload.model_dump_json() + "\n")
            return True
        return False

    def drop(self, manifest: Manifest) -> None:
        """Remove a capture's artefacts here; its manifest stays."""
        if self.copy_elsewhere(manifest.capture_id) is None:
            raise ValueError(f"capture {manifest.capture_id} has no other copy")
        for artefact in manifest.artefacts:
            self.file(manifest.capture_id, artefact.name).unlink(missing_ok=True)

    def removals(self) -> list[Path]:
        """The hidden directories, named by id, of captures that were removed here but may still be elsewhere."""
        return [
            path.parent
            for path in sorted(self._captures.glob(f"{_REMOVING}*/*/{UPLOAD_NAME}"))
            if read_upload(path.parent)
        ]

    def signature(self, capture_id: str, *names: str) -> tuple[object, ...]:
        """A value that changes whenever these files of a capture do."""
        return tuple(_about(self.file(capture_id, name)) for name in names)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[bool]:
        """Hold the lock of this run's uploader; yields False if another process holds it."""
        self._captures.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as held:
            ours = None
            with contextlib.suppress(BlockingIOError):
                ours = held.enter_context(locked(self._captures / ".uploader", wait_s=_LOCK_S))
            yield ours is not None

    @property
    def busy(self) -> bool:
        return is_locked(self._captures / ".uploader")

    def _key(self, reference: str) -> str:
        return check_id(reference)

    def _reference(self, key: str) -> str:
        return key

    def _listed(self) -> dict[str, Names]:
        return {name: self._names_at(name) for name in self.ids()}

    def _names(self, key: str) -> Names:
        directory = self._captures / key
        if not directory.is_dir() or directory.is_symlink():
            raise self._no_capture(key)
        return self._names_at(key)

    def _lock(self, *, sweeping: bool = False) -> contextlib.AbstractContextManager[object]:
        if not self._captures.is_dir():
            # (one by one, because `parents` would create directories with another mode)
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._captures.mkdir(mode=0o700, exist_ok=True)
            sync_directory(self._root)
        return locked(self._captures / ".lock", shared=not sweeping, wait_s=0.0 if sweeping else None)


def _take(source: FileToStore, target: Path) -> Artefact:
    size_bytes, sha256 = pack(source.path, target, compress=source.compress)
    return Artefact(name=target.name, role="trace", media_type=source.media_type, size_bytes=size_bytes, sha256=sha256)


def _about(path: Path) -> object:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
