"""Captures in a store elsewhere: S3, Google Cloud Storage, Azure Blob Storage, or a directory that hosts share.

::

    URL/<job>/<run>/<capture id>/trace.json.gz       or trace.nsys-rep, trace.sqlite, stacks.json, ...
    URL/<job>/<run>/<capture id>/manifest.json       put last, deleted first: without it there is no capture
    URL/<job>/<run>/<capture id>/pinned              empty: retention leaves the capture alone

In a key letters, digits and ``_.-~`` stay as they are; everything else becomes ``%XX``, as in a URL. Each name has one
spelling, and each part is one plain name: never empty, hidden, or a way up.

Others may write there. A manifest counts only where its key says it belongs, and only if what it names lies beside it
in the right size; a sum is checked when an artefact is fetched. Credentials and endpoints come from the environment
alone, as obstore reads them. All failures are a `StoreError` of one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from sftriage.base.files import refusing, replacing, sync_directory
from sftriage.errors import InputError, IntegrityError, StoreError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Artefact, Manifest
from sftriage.traces.store import (
    CHUNK_BYTES,
    PIN_NAME,
    WHOLE,
    Listing,
    Progress,
    Store,
    StoreCondition,
    check_id,
    chunks,
    copy,
    copy_verified,
    destination_of,
    shown,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore


MAX_PART_BYTES = 240  # a file system's limit of a name, less a suffix while it is written
PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 4
_MAX_SAID = 300
_QUERY = re.compile(r"(?<=[^\s?])\?\S*")
_METADATA = "169.254.169.254"  # gives a cloud's machine its own credentials
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


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """Where a capture lies: the job and run as they are called, and its id."""

    job: str
    run: str
    capture_id: str

    @classmethod
    def of(cls, manifest: Manifest) -> CaptureKey:
        """Where a capture belongs; raises InputError where its job or run cannot be part of a key."""
        for name in (manifest.job, manifest.run):
            try:
                written(name)
            except UsageError as error:
                raise InputError(f"capture {manifest.capture_id}: {error}") from None
        return cls(manifest.job, manifest.run, manifest.capture_id)

    @classmethod
    def parse(cls, key: str) -> CaptureKey:
        """The place that ``job/run/capture-id`` is; raises InputError where it is not spelt as we write it."""
        parts = key.split("/")
        if len(parts) != 3 or not CAPTURE_ID.fullmatch(parts[2]):
            raise InputError(f"{shown(key)}: not job/run/capture-id")
        return cls(read(parts[0]), read(parts[1]), parts[2])

    @property
    def key(self) -> str:
        """``job/run/capture-id``."""
        return f"{written(self.job)}/{written(self.run)}/{self.capture_id}"


def written(name: str) -> str:
    """A job's or run's name as one part of a key; raises UsageError where it is empty or too long."""
    try:
        part = quote(name, safe="", errors="strict")
    except UnicodeEncodeError:
        raise UsageError(f"{shown(name)}: not text, so it cannot be part of a key") from None
    if part.startswith("."):
        part = f"%2E{part[1:]}"
    if not part:
        raise UsageError("a job or run without a name has no place in a store")
    if len(part) > MAX_PART_BYTES:
        raise UsageError(f"{shown(name)}: too long for a key, of which a part has at most {MAX_PART_BYTES} bytes")
    return part


def read(part: str) -> str:
    """The name that a part of a key is; raises InputError where we would not write it so."""
    try:
        name = unquote(part, errors="strict")
        if written(name) == part:
            return name
    except (UnicodeDecodeError, UsageError):
        pass
    raise InputError(f"{shown(part)}: not a name as keys have it")


class Objects:
    """The objects below one prefix, through obstore; subclasses have other means."""

    def __init__(self, store: ObjectStore | None, place: str) -> None:
        self.place = place
        self._store: Any = store
        self._errors: tuple[type[Exception], ...] = (OSError,)
        if store is not None:
            import obstore

            self._obstore, self._errors = obstore, (obstore.exceptions.BaseError, OSError)

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
            raise UsageError(f"{url} cannot be opened: {message_of(error)}") from error

    def sizes(self, prefix: str | None = None) -> dict[str, int]:
        """The keys below a prefix, and the bytes of each."""
        with self._failing():
            return dict(self._list(prefix))

    def size(self, key: str) -> int | None:
        """The bytes of an object; None where there is none."""
        with suppress(FileNotFoundError), self._failing():
            return self._size(key)
        return None

    def stream(self, key: str) -> Iterator[bytes]:
        """The content of an object, piece by piece; raises FileNotFoundError where there is none."""
        pieces = self._pieces(key)
        while True:
            with self._failing():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """What is in a small object, and no more than a byte beyond ``max_bytes`` of it; None where there is none."""
        content = b""
        with suppress(FileNotFoundError):
            for piece in self.stream(key):
                content += piece
                if len(content) > max_bytes:
                    break
            return content[: max_bytes + 1]
        return None

    def put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        """Put an object, whole or not at all: bytes in one request, pieces part by part, unless they raise."""
        try:
            with self._failing():
                self._put(key, content)
        except FileNotFoundError as error:
            raise StoreError(f"{self.place}: {message_of(error)}") from error

    def delete(self, key: str) -> None:
        """Delete an object. One that is not there changes nothing."""
        with suppress(FileNotFoundError), self._failing():
            self._delete(key)

    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]:
        for page in self._obstore.list(self._store, prefix, chunk_size=1000):
            yield from ((one["path"], one["size"]) for one in page)

    def _size(self, key: str) -> int:
        return self._obstore.head(self._store, key)["size"]

    def _pieces(self, key: str) -> Iterator[bytes]:
        yield from map(bytes, self._obstore.get(self._store, key).stream(min_chunk_size=CHUNK_BYTES))

    def _put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        self._obstore.put(self._store, key, content, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def _delete(self, key: str) -> None:
        self._obstore.delete(self._store, key)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except self._errors as error:
            raise StoreError(f"{self.place}: {message_of(error)}") from error


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
    """A directory that hosts may share; files appear once the disk holds them. Raises UsageError if it is missing."""

    def __init__(self, place: str, root: Path, *, create: bool) -> None:
        super().__init__(None, place)
        self._root = root
        try:
            if create:
                # Whoever wants to share it makes it first.
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{place} cannot be opened: {message_of(error)}") from error
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


def message_of(error: BaseException) -> str:
    """What obstore says, in a line: the rest is its insides. A query may hold a signature, so it is left out."""
    text = ((error.strerror if isinstance(error, OSError) else None) or str(error)).strip() or type(error).__name__
    first = _QUERY.sub("", text.splitlines()[0].partition(": <")[0])
    message = _MESSAGE.search(text)
    if _METADATA in text:
        first = f"no credentials in the environment, and none of this machine: {first}"
    return shown(f"{first}: {message[1]}" if message else first)[:_MAX_SAID]


_READERS = 16
_MAX_NAMED = 5

_Names = dict[str, int]  # what lies in a capture's place: name and bytes


class RemoteStore(Store):
    """Captures elsewhere: of one run, by id, or of all jobs and runs. Raises UsageError where a name fits no key."""

    def __init__(self, objects: Objects, *, job: str | None = None, run: str | None = None) -> None:
        if (job is None) != (run is None):
            raise ValueError("a job without a run, or a run without a job")
        self._objects = objects
        self._scope = None if job is None or run is None else f"{written(job)}/{written(run)}"

    @classmethod
    def open(cls, url: str, *, job: str | None = None, run: str | None = None, create: bool = False) -> RemoteStore:
        """Open the store of a URL; no request is made. Raises UsageError as `Objects.open` does."""
        return cls(Objects.open(url, patience=Patience(), create=create), job=job, run=run)

    @property
    def place(self) -> str:
        return self._objects.place if self._scope is None else f"{self._objects.place}/{self._scope}"

    def reference(self, manifest: Manifest) -> str:
        """``job/run/id``, or in the store of one run its id."""
        return manifest.capture_id if self._scope else CaptureKey.of(manifest).key

    def look(self, capture_id: str) -> tuple[Manifest, StoreCondition]:
        key = self._key(capture_id)
        return self._look(key, self._names(key))

    def manifests(self) -> Listing:
        listed = sorted(self._listed().items())
        with ThreadPoolExecutor(_READERS) as readers:
            found = readers.map(lambda one: self._seen(*one), listed)
        return Listing.of((self._reference(key), one) for (key, _), one in zip(listed, found, strict=True))

    def leftovers(self) -> tuple[str, ...]:
        return tuple(
            f"{self._objects.place}/{place}: no manifest: it is on its way, or its upload or removal was cut off"
            for place, names in sorted(self._places().items())
            if MANIFEST_NAME not in names
        )

    def ids(self) -> frozenset[str]:
        return frozenset(self._reference(key) for key in self._listed() if _is_place(key))

    def get(
        self,
        capture_id: str,
        artefact: str,
        destination: str | os.PathLike[str],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        manifest = self.manifest(capture_id)
        wanted = manifest.artefact(artefact)
        target = destination_of(wanted.name, destination, force=force)
        source = f"{self.key_of(manifest)}/{wanted.name}"
        with refusing(f"{target} cannot be written"):
            try:
                copy_verified(self._objects.stream(source), target, wanted, f"{self._objects.place}/{source}", progress)
            except FileNotFoundError as error:
                if not target.parent.is_dir():
                    raise
                raise IntegrityError(f"{self._objects.place}/{source}: gone meanwhile") from error
        return target

    def remove(self, capture_id: str) -> None:
        """See `Store.remove`. What an earlier removal, or an upload, that was cut short has left there goes too."""
        key = self._key(capture_id)
        names = self._files_at(key)
        if not names:
            raise UsageError(f"no capture {shown(capture_id)} in {self.place}")
        for name in sorted(names, key=lambda name: (name != MANIFEST_NAME, name)):
            self._objects.delete(f"{key}/{name}")

    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        self._names(self._key(capture_id))
        self.mark_pinned(capture_id, pinned=pinned)

    def pinned(self) -> frozenset[str]:
        return frozenset(
            self._reference(key) for key, names in self._listed().items() if PIN_NAME in names and _is_place(key)
        )

    # What an upload does, step by step: see `sftriage.traces.uploading`.

    def key_of(self, manifest: Manifest) -> str:
        """Where a capture belongs; raises InputError where it is not of this store's job and run."""
        key = CaptureKey.of(manifest).key
        if self._scope and not key.startswith(f"{self._scope}/"):
            raise InputError(f"capture {manifest.capture_id} is of {key.rpartition('/')[0]}, not of {self._scope}")
        return key

    def names(self, capture_id: str) -> Mapping[str, int]:
        """What lies in the place of a capture of this run, whole or not: name and bytes."""
        return self._files_at(self._key(capture_id))

    def put_artefact(self, capture_id: str, artefact: Artefact, content: bytes | Iterator[bytes]) -> None:
        """Put an artefact: in one request if its bytes are given, or else part by part."""
        self._objects.put(f"{self._key(capture_id)}/{artefact.name}", content)

    def holds(self, capture_id: str, artefact: Artefact, progress: Progress | None = None) -> bool:
        """Whether an artefact lies there as it is here: read back from one end to the other."""
        key = f"{self._key(capture_id)}/{artefact.name}"
        try:
            return self._objects.size(key) == artefact.size_bytes and copy(
                self._objects.stream(key), None, progress
            ) == (artefact.size_bytes, artefact.sha256)
        except FileNotFoundError:
            return False

    def put_manifest(self, manifest: Manifest) -> None:
        """Put a manifest and read it back; raises StoreError where that differs."""
        key, content = f"{self.key_of(manifest)}/{MANIFEST_NAME}", manifest.to_json()
        self._objects.put(key, content)
        if self._objects.read(key, MAX_MANIFEST_BYTES) != content:
            raise StoreError(f"{self._objects.place}/{key}: not what was put there")

    def withdraw(self, capture_id: str) -> None:
        """Delete a capture's manifest: it is not there any more, and its artefacts may be put again."""
        self._objects.delete(f"{self._key(capture_id)}/{MANIFEST_NAME}")

    def mark_pinned(self, capture_id: str, *, pinned: bool) -> None:
        key = f"{self._key(capture_id)}/{PIN_NAME}"
        if pinned:
            self._objects.put(key, b"")
        else:
            self._objects.delete(key)

    def _key(self, reference: str) -> str:
        if self._scope:
            return f"{self._scope}/{check_id(reference)}"
        if "/" in reference:
            try:
                return CaptureKey.parse(reference).key
            except InputError as error:
                raise UsageError(str(error)) from None
        check_id(reference)
        found = [key for key in self._listed() if key.endswith(f"/{reference}") and _is_place(key)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise UsageError(f"no capture {reference} in {self.place}")
        some = ", ".join(sorted(found)[:_MAX_NAMED]) + (", ..." if len(found) > _MAX_NAMED else "")
        raise UsageError(f"{len(found)} captures are called {reference}; say which: {some}")

    def _reference(self, key: str) -> str:
        return key.rpartition("/")[2] if self._scope else key

    def _places(self) -> dict[str, _Names]:
        places: dict[str, _Names] = {}
        for key, size in self._objects.sizes(self._scope).items():
            place, _, name = key.rpartition("/")
            if place.count("/") == 2:
                places.setdefault(place, {})[name] = size
        return places

    def _listed(self) -> dict[str, _Names]:
        return {place: names for place, names in self._places().items() if MANIFEST_NAME in names}

    def _files_at(self, key: str) -> _Names:
        """What lies in a place, and not below it: in a directory, a link there may lead anywhere."""
        names = {path.removeprefix(f"{key}/"): size for path, size in self._objects.sizes(key).items()}
        return {name: size for name, size in names.items() if "/" not in name}

    def _names(self, key: str) -> _Names:
        names = self._files_at(key)
        if MANIFEST_NAME not in names:
            raise UsageError(f"no capture {key.rpartition('/')[2]} in {self.place}")
        return names

    def _look(self, key: str, names: _Names) -> tuple[Manifest, StoreCondition]:
        place, where = CaptureKey.parse(key), f"{self._objects.place}/{key}"
        source = f"{where}/{MANIFEST_NAME}"
        if names[MANIFEST_NAME] > MAX_MANIFEST_BYTES:
            raise InputError(f"{source}: larger than {MAX_MANIFEST_BYTES // 2**20} MiB, which no manifest is")
        data = self._objects.read(source.removeprefix(f"{self._objects.place}/"), MAX_MANIFEST_BYTES)
        if data is None:
            raise UsageError(f"no capture {place.capture_id} in {self.place}")
        manifest = Manifest.from_json(data, source)
        if CaptureKey.of(manifest) != place:
            raise InputError(f"{source}: is the manifest of {CaptureKey.of(manifest).key}")
        for artefact in manifest.artefacts:
            size = names.get(artefact.name)
            if size is None:
                return manifest, StoreCondition("missing", f"{where}/{artefact.name}: missing")
            if size != artefact.size_bytes:
                problem = f"{where}/{artefact.name}: {size} bytes; it had {artefact.size_bytes}"
                return manifest, StoreCondition("damaged", problem)
        return manifest, WHOLE

    def _seen(self, key: str, names: _Names) -> tuple[Manifest | None, StoreCondition] | None:
        try:
            return self._look(key, names)
        except UsageError:
            return None  # removed meanwhile
        except InputError as error:
            return None, StoreCondition.after(error)


def _is_place(key: str) -> bool:
    try:
        CaptureKey.parse(key)
    except InputError:
        return False
    return True
