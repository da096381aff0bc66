"""Captures as JSON values, the state of their uploads, and the parsing of queries. For commands and the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

from sftriage.errors import InputError, UsageError
from sftriage.model.windows import plain
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore, Upload

if TYPE_CHECKING:
    from sftriage.runs.decisions import CaptureStatus
    from sftriage.runs.source import Damaged, View
    from sftriage.traces.catalogue import CaptureRow
    from sftriage.traces.store import StoreCondition


def captures_of(view: View) -> tuple[CaptureStatus, ...]:
    """Every requested capture, newest first; then those in the store that this run did not request."""
    from sftriage.runs.decisions import CaptureStatus  # (with the journal's types, which lists of captures do without)

    requested = [(row.time_s, "", request) for row in view.rows for request in row.requests]
    requested += [(row.time_s, row.by, request) for row in view.requests for request in row.requests]
    requested.sort(key=lambda entry: entry[0])
    requested.reverse()
    known = {
        of.capture_id: CaptureStatus(of.capture_id, of.rank, of.role, asked_by=by, whole_job=of.of_whole_job)
        for _, by, of in requested
    }
    stored = {capture.capture_id: capture for capture in view.captures}
    for name, found in stored.items():
        rank = None if not isinstance(found, Manifest) else found.capture.rank
        known.setdefault(name, CaptureStatus(name, rank, "suspect", "stored"))
    return tuple(replace(status, **_found_of(view, name, stored.get(name))) for name, status in known.items())


def _found_of(view: View, capture_id: str, stored: Manifest | Damaged | None) -> dict[str, Any]:
    from sftriage.runs.decisions import picked

    found: dict[str, Any] = {}
    if (sent := view.uploads.get(capture_id)) is not None:
        found = {"upload": sent.state, "upload_reason": sent.reason}
    result = view.results.get(capture_id)
    if (now := result or view.states.get(capture_id)) is not None:
        found |= picked(now, "state", "detail")
    if stored is not None and not isinstance(stored, Manifest):
        return found | {"state": "damaged", "detail": stored.problem}
    if (recorded := result if stored is None else stored.capture) is not None:
        found |= picked(recorded, "first_step", "last_step")
    if stored is not None:
        again = stored.reproduced
        found["size_bytes"] = sum(artefact.size_bytes for artefact in stored.artefacts)
        found["reproduced"] = "" if again is None else again.answer
    return found


def upload_of(directory: RunDirectory | None, capture_id: str) -> Upload | None:
    """The state of a capture's upload; None if it is not in a run directory, or its run uploads nothing."""
    if directory is None:
        return None
    found = LocalStore(directory.path).upload(capture_id)
    with suppress(InputError):
        if found is None and (url := read_info(directory).store) is not None:
            return Upload(url=url, state="waiting")
    return found


def upload_values(upload: Upload | None) -> dict[str, Any] | None:
    """The state of an upload, as JSON values."""
    return None if upload is None else upload.model_dump(mode="json", include={"state", "url", "reason", "verified_at"})


def upload_words(upload: Upload) -> str:
    """The state of an upload, in words."""
    if upload.state == "stored" and upload.verified_at is not None:
        return f"stored in {upload.url}, verified {upload.verified_at:%Y-%m-%d %H:%M:%S} UTC"
    if upload.state == "failed":
        return f"failed: {upload.reason}"
    return f"{upload.state}: {'from' if upload.state == 'removed' else 'to'} {upload.url}"


StoredState: TypeAlias = "tuple[Manifest | None, StoreCondition | None]"
"""A capture's manifest, and its condition in the store; None if unknown."""


def described(
    rows: Sequence[CaptureRow], states: Sequence[StoredState], directory: RunDirectory | None
) -> list[dict[str, Any]]:
    """Captures as JSON values, each with its condition, cause and upload; None for what is unknown."""
    return [
        {
            **plain(row),
            "role": row.role,
            **condition_values(condition),
            "cause": cause_values(manifest) if manifest else row.why_slow and row.why_slow.model_dump(mode="json"),
            "upload": upload_values(upload_of(directory, row.capture_id)),
        }
        for row, (manifest, condition) in zip(rows, states, strict=True)
    ]


def cause_values(manifest: Manifest) -> dict[str, Any] | None:
    """Why a captured rank was slow, as JSON values."""
    return None if manifest.cause is None else manifest.cause.model_dump(mode="json")


def condition_values(condition: StoreCondition | None) -> dict[str, Any]:
    """Whether a stored capture is unchanged, as JSON values."""
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
    """The moment that ``"2h"``, ``"2026-11-20"`` or ``"2026-11-20T08:30:00+01:00"`` is; UTC if it names no zone.

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
