"""Files of captures: opened without following links, written privately, synced, copied with their size and sha256."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sftriage.errors import CaptureError, InputError, IntegrityError, UsageError

if TYPE_CHECKING:
    from sftriage.traces.manifest import Artefact
    from sftriage.traces.stores import Progress

CHUNK_BYTES = 1 << 20


def chunks(source: BinaryIO) -> Iterator[bytes]:
    """What is in a file, to its end."""
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def verified(pieces: Iterable[bytes], artefact: Artefact, wrong: str) -> Iterator[bytes]:
    """The pieces of an artefact, the last of them only if all together are what was stored.

    Raises:
        IntegrityError: they are not; ``wrong`` is its message.
    """
    digest, size_bytes, held = hashlib.sha256(), 0, b""
    for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > artefact.size_bytes:
            break
        digest.update(piece)
        if held:
            yield held
        held = piece
    if (size_bytes, digest.hexdigest()) != (artefact.size_bytes, artefact.sha256):
        raise IntegrityError(wrong)
    yield held


def gzipped(source: Iterable[bytes]) -> Iterator[bytes]:
    """The same, compressed. No name and no time go in, so that one trace always gives the same bytes."""
    # Level 1: the trace waits for nobody, but the host's cores belong to the training job.
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
    """Copy an artefact to a file that appears there only once its size and sha256 are right.

    Raises:
        IntegrityError: what is stored is not what was put.
        OSError: the file cannot be written.
    """
    with replacing(copy_to) as target:
        size, sha256 = copy(source, target, progress)
        if (size, sha256) != (wanted.size_bytes, wanted.sha256):
            raise IntegrityError(
                f"{name}: sha256 {sha256}, {size} bytes; it was put as sha256 {wanted.sha256}, "
                f"{wanted.size_bytes} bytes"
            )


def regular(path: Path, error_type: type[CaptureError] | type[InputError] | type[IntegrityError]) -> BinaryIO:
    """A file for reading. A link could lead out of the store, and a pipe would never end: both are refused."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise error_type(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise error_type(f"{path}: not a regular file")
    return os.fdopen(number, "rb")


def private(path: Path, flags: int = os.O_EXCL) -> BinaryIO:
    """A new file that its owner alone can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), "wb")


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Have what the system refuses said as a UsageError: ``what`` cannot be done, and why."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the target's place when the block ends well, and is gone when it does not."""
    number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            sync(file)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def sync(file: BinaryIO) -> None:
    """Have the disk hold what was written."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Have the disk hold a directory's names."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_atomically(path: Path, text: str) -> None:
    """Write a small private file so that a reader, or a crash, sees the old content or the new and nothing between."""
    with replacing(path) as file:
        file.write(text.encode())
