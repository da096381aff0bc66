"""The captures of a run, each manifest read again only when it has changed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from sftriage.errors import InputError, IntegrityError, RingError, UsageError
from sftriage.recorder import files
from sftriage.traces import LocalStore, Manifest
from sftriage.traces.manifest import MANIFEST_NAME

_Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Damaged:
    """Something in the store that is no capture, and why."""

    capture_id: str
    problem: str


@dataclass(slots=True)
class CaptureShelf:
    """The captures in a run directory."""

    directory: Path
    _known: dict[str, tuple[_Signature, Manifest | Damaged]] = field(default_factory=dict)

    def all(self) -> list[Manifest | Damaged]:
        """Every capture, the newest first, and at the end what is none."""
        ids = LocalStore(self.directory).ids()
        self._known = {name: known for name, known in self._known.items() if name in ids}
        found = [one for name in sorted(ids) if (one := self.get(name)) is not None]
        whole = [one for one in found if isinstance(one, Manifest)]
        whole.sort(key=lambda manifest: (manifest.created_at, manifest.capture_id), reverse=True)
        return [*whole, *(one for one in found if isinstance(one, Damaged))]

    def get(self, capture_id: str) -> Manifest | Damaged | None:
        """One capture; None where there is none of that id, or it could be none."""
        signature = self._signature(capture_id)
        known = self._known.get(capture_id)
        if known is not None and known[0] == signature:
            return known[1]
        try:
            found: Manifest | Damaged = LocalStore(self.directory).manifest(capture_id)
        except UsageError:
            return None
        except (InputError, IntegrityError, OSError) as error:
            return Damaged(capture_id, str(error))
        self._known[capture_id] = (signature, found)
        return found

    def signature(self) -> tuple[tuple[str, _Signature], ...]:
        """What changes whenever a capture comes, goes or is added to."""
        return tuple((name, self._signature(name)) for name in sorted(LocalStore(self.directory).ids()))

    def open(self, manifest: Manifest, name: str) -> BinaryIO:
        """One artefact for reading; whoever asked closes it.

        Raises:
            InputError: the capture has no such artefact.
            IntegrityError: it is missing, no plain file, or of another size.
        """
        artefact = manifest.artefact(name)
        path = self.directory / "captures" / manifest.capture_id / artefact.name
        try:
            descriptor = files.open_regular(path, os.O_RDONLY)
        except RingError as error:
            raise IntegrityError(str(error)) from error
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != artefact.size_bytes:
            os.close(descriptor)
            raise IntegrityError(f"{path}: {size_bytes} bytes; it had {artefact.size_bytes}")
        return os.fdopen(descriptor, "rb")

    def _signature(self, capture_id: str) -> _Signature:
        try:
            about = (self.directory / "captures" / capture_id / MANIFEST_NAME).lstat()
        except (OSError, ValueError):
            return (0, 0, 0)
        return (about.st_mtime_ns, about.st_size, about.st_ino)
