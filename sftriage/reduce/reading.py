"""What a file is, told by its first bytes, and the traces in it: the name says nothing that can be relied on."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sftriage.errors import InputError
from sftriage.reduce.events import Trace
from sftriage.reduce.kineto import read_kineto
from sftriage.reduce.nsys import read_nsys
from sftriage.sampling.sampler import NAME as SAMPLES_NAME
from sftriage.traces.documents import CONTROL

_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\x00"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 512
_REPORT = "an Nsight report; export it with `nsys export --type sqlite`"
_FOREIGN = (
    (b"PAR1", "a Parquet file"),
    (b"(\xb5/\xfd", "compressed with zstd; unpack it first"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first"),
    (b"BZh", "compressed with bzip2; unpack it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"NVIDIA ", _REPORT),
)


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces of a file, whatever it is: one, or as many as an archive or an export holds.

    Raises:
        InputError: it cannot be read; the message says what it is, where and why.
    """
    return read_nsys(path) if _is_sqlite(path) else _documents(path)


def _is_sqlite(path: Path) -> bool:
    """Whether a file is to be read as SQLite and not as JSON (plain, gzip or tar)."""
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
        return True
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise InputError(f"{path}: {what}, not a trace that can be read here")
    if path.name == SAMPLES_NAME:
        raise InputError(f"{path}: sampled stacks, and no trace: `sftriage traces show` says what they show")
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise InputError(f"{path}: {_REPORT}")
    return False


def _documents(path: Path) -> Iterator[Trace]:
    """The traces of JSON documents: of one, or of those in a tar. Nothing is unpacked to disk."""
    with path.open("rb") as file:
        try:
            packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            stream: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]  # it reads as one
            head = stream.read(_HEAD_BYTES)
            stream.seek(0)
            if not head.startswith(_TAR, _TAR_AT):
                yield read_kineto(stream, str(path))
                return
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    # A directory, a link or a device holds no trace; macOS puts a shadow beside each file.
                    shadow = member.name.rpartition("/")[2].startswith(".")
                    content = archive.extractfile(member) if member.isfile() and not shadow else None
                    if content is not None:
                        yield read_kineto(content, f"{path}!{CONTROL.sub('?', member.name)}")
        except (EOFError, tarfile.ReadError) as error:
            raise InputError(f"{path}: cut short: {error}") from error
        except (OSError, zlib.error, tarfile.TarError) as error:
            raise InputError(f"{path}: {error}") from error
