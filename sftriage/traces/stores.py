"""What every store of captures does, whether it is a directory of this host or a bucket.

A capture's id is unique in its run. A store knows a capture by its *reference*: the id in the store of one run,
``job/run/id`` in one of many jobs, as keys spell them (`sftriage.traces.keys`). There a bare id serves too, as long as
only one capture has it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from sftriage.errors import InputError, IntegrityError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.findings import Findings
from sftriage.traces.manifest import (
    CostInfo,
    FollowedInfo,
    Manifest,
    RecordedSteps,
    Remarks,
    ReproducedInfo,
    UnknownVersionError,
)

PIN_NAME = "pinned"
"""An empty file of this name beside a capture's manifest: retention leaves it alone."""

Progress = Callable[[int], None]
"""Told how many bytes have been copied so far."""


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
        """Nothing is the matter with it."""
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
        listed = [(reference, *one) for reference, one in found if one is not None]
        return cls(
            tuple(manifest for _, manifest, condition in listed if manifest is not None and condition.whole),
            {
                reference: condition
                for reference, manifest, condition in listed
                if manifest is None or not condition.whole
            },
        )

    @property
    def problems(self) -> tuple[str, ...]:
        """Why what is unfit is no capture, in words."""
        return tuple(one.problem for one in self.unfit.values())


Noted: TypeAlias = "Findings | CostInfo | ReproducedInfo | RecordedSteps | Remarks | FollowedInfo"
"""What becomes known of a capture once it is stored."""


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

    @abstractmethod
    def manifests(self) -> Listing:
        """Every capture of the store, and every problem found on the way. Never raises for what lies there."""

    @abstractmethod
    def ids(self) -> frozenset[str]:
        """The references of all captures that are there, whole or damaged; read without opening one."""

    def leftovers(self) -> tuple[str, ...]:
        """What lies there, belongs to no capture and is never swept, in words; it is listed nowhere else."""
        return ()

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

    @abstractmethod
    def note(self, capture_id: str, noted: Noted) -> Manifest:
        """Put a finding into a capture's manifest, over an earlier one; raises IntegrityError as `manifest` does."""

    @abstractmethod
    def remove(self, capture_id: str) -> None:
        """Remove a capture, artefacts and manifest as one: from then on it is not listed, whatever happens."""

    @abstractmethod
    def pin(self, capture_id: str) -> None:
        """Keep a capture whatever retention says. A second pin changes nothing."""

    @abstractmethod
    def unpin(self, capture_id: str) -> None:
        """Leave a capture to retention again. One that is not pinned stays so."""

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
    """Whether two captures are of different roles, were asked for together, and recorded some of the same steps."""
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
    names = {
        CostInfo: "cost",
        ReproducedInfo: "reproduced",
        Findings: "findings",
        RecordedSteps: "recorded",
        FollowedInfo: "followed",
    }
    return manifest.model_copy(update={names[type(noted)]: noted})


def check_id(capture_id: str) -> str:
    """An id that is safe to put into a path or a key; UsageError where it is not."""
    if not CAPTURE_ID.fullmatch(capture_id):
        raise UsageError(f"{capture_id!r} is not a capture id")
    return capture_id


def destination_of(name: str, destination: str | os.PathLike[str], *, force: bool) -> Path:
    """The file that an artefact is copied to: under its own name in a directory.

    Raises UsageError where it exists (without ``force``), or is a device or a pipe.
    """
    target = Path(destination)
    if target.is_dir():
        target = target / name
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: not a file that a trace can take the place of")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already")
    return target
