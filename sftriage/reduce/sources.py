"""What a file is, told by its first bytes, and its content as a stream: the name says nothing that can be relied on."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from sftriage.errors import InputError
from sftriage.traces.manifest import CONTROL

Format = Literal["json", "sqlite"]

_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\x00"
_TAR_MAGIC = (257, b"ustar")
_HEAD_BYTES = 512
_FOREIGN = (
    (b"PAR1", "a Parquet file"),
    (b"(\xb5/\xfd", "compressed with zstd; unpack it first"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first"),
    (b"BZh", "compressed with bzip2; unpack it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"NVIDIA ", "an Nsight report; export it with `nsys export --type sqlite`"),
)


def format_of(path: Path) -> Format:
    """Whether a file is to be read as JSON (plain, gzip or tar) or as SQLite.

    Raises:
        InputError: it cannot be read, is empty, or is something else.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path}: a directory; name the trace files themselves")
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not head:
        raise InputError(f"{path}: the file is empty")
    if head.startswith(_SQLITE):
        return "sqlite"
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise InputError(f"{path}: {what}, not a trace that can be read here")
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise InputError(f"{path}: an Nsight report; export it with `nsys export --type sqlite`")
    return "json"


@contextmanager
def opened(path: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """The JSON documents of a file, one after the other, each with its name: more than one in a tar.

    Each stream is to be read before the next is asked for; nothing is unpacked to disk.

    Raises:
        InputError: the file cannot be read, or its compression or archive is damaged.
    """
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        try:
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    tarred = _is_tar(unpacked.read(_HEAD_BYTES))
            else:
                tarred = _is_tar(file.read(_HEAD_BYTES))
            file.seek(0)
            stream: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]  # it reads as one
            yield _members(path, stream) if tarred else iter([(str(path), stream)])
        except (EOFError, tarfile.ReadError) as error:
            raise InputError(f"{path}: cut short: {error}") from error
        except (OSError, zlib.error, tarfile.TarError) as error:
            raise InputError(f"{path}: {error}") from error


def _is_tar(head: bytes) -> bool:
    at, magic = _TAR_MAGIC
    return head[at : at + len(magic)] == magic


def _members(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            # A directory, a link or a device holds no trace; macOS puts a shadow beside each file.
            if not member.isfile() or member.name.rpartition("/")[2].startswith("."):
                continue
            content = archive.extractfile(member)
            if content is not None:
                yield f"{path}!{CONTROL.sub('?', member.name)}", content
