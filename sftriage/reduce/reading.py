"""What a file is, told by its first bytes, and the traces in it: the name says nothing that can be relied on."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sftriage.errors import InputError
from sftriage.reduce.events import Trace
from sftriage.reduce.kineto import read_kineto
from sftriage.reduce.nsys import read_nsys
from sftriage.sampling.sampler import NAME as SAMPLES_NAME
from sftriage.traces.documents import CONTROL
from sftriage.traces.files import CHUNK_BYTES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

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
    """The traces of a file: one, or as many as an archive or an export holds.

    Raises InputError, saying what the file is, and where and why it cannot be read.
    """
    return read_nsys(path) if _is_sqlite(path) else _documents(path)


def _is_sqlite(path: Path) -> bool:
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
    with path.open("rb") as file:
        packed = _Unpacked(file) if file.peek(len(_GZIP)).startswith(_GZIP) else None
        stream: IO[bytes] = file if packed is None else io.BufferedReader(packed, _HEAD_BYTES)
        try:
            if not stream.peek(_HEAD_BYTES).startswith(_TAR, _TAR_AT):  # type: ignore[attr-defined]  # both are buffered
                trace = read_kineto(stream, str(path))
                yield trace if packed is None else replace(trace, notes=(*packed.notes, *trace.notes))
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


class _Unpacked(io.RawIOBase):
    """What is in a gzip file, member after member. What follows the last whole member is noted, and no error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._begins = 0
        self.notes: tuple[str, ...] = ()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        while not self.notes:
            self._packed = self._packed or self._file.read(CHUNK_BYTES)
            if self._member.eof:
                if not self._packed:
                    return 0
                self._member, self._begins = zlib.decompressobj(wbits=31), self._file.tell() - len(self._packed)
            try:
                if not self._packed:
                    raise EOFError("its compressed data has no end")
                piece = self._member.decompress(self._packed, len(into))
            except (EOFError, zlib.error):
                if not self._begins:
                    raise
                self.notes = (f"what follows its compressed data up to byte {self._begins} was not read",)
                return 0
            self._packed = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                into[: len(piece)] = piece
                return len(piece)
        return 0
