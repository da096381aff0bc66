"""Sending one capture to a store elsewhere: artefacts first, each read back; then its manifest, with which it is there.

Whenever this ends, the next time begins with what is there: an artefact of the right size and sum is not sent again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO, Literal

from sftriage.errors import InputError, IntegrityError, SftriageError, UsageError
from sftriage.traces.files import chunks, regular, verified
from sftriage.traces.manifest import MANIFEST_NAME, Artefact, Manifest
from sftriage.traces.objects import PART_BYTES
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import PIN_NAME
from sftriage.traces.uploads import Outbox, Removal, Upload

Doing = Literal["sending", "checking"]
OnProgress = Callable[[str, Artefact, Doing, int], None]
"""Told the capture, its artefact, what is done with it, and how many bytes that has come to. What it raises ends it."""


class Stopped(Exception):  # noqa: N818  # not an error: whoever waits has asked for it
    """Somebody wants the upload to end now."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Brings captures of a run to where its copies are kept."""

    store: LocalStore
    outbox: Outbox
    remote: RemoteStore
    url: str
    told: OnProgress

    def bring(self, capture_id: str, now: datetime, *, changes_only: bool = False) -> bool:
        """Have a capture there as it is here; whether it is.

        Raises:
            StoreError: the store cannot be reached.
            SftriageError: it cannot be there, or not yet. That is noted beside the capture.
        """
        before = self.outbox.noted(capture_id) or Upload(url=self.url, state="waiting")
        if changes_only and before.verified_at is None:
            return False
        noted = before if before.url == self.url else Upload(url=self.url, state="waiting")
        try:
            manifest = self.store.manifest(capture_id)
            wanted = noted.model_copy(
                update={
                    "state": "stored",
                    "reason": "",
                    "manifest_sha256": hashlib.sha256(manifest.to_json()).hexdigest(),
                    "pinned": self.outbox.path(capture_id, PIN_NAME).exists(),
                }
            )
            if noted == wanted and noted.verified_at is not None:
                return True
            self.remote.key_of(manifest)  # which refuses one of another run
            if not self.outbox.note(capture_id, noted.model_copy(update={"state": "uploading", "reason": ""})):
                return False  # removed meanwhile
            names = self.remote.names(capture_id)
            lies_there = all(names.get(one.name) == one.size_bytes for one in manifest.artefacts)
            if noted.verified_at is not None and not lies_there:
                # It was there once: whatever lies there now has to be verified again, or put again from here.
                for artefact in manifest.artefacts:
                    if not self.outbox.path(capture_id, artefact.name).exists():
                        what = f"{artefact.name} of capture {capture_id}"
                        raise IntegrityError(f"{what} is not here, and not in {self.remote.place} any more")
                noted = noted.model_copy(update={"verified_at": None})
                self.outbox.note(capture_id, noted)
            self._send(manifest, noted, names, pinned=wanted.pinned)
        except Stopped:
            self.outbox.note(capture_id, noted)
            raise
        except SftriageError as error:
            self.outbox.note(capture_id, noted.failed(str(error)))
            raise
        return self.outbox.note(capture_id, wanted.model_copy(update={"verified_at": noted.verified_at or now}))

    def remove(self, removal: Removal) -> None:
        """Have a capture that was removed here removed there.

        Raises:
            StoreError: the store cannot be reached.
            UsageError: it is in another store.
        """
        if removal.upload.url != self.url:
            raise UsageError(f"capture {removal.capture_id} was removed here, and may still be in {removal.upload.url}")
        if self.remote.names(removal.capture_id):
            self.remote.remove(removal.capture_id)
        shutil.rmtree(removal.directory, ignore_errors=True)

    def _send(self, manifest: Manifest, before: Upload, names: Mapping[str, int], *, pinned: bool) -> None:
        capture_id = manifest.capture_id
        listed = MANIFEST_NAME in names
        if listed:
            self._refuse_another(manifest)
        for artefact in manifest.artefacts:
            there = names.get(artefact.name) == artefact.size_bytes
            if there and (before.verified_at is not None or self._holds(capture_id, artefact)):
                continue
            if listed:
                # It would be there with something else beside it.
                self.remote.withdraw(capture_id)
                listed = False
            self._put(capture_id, artefact)
        if pinned != before.pinned or not listed:
            self.remote.mark_pinned(capture_id, pinned=pinned)
        self.remote.put_manifest(manifest)

    def _put(self, capture_id: str, artefact: Artefact) -> None:
        with regular(self.outbox.path(capture_id, artefact.name), IntegrityError) as file:
            wrong = f"{artefact.name} of capture {capture_id} was changed here: not what was captured"
            content = verified(self._told(file, capture_id, artefact), artefact, wrong)
            self.remote.put_artefact(
                capture_id, artefact, b"".join(content) if artefact.size_bytes <= PART_BYTES else content
            )
        if not self._holds(capture_id, artefact):
            raise IntegrityError(f"{self.remote.place}/{capture_id}/{artefact.name}: not what was sent there")

    def _told(self, file: BinaryIO, capture_id: str, artefact: Artefact) -> Iterator[bytes]:
        size_bytes = 0
        for piece in chunks(file):
            size_bytes += len(piece)
            self.told(capture_id, artefact, "sending", size_bytes)
            yield piece

    def _holds(self, capture_id: str, artefact: Artefact) -> bool:
        return self.remote.holds(
            capture_id, artefact, lambda size_bytes: self.told(capture_id, artefact, "checking", size_bytes)
        )

    def _refuse_another(self, manifest: Manifest) -> None:
        """Two runs of one name must not write over each other. What is no manifest is nobody's."""
        try:
            other = Manifest.from_json(self.remote.manifest_bytes(manifest.capture_id) or b"", "")
        except InputError:
            return
        if (other.artefacts, other.created_at) != (manifest.artefacts, manifest.created_at):
            raise IntegrityError(f"{self.remote.place} has another capture {manifest.capture_id}")
