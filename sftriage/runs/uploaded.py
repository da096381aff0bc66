"""How far the copies of captures are on their way to a store elsewhere, as it is noted beside each."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sftriage.errors import InputError
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.traces.uploads import Outbox, Upload

_TOLD = {"state", "url", "reason", "verified_at"}


def upload_of(directory: RunDirectory, capture_id: str) -> Upload | None:
    """How far a capture's upload is; None where its run keeps its captures here alone."""
    found = Outbox(directory.path).upload(capture_id)
    if found is None:
        with suppress(InputError):
            url = read_info(directory).store
            return None if url is None else Upload(url=url, state="waiting")
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
