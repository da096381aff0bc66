"""Selects the captures that a policy's retention drops, by age and size, and removes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sftriage.errors import StoreError, UsageError
from sftriage.traces.store import Store


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Removes captures older than ``age_s``, and the oldest beyond ``max_bytes`` in total; None: no limit."""

    age_s: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A capture as retention needs it; ``capture_id`` is its reference, ``created_s`` is in seconds since the epoch."""

    capture_id: str
    created_s: float
    size_bytes: int
    pinned: bool = False


def expired(captures: Sequence[Kept], retention: RetentionLimits, now_s: float) -> tuple[Kept, ...]:
    """The captures to remove now, oldest first. Pinned captures stay, and their bytes count."""
    gone, total_bytes = [], sum(capture.size_bytes for capture in captures)
    for capture in sorted(captures, key=lambda capture: (capture.created_s, capture.capture_id)):
        too_old = retention.age_s is not None and now_s - capture.created_s > retention.age_s
        too_much = retention.max_bytes is not None and total_bytes > retention.max_bytes
        if (too_old or too_much) and not capture.pinned:
            gone.append(capture)
            total_bytes -= capture.size_bytes
    return tuple(gone)


@dataclass(frozen=True, slots=True)
class Due:
    """The captures to remove now, and by reference why others, which are due or unfit, stay."""

    captures: tuple[Kept, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)


def outlook(store: Store, retention: RetentionLimits, now_s: float, *, unfit: bool = False) -> Due:
    """The captures to remove now, and those that stay, with reasons; raises OSError or StoreError."""
    pinned, listing = store.pinned(), store.manifests()
    captures = []
    for capture in listing.manifests:
        reference, size_bytes = store.reference(capture), sum(artefact.size_bytes for artefact in capture.artefacts)
        captures.append(Kept(reference, capture.created_at.timestamp(), size_bytes, reference in pinned))
    going = expired(captures, retention, now_s)
    unpinned = expired([replace(capture, pinned=False) for capture in captures], retention, now_s)
    left = {capture.capture_id: "it is pinned" for capture in unpinned if capture.capture_id in pinned}
    broken: list[Kept] = []
    for reference, condition in listing.unfit.items():
        if reference in pinned:
            left[reference] = f"it is pinned, and {condition.words}"
        elif (elsewhere := store.copy_elsewhere(reference)) is not None:
            left[reference] = f"it {condition.words}, though its copy in {elsewhere} was verified"
        elif unfit and condition.beyond_repair:
            broken.append(Kept(reference, 0.0, 0))
        else:
            left[reference] = f"it {condition.words}"
    return Due((*broken, *going), left)


def remove(store: Store, captures: Sequence[Kept]) -> tuple[tuple[Kept, ...], str | None]:
    """Remove captures, each atomically; return those removed, and why it stopped before the rest.

    The next refresh of a catalogue drops their rows. The uploader removes their copies (`sftriage.traces.uploading`).
    """
    gone: list[Kept] = []
    for capture in captures:
        try:
            if capture.capture_id in store.pinned():
                continue  # (pinned meanwhile)
            store.remove(capture.capture_id)
        except (UsageError, StoreError) as error:
            return tuple(gone), str(error)
        gone.append(capture)
    return tuple(gone), None
