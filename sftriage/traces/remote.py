"""Captures in a remote store: S3, Google Cloud Storage, Azure Blob Storage, or a directory that hosts share.

::

    URL/<job>/<run>/<capture id>/trace.json.gz       or trace.nsys-rep, trace.sqlite, stacks.json, ...
    URL/<job>/<run>/<capture id>/manifest.json       put last, deleted first: without it there is no capture
    URL/<job>/<run>/<capture id>/pinned              empty: retention keeps the capture

In a key letters, digits and ``_.-~`` stay as they are; all else becomes ``%XX``, as in a URL. Each name has one
spelling, and each part is a plain name: never empty, hidden, or ``..``.

Others may write to the store. A manifest is valid only under its own key, and only if its artefacts exist in the right
size; their checksums are verified on reading. Credentials and endpoints come only from the environment, as obstore
reads them. All failures raise `StoreError` with one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from sftriage.base.files import refusing
from sftriage.errors import InputError, IntegrityError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import MANIFEST_NAME, Artefact, Manifest
from sftriage.traces.objects import CHUNK_BYTES, Directory, Objects, Progress, message_of, shown, verified
from sftriage.traces.store import Names, Store, check_id

if TYPE_CHECKING:
    from obstore.store import ObjectStore


MAX_PART_BYTES = 240  # a file system's limit of a name, less the suffix of an unfinished file
PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 4
_MAX_NAMED = 5
URL_VARIABLE = "SFTRIAGE_CATALOGUE"
FILE_VARIABLE = "SFTRIAGE_CATALOGUE_FILE"
_SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
# obstore reads these from the environment only if it gets no options.
_FROM_ENVIRONMENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts of a request, to connect and then to answer; how often to retry it, and for how long."""

    connect_s: float = 10.0
    idle_s: float = 120.0
    retries: int = 3
    retry_s: float = 30.0


def checked_url(url: str) -> str:
    """A store's URL in its canonical form, ``file://`` for a directory; raises UsageError if it is invalid."""
    if "://" not in url:
        if not url:
            raise UsageError("a store's URL is empty")
        return Path(url).absolute().as_uri()
    parts = urlsplit(url)
    if parts.scheme not in (*_SCHEMES, "file"):
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UsageError(f"{shown(url)}: not a store: use {known}, file:// or a directory")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # (not quoted: it often contains a secret)
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


def catalogue_url(option: str | None, *, from_environment: bool = True) -> str | None:
    """The URL of the catalogue that the option or the environment names, if any.

    Raises UsageError if it has a password that all users of the machine can read, or its file cannot be read.
    """
    if option is not None:
        from sftriage.traces.catalogue import has_password

        if has_password(option):
            raise UsageError(
                "everyone on this machine can read a command line: put the catalogue's URL into "
                f"${URL_VARIABLE}, or into the file that ${FILE_VARIABLE} names, or its password into ~/.pgpass"
            )
        return option
    if not from_environment:
        return None
    if url := os.environ.get(URL_VARIABLE):
        return url
    if not (name := os.environ.get(FILE_VARIABLE)):
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"${FILE_VARIABLE}: {Path(name)}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"${FILE_VARIABLE}: {Path(name)}: not a URL") from None


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """The key of a capture: the names of its job and run, and its id."""

    job: str
    run: str
    capture_id: str

    @classmethod
    def of(cls, manifest: Manifest) -> CaptureKey:
        """The key of a manifest; raises InputError if its job or run cannot be part of a key."""
        for name in (manifest.job, manifest.run):
            try:
                written(name)
            except UsageError as error:
                raise InputError(f"capture {manifest.capture_id}: {error}") from None
        return cls(manifest.job, manifest.run, manifest.capture_id)

    @classmethod
    def parse(cls, key: str) -> CaptureKey:
        """Parse ``job/run/capture-id``; raises InputError unless it is in canonical spelling."""
        parts = key.split("/")
        if len(parts) != 3 or not CAPTURE_ID.fullmatch(parts[2]):
            raise InputError(f"{shown(key)}: not job/run/capture-id")
        return cls(read(parts[0]), read(parts[1]), parts[2])

    @property
    def key(self) -> str:
        """``job/run/capture-id``."""
        return f"{written(self.job)}/{written(self.run)}/{self.capture_id}"


def written(name: str) -> str:
    """A job's or run's name as a part of a key; raises UsageError if it is empty or too long."""
    try:
        part = quote(name, safe="", errors="strict")
    except UnicodeEncodeError:
        raise UsageError(f"{shown(name)}: not text, so it cannot be part of a key") from None
    if part.startswith("."):
        part = f"%2E{part[1:]}"
    if not part:
        raise UsageError("a job or run needs a name to be in a store")
    if len(part) > MAX_PART_BYTES:
        raise UsageError(f"{shown(name)}: too long for a key: a part has at most {MAX_PART_BYTES} bytes")
    return part


def read(part: str) -> str:
    """The name behind a part of a key; raises InputError unless it is in canonical spelling."""
    try:
        name = unquote(part, errors="strict")
        if written(name) == part:
            return name
    except (UnicodeDecodeError, UsageError):
        pass
    raise InputError(f"{shown(part)}: not a valid part of a key")


class Bucket(Objects):
    """The objects of a bucket, through obstore, which retries requests and uploads large objects in parts."""

    def __init__(self, store: ObjectStore, place: str) -> None:
        import obstore

        super().__init__(place)
        self._store: Any = store
        self._obstore = obstore
        self.failures = (obstore.exceptions.BaseError, OSError)

    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]:
        for page in self._obstore.list(self._store, prefix, chunk_size=1000):
            yield from ((item["path"], item["size"]) for item in page)

    def _pieces(self, key: str) -> Iterator[bytes]:
        yield from map(bytes, self._obstore.get(self._store, key).stream(min_chunk_size=CHUNK_BYTES))

    def _put(self, key: str, content: bytes | Iterator[bytes]) -> None:
        self._obstore.put(self._store, key, content, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def _delete(self, key: str) -> None:
        self._obstore.delete(self._store, key)


def open_objects(url: str, *, patience: Patience, create: bool = False) -> Objects:
    """Open a store, without a request. Raises UsageError if it does not exist, or obstore is not installed."""
    url = checked_url(url)
    scheme, path = urlsplit(url).scheme, Path(unquote(urlsplit(url).path))
    if scheme == "file":
        if create:
            # (the user creates a shared directory)
            with refusing(f"{url} cannot be opened"):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_dir():
            raise UsageError(f"{shown(str(path))}: no such directory")
        return Directory(url, path)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UsageError("a bucket needs obstore: pip install 'sftriage[store]'") from None
    try:
        return Bucket(from_url(url, **_options(_SCHEMES[scheme], patience)), url)
    except (BaseError, OSError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened: {message_of(error)}") from error


def _options(prefix: str, patience: Patience) -> dict[str, Any]:
    named = {key: os.environ.get(f"{prefix}_{key.upper()}") for key in _FROM_ENVIRONMENT}
    return {
        "client_options": {
            **{key: value for key, value in named.items() if value},
            "connect_timeout": timedelta(seconds=patience.connect_s),
            "read_timeout": timedelta(seconds=patience.idle_s),
            # (of a whole request, which may download a large trace)
            "timeout": timedelta(days=1),
        },
        "retry_config": {"max_retries": patience.retries, "retry_timeout": timedelta(seconds=patience.retry_s)},
    }


class RemoteStore(Store):
    """Captures in a remote store, of one run or of all jobs and runs. Raises UsageError for a name that fits no key."""

    def __init__(self, objects: Objects, *, job: str | None = None, run: str | None = None) -> None:
        if (job is None) != (run is None):
            raise ValueError("give both a job and a run, or neither")
        super().__init__(objects)
        self._scope = None if job is None or run is None else f"{written(job)}/{written(run)}"

    @classmethod
    def open(cls, url: str, *, job: str | None = None, run: str | None = None, create: bool = False) -> RemoteStore:
        """Open the store of a URL, without a request. Raises UsageError as `open_objects` does."""
        return cls(open_objects(url, patience=Patience(), create=create), job=job, run=run)

    @property
    def place(self) -> str:
        return self._objects.place if self._scope is None else f"{self._objects.place}/{self._scope}"

    def key_of(self, manifest: Manifest) -> str:
        key = CaptureKey.of(manifest).key
        if self._scope and not key.startswith(f"{self._scope}/"):
            raise InputError(f"capture {manifest.capture_id} is of {key.rpartition('/')[0]}, not of {self._scope}")
        return key

    def leftovers(self) -> tuple[str, ...]:
        return tuple(
            f"{self._objects.place}/{place}: no manifest: its upload is in progress, or was cut off, or its removal was"
            for place, names in sorted(self._places().items())
            if MANIFEST_NAME not in names
        )

    def ids(self) -> frozenset[str]:
        return frozenset(self._reference(key) for key in self._listed() if _is_key(key))

    def remove(self, capture_id: str) -> None:
        """See `Store.remove`; removes the remains of an interrupted removal or upload, too."""
        key = self._key(capture_id)
        names = self._names_at(key)
        if not names:
            raise self._no_capture(key)
        for name in sorted(names, key=lambda name: (name != MANIFEST_NAME, name)):
            self._objects.delete(f"{key}/{name}")

    # The steps of an upload: see `sftriage.traces.uploading`.

    def names(self, capture_id: str) -> Mapping[str, int]:
        """The files of a capture of this run, complete or not, with their sizes."""
        return self._names_at(self._key(capture_id))

    def put_artefact(self, capture_id: str, artefact: Artefact, content: bytes | Iterator[bytes]) -> None:
        """Put an artefact: bytes in one request, or pieces part by part."""
        self._objects.put(f"{self._key(capture_id)}/{artefact.name}", content)

    def holds(self, capture_id: str, artefact: Artefact, progress: Progress | None = None) -> bool:
        """Whether the store has this artefact, unchanged; reads all of it."""
        content = self._objects.stream(f"{self._key(capture_id)}/{artefact.name}")
        with suppress(IntegrityError):
            for _ in verified(content, artefact, artefact.name, progress):
                pass
            return True
        return False

    def withdraw(self, capture_id: str) -> None:
        """Delete a capture's manifest, so that the capture is no longer listed and its artefacts may be replaced."""
        self._objects.delete(f"{self._key(capture_id)}/{MANIFEST_NAME}")

    def _key(self, reference: str) -> str:
        if self._scope:
            return f"{self._scope}/{check_id(reference)}"
        if "/" in reference:
            try:
                return CaptureKey.parse(reference).key
            except InputError as error:
                raise UsageError(str(error)) from None
        check_id(reference)
        found = [key for key in self.ids() if key.endswith(f"/{reference}")]
        if len(found) == 1:
            return found[0]
        if not found:
            raise self._no_capture(reference)
        some = ", ".join(sorted(found)[:_MAX_NAMED]) + (", ..." if len(found) > _MAX_NAMED else "")
        raise UsageError(f"{len(found)} captures are called {reference}; choose one: {some}")

    def _reference(self, key: str) -> str:
        return key.rpartition("/")[2] if self._scope else key

    def _listed(self) -> dict[str, Names]:
        return {place: names for place, names in self._places().items() if MANIFEST_NAME in names}

    def _places(self) -> dict[str, Names]:
        places: dict[str, Names] = {}
        for key, size in self._objects.sizes(self._scope).items():
            place, _, name = key.rpartition("/")
            if place.count("/") == 2:
                places.setdefault(place, {})[name] = size
        return places


def _is_key(text: str) -> bool:
    try:
        CaptureKey.parse(text)
    except InputError:
        return False
    return True
