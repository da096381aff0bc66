"""The manifest: the small JSON beside a trace that says what it is and why it exists.

It is read back from disk, by later versions and after anybody may have touched it, so everything in it is bounded and
checked. Fields a newer version has added are ignored; a newer ``schema_version`` means they cannot be, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sftriage.errors import InputError
from sftriage.records import (
    CAPTURE_ID,
    MAX_STAGE_NAME_BYTES,
    CaptureRequest,
    CaptureResult,
    Label,
    Profiler,
    Scope,
    Trigger,
)

SCHEMA_VERSION: Final = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""Room for a suspect of a hundred thousand ranks."""

MANIFEST_NAME = "manifest.json"

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _text(max_length: int) -> object:
    # What is stored is printed on terminals one day.
    return Field(max_length=max_length, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")


CaptureId = Annotated[str, Field(pattern=rf"^{CAPTURE_ID.pattern}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Word = Annotated[str, _text(100)]
Sentence = Annotated[str, _text(2000)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# SQLite's integers, and everybody else's.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Steps(_Model):
    """A run of steps, both ends included."""

    first_step: Count
    last_step: Count

    @model_validator(mode="after")
    def _in_order(self) -> Steps:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} comes before first_step {self.first_step}")
        return self


class TriggerInfo(_Model):
    """Why the capture exists: the window, the suspect found in it, and the rule that asked (see `records.Trigger`)."""

    window: Steps
    label: Label
    scope: Scope
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=1_000_000)]
    stage: Annotated[str, _text(MAX_STAGE_NAME_BYTES)] | None
    gain_s: Number
    share: Number
    persistence: Number
    policy: Word
    policy_sha256: Sha256
    rule: Word

    @classmethod
    def of(cls, trigger: Trigger) -> TriggerInfo:
        """The trigger as a manifest writes it."""
        return cls(
            window=Steps(first_step=trigger.first_step, last_step=trigger.last_step),
            label=trigger.label,
            scope=trigger.scope,
            ranks=trigger.ranks,
            stage=trigger.stage,
            gain_s=trigger.gain_s,
            share=trigger.share,
            persistence=trigger.persistence,
            policy=trigger.policy,
            policy_sha256=trigger.policy_sha256,
            rule=trigger.rule,
        )


class CaptureInfo(Steps):
    """What was captured. The steps are those measured, warm-up excluded; times and clock as in `CaptureResult`."""

    profiler: Profiler
    rank: Rank
    world_size: Annotated[int, Field(ge=1, le=2**31)]
    host: Annotated[str, _text(255)]
    steps: Count
    requested_steps: Count
    warmup_steps: Count
    timings_s: Annotated[dict[Word, Number], Field(max_length=64)]
    clock: Annotated[dict[Word, Count], Field(max_length=64)]
    detail: Sentence

    @model_validator(mode="after")
    def _agrees(self) -> CaptureInfo:
        if self.steps != self.last_step - self.first_step + 1:
            raise ValueError(f"{self.steps} steps are not those from {self.first_step} to {self.last_step}")
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} in a world of {self.world_size}")
        return self

    @classmethod
    def of(cls, request: CaptureRequest, result: CaptureResult, *, world_size: int, host: str) -> CaptureInfo:
        """What a finished capture has to say for itself.

        Raises:
            InputError: the capture measured no step.
        """
        if result.first_step is None or result.last_step is None:
            raise InputError(f"capture {result.capture_id} measured no step: {result.detail or result.state}")
        return cls(
            profiler=request.profiler,
            rank=request.rank,
            world_size=world_size,
            host=host,
            first_step=result.first_step,
            last_step=result.last_step,
            steps=result.last_step - result.first_step + 1,
            requested_steps=request.steps,
            warmup_steps=request.warmup_steps,
            timings_s=dict(result.timings_s),
            clock=dict(result.clock),
            # A profiler's own message may span lines.
            detail=_CONTROL.sub(" ", result.detail)[:2000],
        )


class Artefact(_Model):
    """One stored file of a capture, with what is needed to know it again."""

    name: FileName
    role: Literal["trace"]
    media_type: Word
    size_bytes: Count
    sha256: Sha256

    @field_validator("name")
    @classmethod
    def _not_the_manifest(cls, name: str) -> str:
        if name == MANIFEST_NAME:
            raise ValueError(f"{MANIFEST_NAME} is the manifest itself")
        return name


class Manifest(_Model):
    """A capture, whole: what asked for it, what it measured, and the files it left."""

    schema_version: Literal[1] = SCHEMA_VERSION
    capture_id: CaptureId
    job: Sentence
    run: Sentence
    created_at: AwareDatetime
    trigger: TriggerInfo
    capture: CaptureInfo
    artefacts: Annotated[tuple[Artefact, ...], Field(min_length=1, max_length=16)]
    may_contain: Sentence

    @field_validator("created_at")
    @classmethod
    def _in_utc(cls, moment: datetime) -> datetime:
        if moment.utcoffset() != timedelta(0):
            raise ValueError("not in UTC")
        return moment

    @field_validator("artefacts")
    @classmethod
    def _distinct(cls, artefacts: tuple[Artefact, ...]) -> tuple[Artefact, ...]:
        names = [artefact.name for artefact in artefacts]
        if len(set(names)) < len(names):
            raise ValueError("two artefacts of one name")
        return artefacts

    def artefact(self, name: str) -> Artefact:
        """The artefact of that name.

        Raises:
            InputError: there is none.
        """
        for artefact in self.artefacts:
            if artefact.name == name:
                return artefact
        there = ", ".join(artefact.name for artefact in self.artefacts)
        raise InputError(f"capture {self.capture_id} has no artefact {name!r}; there are: {there}")

    def to_json(self) -> bytes:
        """The manifest as it is stored."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, source: str) -> Manifest:
        """A stored manifest, checked; ``source`` names it in messages.

        Raises:
            InputError: not a manifest, or one of a newer version.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise InputError(f"{source}: larger than {MAX_MANIFEST_BYTES // 2**20} MiB, which no manifest is")
        try:
            version = _Version.model_validate_json(data).schema_version
            if version > SCHEMA_VERSION:
                raise InputError(
                    f"{source}: written by a newer sftriage (schema_version {version}; "
                    f"this one reads up to {SCHEMA_VERSION})"
                )
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise InputError(f"{source}: not a manifest: {first_problem(error)}") from None


class _Version(_Model):
    schema_version: Annotated[int, Field(ge=1)]


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong, as one short piece of a message: the rest of a hostile file is noise."""
    first = error.errors(include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    return _CONTROL.sub("?", f"{where[:100]}: {first['msg'][:200]}")


def may_contain(options: Mapping[str, bool]) -> str:
    """What private data a torch.profiler trace recorded with these options may hold, in plain words."""
    parts = ["names of operators, kernels, threads and the program's own annotations", "process ids and device names"]
    if options.get("with_stack"):
        parts.append("file paths, function names and line numbers of the program")
    if options.get("record_shapes"):
        parts.append("shapes, types and scalar values of operator arguments")
    if options.get("profile_memory"):
        parts.append("sizes and addresses of memory allocations")
    return "; ".join(parts)
