"""The models of a policy, in the Kubernetes form, so that one file serves the command line and a cluster.

A CRD is made of them (`sftriage.kube`), whose structural schemas know no unions: every field has one type (a fraction,
which may be written as a percentage, has none), quantities are strings with their unit, and what is optional has a
default. The parsed number of a quantity is a property beside it.
"""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Callable
from datetime import datetime, timezone, tzinfo
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from apscheduler.triggers.cron import CronTrigger
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from sftriage.errors import SchemaError
from sftriage.model.captures import ProfilerChoice
from sftriage.model.verdicts import Label, Pattern, Scope, Suspect
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, STAGE_NAME, StageSchema
from sftriage.policy import fields
from sftriage.policy.fields import DEFAULTS, contradictions, shown, unsaid

CAPTURES_PER_DAY = 12
MAX_ITEMS = 1000
"""More than any list of a policy has; where one goes on, the text is read no further."""
MAX_CRON_LENGTH = 200
UTC = timezone.utc


def zone(name: object) -> tzinfo:
    """The time zone of a name such as ``Europe/Berlin``; raises ValueError where there is none."""
    if name == "UTC":
        return UTC  # where a machine has no time zones installed, too
    wanted = f"expected a time zone such as UTC or Europe/Berlin, got {shown(name)}"
    if not isinstance(name, str):
        raise ValueError(wanted)
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = difflib.get_close_matches(name[:100], zoneinfo.available_timezones(), n=1)
        raise ValueError(wanted + (f'; did you mean "{near[0]}"?' if near else "")) from None


def cron_trigger(cron: object, where: tzinfo) -> CronTrigger:
    """The minutes of a cron expression, all of whose fields have to match.

    Raises ValueError where it is none, could be misread, or names no minute ever.
    """
    wanted = f"expected minute, hour, day, month and weekday such as * 20-23 * * mon-fri, got {shown(cron)}"
    if not isinstance(cron, str) or len(cron) > MAX_CRON_LENGTH:
        raise ValueError(wanted)
    try:
        found = CronTrigger.from_crontab(cron, timezone=where)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{wanted}: {error}") from None
    # To cron, 1 is Monday; to the scheduler, whose other fields read as cron's, it is Tuesday.
    weekday = cron.split()[4]
    if re.search("[0-9]", re.sub("/[0-9]+", "", weekday)):
        raise ValueError(f"expected the weekday by name, such as mon-fri, got {shown(weekday)}")
    if found.get_next_fire_time(None, datetime(2024, 1, 1, tzinfo=UTC)) is None:
        raise ValueError(f"expected a time that comes, but {shown(cron)} never does")
    return found


def _read(parse: Callable[..., object]) -> BeforeValidator:
    """A validator that keeps a text as it is, and refuses one that cannot be read."""

    def check(value: object) -> object:
        parse(value)
        return value

    return BeforeValidator(check)


def _within(parse: Callable[[object], float], low: float, high: float, bounds: str) -> BeforeValidator:

    def check(value: object) -> object:
        if not low <= parse(value) <= high:
            raise ValueError(f"expected {bounds}, got {shown(value)}")
        return value

    return BeforeValidator(check)


def _written(pattern: str) -> object:
    """How a text is written, for whoever knows only the schema; what reads it says better what is wrong."""
    return Field(json_schema_extra={"pattern": pattern})


def _stage(value: object) -> object:
    if isinstance(value, str):
        try:
            StageSchema((value,))
        except SchemaError as error:
            raise ValueError(str(error)) from None
    return value


def _held(value: object) -> object:
    if value is False:
        raise ValueError(
            "only true: that nothing heavy starts on a window that cannot be decided is what sftriage is for; "
            "a person can always ask for a capture"
        )
    return value


_PERCENTAGE, _DURATION, _SIZE = map(_written, (fields.PERCENTAGE, fields.DURATION, fields.SIZE))

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Stage = Annotated[
    str,
    BeforeValidator(_stage),
    Field(min_length=1, max_length=MAX_STAGE_NAME_BYTES),
    _written(f"^{STAGE_NAME.pattern}$"),
]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[str, _within(fields.fraction, 0.0, 1.0, "0% to 100%"), _PERCENTAGE]
Fraction = Annotated[
    float,
    BeforeValidator(lambda value: fields.fraction(value) if isinstance(value, str) else value),
    Field(ge=0, le=1),
    WithJsonSchema({"type": ["number", "string"], "minimum": 0, "maximum": 1, "pattern": fields.PERCENTAGE}),
]
"""A number, or a percentage."""
Budget = Annotated[str, _within(fields.fraction, 0.0001, 1.0, "0.01% to 100%"), _PERCENTAGE]
Gain = Annotated[str, _read(fields.gain), _written(fields.GAIN)]
Cost = Annotated[str, _read(fields.cost), _written(fields.COST)]
Lasting = Annotated[str, _read(fields.lasting), _written(fields.LASTING)]
Cooldown = Annotated[str, _within(fields.seconds, 0.0, 30 * 86400.0, "0s to 30d"), _DURATION]
StallTime = Annotated[str, _within(fields.seconds, 1.0, 86400.0, "1s to 1d"), _DURATION]
Age = Annotated[str, _within(fields.seconds, 3600.0, 3650 * 86400.0, "1h to 3650d"), _DURATION]
TraceSize = Annotated[str, _within(fields.size_bytes, 2**20, 2**36, "1Mi to 64Gi"), _SIZE]
StoreSize = Annotated[str, _within(fields.size_bytes, 2**20, 2**50, "1Mi to 1024Ti"), _SIZE]
Held = Annotated[bool, BeforeValidator(_held)]
Cron = Annotated[str, _read(lambda value: cron_trigger(value, UTC))]
TimeZone = Annotated[str, _read(zone)]
EnvironmentName = Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")]

Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], Field(strict=False)]
"""Several values; not strict, because YAML has lists and no tuples."""


class PolicyModel(BaseModel):
    """Strict, so that ``steps: yes`` is a mistake and not 1; frozen, so that a policy is the one that was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A schema as a CRD may have it, which knows no `anyOf`, no `default: null` and no `const`."""
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema).get("properties", {}).values():
            if "anyOf" in field and field.get("default", ...) is None:
                del field["default"]
                field.update(field.pop("anyOf")[0])
            if "const" in field:
                field["enum"] = [field.pop("const")]
        return schema


Number = TypeVar("Number")


def _number(field: str, parse: Callable[[Any], Number]) -> cached_property[Number]:
    """What a field says in text, as a number: a property beside it."""
    return cached_property(lambda model: parse(getattr(model, field)))


class TorchOptions(PolicyModel):
    """What is recorded beside operators and kernels. What costs time and memory is off unless asked for."""

    sample_stacks: bool = Field(
        default=True,
        description="Sample the Python stacks of all threads, from one in the trainer, and in its DataLoader's "
        "workers: they say where what is no operator took its time. Not beside `with_stack`.",
    )
    record_shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    with_stack: bool = Field(
        default=False, description="Trace every Python call: exact, and several times slower where there are many."
    )
    profile_memory: bool = Field(default=False, description="Record allocations.")


class NsysOptions(PolicyModel):
    """What Nsight Systems records of the process, from outside of it."""

    trace: Listed[Literal["cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx"]] | None = Field(
        default=None,
        max_length=7,
        json_schema_extra={"minItems": 1},  # (pydantic's own would count an invalid entry as one that is missing)
        description="The interfaces whose calls are recorded: as a rule those that the ranks were launched with "
        "(`--nsys-trace`), of which these have to be some.",
    )
    sample: Literal["none", "cpu"] = Field(
        default="none", description="Whether the stacks of the process are sampled (`cpu`), which slows it."
    )
    sqlite: bool = Field(default=True, description="Export the report to SQLite too, which other programs can read.")


class StacksOptions(PolicyModel):
    """What is taken along with the Python stacks of all threads. Either means one look from outside, over no steps."""

    native: bool = Field(default=False, description="The frames of C and C++ too; the process stops for longer.")
    flight_recorder: bool = Field(
        default=False, description="The flight recorder of torch.distributed too: the collectives entered and left."
    )


class ProfilerRun(PolicyModel):
    """One time-boxed run of a profiler, whoever it is of."""

    profiler: ProfilerChoice = Field(
        default="auto",
        description="`auto`: `stacks` where the host does the work, `torch` (or `nsys`, where the job runs under it) "
        "for what computes, and what one leaves open by another; `torch`: operators and kernels, and stacks beside; "
        "`nsys`: Nsight Systems; `stacks`: Python stacks over the steps, or from outside of a rank that takes none.",
    )
    steps: int = Field(default=5, ge=1, le=1000, description="Steps to record.")
    warmup_steps: int = Field(
        default=1, ge=0, le=100, description="Steps the profiler runs before those that count; stacks need none."
    )
    samples_per_second: int = Field(
        default=200,
        ge=1,
        le=1000,
        description="How often stacks are sampled over the steps, at most: sampling has a 40th of the time.",
    )
    max_seconds: int = Field(
        default=60, ge=1, le=3600, description="Seconds after which the capture ends, whatever happens."
    )
    max_bytes: TraceSize = Field(
        default="512Mi",
        description="Size over which a trace is not kept. Of many steps the torch profiler records as many as fit.",
    )
    torch: TorchOptions = Field(default=TorchOptions(), description="Options of the torch profiler.")
    nsys: NsysOptions = Field(default=NsysOptions(), description="Options of Nsight Systems.")
    stacks: StacksOptions = Field(default=StacksOptions(), description="Options of a look from outside.")

    max_trace_bytes = _number("max_bytes", fields.size_bytes)


class Capture(ProfilerRun):
    """One time-boxed run of a profiler on a suspect's ranks."""

    sample: int = Field(
        default=DEFAULTS["sample"],
        ge=1,
        le=1024,
        description="Of the suspect's ranks only so many: what is slow alike looks alike, and each costs the job.",
    )
    ranks: Listed[Rank] = Field(default=(), max_length=1024, description="These ranks, instead of the suspect's.")
    control_ranks: int = Field(
        default=0, ge=0, le=16, description="So many healthy peers too, in the same steps, to compare with."
    )


class Detection(PolicyModel):
    """How windows are cut and when a window counts as slow."""

    window_steps: int = Field(
        default=DEFAULTS["window_steps"],
        ge=2,
        le=10_000,
        description="Steps in a window; not said, fewer where steps are long, down to 10.",
    )
    stride_steps: int = Field(
        default=DEFAULTS["stride_steps"],
        ge=1,
        le=10_000,
        description="Steps from one window to the next; not said, fewer where windows have fewer.",
    )
    warmup_steps: int = Field(
        default=20,
        ge=0,
        le=1_000_000,
        description="Steps at the start of a job that are not judged; not said, fewer where steps are long, down to 4.",
    )
    min_gain: Share = Field(default="4%", description="Share of the exposed step time a suspect must be worth.")
    false_names_per_million_steps: float = Field(
        default=0.1,
        ge=1e-6,
        le=1e5,
        description="How often chance alone may name somebody; the fewer, the longer a fault must last to be named "
        "(docs/verdicts.md has the trade-off).",
    )
    min_persistence: Fraction = Field(
        default=0.6,
        description="Fraction of the window's steps in which what all ranks share must be there, and of the captured "
        "steps in which a fault must be to be reproduced.",
    )
    min_coverage: Fraction = Field(
        default=0.95, description="Fraction of the window's ranks and steps that must be present."
    )
    contended_after: Cooldown = Field(
        default="30s",
        description="How long contention for CPUs, where that may be why somebody is slow, must have gone on before "
        "anything is captured for it; `0s` waits for nothing.",
    )
    stalled_after: StallTime = Field(
        default="60s",
        description="Time without any rank moving from which on a step may be `stalled`; "
        "more is allowed where the job itself takes longer.",
    )

    min_gain_fraction = _number("min_gain", fields.fraction)
    contended_for = _number("contended_after", lambda text: fields.Lasting(seconds=fields.seconds(text)))
    stalled_after_s = _number("stalled_after", fields.seconds)


class Match(PolicyModel):
    """Which verdicts a rule is about."""

    label: Label = Field(
        default="suspect",
        description="The verdict's label: `suspect`, or `stalled`, of which only stacks can be taken.",
    )
    reason: Literal["regressed"] | None = Field(
        default=None,
        description="In place of a label `regressed`: the job is slower than its own best. `gain` is then by how much, "
        "`stage` where; such a rule tells somebody, and captures nothing.",
    )
    scope: Listed[Scope] = Field(
        default=(),
        max_length=8,
        description="Who the suspect may be: one `rank`, the ranks of a `host` or of a `cohort`, or `all`; "
        "none named means any.",
    )
    stage: Listed[Stage] = Field(
        default=(),
        max_length=32,
        description="Stages the suspect may be in; none named means any, a whole slow rank among them.",
    )
    gain: Gain = Field(default=">= 0%", description="What the suspect must be worth, such as `>= 5% and >= 10ms`.")
    cost: Cost | None = Field(
        default=None,
        description="What the suspect must have cost the job since the run began, such as `>= 5 GPU-hours`: the "
        "hours of all its ranks, whatever they run on.",
    )
    pattern: Listed[Pattern] = Field(
        default=(),
        max_length=3,
        description="How the fault behaves: `chronic`, it is there to stay; `recurring`, it comes back; `one-off`, it "
        "has passed, and is never captured; none named means any.",
    )


class Webhook(PolicyModel):
    """Where to send a message. The address is a secret, so the policy says only where to find it."""

    url_from_env: EnvironmentName | None = Field(
        default=None, description="The environment variable that holds the address."
    )
    url_from_file: AbsolutePath | None = Field(default=None, description="The file that holds the address.")
    format: Literal["cloudevents", "slack"] = Field(
        default="cloudevents", description="`cloudevents`: a CloudEvents 1.0 envelope; `slack`: what Slack takes."
    )


class Notification(PolicyModel):
    """Who is told that a rule matches."""

    webhook: Webhook = Field(description="An HTTP POST of what was decided.")


class Rule(PolicyModel):
    """If verdicts match, capture, and tell somebody; or, with neither, put on record that it would have matched."""

    name: Name = Field(description="Unique in the policy; goes into capture ids and manifests.")
    match: Match = Field(description="Which verdicts the rule is about.")
    lasting: Lasting = Field(
        default="1 step",
        alias="for",
        description="How long the same suspect must match, in steps or time, such as `100 steps` or `30s`: from its "
        "first step in the window that first names it to the last of this one, each step counted once. `2 windows`, "
        "of older policies, is the steps that two windows in a row span.",
    )
    capture: Capture | None = Field(default=None, description="What to capture; a rule without it observes only.")
    notify: Listed[Notification] = Field(
        default=(),
        max_length=16,
        description="Who is told when the rule matches, captured or not; again only after the cooldown.",
    )
    cooldown: Cooldown = Field(
        default="10m",
        description="Time after a capture of a suspect in which this rule starts no other of that suspect (who and "
        "where: its ranks and stage), and after a message about it in which it sends none. Others wait for nothing.",
    )

    cooldown_s = _number("cooldown", fields.seconds)

    def lasts(self, detection: Detection) -> fields.Lasting:
        """``for`` in steps or seconds, where windows are cut as ``detection`` says."""
        found = fields.lasting(self.lasting)
        if not found.windows:
            return found
        # The steps that so many in a row span; of one window one, for whatever it shows is there at once.
        more = found.windows - 1
        return fields.Lasting(steps=detection.window_steps + more * detection.stride_steps if more else 1)

    min_share = _number("match", lambda match: fields.gain(match.gain)[0])
    min_gain_s = _number("match", lambda match: fields.gain(match.gain)[1])
    min_cost_hours = _number("match", lambda match: 0.0 if match.cost is None else fields.cost(match.cost))

    def misses(self, label: str, suspect: Suspect) -> tuple[bool, bool, bool, bool]:
        """Whether label, scope, stage and pattern are what the rule is not about; one that is not said is any."""
        match = self.match
        return (
            match.label != label or match.reason is not None,
            bool(match.scope) and suspect.scope not in match.scope,
            bool(match.stage) and suspect.stage not in match.stage,
            bool(match.pattern) and suspect.pattern not in match.pattern,
        )

    def reached(self, share: float, gain_s: float) -> bool:
        """Whether a gain is what the rule asks for. Not a number reaches nothing."""
        return share >= self.min_share and gain_s >= self.min_gain_s


class OnNeedsEvidence(PolicyModel):
    """What happens on a window that cannot be decided."""

    hold: Held = Field(default=True, description="Start nothing heavy; only true.", json_schema_extra={"enum": [True]})
    gather: Listed[Literal["bucket_ready", "nvml", "next_windows"]] = Field(
        default=(),
        max_length=3,
        description="Cheap evidence that may resolve it: when the last gradients are ready, what the GPUs say of "
        "themselves, more windows.",
    )


class Limits(PolicyModel):
    """What captures may cost a job, over all rules. One rank captured once is one capture, a control rank's too."""

    captures_per_hour: int = Field(
        default=DEFAULTS["captures_per_hour"],
        ge=1,
        le=10_000,
        description="Captures asked for in any hour, whatever becomes of them: the default is one suspect, a peer to "
        "compare with, and each once more. Of several, the last is kept for a suspect larger than any before.",
    )
    captures_per_day: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description=f"The same in any 24 hours. Where it is not said it is {CAPTURES_PER_DAY}, no more traces than a "
        "person looks at in a day, or `captures_per_hour` where that is more.",
    )
    captures_per_run: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Captures in one run, if that is to be limited: a job of a month would have none left after the "
        "first days. One that is refused or fails is not counted.",
    )
    concurrent_ranks: int = Field(
        default=DEFAULTS["concurrent_ranks"], ge=1, le=1024, description="Ranks that may be captured at the same time."
    )
    overhead_budget: Budget = Field(
        default="0.5%",
        description="Share of the run's time that captures may cost the job; when it is spent, captures wait.",
    )

    @cached_property
    def day_limit(self) -> int:
        """``captures_per_day``, said or not."""
        return self.captures_per_day or max(CAPTURES_PER_DAY, self.captures_per_hour)

    overhead_fraction = _number("overhead_budget", fields.fraction)


class Active(PolicyModel):
    """When captures are allowed. Everything else happens at any time."""

    cron: Cron = Field(
        default="* * * * *",
        description="The minutes in which captures may start, as minute, hour, day, month and weekday (by name), "
        "all of which have to match.",
    )
    timezone: TimeZone = Field(default="UTC", description="The time zone of `cron`, such as Europe/Berlin.")

    @cached_property
    def trigger(self) -> CronTrigger | None:
        """The minutes of ``cron``; None if it is all of them."""
        return None if self.cron.split() == ["*"] * 5 else cron_trigger(self.cron, zone(self.timezone))


class Mitigate(PolicyModel):
    """What may be done by itself about a straggler that stays: tried, and undone where it does not help."""

    remedies: Listed[Literal["stragglar", "pipeline"]] = Field(
        max_length=2,
        description="Which, where the job has taken them in (docs/mitigate.md): `stragglar` reduces gradients around "
        "the straggler, `pipeline` runs stages further ahead under a slow link.",
        json_schema_extra={"minItems": 1, "items": {"type": "string", "enum": ["stragglar", "pipeline"]}},
    )
    min_saving: Share = Field(
        default="2%", description="Share of a step that a remedy must save: by its model to be tried, measured to stay."
    )
    steps: int = Field(
        default=50,
        ge=5,
        le=10_000,
        description="Steps that each part of a trial takes: with the remedy and without, twice in turn.",
    )
    cooldown: Cooldown = Field(
        default="1h", description="Time after a remedy was undone in which it is not tried again on the same straggler."
    )

    min_saving_fraction = _number("min_saving", fields.fraction)
    cooldown_s = _number("cooldown", fields.seconds)


class Retention(PolicyModel):
    """How long traces are kept. What is not said is not limited."""

    age: Age | None = Field(default=None, description="Traces older than this are removed.")
    bytes: StoreSize | None = Field(default=None, description="Size of all traces over which the oldest are removed.")

    age_s = _number("age", lambda age: None if age is None else fields.seconds(age))
    size_bytes = _number("bytes", lambda size: None if size is None else fields.size_bytes(size))


class Spec(PolicyModel):
    """What the policy says."""

    detection: Detection = Field(default=Detection(), description="How windows are cut and judged.")
    rules: Listed[Rule] = Field(
        max_length=MAX_ITEMS,
        json_schema_extra={"minItems": 1},  # pydantic's own would count an invalid rule as one that is missing
        description="Tried in order; the first that may capture decides.",
    )
    on_needs_evidence: OnNeedsEvidence = Field(
        default=OnNeedsEvidence(), description="What happens on a window that cannot be decided."
    )
    limits: Limits = Field(default=Limits(), description="What captures may cost a job.")
    active: Active = Field(default=Active(), description="When captures are allowed.")
    mitigate: Mitigate | None = Field(
        default=None,
        description="What may be done by itself about a straggler that stays; without it, there is advice alone.",
    )
    retention: Retention | None = Field(default=None, description="How long traces are kept; for ever without it.")


def _in_a_cluster(schema: JsonDict) -> None:
    """What else people write there: it is left to Kubernetes (see `sftriage.policy.parsing.OBJECT_META`)."""
    texts: JsonDict = {"type": "object", "additionalProperties": {"type": "string"}}
    properties = schema["properties"]
    if isinstance(properties, dict):
        properties["namespace"] = {"type": "string", "description": "In a cluster, where it is in force."}
        properties["labels"] = {**texts, "description": "In a cluster, what it is selected by."}
        properties["annotations"] = {**texts, "description": "In a cluster, what others keep beside it."}


class Metadata(PolicyModel):
    """How the policy is called."""

    model_config = ConfigDict(json_schema_extra=_in_a_cluster)

    name: Name = Field(description="The policy's name.")


class TriagePolicy(PolicyModel):
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
            for where, message in contradictions(self.model_dump(by_alias=True, exclude_unset=True))
        ]
        if found:
            raise ValidationError.from_exception_data("TriagePolicy", found)
        return self

    def filled(self) -> dict[str, Any]:
        """The policy as plain data with every default filled in, ready to be written as YAML and read again.

        Left out is what would be a mistake to say: the options of profilers that are not used, for one.
        """
        filled = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        filled["spec"]["limits"]["captures_per_day"] = self.spec.limits.day_limit
        for rule in filled["spec"]["rules"]:
            if "reason" in rule["match"]:
                del rule["match"]["label"]
            capture = rule.get("capture")
            if capture is None:
                continue
            for word in unsaid(capture, stalled=rule["match"].get("label") == "stalled"):
                capture.pop(word, None)
        return filled
