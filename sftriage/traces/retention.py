"""Which captures of a store are kept no longer, by age and size, and their removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sftriage.errors import StoreError, UsageError
from sftriage.traces.store import Store


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Captures older than ``age_s`` go, and the oldest of those above ``max_bytes`` together; None: no such limit."""

    age_s: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What retention knows of a capture, by its store's reference. ``created_s``: seconds since the epoch."""

    capture_id: str
    created_s: float
    size_bytes: int
    pinned: bool = False


def expired(captures: Sequence[Kept], retention: RetentionLimits, now_s: float) -> tuple[Kept, ...]:
    """Those that go now, the oldest first. What is pinned stays, and its bytes count."""
    gone, total_bytes = [], sum(one.size_bytes for one in captures)
    for one in sorted(captures, key=lambda one: (one.created_s, one.capture_id)):
        too_old = retention.age_s is not None and now_s - one.created_s > retention.age_s
        too_much = retention.max_bytes is not None and total_bytes > retention.max_bytes
        if (too_old or too_much) and not one.pinned:
            gone.append(one)
            total_bytes -= one.size_bytes
    return tuple(gone)


@dataclass(frozen=True, slots=True)
class Due:
    """What retention comes to: the captures that go now, and by reference why others that it looked at do not."""

    captures: tuple[Kept, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)


def outlook(store: Store, retention: RetentionLimits, now_s: float, *, unfit: bool = False) -> Due:
    """The captures that go now, and those that are left alone, and why; raises OSError or StoreError."""
    pinned, listing = store.pinned(), store.manifests()
    captures = []
    for one in listing.manifests:
        reference, size_bytes = store.reference(one), sum(artefact.size_bytes for artefact in one.artefacts)
        captures.append(Kept(reference, one.created_at.timestamp(), size_bytes, reference in pinned))
    going = expired(captures, retention, now_s)
    unpinned = expired([replace(one, pinned=False) for one in captures], retention, now_s)
    left = {one.capture_id: "it is pinned" for one in unpinned if one.capture_id in pinned}
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
    """Remove captures, each as one; those that went, and why the rest did not.

    A catalogue learns it when it is next compared with the store; a copy elsewhere of what was removed here goes as
    soon as it can be reached: see `sftriage.traces.uploading`.
    """
    gone: list[Kept] = []
    for one in captures:
        try:
            if one.capture_id in store.pinned():
                continue  # pinned meanwhile
            store.remove(one.capture_id)
        except (UsageError, StoreError) as error:
            return tuple(gone), str(error)
        gone.append(one)
    return tuple(gone), None
