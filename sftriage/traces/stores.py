"""What every store of captures does, whether it is a directory of this host or a bucket.

A capture's id is unique in its run. A store knows a capture by its *reference*: the id in the store of one run,
``job/run/id`` in one of many jobs. There a bare id serves too, as long as only one capture has it.

In a reference letters, digits and ``_.-~`` stay as they are; everything else becomes ``%XX``, as in a URL. Each name
has one spelling, and each part is one plain name: never empty, hidden, or a way up.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeAlias
from urllib.parse import quote, unquote

from sftriage.base.files import replacing
from sftriage.errors import CatalogueError, InputError, IntegrityError, StoreError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import (
    CONTROL,
    Artefact,
    CostInfo,
    Findings,
    FollowedInfo,
    Manifest,
    RecordedSteps,
    Remarks,
    ReproducedInfo,
    UnknownVersionError,
)

if TYPE_CHECKING:
    from sftriage.traces.catalogue import Catalogue

MAX_PART_BYTES = 240  # a file system's limit of a name, less a suffix while it is written


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


CHUNK_BYTES = 1 << 20


def chunks(source: BinaryIO) -> Iterator[bytes]:
    """What is in a file, to its end."""
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


def verified(pieces: Iterable[bytes], artefact: Artefact, wrong: str) -> Iterator[bytes]:
    """The pieces of an artefact; raises IntegrityError (``wrong``) before the last if they are not what was stored."""
    digest, size_bytes, held = hashlib.sha256(), 0, b""
    for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > artefact.size_bytes:
            break
        digest.update(piece)
        if held:
            yield held
        held = piece
    if (size_bytes, digest.hexdigest()) != (artefact.size_bytes, artefact.sha256):
        raise IntegrityError(wrong)
    yield held


def gzipped(source: Iterable[bytes]) -> Iterator[bytes]:
    """The same, compressed. No name and no time go in, so that one trace always gives the same bytes."""
    # Level 1: the host's cores belong to the training job.
    stream = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
    for chunk in source:
        yield stream.compress(chunk)
    yield stream.flush()


def copy(source: Iterable[bytes], target: BinaryIO | None, progress: Progress | None = None) -> tuple[int, str]:
    """Copy to the end, or only sum where there is no target; the size and sha256 of what was read."""
    digest, size = hashlib.sha256(), 0
    for chunk in source:
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
        if progress is not None:
            progress(size)
    return size, digest.hexdigest()


def copy_verified(
    source: Iterable[bytes], copy_to: Path, wanted: Artefact, name: str, progress: Progress | None = None
) -> None:
    """Copy an artefact to a file that appears once its sum is right; raises IntegrityError, or OSError."""
    with replacing(copy_to) as target:
        size, sha256 = copy(source, target, progress)
        if (size, sha256) != (wanted.size_bytes, wanted.sha256):
            put = f"it was put as sha256 {wanted.sha256}, {wanted.size_bytes} bytes"
            raise IntegrityError(f"{name}: sha256 {sha256}, {size} bytes; {put}")


PIN_NAME = "pinned"  # an empty file of this name beside a capture's manifest: retention leaves it alone

Progress = Callable[[int], None]  # takes the number of bytes copied so far


State = Literal["whole", "missing", "damaged", "unreadable"]
_WORDS: Mapping[State, str] = {
    "whole": "is whole",
    "missing": "is not all there",
    "damaged": "is damaged",
    "unreadable": "cannot be read",
}


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """Whether a capture is there as it was put, as far as names and sizes tell; ``problem`` says what is wrong.

    It is ``missing`` if a file of it is gone, ``damaged`` if a file differs from what was put or its manifest is none,
    ``unreadable`` if its owner does not let others read it or its manifest is of another version.
    """

    state: State = "whole"
    problem: str = ""

    @property
    def whole(self) -> bool:
        return self.state == "whole"

    @property
    def words(self) -> str:
        """The same as the end of a sentence about it."""
        return f"{_WORDS[self.state]}: {self.problem}" if self.problem else _WORDS[self.state]

    @property
    def beyond_repair(self) -> bool:
        """Nobody gets the trace from it any more."""
        return self.state in ("missing", "damaged")

    @classmethod
    def after(cls, error: InputError | IntegrityError | UsageError | OSError) -> StoreCondition:
        """What an attempt to read a capture has come to."""
        cause = error if isinstance(error, OSError) else error.__cause__
        state: State = "damaged"
        if isinstance(error, UnknownVersionError) or isinstance(cause, PermissionError):
            state = "unreadable"
        elif isinstance(error, UsageError) or isinstance(cause, FileNotFoundError):
            state = "missing"
        return cls(state, str(error))


WHOLE = StoreCondition()


@dataclass(frozen=True, slots=True)
class Listing:
    """The captures of a store, and by reference what else lies there and why it is not one."""

    manifests: tuple[Manifest, ...]
    unfit: Mapping[str, StoreCondition]

    @classmethod
    def of(cls, found: Iterable[tuple[str, tuple[Manifest | None, StoreCondition] | None]]) -> Listing:
        """Of what lies under each reference: a manifest, where it can be read, and its condition; or nothing."""
        manifests, unfit = [], {}
        for reference, (manifest, condition) in ((reference, one) for reference, one in found if one is not None):
            if manifest is not None and condition.whole:
                manifests.append(manifest)
            else:
                unfit[reference] = condition
        return cls(tuple(manifests), unfit)


# What becomes known of a capture once it is stored.
Noted: TypeAlias = "Findings | CostInfo | ReproducedInfo | RecordedSteps | Remarks | FollowedInfo"
_KINDS = (CostInfo, ReproducedInfo, Findings, RecordedSteps, FollowedInfo)
_FIELD_OF = dict(zip(_KINDS, ("cost", "reproduced", "findings", "recorded", "followed"), strict=True))


class Store(ABC):
    """Captures, each its artefacts and its manifest.

    Methods that take a reference raise UsageError where there is no such capture, InputError where what lies there is
    none; those that write, UsageError where the store cannot be written; all of them, StoreError where it cannot be
    reached.
    """

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is: a directory, or a URL."""

    @abstractmethod
    def reference(self, manifest: Manifest) -> str:
        """What this store knows a capture by; `ids` holds it, and every method takes it."""

    def manifest(self, capture_id: str) -> Manifest:
        """The manifest of a whole capture; raises IntegrityError if an artefact is missing or of another size."""
        manifest, condition = self.look(capture_id)
        if not condition.whole:
            raise IntegrityError(condition.problem)
        return manifest

    @abstractmethod
    def look(self, capture_id: str) -> tuple[Manifest, StoreCondition]:
        """The manifest of a capture, and whether its artefacts are there in the right size."""

    def seen(self, capture_id: str) -> tuple[Manifest | None, StoreCondition]:
        """What `look` finds, without a manifest where that cannot be read. Raises StoreError alone."""
        try:
            return self.look(capture_id)
        except (InputError, UsageError, OSError) as error:
            return None, StoreCondition.after(error)

    def manifests(self) -> Listing:
        """Every capture of the store, and every problem found on the way. Never raises for what lies there."""
        return Listing.of((name, self.seen(name)) for name in sorted(self.ids()))

    @abstractmethod
    def ids(self) -> frozenset[str]:
        """The references of all captures that are there, whole or damaged; read without opening one."""

    def leftovers(self) -> tuple[str, ...]:
        """What lies there, belongs to no capture and is never swept, in words; it is listed nowhere else."""
        return ()

    def copy_elsewhere(self, capture_id: str) -> str | None:
        """The store elsewhere that has a verified copy of a capture, if one has."""
        return None

    @abstractmethod
    def get(
        self,
        capture_id: str,
        artefact: str,
        destination: str | os.PathLike[str],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """Copy an artefact out of the store, verified. Into a directory it goes under its own name.

        Raises UsageError where the destination exists (without ``force``) or cannot be written, InputError where there
        is no such artefact, IntegrityError, leaving nothing, where it is not what was put.
        """

    def note(self, capture_id: str, noted: Noted) -> Manifest:
        """Put a finding into a capture's manifest, over an earlier one; raises IntegrityError as `manifest` does."""
        manifest = noting(self.manifest(capture_id), noted)
        self.put_manifest(manifest)
        return manifest

    @abstractmethod
    def put_manifest(self, manifest: Manifest) -> None:
        """Put the manifest of a capture in place of the one that is there."""

    @abstractmethod
    def remove(self, capture_id: str) -> None:
        """Remove a capture, artefacts and manifest as one: from then on it is not listed, whatever happens."""

    @abstractmethod
    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        """Keep a capture whatever retention says, or no longer so. To do so again changes nothing."""

    @abstractmethod
    def pinned(self) -> frozenset[str]:
        """The references of the captures that are pinned."""


def beside(store: Store, reference: str, manifest: Manifest) -> list[tuple[str, Manifest]]:
    """The captures of the other role, with the same trigger, of some of the same steps; raises SftriageError."""
    window = manifest.trigger.window
    begins = f"{reference.removesuffix(manifest.capture_id)}w{window.first_step}-{window.last_step}-r"
    others = ((one, store.manifest(one)) for one in sorted(store.ids()) if one.startswith(begins))
    return [(one, other) for one, other in others if are_beside(manifest, other)]


def are_beside(one: Manifest, other: Manifest) -> bool:
    """Whether two captures are of different roles, have one trigger, and recorded some of the same steps."""
    its, others = one.capture, other.capture
    return (
        (other.job, other.run, other.trigger.rule) == (one.job, one.run, one.trigger.rule)
        and other.trigger.window == one.trigger.window
        and others.role != its.role
        and (others.first_step <= its.last_step and others.last_step >= its.first_step)
    )


def noting(manifest: Manifest, noted: Noted) -> Manifest:
    """The manifest with what became known later."""
    if isinstance(noted, Remarks):
        return manifest.model_copy(update={"evidence": noted.lines})
    return manifest.model_copy(update={_FIELD_OF[type(noted)]: noted})


def check_id(capture_id: str) -> str:
    """An id that is safe to put into a path or a key; UsageError where it is not."""
    if not CAPTURE_ID.fullmatch(capture_id):
        raise UsageError(f"{capture_id!r} is not a capture id")
    return capture_id


def destination_of(name: str, destination: str | os.PathLike[str], *, force: bool) -> Path:
    """The file to copy an artefact to; raises UsageError if it exists (without ``force``), or is a device or a pipe."""
    target = Path(destination)
    if target.is_dir():
        target = target / name
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: not a file that a trace can take the place of")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already")
    return target


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Captures older than ``age_s`` go, and the oldest of those above ``max_bytes`` together; None: no such limit."""

    age_s: float | None = None
    max_bytes: int | None = None

    @property
    def unlimited(self) -> bool:
        """Everything is kept for ever."""
        return self.age_s is None and self.max_bytes is None


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


def due(store: Store, retention: RetentionLimits, now_s: float) -> tuple[Kept, ...]:
    """Those of a store that go now, as `outlook` has them. A damaged capture is left for people to look at."""
    return () if retention.unlimited else outlook(store, retention, now_s).captures


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
            left[reference] = f"it {condition.words}; but its copy in {elsewhere} was verified"
        elif unfit and condition.beyond_repair:
            broken.append(Kept(reference, 0.0, 0))
        else:
            left[reference] = f"it {condition.words}"
    return Due((*broken, *going), left)


def remove(store: Store, catalogue: Catalogue, captures: Sequence[Kept]) -> tuple[tuple[Kept, ...], str | None]:
    """Remove captures from the catalogue and the store, each as one; those that went, and why the rest did not.

    The row goes first: what is listed is there. A full catalogue is passed over. A copy elsewhere of what was removed
    here goes as soon as it can be reached: see `sftriage.traces.uploading`.
    """
    gone: list[Kept] = []
    for one in captures:
        try:
            if one.capture_id in store.pinned():
                continue  # pinned meanwhile
            with suppress(CatalogueError, UsageError):
                catalogue.drop(one.capture_id)
            store.remove(one.capture_id)
        except (UsageError, StoreError) as error:
            return tuple(gone), str(error)
        gone.append(one)
    return tuple(gone), None
