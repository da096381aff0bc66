"""The models of a policy, in the Kubernetes form, so that one file serves the command line and a cluster.

They will become a Kubernetes CRD, whose structural schemas know no unions: every field has one type, quantities are
strings with their unit, and what is optional has a default. The parsed number of a quantity is a property beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic_core import InitErrorDetails, PydanticCustomError

from sftriage.errors import SchemaError
from sftriage.policy import quantities
from sftriage.records import MAX_STAGE_NAME_BYTES, Label, Profiler, Scope, StageSchema

API_VERSION = "sftriage.dev/v1alpha1"

Location = tuple[int | str, ...]
"""The way to a value of a document: field names and list indices."""

_MIN_TRACE_BYTES, _MAX_TRACE_BYTES = 2**20, 2**36
_MAX_COOLDOWN_S = 30 * 86400.0
_MIN_STALL_S, _MAX_STALL_S = 1.0, 86400.0


def _within(parse: Callable[[object], float], low: float, high: float, bounds: str) -> Callable[[object], object]:
    """A validator that keeps the text of a quantity and refuses one that cannot be read or is out of bounds."""

    def check(value: object) -> object:
        if not low <= parse(value) <= high:
            raise ValueError(f"expected {bounds}, got {quantities.shown(value)}")
        return value

    return check


def _gain(value: object) -> object:
    quantities.gain(value)
    return value


def _stage(value: object) -> object:
    if isinstance(value, str):
        try:
            StageSchema((value,))
        except SchemaError as error:
            raise ValueError(str(error)) from None
    return value


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Stage = Annotated[str, BeforeValidator(_stage), Field(min_length=1, max_length=MAX_STAGE_NAME_BYTES)]
Share = Annotated[str, BeforeValidator(_within(quantities.fraction, 0.0, 1.0, "0% to 100%"))]
Gain = Annotated[str, BeforeValidator(_gain)]
Cooldown = Annotated[str, BeforeValidator(_within(quantities.seconds, 0.0, _MAX_COOLDOWN_S, "0s to 30d"))]
StallTime = Annotated[str, BeforeValidator(_within(quantities.seconds, _MIN_STALL_S, _MAX_STALL_S, "1s to 1d"))]
TraceSize = Annotated[
    str, BeforeValidator(_within(quantities.size_bytes, _MIN_TRACE_BYTES, _MAX_TRACE_BYTES, "1Mi to 64Gi"))
]


class _Model(BaseModel):
    """Strict, so that ``steps: yes`` is a mistake and not 1; frozen, so that a policy is the one that was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Detection(_Model):
    """How windows are cut and when a window counts as slow."""

    window_steps: int = Field(default=50, ge=2, le=10_000, description="Steps in a window.")
    stride_steps: int = Field(default=10, ge=1, le=10_000, description="Steps from one window to the next.")
    warmup_steps: int = Field(
        default=20, ge=0, le=1_000_000, description="Steps at the start of a job that are not judged."
    )
    min_gain: Share = Field(default="5%", description="Share of the exposed step time a suspect must be worth.")
    min_persistence: float = Field(
        default=0.6, ge=0, le=1, description="Fraction of the window's steps in which the gain must be there."
    )
    min_coverage: float = Field(
        default=0.95, ge=0, le=1, description="Fraction of the window's ranks and steps that must be present."
    )
    stalled_after: StallTime = Field(
        default="60s",
        description="Time without any rank moving from which on a step may be `stalled`; "
        "more is allowed where the job itself takes longer.",
    )

    @cached_property
    def min_gain_fraction(self) -> float:
        """``min_gain`` as a fraction."""
        return quantities.fraction(self.min_gain)

    @cached_property
    def stalled_after_s(self) -> float:
        """``stalled_after`` in seconds."""
        return quantities.seconds(self.stalled_after)


class Match(_Model):
    """Which verdicts a rule is about."""

    label: Label = Field(
        default="suspect",
        description="The verdict's label: `suspect`, or `stalled`, which can only be observed.",
    )
    scope: tuple[Scope, ...] = Field(
        default=(),
        strict=False,  # YAML has lists and no tuples
        max_length=8,
        description="Who the suspect may be: `rank`, or `all` ranks together; none named means either.",
    )
    stage: tuple[Stage, ...] = Field(
        default=(),
        strict=False,  # YAML has lists and no tuples
        max_length=32,
        description="Stages the suspect may be in; none named means any, a whole slow rank among them.",
    )
    gain: Gain = Field(default=">= 0%", description="What the suspect must be worth, such as `>= 5% and >= 10ms`.")

    @cached_property
    def gain_condition(self) -> quantities.GainCondition:
        """``gain``, parsed."""
        return quantities.gain(self.gain)


class TorchOptions(_Model):
    """What torch.profiler records beside operators and kernels. Each costs time and memory: off unless asked for."""

    record_shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    with_stack: bool = Field(default=False, description="Record the Python stack of each operator.")
    profile_memory: bool = Field(default=False, description="Record allocations.")


class Capture(_Model):
    """One time-boxed run of a profiler on a suspect rank."""

    profiler: Profiler = Field(default="torch", description="The profiler to run.")
    steps: int = Field(default=5, ge=1, le=1000, description="Steps to record.")
    warmup_steps: int = Field(default=1, ge=0, le=100, description="Steps the profiler runs before those that count.")
    max_seconds: int = Field(
        default=60, ge=1, le=3600, description="Seconds after which the capture ends, whatever happens."
    )
    max_bytes: TraceSize = Field(default="512Mi", description="Size over which a trace is not kept.")
    torch: TorchOptions = Field(default=TorchOptions(), description="Options of the torch profiler.")

    @cached_property
    def max_trace_bytes(self) -> int:
        """``max_bytes`` as a number."""
        return quantities.size_bytes(self.max_bytes)


def _left_out(schema: JsonDict) -> None:
    """Describe a field that is there or left out, never null: a CRD knows neither `anyOf` nor `default: null`."""
    choices = schema.pop("anyOf")
    schema.pop("default")
    if isinstance(choices, list) and isinstance(choices[0], dict):
        schema.update(choices[0])


class Rule(_Model):
    """If a verdict matches, capture; or, without a capture, put on record that it would have matched."""

    name: Name = Field(description="Unique in the policy; goes into capture ids and manifests.")
    match: Match = Field(description="Which verdicts the rule is about.")
    capture: Capture | None = Field(
        default=None,
        description="What to capture; a rule without it observes only.",
        json_schema_extra=_left_out,
    )
    cooldown: Cooldown = Field(default="10m", description="Time after a capture in which this rule starts no other.")

    @cached_property
    def cooldown_s(self) -> float:
        """``cooldown`` in seconds."""
        return quantities.seconds(self.cooldown)


class Limits(_Model):
    """What captures may cost a job, over all rules."""

    captures_per_run: int = Field(
        default=3, ge=1, le=10_000, description="Captures in one run; one rank captured once is one."
    )
    concurrent_ranks: int = Field(default=2, ge=1, le=1024, description="Ranks that may be captured at the same time.")


class Spec(_Model):
    """What the policy says."""

    detection: Detection = Field(default=Detection(), description="How windows are cut and judged.")
    rules: tuple[Rule, ...] = Field(
        strict=False,
        max_length=1000,
        json_schema_extra={"minItems": 1},  # pydantic's own would count an invalid rule as one that is missing
        description="Tried in order; the first with a capture decides.",
    )
    limits: Limits = Field(default=Limits(), description="What captures may cost a job.")


class Metadata(_Model):
    """How the policy is called."""

    name: Name = Field(description="The policy's name.")


class TriagePolicy(_Model):
    """A triage policy.

    Raises:
        pydantic.ValidationError: on construction, with the location of everything that is wrong.
    """

    api_version: Literal["sftriage.dev/v1alpha1"] = Field(alias="apiVersion", description="Version of this format.")
    kind: Literal["TriagePolicy"] = Field(description="Always TriagePolicy.")
    metadata: Metadata = Field(description="How the policy is called.")
    spec: Spec = Field(description="What the policy says.")

    @model_validator(mode="after")
    def _no_contradictions(self) -> TriagePolicy:
        found = [
            InitErrorDetails(
                type=PydanticCustomError("contradiction", "{said}", {"said": message}), loc=where, input=None
            )
            for where, message in contradictions(self.model_dump())
        ]
        if found:
            raise ValidationError.from_exception_data("TriagePolicy", found)
        return self


def contradictions(document: Any) -> Iterator[tuple[Location, str]]:
    """What is wrong between fields that are each right, as (location, message).

    Works on plain data of any shape, so that these are reported together with the mistakes inside the fields.
    """
    spec = _mapping(document, "spec")
    detection = _mapping(spec, "detection")
    window, stride = (detection.get(name) for name in ("window_steps", "stride_steps"))
    if isinstance(window, int) and isinstance(stride, int) and stride > window:
        yield (
            ("spec", "detection", "stride_steps"),
            (f"{stride} steps from window to window leave gaps between windows of {window} steps"),
        )
    rules = spec.get("rules")
    if rules in ([], ()):
        yield ("spec", "rules"), "no rule; a policy that captures nothing has rules without a capture"
    seen: dict[str, int] = {}
    for index, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        where: Location = ("spec", "rules", index)
        name = rule.get("name") if isinstance(rule, dict) else None
        if isinstance(name, str) and seen.setdefault(name, index) != index:
            yield (*where, "name"), f"a second rule named {name!r}; the first is spec.rules[{seen[name]}]"
        label = _mapping(rule, "match").get("label")
        if label in ("healthy", "needs_evidence"):
            yield (*where, "match", "label"), _idle_label(label, rule.get("capture") is not None)
        if label == "stalled" and _starts_torch(rule):
            yield (*where, "match", "label"), _STALLED_CAPTURE


def _idle_label(label: str, captures: bool) -> str:
    if captures:
        why = "nothing is slow" if label == "healthy" else "the signal cannot say which rank to capture"
        return f"no capture on {label}, because {why}; only suspect may capture"
    return f"a rule on {label} would do nothing; such windows are put on record without a rule"


_STALLED_CAPTURE = (
    "no torch capture on stalled, because it starts at a rank's next step, and a stalled rank takes none; "
    "a rule on stalled only observes"
)


def _starts_torch(rule: Any) -> bool:
    captures = isinstance(rule, dict) and rule.get("capture") is not None
    return captures and _mapping(rule, "capture").get("profiler", "torch") == "torch"


def _mapping(holder: Any, name: str) -> dict[str, Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}
