"""Where captures are kept: one directory a capture, holding its trace and its manifest.

::

    ROOT/captures/.lock                    shared while something is being put, exclusive while leftovers are swept
    ROOT/captures/.tmp-<capture id>-xxxx/  being written, or left by a crash
    ROOT/captures/<capture id>/trace.json.gz       or trace.nsys-rep, trace.sqlite, stacks.json, ...
    ROOT/captures/<capture id>/manifest.json

A capture is written and synced in a hidden directory that one rename then publishes, so that it is there whole or not
at all, whenever the process or the machine stops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from sftriage.errors import CaptureError, InputError, IntegrityError, UsageError
from sftriage.records import CAPTURE_ID
from sftriage.traces.fields import first_problem
from sftriage.traces.findings import Findings
from sftriage.traces.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Artefact, Manifest

TRACE_NAME = "trace.json.gz"

PIN_NAME = "pinned"
"""An empty file of this name in a capture's directory: retention leaves it alone."""

_CHUNK_BYTES = 1 << 20
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Listing:
    """The captures of a store, by id, and what else lies there and why it is not one."""

    manifests: tuple[Manifest, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileToStore:
    """A file that a capture has left.

    Attributes:
        path: where it lies; it stays there.
        name: its name in the store.
        media_type: what it is there.
        compress: it is gzipped on its way in.
    """

    path: Path
    name: str = TRACE_NAME
    media_type: str = "application/gzip"
    compress: bool = True


class LocalStore:
    """Captures in a directory of this host, readable by its owner alone."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        self._captures = self._root / "captures"

    def put(self, capture_id: str, source: str | os.PathLike[str], build: Callable[[Artefact], Manifest]) -> Manifest:
        """Store a plain JSON trace, compressed, with its manifest. ``source`` stays where it is.

        Args:
            capture_id: the capture, not yet stored.
            source: the trace as the profiler exported it.
            build: makes the manifest, once the artefact is written and its size and sha256 are known.

        Raises:
            CaptureError: the trace is empty or unreadable, the capture is there already, or the disk is full. Nothing
                of it is kept.
        """
        return self.put_files(capture_id, [FileToStore(Path(source))], lambda artefacts: build(artefacts[0]))

    def put_files(
        self, capture_id: str, files: Sequence[FileToStore], build: Callable[[tuple[Artefact, ...]], Manifest]
    ) -> Manifest:
        """Store the files of a capture, the main one first, with its manifest: see `put`."""
        _check_id(capture_id)
        try:
            with self._lock(fcntl.LOCK_SH):
                return self._put(capture_id, files, build)
        except OSError as error:
            # Renaming a directory onto one that is not empty.
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            reason = "it is stored already" if taken else error.strerror
            raise CaptureError(f"capture {capture_id} could not be stored: {reason}") from error

    def _put(
        self, capture_id: str, files: Sequence[FileToStore], build: Callable[[tuple[Artefact, ...]], Manifest]
    ) -> Manifest:
        final = self._captures / capture_id
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        staging = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{capture_id}-", dir=self._captures))
        try:
            artefacts = tuple(_take(file, staging / file.name) for file in files)
            try:
                manifest = build(artefacts)
            except ValidationError as error:
                raise CaptureError(f"capture {capture_id} has no valid manifest: {first_problem(error)}") from error
            if manifest.capture_id != capture_id or not set(artefacts) <= set(manifest.artefacts):
                raise ValueError("the manifest is not that of this capture")
            with _private(staging / MANIFEST_NAME) as file:
                file.write(manifest.to_json())
                _sync(file)
            _sync_directory(staging)
            staging.rename(final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        _sync_directory(self._captures)
        return manifest

    def manifest(self, capture_id: str) -> Manifest:
        """The manifest of a capture that is there whole: its artefacts exist and have the right size.

        Raises:
            UsageError: no such capture.
            InputError: what lies there is not one.
            IntegrityError: an artefact is missing or of another size.
        """
        directory = self._directory(capture_id)
        path = directory / MANIFEST_NAME
        with _regular(path, InputError) as file:
            manifest = Manifest.from_json(file.read(MAX_MANIFEST_BYTES + 1), str(path))
        if manifest.capture_id != capture_id:
            raise InputError(f"{path}: is the manifest of {manifest.capture_id}")
        for artefact in manifest.artefacts:
            with _regular(directory / artefact.name, IntegrityError) as file:
                size = os.fstat(file.fileno()).st_size
            if size != artefact.size_bytes:
                raise IntegrityError(f"{directory / artefact.name}: {size} bytes; it had {artefact.size_bytes}")
        return manifest

    def note_findings(self, capture_id: str, findings: Findings) -> Manifest:
        """Put what a capture shows into its manifest, in place of what was noted before.

        Raises:
            UsageError: no such capture, or its directory cannot be written.
            InputError, IntegrityError: as `manifest` does.
        """
        manifest = self.manifest(capture_id).model_copy(update={"findings": findings})
        path = self._captures / capture_id / MANIFEST_NAME
        try:
            with self._lock(fcntl.LOCK_SH), _replacing(path) as file:
                file.write(manifest.to_json())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        return manifest

    def manifests(self) -> Listing:
        """Every capture of the store, and every problem found on the way. Never raises for what lies there."""
        manifests, problems = [], []
        for name in sorted(self.ids()):
            try:
                manifests.append(self.manifest(name))
            except (InputError, IntegrityError, UsageError, OSError) as error:
                problems.append(str(error))
        return Listing(tuple(manifests), tuple(problems))

    def ids(self) -> frozenset[str]:
        """The ids of all captures that are there, whole or damaged; read without opening one."""
        return frozenset(name for name in self._names() if not name.startswith("."))

    def path(self, capture_id: str, artefact: str) -> Path:
        """Where an artefact of a capture lies; its size is right, its content is not verified.

        Raises:
            UsageError, InputError, IntegrityError: as `manifest` does; InputError too if it has no such artefact.
        """
        return self._captures / capture_id / self.manifest(capture_id).artefact(artefact).name

    def get(self, capture_id: str, artefact: str, destination: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Copy an artefact out of the store, verified. Into a directory it goes under its own name.

        Raises:
            UsageError: no such capture, the destination exists (and ``force`` is not set) or cannot be written.
            InputError: the capture's manifest is not one, or it names no such artefact.
            IntegrityError: what is stored is not what was put; nothing is left at the destination.
        """
        wanted = self.manifest(capture_id).artefact(artefact)
        target = Path(destination)
        if target.is_dir():
            target = target / wanted.name
        if target.exists() and not force:
            raise UsageError(f"{target} exists already")
        source = self._captures / capture_id / wanted.name
        try:
            with _regular(source, IntegrityError) as stored, _replacing(target) as copy:
                size, sha256 = _copy(stored, copy)
                if (size, sha256) != (wanted.size_bytes, wanted.sha256):
                    raise IntegrityError(
                        f"{source}: sha256 {sha256}, {size} bytes; it was put as sha256 {wanted.sha256}, "
                        f"{wanted.size_bytes} bytes"
                    )
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from error
        return target

    def remove(self, capture_id: str) -> None:
        """Remove a capture, artefacts and manifest as one: one rename hides it, and what a crash leaves is swept.

        Raises:
            UsageError: no such capture, or the store cannot be written.
        """
        directory = self._directory(capture_id)
        try:
            with self._lock(fcntl.LOCK_SH):
                hidden = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{capture_id}-", dir=self._captures))
                directory.rename(hidden / capture_id)
                _sync_directory(self._captures)
                shutil.rmtree(hidden)
        except OSError as error:
            raise UsageError(f"capture {capture_id} cannot be removed: {error.strerror}") from error

    def pin(self, capture_id: str) -> None:
        """Keep a capture whatever retention says. A second pin changes nothing.

        Raises:
            UsageError: no such capture, or the store cannot be written.
        """
        directory = self._directory(capture_id)
        try:
            with contextlib.suppress(FileExistsError), _private(directory / PIN_NAME):
                _sync_directory(directory)
        except OSError as error:
            raise UsageError(f"capture {capture_id} cannot be pinned: {error.strerror}") from error

    def unpin(self, capture_id: str) -> None:
        """Leave a capture to retention again. One that is not pinned stays so.

        Raises:
            UsageError: no such capture, or the store cannot be written.
        """
        directory = self._directory(capture_id)
        try:
            (directory / PIN_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"capture {capture_id} cannot be unpinned: {error.strerror}") from error

    def pinned(self) -> frozenset[str]:
        """The ids of the captures that are pinned."""
        return frozenset(name for name in self.ids() if (self._captures / name / PIN_NAME).exists())

    def sweep(self) -> int:
        """Remove what crashes have left half written; how many there were. Does nothing while a put is under way.

        Raises:
            UsageError: the store belongs to somebody else, or cannot be written.
        """
        if not self._captures.is_dir():
            return 0
        try:
            with self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
                leftovers = [name for name in self._names() if name.startswith(_TEMPORARY)]
                for name in leftovers:
                    shutil.rmtree(self._captures / name)
                return len(leftovers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise UsageError(f"{self._captures} cannot be swept: {error.strerror}") from error

    def _directory(self, capture_id: str) -> Path:
        """Where a capture that is there lies."""
        directory = self._captures / _check_id(capture_id)
        if not directory.is_dir() or directory.is_symlink():
            raise UsageError(f"no capture {capture_id} in {self._captures}")
        return directory

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self._captures.iterdir())
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _lock(self, how: int) -> Iterator[None]:
        """Hold the store's lock. The kernel gives it back when a process dies, so a crash blocks nobody."""
        if not self._captures.is_dir():
            # One by one: the mode is not that of the parents that `parents` makes.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._captures.mkdir(mode=0o700, exist_ok=True)
            _sync_directory(self._root)
        with _private(self._captures / ".lock", flags=0) as file:
            fcntl.flock(file, how)
            yield


def _check_id(capture_id: str) -> str:
    """An id that is safe to put into a path; it comes from a command line or a manifest."""
    if not CAPTURE_ID.fullmatch(capture_id):
        raise UsageError(f"{capture_id!r} is not a capture id")
    return capture_id


def _take(source: FileToStore, target: Path) -> Artefact:
    """Copy a file, gzipped where it is to be, and synced; the sum and size are those of the bytes as written."""
    with _regular(source.path, CaptureError) as plain, _private(target) as file:
        written = _Summed(file)
        if source.compress:
            # Level 1: the trace waits for nobody, but the host's cores belong to the training job.
            # No name and no time inside, so that one trace always gives the same bytes.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=written, mtime=0) as compressed:
                size, _ = _copy(plain, compressed)
        else:
            size, _ = _copy(plain, written)
        if size == 0:
            raise CaptureError(f"{source.path}: the trace is empty")
        _sync(file)
    return Artefact(
        name=target.name,
        role="trace",
        media_type=source.media_type,
        size_bytes=written.size_bytes,
        sha256=written.sha256.hexdigest(),
    )


class _Summed(io.RawIOBase):
    """Sums what passes through to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # gzip writes nothing but bytes
        self.sha256.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)


def _copy(source: BinaryIO, target: BinaryIO | gzip.GzipFile | _Summed) -> tuple[int, str]:
    """Copy to the end; the size and sha256 of what was read."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        target.write(chunk)
    return size, digest.hexdigest()


def _regular(path: Path, error_type: type[CaptureError] | type[InputError] | type[IntegrityError]) -> BinaryIO:
    """A file for reading. A link could lead out of the store, and a pipe would never end: both are refused."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise error_type(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise error_type(f"{path}: not a regular file")
    return os.fdopen(number, "rb")


def _private(path: Path, flags: int = os.O_EXCL) -> BinaryIO:
    """A new file that its owner alone can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), "wb")


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the target's place when the block ends well, and is gone when it does not."""
    number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            _sync(file)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
