"""The manifest: the small JSON beside a trace that says what it is, why it exists, and what it shows.

Others may write to a shared store, so all fields are bounded and checked. Another ``schema_version`` is refused; an
unknown field is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from sftriage.errors import InputError, SchemaError
from sftriage.model.captures import (
    CAPTURE_ID,
    SAMPLE_STACKS,
    WHOLE_JOB,
    CaptureRequest,
    CaptureResult,
    Cause,
    ChoiceReason,
    Profiler,
    Report,
    Reproduced,
    Role,
    Trigger,
)
from sftriage.model.hangs import HANG_NAME, HangKind
from sftriage.model.verdicts import Clock, Pattern, Scope
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, MAX_STAGES, StageSchema, plain
from sftriage.trainer.sampler import NAME as SAMPLES_NAME

if TYPE_CHECKING:
    from sftriage.model.events import CauseFound  # (an annotation: it imports msgspec)

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # control characters of a terminal


def text(max_length: int) -> object:
    """A string of bounded length without control characters, since terminals print it."""
    return Field(max_length=max_length, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")


Word = Annotated[str, text(100)]
Sentence = Annotated[str, text(2000)]
# (fits an integer of SQLite)
Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class DocumentModel(BaseModel):
    """A document to which later versions may add fields: unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


def first_problem(error: ValidationError) -> str:
    """The first error, as a short part of a message."""
    first = error.errors(include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    return CONTROL.sub("?", f"{where[:100]}: {first['msg'][:200]}")


MAX_SHARES = MAX_KERNELS = 20

Kind = Literal["operator", "python", "call", "annotation"]


class StageProfile(DocumentModel):
    """What one rank did in the stage: means per step, in seconds.

    ``working_s``, ``waiting_s`` and ``unseen_s`` sum to ``stage_s``. Working: some thread of the process was in an
    operator, a call or a Python function. Waiting: none was, but one waited in a collective, for the device or for
    another process. Unseen: the trace has nothing but the stage itself. ``device_s`` is the device's time for work
    launched in the stage, whenever it ran; ``collective_s`` is its part in collectives, and ``device_own_s`` in all
    else, and the two may overlap. ``device_idle_s`` is how long the device waited for its host before it was done.
    """

    source: Sentence
    rank: Rank | None
    first_step: Count
    last_step: Count
    steps: Count
    step_s: Number
    stage_s: Number
    working_s: Number
    waiting_s: Number
    unseen_s: Number
    device_s: Number
    collective_s: Number
    kernels: Number
    launches: Number
    launch_s: Number
    device_own_s: Number | None = None
    device_idle_s: Number | None = None


class Share(DocumentModel):
    """The self time of one name in the stage, over all threads: means per step. ``control`` is the control rank's."""

    name: Word
    kind: Kind
    waits: bool
    self_s: Number
    calls: Number
    control_self_s: Number | None = None


class KernelShare(DocumentModel):
    """The device's time for one kernel or copy launched in the stage, without collectives: means per step.

    ``operator`` launched it, ``within`` another operator ("" if the trace does not say). ``control`` is the control
    rank's time.
    """

    name: Word
    operator: Word | Literal[""]
    within: Word | Literal[""]
    device_s: Number
    calls: Number
    control_device_s: Number | None = None

    @property
    def words(self) -> str:
        by = " in ".join(name for name in (self.operator, self.within) if name)
        return f"{self.name} ({by})" if by else self.name

    @property
    def more_s(self) -> float:
        """How much longer it took than on the control."""
        return self.device_s - (self.control_device_s or 0.0)


_Waits = Literal["sleep", "dataloader_workers", "lock", "subprocess", "output", "database", "network", "disk"]
_Works = Literal["checkpoint", "garbage_collection", "recompilation", "collective", "python", "operator", "kernel"]
_Kept = Literal["blocked", "gil", "descheduled", "stopped", "cgroup_throttled", "page_faults", "memory_pressure"]
CauseCode = Literal[_Waits, _Works, _Kept, "gpu_throttled", "unknown"]


class PlaceInfo(DocumentModel):
    """A line of the program: its function and file, and its text if that could be read."""

    function: Word
    file: Sentence
    line: Count
    source: Sentence = ""


class CauseInfo(DocumentModel):
    """Why the suspect stage was slow, or why the job hangs.

    ``code`` is the kind of cause and ``place`` its location, which took ``took_s`` of the stage's ``stage_s`` per step.
    ``control_s`` is the time of the same place on the rank ``compared_with``, or in the suspect's other steps if that
    is None. The cause is ``sure`` if most of the stage's extra time is in that place, in enough samples.
    """

    code: CauseCode | HangKind
    sure: bool
    sentence: Sentence
    next_step: Sentence
    place: PlaceInfo | None = None
    compared_with: Rank | None = None
    took_s: Number | None = None
    control_s: Number | None = None

    @classmethod
    def of(cls, found: CauseFound) -> CauseInfo:
        """The cause of an event, which has no times."""
        at = found.place
        place = None if at is None else PlaceInfo.model_construct(function=at.function, file=at.file, line=at.line)
        about = {name: getattr(found, name) for name in ("code", "sure", "sentence", "next_step", "compared_with")}
        return cls.model_construct(**about, place=place)

    @property
    def short(self) -> str:
        """The cause in a few words, for a line of a list: the call or its kind, and the line."""
        call = self.code.replace("_", " ")
        if self.place is None:
            return call
        called = _CALLED.search(self.place.source)
        if self.code == "python":
            call = self.place.function
        elif called is not None and self.code in _AT_A_CALL:
            call = called[1]
        return f"{call} at {PurePath(self.place.file).name}:{self.place.line}"


_CALLED = re.compile(r"\b([A-Za-z_][\w.]*)\(")
_AT_A_CALL: frozenset[CauseCode] = frozenset(
    {"sleep", "subprocess", "output", "database", "network", "disk", "checkpoint", "collective"}
)
"""In words, what the call in the line does."""


class Findings(DocumentModel):
    """What filled the suspect stage, compared with the same stage of a control rank, if there is one.

    If some of the captured steps are known to have the fault, only these are analysed; ``of_steps`` counts all of
    them. ``control`` is another ``rank`` in the same steps, or else the other ``steps`` of the suspect: ``beside`` says
    which. ``counted`` has the kernel's counters of the suspect's process above its peers', per step (see
    `model.windows`), as far as known; its ``gpu_s`` is the time lost to a lower clock of its GPU.
    """

    stage: Annotated[str, text(MAX_STAGE_NAME_BYTES)]
    suspect: StageProfile
    control: StageProfile | None = None
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_SHARES)]
    kernels: Annotated[tuple[KernelShare, ...], Field(max_length=MAX_KERNELS)] = ()
    summary: Sentence
    of_steps: Count | None = None
    beside: Literal["rank", "steps"] = "rank"
    counted: Annotated[dict[Word, Number], Field(max_length=64)] | None = None
    cause: CauseInfo | None = None


SCHEMA_VERSION: Final = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024  # enough for a suspect of a hundred thousand ranks

MANIFEST_NAME = "manifest.json"

Version = Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION), WithJsonSchema({"const": 1, "type": "integer"})]
CaptureId = Annotated[str, Field(pattern=rf"^{CAPTURE_ID.pattern}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class UnknownVersionError(InputError):
    """A manifest of another version, which may be valid there."""


class Steps(DocumentModel):
    """A range of steps, both ends included."""

    first_step: Count
    last_step: Count

    @model_validator(mode="after")
    def _in_order(self) -> Steps:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} comes before first_step {self.first_step}")
        return self


class TriggerInfo(DocumentModel):
    """Why the capture exists: the window, its suspect, and the rule that matched (see `model.captures.Trigger`)."""

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
        window = Steps(first_step=trigger.first_step, last_step=trigger.last_step)
        return cls(window=window, **{name: getattr(trigger, name) for name in cls.model_fields if name != "window"})


class CaptureInfo(Steps):
    """What was captured: the measured steps, without warm-up; times and clock as in `CaptureResult`.

    The ``role`` of a healthy peer, captured for comparison with the suspect, is ``control``.
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
            raise ValueError(f"{self.steps} steps do not match steps {self.first_step} to {self.last_step}")
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} in a world of {self.world_size}")
        return self

    @classmethod
    def of(cls, request: CaptureRequest, result: CaptureResult, *, world_size: int, host: str) -> CaptureInfo:
        """The info of a finished capture; raises InputError if it measured no step."""
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
            # (a profiler's message may span lines)
            detail=CONTROL.sub(" ", result.detail)[:2000],
            role=request.role,
        )


class Artefact(DocumentModel):
    """One stored file of a capture, with what is needed to verify it."""

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
    """Whether the fault was present during the capture (see `model.captures.Reproduced`)."""

    answer: Literal["yes", "no", "partly"]
    steps: Count
    steps_with: Count
    over_s: Number
    expected_s: Number
    fault_steps: Annotated[tuple[Count, ...], Field(max_length=100_000)] = ()

    @classmethod
    def of(cls, reproduced: Reproduced) -> ReproducedInfo:
        return cls(**{**plain(reproduced), "fault_steps": reproduced.fault_steps})


class Remarks(DocumentModel):
    """Remarks on a captured rank: on its GPU, and what differs between it and its peers."""

    lines: Annotated[tuple[Sentence, ...], Field(max_length=64)]


class FollowedInfo(DocumentModel):
    """The later capture of the same suspect that follows this one up."""

    capture_id: CaptureId


class CostInfo(Steps):
    """The cost of captures to the whole job. The steps are those with a profiler, including warm-up and probing.

    ``cost_s`` is how much longer these steps, and some after them, took than steps before (``before_s`` each); None if
    too few of those are known. Captures in the same steps share one cost: ``captures`` is their number.
    """

    cost_s: Number | None
    before_s: Number | None
    captures: Annotated[int, Field(ge=1, le=2**31)] = 1


MAX_RECORDED_STEPS = 8


class RecordedStep(DocumentModel):
    """One step as its rank recorded it (see `model.windows.StepRecord`), in nanoseconds on the rank's own clock."""

    step: Count
    start_ns: Count
    durations_ns: Annotated[tuple[Count, ...], Field(max_length=MAX_STAGES)]
    outside_ns: Annotated[tuple[Count, ...], Field(max_length=MAX_STAGES)]


class RecordedRank(DocumentModel):
    """The first captured steps of one rank: the captured one, or one to compare it with."""

    title: Literal["captured", "control"]
    rank: Rank
    host: Annotated[str, text(255)]
    steps: Annotated[tuple[RecordedStep, ...], Field(min_length=1, max_length=MAX_RECORDED_STEPS)]


class RecordedSteps(DocumentModel):
    """The captured steps as they were recorded, stage by stage, for when the run is gone."""

    stages: Annotated[tuple[str, ...], Field(max_length=MAX_STAGES)]
    sync: Annotated[tuple[str, ...], Field(max_length=MAX_STAGES)]
    ranks: Annotated[tuple[RecordedRank, ...], Field(min_length=1, max_length=2)]

    @property
    def schema_(self) -> StageSchema:
        """The stages of a step, and which of them are sync stages."""
        return StageSchema(self.stages, self.sync)

    @model_validator(mode="after")
    def _agrees(self) -> RecordedSteps:
        try:
            schema = self.schema_
        except SchemaError as error:
            raise ValueError(str(error)) from error
        for step in (step for rank in self.ranks for step in rank.steps):
            if (len(step.durations_ns), len(step.outside_ns)) != (len(schema.stages), len(schema.sync)):
                raise ValueError(f"step {step.step} lacks a duration for a stage")
        return self


class Manifest(DocumentModel):
    """A capture: its trigger, what it measured, its files, and what their analysis shows.

    ``hang`` is the cause that a capture of a whole job shows, which has no findings.
    """

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
    hang: CauseInfo | None = None

    @property
    def holds_fault(self) -> Literal["yes", "no", "partly"] | None:
        """Whether the capture shows the fault; None if unknown, and for a control rank, which has none."""
        return None if self.reproduced is None or self.capture.role == "control" else self.reproduced.answer

    @property
    def sampled(self) -> bool:
        """Whether it has only sampled stacks of its steps, perhaps because its trace was lost."""
        return self.artefacts[0].name == SAMPLES_NAME

    @property
    def report(self) -> Report:
        """The report on the capture, which is in the store."""
        about, size_bytes = self.capture, sum(artefact.size_bytes for artefact in self.artefacts)
        steps = about.first_step, about.last_step
        result = CaptureResult(
            *(self.capture_id, about.rank, "stored", about.detail, *steps, size_bytes, about.timings_s, about.clock)
        )
        return Report(result, stored_bytes=size_bytes)

    @property
    def of_hang(self) -> bool:
        """Whether it is of a whole job that hangs, with a `HangEvidence`."""
        return self.artefacts[0].name == HANG_NAME

    @property
    def cause(self) -> CauseInfo | None:
        """Why its rank was slow, once analysed, or why the job hangs."""
        return self.hang if self.findings is None else self.findings.cause

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
            raise ValueError("two artefacts share a name")
        return artefacts

    def artefact(self, name: str) -> Artefact:
        """The artefact of that name; raises InputError if there is none."""
        for artefact in self.artefacts:
            if artefact.name == name:
                return artefact
        there = ", ".join(artefact.name for artefact in self.artefacts)
        raise InputError(f"capture {self.capture_id} has no artefact {name!r}; it has: {there}")

    def noting(self, noted: Noted) -> Manifest:
        """The manifest with a later finding."""
        if isinstance(noted, Remarks):
            return self.model_copy(update={"evidence": noted.lines})
        return self.model_copy(update={_FIELD_OF[type(noted)]: noted})

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, source: str) -> Manifest:
        """Parse a stored manifest, called ``source`` in messages; raises InputError or UnknownVersionError."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"] == ("schema_version",) and type(first["input"]) is int:
                words = f"{source}: schema_version {first['input']}; this sftriage reads {SCHEMA_VERSION}"
                raise UnknownVersionError(words) from None
            raise InputError(f"{source}: not a manifest: {first_problem(error)}") from None


# Findings on a capture after it was stored.
Noted: TypeAlias = "Findings | CostInfo | ReproducedInfo | RecordedSteps | Remarks | FollowedInfo"
_KINDS = (CostInfo, ReproducedInfo, Findings, RecordedSteps, FollowedInfo)
_FIELD_OF = dict(zip(_KINDS, ("cost", "reproduced", "findings", "recorded", "followed"), strict=True))


def are_beside(a: Manifest, b: Manifest) -> bool:
    """Whether two captures have different roles and the same trigger, and recorded some of the same steps."""
    return (
        (a.job, a.run, a.trigger.rule, a.trigger.window) == (b.job, b.run, b.trigger.rule, b.trigger.window)
        and a.capture.role != b.capture.role
        and (a.capture.first_step <= b.capture.last_step and a.capture.last_step >= b.capture.first_step)
    )


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:sftriage:manifest:{SCHEMA_VERSION}",
        **Manifest.model_json_schema(),
    }


def may_contain(options: Mapping[str, bool]) -> str:
    """The private data that a torch.profiler trace with these options may hold, in words."""
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
_HANG_CONTAINS = (
    "file paths, function names, line numbers and single lines of the program; names of its threads, locks, files and "
    "network peers; operations, sizes and types of its collectives; process ids and host names"
)
_SAMPLES_CONTAIN = (
    "file paths, function names and line numbers of the program; single lines of its source; names of its threads"
)


def contents_of(profiler: Profiler, options: Mapping[str, Any]) -> str:
    """The private data that the artefacts of a capture may hold, in words."""
    from_outside = _HANG_CONTAINS if options.get(WHOLE_JOB) else _STACKS_CONTAINS
    stacks = _SAMPLES_CONTAIN if options.get(SAMPLE_STACKS) else from_outside
    return {"nsys": _NSYS_CONTAINS, "stacks": stacks}.get(profiler) or may_contain(options)
