"""Where a capture lies in a store of many jobs: ``job/run/capture-id``, with any job's and run's name made safe.

Letters, digits and ``_.-~`` stay as they are; everything else becomes ``%XX``, as in a URL. Each name has one spelling,
and each part of a key is one plain name: never empty, hidden, or a way up.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from sftriage.errors import InputError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.documents import CONTROL
from sftriage.traces.manifest import Manifest

MAX_PART_BYTES = 240
"""What a file system takes as one name, and room for a suffix while it is written."""


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


def shown(text: str) -> str:
    """Text of others, short and safe to print."""
    return CONTROL.sub("?", text.encode("utf-8", "replace").decode()[:300])
