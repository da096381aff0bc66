"""How far each capture of a run is on its way to a store elsewhere: a small file beside its manifest.

::

    RUN/captures/.uploader                     held by whoever uploads this run's captures
    RUN/captures/<capture id>/upload.json      where it goes, and how far it is
    RUN/captures/.removing-xxxx/<capture id>/  removed here, and still to be removed there

Programs beside the uploader read these files, and the uploader itself after a crash.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, ValidationError

from sftriage.base.files import refusing, sync_directory, write_atomically
from sftriage.base.process import is_locked, locked
from sftriage.traces.documents import CONTROL, DocumentModel, Sentence, text
from sftriage.traces.manifest import MANIFEST_NAME, Manifest, Sha256
from sftriage.traces.stores import PIN_NAME

UPLOAD_NAME: Final = "upload.json"
REMOVING: Final = ".removing-"
_LOCK_S = 0.1  # (somebody may only be asking whether it is held)

Signature = tuple[object, object]
UploadState = Literal["waiting", "uploading", "stored", "failed"]


class Upload(DocumentModel):
    """How far a capture is on its way to the store at ``url``; what has failed is retried.

    ``verified_at`` is when all of it was read back and found right; ``manifest_sha256`` and ``pinned`` are as it is
    there.
    """

    version: Literal[1] = 1
    url: Annotated[str, text(4000)]
    state: UploadState
    reason: Sentence = ""
    verified_at: AwareDatetime | None = None
    manifest_sha256: Sha256 | None = None
    pinned: bool = False

    def failed(self, reason: str) -> Upload:
        """The same, failed."""
        return self.model_copy(update={"state": "failed", "reason": CONTROL.sub(" ", reason)[:2000]})


@dataclass(frozen=True, slots=True)
class QueuedRemoval:
    """A capture that was removed here, and that the store elsewhere may still have."""

    directory: Path
    capture_id: str
    upload: Upload


def read_upload(directory: Path) -> Upload | None:
    """How far the capture in a directory is; None where nothing has begun, or what is noted makes no sense."""
    try:
        return Upload.model_validate_json((directory / UPLOAD_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


class Outbox:
    """What is known of the uploads of a run's captures. ``root`` is the run directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._captures = Path(root) / "captures"

    def noted(self, capture_id: str) -> Upload | None:
        """What is noted of a capture; None where nothing has begun."""
        return read_upload(self._captures / capture_id)

    def upload(self, capture_id: str) -> Upload | None:
        """How far a capture is; None where nothing has begun. What died on its way is waiting."""
        upload = self.noted(capture_id)
        if upload is not None and upload.state == "uploading" and not self.busy:
            return upload.model_copy(update={"state": "waiting"})
        return upload

    def note(self, capture_id: str, upload: Upload) -> bool:
        """Write down how far a capture is. False where it was removed meanwhile."""
        with refusing(f"{self._captures / capture_id} cannot be written"), contextlib.suppress(FileNotFoundError):
            write_atomically(self.path(capture_id, UPLOAD_NAME), upload.model_dump_json() + "\n")
            return True
        return False

    def drop(self, manifest: Manifest) -> None:
        """Remove a capture's artefacts here; its manifest stays, and says where they are."""
        upload = self.noted(manifest.capture_id)
        if upload is None or upload.verified_at is None:
            raise ValueError(f"capture {manifest.capture_id} is nowhere else")
        for artefact in manifest.artefacts:
            self.path(manifest.capture_id, artefact.name).unlink(missing_ok=True)

    def path(self, capture_id: str, name: str) -> Path:
        """Where a file of a capture lies, if it is here."""
        return self._captures / capture_id / name

    def removals(self) -> list[QueuedRemoval]:
        """What was removed here, and may still be there."""
        return [
            QueuedRemoval(hidden, directory.name, upload)
            for hidden in sorted(self._captures.glob(f"{REMOVING}*"))
            for directory in hidden.iterdir()
            if (upload := read_upload(directory)) is not None
        ]

    def signature(self, capture_id: str) -> Signature:
        """What changes whenever there may be something to send of a capture."""
        return _about(self.path(capture_id, MANIFEST_NAME)), _about(self.path(capture_id, PIN_NAME))

    def noted_signature(self, capture_id: str) -> object:
        """What changes whenever something is noted of a capture."""
        return _about(self.path(capture_id, UPLOAD_NAME))

    @contextlib.contextmanager
    def uploading(self) -> Iterator[bool]:
        """Be the one who uploads; False where somebody else is. The kernel gives it back when a process dies."""
        self._captures.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            ours = None
            with contextlib.suppress(BlockingIOError):
                ours = held.enter_context(locked(self._captures / ".uploader", wait_s=_LOCK_S))
            yield ours is not None

    @property
    def busy(self) -> bool:
        """Somebody uploads."""
        return is_locked(self._captures / ".uploader")


def keep_tombstone(directory: Path) -> bool:
    """Of a capture that was just hidden, leave what its removal elsewhere needs; False where none is needed."""
    if not (directory / UPLOAD_NAME).exists():
        return False
    for path in directory.iterdir():
        if path.name not in (UPLOAD_NAME, MANIFEST_NAME):
            path.unlink()
    sync_directory(directory)
    return True


def is_tombstone(hidden: Path) -> bool:
    """Whether a hidden directory is a capture that is still to be removed elsewhere, rather than a leftover."""
    return hidden.name.startswith(REMOVING) and any((one / UPLOAD_NAME).exists() for one in hidden.iterdir())


def _about(path: Path) -> object:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
