"""Files of captures: compressed, summed, copied with their size and sha256."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sftriage.base.files import replacing
from sftriage.errors import IntegrityError

if TYPE_CHECKING:
    from sftriage.traces.manifest import Artefact
    from sftriage.traces.stores import Progress

CHUNK_BYTES = 1 << 20


def chunks(source: BinaryIO) -> Iterator[bytes]:
    """What is in a file, to its end."""
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def verified(pieces: Iterable[bytes], artefact: Artefact, wrong: str) -> Iterator[bytes]:
    """The pieces of an artefact; raises IntegrityError (``wrong``) before the last if they are not what was stored."""
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
    """Copy an artefact to a file that appears only once its size and sha256 are right.

    Raises IntegrityError where the artefact is not what was put, OSError where the file cannot be written.
    """
    with replacing(copy_to) as target:
        size, sha256 = copy(source, target, progress)
        if (size, sha256) != (wanted.size_bytes, wanted.sha256):
            raise IntegrityError(
                f"{name}: sha256 {sha256}, {size} bytes; it was put as sha256 {wanted.sha256}, "
                f"{wanted.size_bytes} bytes"
            )
