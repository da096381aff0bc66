"""The manifest: the small JSON beside a trace that says what it is and why it exists.

Others may write to a shared store, so everything in a manifest is bounded and checked. Another ``schema_version`` is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, Field, ValidationError, WithJsonSchema, field_validator, model_validator

from sftriage.errors import InputError, SchemaError
from sftriage.model.captures import (
    CAPTURE_ID,
    SAMPLE_STACKS,
    CaptureRequest,
    CaptureResult,
    Cause,
    ChoiceReason,
    Profiler,
    Reproduced,
    Role,
    Trigger,
)
from sftriage.model.verdicts import Clock, Pattern, Scope
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, MAX_STAGES, StageSchema, plain
from sftriage.sampling.sampler import NAME as SAMPLES_NAME
from sftriage.traces.documents import CONTROL, Count, DocumentModel, Number, Rank, Sentence, Word, first_problem, text
from sftriage.traces.findings import CauseInfo, Findings

SCHEMA_VERSION: Final = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""Room for a suspect of a hundred thousand ranks."""

MANIFEST_NAME = "manifest.json"

Version = Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION), WithJsonSchema({"const": 1, "type": "integer"})]
CaptureId = Annotated[str, Field(pattern=rf"^{CAPTURE_ID.pattern}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class UnknownVersionError(InputError):
    """A manifest of another version: it may well be whole."""


class Steps(DocumentModel):
    """A run of steps, both ends included."""

    first_step: Count
    last_step: Count

    @model_validator(mode="after")
    def _in_order(self) -> Steps:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} comes before first_step {self.first_step}")
        return self


class TriggerInfo(DocumentModel):
    """Why the capture exists: the window, the suspect in it, and the rule that asked (see `model.captures.Trigger`)."""

    window: Steps
    label: Cause
    scope: Scope
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=1_000_000)]
    stage: Annotated[str, text(MAX_STAGE_NAME_BYTES)] | None
    gain_s: Number
    share: Number
    persistence: Number
    policy: Word
    policy_sha256: Sha256
    rule: Word
    pattern: Pattern = "chronic"
    period_steps: Annotated[int, Field(ge=2, lt=2**63)] | None = None
    onset_step: Count | None = None
    why: Sentence = ""
    chosen: ChoiceReason = ""
    follows: Annotated[str, Field(pattern=rf"^({CAPTURE_ID.pattern})?$")] = ""
    clock: Clock | Literal[""] = ""

    @classmethod
    def of(cls, trigger: Trigger) -> TriggerInfo:
        """The trigger as a manifest writes it."""
        window = Steps(first_step=trigger.first_step, last_step=trigger.last_step)
        return cls(window=window, **{name: getattr(trigger, name) for name in cls.model_fields if name != "window"})


class CaptureInfo(Steps):
    """What was captured. The steps are those measured, warm-up excluded; times and clock as in `CaptureResult`.

    The ``role`` of a healthy peer, captured to compare the suspect with, is ``control``.
    """

    profiler: Profiler
    rank: Rank
    world_size: Annotated[int, Field(ge=1, le=2**31)]
    host: Annotated[str, text(255)]
    steps: Count
    requested_steps: Count
    warmup_steps: Count
    timings_s: Annotated[dict[Word, Number], Field(max_length=64)]
    clock: Annotated[dict[Word, Count], Field(max_length=64)]
    detail: Sentence
    role: Role = "suspect"

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
            detail=CONTROL.sub(" ", result.detail)[:2000],
            role=request.role,
        )


class Artefact(DocumentModel):
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


class ReproducedInfo(DocumentModel):
    """Whether the fault was there while it was captured (see `model.captures.Reproduced`)."""

    answer: Literal["yes", "no", "partly"]
    steps: Count
    steps_with: Count
    over_s: Number
    expected_s: Number
    fault_steps: Annotated[tuple[Count, ...], Field(max_length=100_000)] = ()

    @classmethod
    def of(cls, reproduced: Reproduced) -> ReproducedInfo:
        """What was found, as a manifest writes it."""
        return cls(**{**plain(reproduced), "fault_steps": reproduced.fault_steps})


class Remarks(DocumentModel):
    """What the GPU of a captured rank said of itself."""

    lines: Annotated[tuple[Sentence, ...], Field(max_length=64)]


class FollowedInfo(DocumentModel):
    """The capture of the same suspect that shows what this one left open."""

    capture_id: CaptureId


class CostInfo(Steps):
    """What captures cost the whole job. The steps are those that a profiler touched, warm-up and probing included.

    ``cost_s`` is by how much these, and some after them, took longer than they would have without, by the steps before
    (``before_s`` each); None where too little is known of these. Of captures in the same steps it cannot be told which
    cost what: ``captures`` share it.
    """

    cost_s: Number | None
    before_s: Number | None
    captures: Annotated[int, Field(ge=1, le=2**31)] = 1


MAX_RECORDED_STEPS = 8


class RecordedStep(DocumentModel):
    """One step as its rank recorded it (see `model.windows.StepRecord`), nanoseconds on the rank's own clock."""

    step: Count
    start_ns: Count
    durations_ns: Annotated[tuple[Count, ...], Field(max_length=MAX_STAGES)]
    outside_ns: Annotated[tuple[Count, ...], Field(max_length=MAX_STAGES)]


class RecordedRank(DocumentModel):
    """The first of the captured steps of one rank: of the one that was captured, or of one to compare it with."""

    title: Literal["captured", "control"]
    rank: Rank
    host: Annotated[str, text(255)]
    steps: Annotated[tuple[RecordedStep, ...], Field(min_length=1, max_length=MAX_RECORDED_STEPS)]


class RecordedSteps(DocumentModel):
    """The captured steps as they were recorded, stage by stage: what is left of them once the run has gone."""

    stages: Annotated[tuple[str, ...], Field(max_length=MAX_STAGES)]
    sync: Annotated[tuple[str, ...], Field(max_length=MAX_STAGES)]
    ranks: Annotated[tuple[RecordedRank, ...], Field(min_length=1, max_length=2)]

    @property
    def schema_(self) -> StageSchema:
        """The stages of a step, and which of them wait for the others."""
        return StageSchema(self.stages, self.sync)

    @model_validator(mode="after")
    def _agrees(self) -> RecordedSteps:
        try:
            schema = self.schema_
        except SchemaError as error:
            raise ValueError(str(error)) from error
        for one in (step for rank in self.ranks for step in rank.steps):
            if (len(one.durations_ns), len(one.outside_ns)) != (len(schema.stages), len(schema.sync)):
                raise ValueError(f"step {one.step} has not a duration for each stage")
        return self


class Manifest(DocumentModel):
    """A capture, whole: what asked for it, what it measured, the files it left, and what they show once reduced."""

    schema_version: Version = SCHEMA_VERSION
    capture_id: CaptureId
    job: Sentence
    run: Sentence
    created_at: AwareDatetime
    trigger: TriggerInfo
    capture: CaptureInfo
    artefacts: Annotated[tuple[Artefact, ...], Field(min_length=1, max_length=16)]
    may_contain: Sentence
    reproduced: ReproducedInfo | None = None
    cost: CostInfo | None = None
    evidence: Annotated[tuple[Sentence, ...], Field(max_length=64)] = ()
    findings: Findings | None = None
    recorded: RecordedSteps | None = None
    followed: FollowedInfo | None = None

    @property
    def holds_fault(self) -> Literal["yes", "no", "partly"] | None:
        """Whether the fault is in it; None where nobody knows, and of a control rank, which has none."""
        return None if self.reproduced is None or self.capture.role == "control" else self.reproduced.answer

    @property
    def sampled(self) -> bool:
        """Whether its trainer's sampled stacks are all there is of its steps, be it that its trace is lost."""
        return self.artefacts[0].name == SAMPLES_NAME

    @property
    def cause(self) -> CauseInfo | None:
        """Why its rank was slow, once it was looked into."""
        return None if self.findings is None else self.findings.cause

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
            InputError: not a manifest; `UnknownVersionError` if it is one of another version.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"] == ("schema_version",) and type(first["input"]) is int:
                words = f"{source}: schema_version {first['input']}; this sftriage reads {SCHEMA_VERSION}"
                raise UnknownVersionError(words) from None
            raise InputError(f"{source}: not a manifest: {first_problem(error)}") from None


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:sftriage:manifest:{SCHEMA_VERSION}",
        **Manifest.model_json_schema(),
    }


def may_contain(options: Mapping[str, bool]) -> str:
    """What private data a torch.profiler trace recorded with these options may hold, in plain words."""
    parts = ["names of operators, kernels, threads and the program's own annotations", "process ids and device names"]
    if options.get("with_stack") or options.get(SAMPLE_STACKS):
        parts.append("file paths, function names and line numbers of the program")
    if options.get(SAMPLE_STACKS):
        parts.append("single lines of its source")
    if options.get("record_shapes"):
        parts.append("shapes, types and scalar values of operator arguments")
    if options.get("profile_memory"):
        parts.append("sizes and addresses of memory allocations")
    return "; ".join(parts)


_NSYS_CONTAINS = (
    "names of threads, system calls, libraries, CUDA kernels and the program's own ranges; process ids and names; "
    "host name, devices and drivers; the environment of processes that were started while it was collected, in the "
    "report itself (from an export they are removed)"
)
_STACKS_CONTAINS = (
    "file paths, function names and line numbers of the program, names of its threads; with a flight recorder's dump, "
    "sizes, types and stacks of collectives, as a pickle: open it only if you trust the job"
)
_SAMPLES_CONTAIN = (
    "file paths, function names and line numbers of the program; single lines of its source; names of its threads"
)


def contents_of(profiler: Profiler, options: Mapping[str, Any]) -> str:
    """What private data the artefacts of a capture may hold, in plain words."""
    stacks = _SAMPLES_CONTAIN if options.get(SAMPLE_STACKS) else _STACKS_CONTAINS
    return {"nsys": _NSYS_CONTAINS, "stacks": stacks}.get(profiler) or may_contain(options)
