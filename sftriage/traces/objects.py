"""Objects below one prefix: bytes by key, put atomically, in a `Directory` or a bucket (`sftriage.traces.remote`)."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sftriage.base.files import PRIVATE, private, regular, replacing, sync, sync_directory
from sftriage.errors import CaptureError, InputError, IntegrityError, SftriageError, StoreError, UsageError
from sftriage.traces.manifest import CONTROL, Artefact

CHUNK_BYTES = 1 << 20
_MAX_MESSAGE = 300
_QUERY = re.compile(r"(?<=[^\s?])\?\S*")
_METADATA = "169.254.169.254"  # gives a cloud machine its credentials
_MESSAGE = re.compile(r"<Message>([^<]{1,200})</Message>")

Progress = Callable[[int], None]  # takes the number of bytes copied so far


def shown(text: str) -> str:
    """Foreign text, shortened and safe to print."""
    return CONTROL.sub("?", text.encode("utf-8", "replace").decode()[:300])


def chunks(source: BinaryIO) -> Iterator[bytes]:
    """The content of a file, in pieces."""
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def gzipped(source: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces, compressed; without name and time, so that a trace always gives the same bytes."""
    # (level 1: the host's cores belong to the training job)
    stream = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
    for chunk in source:
        yield stream.compress(chunk)
    yield stream.flush()


def pack(source: Path, target: Path, *, compress: bool) -> tuple[int, str]:
    """Copy and sync a file of a capture; return size and sha256 of the copy. Raises CaptureError if it is empty."""
    with regular(source, CaptureError) as plain, private(target) as file:
        if os.fstat(plain.fileno()).st_size == 0:
            raise CaptureError(f"{source}: the trace is empty")
        digest = hashlib.sha256()
        for chunk in gzipped(chunks(plain)) if compress else chunks(plain):
            digest.update(chunk)
            file.write(chunk)
        sync(file)
        return file.tell(), digest.hexdigest()


def destination_of(name: str, destination: str | os.PathLike[str], *, force: bool) -> Path:
    """The target file for an artefact; raises UsageError if it exists (without ``force``), or is a device or a pipe."""
    target = Path(destination)
    if target.is_dir():
        target = target / name
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: not a plain file, so no trace can replace it")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already")
    return target


def verified(
    pieces: Iterable[bytes], artefact: Artefact, name: str, progress: Progress | None = None
) -> Iterator[bytes]:
    """The pieces of an artefact; raises IntegrityError before the last piece if the content has changed."""
    digest, size_bytes, held = hashlib.sha256(), 0, b""
    for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > artefact.size_bytes:
            break
        digest.update(piece)
        if progress is not None:
            progress(size_bytes)
        if held:
            yield held
        held = piece
    if (size_bytes, digest.hexdigest()) != (artefact.size_bytes, artefact.sha256):
        found = "more bytes" if size_bytes > artefact.size_bytes else f"sha256 {digest.hexdigest()}, {size_bytes} bytes"
        raise IntegrityError(f"{name}: {found}; it was stored as sha256 {artefact.sha256}, {artefact.size_bytes} bytes")
    yield held


class Objects(ABC):
    """The objects below one prefix. Failures raise ``error_type``, with a message of one line."""

    error_type: type[SftriageError] = StoreError
    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, place: str) -> None:
        self.place = place

    def sizes(self, prefix: str | None = None) -> dict[str, int]:
        """The keys below a prefix, with their sizes in bytes."""
        with self._failing():
            return dict(self._list(prefix))

    def stream(self, key: str) -> Iterator[bytes]:
        """The content of an object, piece by piece; raises IntegrityError if it does not exist."""
        pieces = self._pieces(key)
        while True:
            try:
                with self._failing(FileNotFoundError):
                    piece = next(pieces, None)
            except FileNotFoundError as error:
                raise IntegrityError(f"{self.place}/{key}: missing") from error
            if piece is None:
                return
            yield piece

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """The content of a small object, cut a byte beyond ``max_bytes``; None if it does not exist."""
        content = b""
        with suppress(IntegrityError):
            for piece in self.stream(key):
                content += piece
                if len(content) > max_bytes:
                    break
            return content[: max_bytes + 1]
        return None

    def put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        """Put an object atomically: bytes in one request, pieces part by part, unless they raise."""
        with self._failing():
            self._put(key, content)

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        with suppress(FileNotFoundError), self._failing(FileNotFoundError):
            self._delete(key)

    def is_plain(self, key: str) -> bool:
        """Whether a key is an object itself, or nothing, rather than a link, which may lead anywhere."""
        return True

    @abstractmethod
    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]: ...

    @abstractmethod
    def _pieces(self, key: str) -> Iterator[bytes]: ...

    @abstractmethod
    def _put(self, key: str, content: bytes | Iterator[bytes]) -> None: ...

    @abstractmethod
    def _delete(self, key: str) -> None: ...

    @contextmanager
    def _failing(self, *passed: type[Exception]) -> Iterator[None]:
        try:
            yield
        except passed:
            raise
        except self.failures as error:
            where = shown(str(getattr(error, "filename", None) or self.place))
            raise self.error_type(f"{where}: {message_of(error)}") from error


class Directory(Objects):
    """A directory; a file appears in it once it is synced. Hosts may share it, unless it is ``private`` to one run.

    In a private one, only the owner can read files, and no directory is created: a removed capture stays removed.
    """

    def __init__(self, place: str, root: Path, *, private: bool = False) -> None:
        super().__init__(place)
        self._root, self._private = root, private
        self.error_type = InputError if private else StoreError

    def is_plain(self, key: str) -> bool:
        path = self._root / key
        return not path.exists() or (path.is_file() and path.resolve() == self._root.resolve() / key)

    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self._root / (prefix or ""), onerror=_refuse, followlinks=True):
            for name in names:
                path = Path(folder, name)
                # (unfinished files begin with a dot)
                if not name.startswith("."):
                    with suppress(FileNotFoundError):
                        about = path.stat()
                        if stat.S_ISREG(about.st_mode):
                            yield path.relative_to(self._root).as_posix(), about.st_size

    def _pieces(self, key: str) -> Iterator[bytes]:
        with (self._root / key).open("rb") as file:
            yield from chunks(file)

    def _put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        path = self._root / key
        if not self._private:
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, PRIVATE if self._private else 0o666) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        sync_directory(path.parent)

    def _delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)
        with suppress(OSError):
            # Remove parent directories that are empty now.
            for above in (self._root / key).parents:
                if above == self._root:
                    break
                above.rmdir()


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def message_of(error: BaseException) -> str:
    """The message of obstore's error, without its details, and without a query, which may hold a signature."""
    text = ((error.strerror if isinstance(error, OSError) else None) or str(error)).strip() or type(error).__name__
    first = _QUERY.sub("", text.splitlines()[0].partition(": <")[0])
    message = _MESSAGE.search(text)
    if _METADATA in text:
        first = f"no credentials in the environment or from this machine: {first}"
    return shown(f"{first}: {message[1]}" if message else first)[:_MAX_MESSAGE]
