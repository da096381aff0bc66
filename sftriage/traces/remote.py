"""Captures in a store elsewhere: S3, Google Cloud Storage, Azure Blob Storage, or a directory that hosts share.

::

    URL/<job>/<run>/<capture id>/trace.json.gz       or trace.nsys-rep, trace.sqlite, stacks.json, ...
    URL/<job>/<run>/<capture id>/manifest.json       put last, deleted first: without it there is no capture
    URL/<job>/<run>/<capture id>/pinned              empty: retention leaves the capture alone

Others may write there. A manifest counts only where its key says it belongs, and only if what it names lies beside it
in the right size; a sum is checked when an artefact is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sftriage.base.files import refusing
from sftriage.errors import InputError, IntegrityError, StoreError, UsageError
from sftriage.traces.files import copy, copy_verified
from sftriage.traces.keys import CaptureKey, shown, written
from sftriage.traces.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Artefact, Manifest
from sftriage.traces.objects import Objects, Patience
from sftriage.traces.stores import (
    PIN_NAME,
    WHOLE,
    Listing,
    Noted,
    Progress,
    Store,
    StoreCondition,
    check_id,
    destination_of,
    noting,
)

_READERS = 16
_MAX_NAMED = 5

_Names = dict[str, int]
"""What lies in a capture's place: name and bytes."""


class RemoteStore(Store):
    """Captures elsewhere: those of one run, known by their ids alone, or of all jobs and runs.

    Making one raises UsageError where the job's or run's name cannot be part of a key.
    """

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
        """Its URL."""
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

    def note(self, capture_id: str, noted: Noted) -> Manifest:
        manifest = noting(self.manifest(capture_id), noted)
        self.put_manifest(manifest)
        return manifest

    def remove(self, capture_id: str) -> None:
        """See `Store.remove`. What an earlier removal, or an upload, that was cut short has left there goes too."""
        key = self._key(capture_id)
        names = self._files_at(key)
        if not names:
            raise UsageError(f"no capture {shown(capture_id)} in {self.place}")
        for name in sorted(names, key=lambda name: (name != MANIFEST_NAME, name)):
            self._objects.delete(f"{key}/{name}")

    def pin(self, capture_id: str) -> None:
        self._names(self._key(capture_id))
        self.mark_pinned(capture_id, pinned=True)

    def unpin(self, capture_id: str) -> None:
        self._names(self._key(capture_id))
        self.mark_pinned(capture_id, pinned=False)

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

    def manifest_bytes(self, capture_id: str) -> bytes | None:
        """The manifest of a capture of this run as it lies there, unchecked; None where there is none."""
        return self._objects.read(f"{self._key(capture_id)}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)

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
        """Pin a capture that is there, or not."""
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
