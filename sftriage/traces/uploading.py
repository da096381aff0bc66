"""Copies a run's captures to a remote store, in the background, until the copies are up to date.

The files alone show what is left to do. A capture without a verified upload is sent: its artefacts, each read back, and
then its manifest. A capture whose manifest or pin has changed is updated, and one that was removed here is removed
there. The next uploader finishes what was interrupted.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sftriage.base.files import regular
from sftriage.base.loops import Backoff, Loop
from sftriage.errors import IntegrityError, SftriageError, UsageError
from sftriage.traces.manifest import MANIFEST_NAME, Artefact, Manifest
from sftriage.traces.objects import chunks, verified
from sftriage.traces.remote import PART_BYTES, RemoteStore
from sftriage.traces.store import PIN_NAME, UPLOAD_NAME, LocalStore, Upload, read_upload

log = logging.getLogger("sftriage")

POLL_S = 2.0  # how often to check for new and changed captures
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
_SHORTEST_PAUSE_S = 0.05

Doing = Literal["sending", "checking"]
OnProgress = Callable[[str, Artefact, Doing, int], None]  # gets the bytes so far; an exception ends the upload


class Stopped(Exception):  # noqa: N818  # not an error: the caller wants it
    """The caller ends the upload."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends captures of a run to the store with its copies; with ``resend``, again those that were removed there."""

    store: LocalStore
    remote: RemoteStore
    url: str
    report: OnProgress
    resend: bool = True

    def bring(self, capture_id: str, now: datetime, *, changes_only: bool = False) -> bool:
        """Bring the copy of a capture up to date; return whether it is.

        Raises StoreError if the store cannot be reached, and SftriageError if the capture cannot be copied, or not yet,
        which is noted beside the capture.
        """
        before = self.store.noted_upload(capture_id) or Upload(url=self.url, state="waiting")
        if changes_only and before.verified_at is None:
            return False
        noted = before if before.url == self.url else Upload(url=self.url, state="waiting")
        try:
            manifest = self.store.manifest(capture_id)
            target = noted.model_copy(
                update={
                    "state": "stored",
                    "reason": "",
                    "manifest_sha256": hashlib.sha256(manifest.to_json()).hexdigest(),
                    "pinned": self.store.file(capture_id, PIN_NAME).exists(),
                }
            )
            if noted.verified_at is not None and (noted == target or (noted.state == "removed" and not self.resend)):
                return True
            self.remote.key_of(manifest)  # (raises for a capture of another run)
            if not self.store.note_upload(capture_id, noted.model_copy(update={"state": "uploading", "reason": ""})):
                return False  # (removed meanwhile)
            names = self.remote.names(capture_id)
            if noted.verified_at is not None and not names and not self.resend:
                return self.store.note_upload(capture_id, noted.model_copy(update={"state": "removed"}))
            lies_there = all(names.get(artefact.name) == artefact.size_bytes for artefact in manifest.artefacts)
            if noted.verified_at is not None and not lies_there:
                # The copy has changed since: verify it again, or send it again.
                for artefact in manifest.artefacts:
                    if not self.store.file(capture_id, artefact.name).exists():
                        name = f"{artefact.name} of capture {capture_id}"
                        raise IntegrityError(f"{name} is neither here nor in {self.remote.place} any more")
                noted = noted.model_copy(update={"verified_at": None})
                self.store.note_upload(capture_id, noted)
            self._send(manifest, noted, names, pinned=target.pinned)
        except Stopped:
            self.store.note_upload(capture_id, noted)
            raise
        except SftriageError as error:
            self.store.note_upload(capture_id, noted.failed(str(error)))
            raise
        return self.store.note_upload(capture_id, target.model_copy(update={"verified_at": noted.verified_at or now}))

    def remove(self, hidden: Path) -> None:
        """Remove the copy of a removed capture; raises StoreError, or UsageError if the copy is in another store."""
        upload = read_upload(hidden)
        if upload is not None and upload.url != self.url:
            raise UsageError(f"capture {hidden.name} was removed here, but may still be in {upload.url}")
        if self.remote.names(hidden.name):
            self.remote.remove(hidden.name)
        shutil.rmtree(hidden.parent, ignore_errors=True)

    def _send(self, manifest: Manifest, before: Upload, names: Mapping[str, int], *, pinned: bool) -> None:
        capture_id = manifest.capture_id
        listed = MANIFEST_NAME in names
        if listed:
            # Two runs of one name must not overwrite each other's captures; an invalid manifest may be replaced.
            other, _ = self.remote.state(capture_id)
            if other is not None and (other.artefacts, other.created_at) != (manifest.artefacts, manifest.created_at):
                raise IntegrityError(f"{self.remote.place} has a different capture {capture_id}")
        for artefact in manifest.artefacts:
            if names.get(artefact.name) == artefact.size_bytes and (
                before.verified_at is not None or self._holds(capture_id, artefact)
            ):
                continue
            if listed:
                # (while an artefact is replaced, the capture must not be listed)
                self.remote.withdraw(capture_id)
                listed = False
            self._put(capture_id, artefact)
        if pinned != before.pinned or not listed:
            self.remote.mark_pinned(capture_id, pinned=pinned)
        self.remote.put_manifest(manifest)

    def _put(self, capture_id: str, artefact: Artefact) -> None:
        changed = f"{artefact.name} of capture {capture_id} was changed here"
        report = partial(self.report, capture_id, artefact, "sending")
        with regular(self.store.file(capture_id, artefact.name), IntegrityError) as file:
            content = verified(chunks(file), artefact, changed, report)
            # (send a small file in one request)
            whole = b"".join(content) if artefact.size_bytes <= PART_BYTES else content
            self.remote.put_artefact(capture_id, artefact, whole)
        if not self._holds(capture_id, artefact):
            raise IntegrityError(f"{self.remote.place}/{capture_id}/{artefact.name}: not what was sent")

    def _holds(self, capture_id: str, artefact: Artefact) -> bool:
        return self.remote.holds(capture_id, artefact, partial(self.report, capture_id, artefact, "checking"))


@dataclass(frozen=True, slots=True)
class Current:
    """The transfer in progress: bytes of an artefact sent or read back so far, and in total."""

    capture_id: str
    artefact: str
    doing: Doing
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """The progress of a run's uploads."""

    stored: int = 0  # captures whose copies are up to date
    left: dict[str, str] = field(default_factory=dict)  # other captures, and why their last try failed, or ""
    removals: dict[str, str] = field(default_factory=dict)  # captures removed here, but not yet there, and why
    current: Current | None = None
    moved_bytes: int = 0  # sent and read back: grows while a transfer makes progress
    checked: bool = False  # every capture was checked since `Uploader.release_all`
    given_up: bool = False  # failures are no longer retried
    taken: bool = False  # another process uploads this run's captures

    @property
    def done(self) -> bool:
        """Whether all copies are up to date."""
        return self.checked and not self.left and not self.removals


class Uploader:
    """Sends the captures of a run directory to a store, in a thread of its own; notes its ``url`` beside each capture.

    Args:
        keep_local: keep artefacts here. Otherwise remove them once they are verified there, after `release`.
        changes_only: only update captures that were copied before.
        resend: send captures again whose whole copy was removed there.
        tries: how many turns in a row may have failures; by default any number.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteStore,
        url: str,
        *,
        keep_local: bool = True,
        changes_only: bool = False,
        resend: bool = True,
        tries: int | None = None,
    ) -> None:
        self._store = LocalStore(root)
        self._sender = Sender(self._store, remote, url, self._reported, resend)
        self._keep_local, self._changes_only, self._tries = keep_local, changes_only, tries
        self._released: set[str] = set()
        self._dropped: set[str] = set()
        self._all_released = False
        # Why the last try of each failed; how many turns in a row had a failure; when to retry.
        self._failures: dict[str, str] = {}
        self._failed_turns, self._again_s = 0, 0.0
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        # Captures whose copies are up to date, with the signatures of their files at that time.
        self._settled: dict[str, tuple[object, object]] = {}
        # How many new checks were requested, and how many of them have begun.
        self._requested = self._answered = 0
        self._progress = UploadProgress()
        self._changed = threading.Condition()
        self._loop = Loop(
            "uploads", self._turn_if_ours, POLL_S, failing="captures are not uploaded", expected=(OSError,)
        )

    def start(self) -> None:
        """Start the thread; it ends with the process at the latest."""
        self._loop.start()

    def release(self, capture_id: str) -> None:
        """Allow the removal of a capture's artefacts here, once copied: this process no longer reads them."""
        self._released.add(capture_id)
        self._loop.wake()

    def release_all(self) -> None:
        """Allow the removal of all artefacts; retry failures now, and check every capture once more."""
        self._all_released = True
        with self._changed:
            self._requested += 1
            self._progress = replace(self._progress, checked=False)
        self._loop.wake()

    @property
    def standing(self) -> UploadProgress:
        return self._progress

    def wait(self, known: UploadProgress, timeout_s: float) -> UploadProgress:
        """Wait until the progress differs from ``known``, or for ``timeout_s``; return the progress."""
        with self._changed:
            self._changed.wait_for(lambda: self._progress is not known, timeout_s)
            return self._progress

    def close(self, timeout_s: float) -> bool:
        """Stop the thread, even in the middle of a file; return whether it ended in time."""
        ended = self._loop.stop(timeout_s)
        self._set_progress(current=None, given_up=True)
        return ended

    def turn(self) -> None:
        """Check every capture once, and update its copy."""
        requested, before = self._requested, dict(self._failures)
        pauses = time.monotonic() < self._again_s and requested == self._answered
        waits = before if pauses or self._over else {}
        self._answered = requested
        ids = sorted(self._store.ids())
        todo = {f"removal of {path.name}": partial(self._sender.remove, path) for path in self._store.removals()}
        todo |= {capture_id: partial(self._bring, capture_id) for capture_id in ids}
        failed = [name for name, act in todo.items() if name not in waits and not self._attempt(name, act)]
        self._failures = {name: reason for name, reason in self._failures.items() if name in todo}
        if failed:
            self._failed_turns += 1
            self._again_s = time.monotonic() + self._backoff.next_s()
        elif not self._failures:
            self._failed_turns = 0
            self._backoff.reset()
        if before.keys() - self._failures.keys():
            self._again_s = 0.0  # (the store works again: retry the rest at once)
        self._report(ids, requested)

    def _turn_if_ours(self) -> float:
        # One process uploads; if it ends, another one gets the lock at its next check.
        with self._store.uploading() as ours, suppress(Stopped):
            self._set_progress(taken=not ours)
            if ours:
                self.turn()
        if self._progress.given_up:
            self._loop.stopping.set()
        due_s = self._again_s - time.monotonic() if self._failures else POLL_S
        return max(_SHORTEST_PAUSE_S, min(POLL_S, due_s))

    def _bring(self, capture_id: str) -> None:
        # (taken before sending: the next turn sends later changes)
        here = self._store.signature(capture_id, MANIFEST_NAME, PIN_NAME)
        if self._settled.get(capture_id) != (here, self._store.signature(capture_id, UPLOAD_NAME)):
            self._settled.pop(capture_id, None)
            if not self._sender.bring(capture_id, datetime.now(timezone.utc), changes_only=self._changes_only):
                return
            self._settled[capture_id] = (here, self._store.signature(capture_id, UPLOAD_NAME))
        released = self._all_released or capture_id in self._released
        if released and not self._keep_local and capture_id not in self._dropped:
            self._store.drop(self._store.manifest(capture_id))
            self._dropped.add(capture_id)

    def _attempt(self, name: str, act: Callable[[], None]) -> bool:
        if self._loop.stopping.is_set():
            raise Stopped
        self._failures.pop(name, None)
        try:
            act()
        except Stopped:
            raise
        except Exception as error:
            if not isinstance(error, SftriageError | OSError):
                log.exception("%s could not be uploaded", name)
            self._failures[name] = str(error)
            log.info("%s is not in the store yet: %s", name, error)
        self._set_progress(current=None)
        return name not in self._failures

    @property
    def _over(self) -> bool:
        return self._tries is not None and self._failed_turns >= self._tries

    def _reported(self, capture_id: str, artefact: Artefact, doing: Doing, done_bytes: int) -> None:
        if self._loop.stopping.is_set():
            raise Stopped
        now, before = Current(capture_id, artefact.name, doing, done_bytes, artefact.size_bytes), self._progress.current
        same = before is not None and replace(before, done_bytes=done_bytes) == now
        moved = done_bytes - (before.done_bytes if before is not None and same else 0)
        self._set_progress(current=now, moved_bytes=self._progress.moved_bytes + max(0, moved))

    def _report(self, ids: list[str], requested: int) -> None:
        why = self._failures
        left = [name for name in ids if name not in self._settled and (name in why or not self._changes_only)]
        self._set_progress(
            stored=sum(name in self._settled for name in ids),
            left={name: why.get(name, "") for name in left},
            removals={path.name: why.get(f"removal of {path.name}", "") for path in self._store.removals()},
            current=None,
            checked=requested == self._requested,
            given_up=bool(why) and self._over,
        )

    def _set_progress(self, **now: Any) -> None:
        with self._changed:
            self._progress = replace(self._progress, **now)
            self._changed.notify_all()
