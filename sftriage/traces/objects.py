"""Objects by key, in S3, Google Cloud Storage or Azure Blob Storage, through obstore, or in a directory, without it.

Credentials and endpoints come from the environment alone, as obstore reads them. All failures are a `StoreError` of one
line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from sftriage.base.files import replacing, sync_directory
from sftriage.errors import StoreError, UsageError
from sftriage.traces.files import CHUNK_BYTES, chunks
from sftriage.traces.keys import shown

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 4
_MAX_SAID = 300
_QUERY = re.compile(r"(?<=[^\s?])\?\S*")
_METADATA = "169.254.169.254"
"""Where a cloud's machines ask for their own credentials, once there are no others."""
_MESSAGE = re.compile(r"<Message>([^<]{1,200})</Message>")
_SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
# What obstore reads from the environment only as long as it is given no options of its own.
_FROM_ENVIRONMENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request may take to connect, and then without an answer; how often it is retried, and for how long."""

    connect_s: float = 10.0
    idle_s: float = 120.0
    retries: int = 3
    retry_s: float = 30.0


def checked_url(url: str) -> str:
    """A store's URL in its canonical form, ``file://`` for a directory; raises UsageError where it cannot be opened."""
    if "://" not in url:
        if not url:
            raise UsageError("a store's URL is empty")
        return Path(url).absolute().as_uri()
    parts = urlsplit(url)
    if parts.scheme not in (*_SCHEMES, "file"):
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UsageError(f"{shown(url)}: not a store; there are {known}, file:// and directories")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Not shown: what stands there is often a secret.
        raise UsageError(
            f"{parts.scheme}://{shown(parts.netloc.rpartition('@')[2])}: a store's URL is a bucket and a prefix; "
            "credentials and options come from the environment"
        )
    if (parts.scheme == "file") != (not parts.netloc) or (parts.scheme == "file" and parts.path in ("", "/")):
        raise UsageError(f"{shown(url)}: names no {'directory' if parts.scheme == 'file' else 'bucket'}")
    names = unquote(parts.path).split("/")
    if any(name in (".", "..") for name in names) or shown(unquote(url)) != unquote(url):
        raise UsageError(f"{shown(url)}: not a plain path")
    return f"{parts.scheme}://{parts.netloc}{quote(unquote(parts.path)).rstrip('/')}"


class Objects:
    """The objects below one prefix; subclasses have other means than obstore."""

    def __init__(self, store: ObjectStore | None, place: str) -> None:
        self.place = place
        self._store: Any = store

    @classmethod
    def open(cls, url: str, *, patience: Patience, create: bool = False) -> Objects:
        """Open a store; no request is made. Raises UsageError where there is none, or obstore is not installed."""
        url = checked_url(url)
        scheme = urlsplit(url).scheme
        if scheme == "file":
            return Directory(url, Path(unquote(urlsplit(url).path)), create=create)
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise UsageError("a store elsewhere needs obstore; install sftriage[store]") from None
        try:
            return cls(from_url(url, **_options(_SCHEMES[scheme], patience)), url)
        except (BaseError, OSError, ValueError) as error:
            raise UsageError(f"{url} cannot be opened: {said(error)}") from error

    def sizes(self, prefix: str | None = None) -> dict[str, int]:
        """The keys below a prefix, and the bytes of each."""
        with self._told():
            return dict(self._list(prefix))

    def size(self, key: str) -> int | None:
        """The bytes of an object; None where there is none."""
        try:
            with self._told():
                return self._size(key)
        except FileNotFoundError:
            return None

    def stream(self, key: str) -> Iterator[bytes]:
        """The content of an object, piece by piece; raises FileNotFoundError where there is none."""
        pieces = self._pieces(key)
        while True:
            with self._told():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """What is in a small object, and no more than a byte beyond ``max_bytes`` of it; None where there is none."""
        content = b""
        try:
            for piece in self.stream(key):
                content += piece
                if len(content) > max_bytes:
                    break
        except FileNotFoundError:
            return None
        return content[: max_bytes + 1]

    def put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        """Put an object, whole or not at all: bytes in one request, pieces part by part, unless they raise."""
        try:
            with self._told():
                self._put(key, content)
        except FileNotFoundError as error:
            raise StoreError(f"{self.place}: {said(error)}") from error

    def delete(self, key: str) -> None:
        """Delete an object. One that is not there changes nothing."""
        with suppress(FileNotFoundError), self._told():
            self._delete(key)

    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]:
        import obstore

        for page in obstore.list(self._store, prefix, chunk_size=1000):
            yield from ((one["path"], one["size"]) for one in page)

    def _size(self, key: str) -> int:
        import obstore

        return obstore.head(self._store, key)["size"]

    def _pieces(self, key: str) -> Iterator[bytes]:
        import obstore

        yield from map(bytes, obstore.get(self._store, key).stream(min_chunk_size=CHUNK_BYTES))

    def _put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        import obstore

        obstore.put(self._store, key, content, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def _delete(self, key: str) -> None:
        import obstore

        obstore.delete(self._store, key)

    @contextmanager
    def _told(self) -> Iterator[None]:
        errors: tuple[type[Exception], ...] = (OSError,)
        if self._store is not None:
            from obstore.exceptions import BaseError

            errors = BaseError, OSError
        try:
            yield
        except FileNotFoundError:
            raise
        except errors as error:
            raise StoreError(f"{self.place}: {said(error)}") from error


def _options(prefix: str, patience: Patience) -> dict[str, Any]:
    named = {key: os.environ.get(f"{prefix}_{key.upper()}") for key in _FROM_ENVIRONMENT}
    return {
        "client_options": {
            **{key: value for key, value in named.items() if value},
            "connect_timeout": timedelta(seconds=patience.connect_s),
            "read_timeout": timedelta(seconds=patience.idle_s),
            # Of a whole request, which may be the download of a large trace.
            "timeout": timedelta(days=1),
        },
        "retry_config": {"max_retries": patience.retries, "retry_timeout": timedelta(seconds=patience.retry_s)},
    }


class Directory(Objects):
    """A directory that hosts may share. A file takes its name when the disk holds it.

    Making one raises UsageError where there is no such directory, or it cannot be made.
    """

    def __init__(self, place: str, root: Path, *, create: bool) -> None:
        super().__init__(None, place)
        self._root = root
        try:
            if create:
                # Whoever wants to share it makes it first.
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{place} cannot be opened: {said(error)}") from error
        if not root.is_dir():
            raise UsageError(f"{shown(str(root))}: no such directory")

    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self._root / (prefix or ""), onerror=_refuse, followlinks=True):
            for name in names:
                path = Path(folder, name)
                # (what is on its way begins with a dot; what has gone since it was listed is not there)
                if not name.startswith("."):
                    with suppress(FileNotFoundError):
                        yield path.relative_to(self._root).as_posix(), path.stat().st_size

    def _size(self, key: str) -> int:
        return (self._root / key).stat().st_size

    def _pieces(self, key: str) -> Iterator[bytes]:
        with (self._root / key).open("rb") as file:
            yield from chunks(file)

    def _put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o666) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        sync_directory(path.parent)

    def _delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)
        with suppress(OSError):
            # Directories above that are empty now go too.
            for above in (self._root / key).parents:
                if above == self._root:
                    break
                above.rmdir()


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def said(error: BaseException) -> str:
    """What obstore says, in a line: the rest is its insides. A query may hold a signature, so it is left out."""
    text = ((error.strerror if isinstance(error, OSError) else None) or str(error)).strip() or type(error).__name__
    first = _QUERY.sub("", text.splitlines()[0].partition(": <")[0])
    message = _MESSAGE.search(text)
    if _METADATA in text:
        first = f"no credentials in the environment, and none of this machine: {first}"
    return shown(f"{first}: {message[1]}" if message else first)[:_MAX_SAID]
