"""The captures of a run, each manifest read again only when it has changed, their uploads, and how queries are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sftriage.errors import InputError, IntegrityError, UsageError
from sftriage.model.windows import plain
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.traces.manifest import MANIFEST_NAME, Artefact, Manifest
from sftriage.traces.store import UPLOAD_NAME, LocalStore, Upload

if TYPE_CHECKING:
    from sftriage.traces.catalogue import CaptureRow
    from sftriage.traces.store import StoreCondition


_TOLD = {"state", "url", "reason", "verified_at"}
_Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """Something in the store that is no capture, and why."""

    capture_id: str
    problem: str


class CaptureShelf:
    """The captures in a run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._store = directory, LocalStore(directory)
        self._known: dict[str, tuple[_Signature, Manifest]] = {}
        self._sent: dict[str, tuple[object, Upload | None]] = {}

    def all(self) -> list[Manifest | Damaged]:
        """Every capture, the newest first, and at the end what is none."""
        ids = self._store.ids()
        self._known = {name: known for name, known in self._known.items() if name in ids}
        found = [self.get(name) for name in sorted(ids)]
        whole = [one for one in found if isinstance(one, Manifest)]
        whole.sort(key=lambda manifest: (manifest.created_at, manifest.capture_id), reverse=True)
        return [*whole, *(one for one in found if isinstance(one, Damaged))]

    def get(self, capture_id: str) -> Manifest | Damaged | None:
        """One capture; None where there is none of that id, or it could be none."""
        known = self._known.get(capture_id)
        if known is not None and known[0] == self._signature(capture_id, known[1].artefacts):
            return known[1]
        # Before it is read: what changes meanwhile is read again.
        signature = self._signature(capture_id, ())
        try:
            found = self._store.manifest(capture_id)
        except UsageError:
            return None
        except (InputError, IntegrityError, OSError) as error:
            return Damaged(capture_id, str(error))
        sizes = tuple(self._sizes(capture_id, found.artefacts))
        if all(size in (None, one.size_bytes) for size, one in zip(sizes, found.artefacts, strict=True)):
            self._known[capture_id] = ((*signature, *sizes), found)
        return found

    def uploads(self, url: str | None) -> tuple[dict[str, Upload], bool]:
        """How far each capture is on its way elsewhere, and whether somebody sends them now."""
        found: dict[str, Upload] = {}
        for name in self._store.ids():
            # What has arrived does not change any more; what has not is looked at again.
            signature = self._store.signature(name, UPLOAD_NAME)
            known = self._sent.get(name)
            if known is None or known[0] != signature:
                known = self._sent[name] = (signature, self._store.noted_upload(name))
            if (upload := known[1]) is not None:
                found[name] = upload
            elif url is not None:
                found[name] = Upload(url=url, state="waiting")
        self._sent = {name: known for name, known in self._sent.items() if name in found}
        if all(upload.state == "stored" for upload in found.values()):
            return found, False
        busy = self._store.busy
        for name, one in found.items():
            # What was on its way when its sender died waits.
            if not busy and one.state == "uploading":
                found[name] = one.model_copy(update={"state": "waiting"})
        return found, busy

    def signature(self) -> tuple[tuple[str, _Signature], ...]:
        """What changes whenever a capture comes, goes or is added to."""
        artefacts = {name: manifest.artefacts for name, (_, manifest) in self._known.items()}
        return tuple((name, self._signature(name, artefacts.get(name, ()))) for name in sorted(self._store.ids()))

    def _signature(self, capture_id: str, artefacts: Sequence[Artefact]) -> _Signature:
        try:
            about = (self._directory / "captures" / capture_id / MANIFEST_NAME).lstat()
        except (OSError, ValueError):
            return ()
        return (about.st_mtime_ns, about.st_size, about.st_ino, *self._sizes(capture_id, artefacts))

    def _sizes(self, capture_id: str, artefacts: Sequence[Artefact]) -> Iterator[int | None]:
        for artefact in artefacts:
            try:
                yield (self._directory / "captures" / capture_id / artefact.name).lstat().st_size
            except OSError:
                yield None


def upload_of(directory: RunDirectory, capture_id: str) -> Upload | None:
    """How far a capture's upload is; None where its run keeps its captures here alone."""
    found = LocalStore(directory.path).upload(capture_id)
    with suppress(InputError):
        if found is None and (url := read_info(directory).store) is not None:
            return Upload(url=url, state="waiting")
    return found


def upload_values(directory: RunDirectory | None, capture_id: str) -> dict[str, Any] | None:
    """How far a capture's upload is, as JSON values; None where there is none to speak of."""
    found = None if directory is None else upload_of(directory, capture_id)
    return None if found is None else found.model_dump(mode="json", include=_TOLD)


def upload_words(upload: Upload) -> str:
    """How far an upload is, in words."""
    if upload.state == "stored" and upload.verified_at is not None:
        return f"stored in {upload.url}, verified {upload.verified_at:%Y-%m-%d %H:%M:%S} UTC"
    if upload.state == "failed":
        return f"failed: {upload.reason}"
    return f"{upload.state}: to {upload.url}"


StoredState: TypeAlias = "tuple[Manifest | None, StoreCondition | None]"
"""A capture's manifest, and whether it is there as it was put; None of what cannot be told."""


def described(
    rows: Sequence[CaptureRow], seen: Sequence[StoredState], directory: RunDirectory | None
) -> list[dict[str, Any]]:
    """Captures as JSON values, each with its condition, cause and how far its upload is; None of what is unknown."""
    return [
        {
            **plain(row),
            "role": row.role,
            **condition_values(condition),
            "cause": cause_values(manifest) if manifest else row.why_slow and row.why_slow.model_dump(mode="json"),
            "upload": upload_values(directory, row.capture_id),
        }
        for row, (manifest, condition) in zip(rows, seen, strict=True)
    ]


def cause_values(manifest: Manifest) -> dict[str, Any] | None:
    """Why a captured rank was slow, as JSON values."""
    return None if manifest.cause is None else manifest.cause.model_dump(mode="json")


def condition_values(condition: StoreCondition | None) -> dict[str, Any]:
    """Whether a capture is there as it was put, as JSON values."""
    return {"state": condition and condition.state, "problem": (condition and condition.problem) or None}


_STEP = r"[0-9]{1,19}"
_STEPS = re.compile(rf"({_STEP})(?:\.\.({_STEP}))?")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ].+)?")


def steps_of(text: str) -> tuple[int, int]:
    """The first and last step of ``"1042"`` or ``"1000..1100"``.

    Raises:
        UsageError: it is neither.
    """
    found = _STEPS.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not found or max(first, last) >= 2**63:
        raise UsageError(f"--step {text!r}: expected a step such as 1042, or steps such as 1000..1100")
    if last < first:
        raise UsageError(f"--step {text!r}: the last step comes before the first")
    return first, last


def since_of(text: str, now: datetime) -> datetime:
    """The moment that ``"2h"``, ``"2026-11-20"`` or ``"2026-11-20T08:30:00+01:00"`` is; in UTC where no zone is said.

    Raises:
        UsageError: it is none.
    """
    from pydantic import TypeAdapter, ValidationError

    from sftriage.policy import fields

    try:
        if _MOMENT.fullmatch(text):
            moment = TypeAdapter(datetime).validate_python(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
        return now - timedelta(seconds=fields.seconds(text))
    except (ValidationError, ValueError, OverflowError):
        raise UsageError(
            f"--since {text!r}: expected how long ago, such as 2h or 3d, a day such as 2026-11-20, "
            "or a time such as 2026-11-20T08:30:00Z"
        ) from None
