"""The models of a policy, in Kubernetes form, so that one file serves the command line and a cluster.

A CRD is generated from them (`sftriage.kube`). Its structural schemas allow no unions: every field has one type (a
fraction, which may be written as a percentage, has none), quantities are strings with their unit, and optional fields
have a default. The parsed number of a quantity is a property beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

from apscheduler.triggers.cron import CronTrigger
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sftriage.model.captures import Profiler, ProfilerChoice
from sftriage.model.verdicts import Label, Pattern, Scope, Suspect
from sftriage.policy import fields
from sftriage.policy.fields import Listed

CAPTURES_PER_DAY = 12
MAX_ITEMS = 1000
"""Maximum items of any list in a policy; reading stops at a longer one."""
PROFILERS: tuple[str, ...] = get_args(Profiler)


class PolicyModel(BaseModel):
    """Strict, so that ``steps: yes`` is a mistake and not 1; frozen, so that a policy is the one that was checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A schema for a CRD, which allows no `anyOf`, no `default: null` and no `const`."""
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema).get("properties", {}).values():
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
            if "anyOf" in field and field.get("default", ...) is None:
                del field["default"]
                field.update(field.pop("anyOf")[0])
            if "const" in field:
                field["enum"] = [field.pop("const")]
        return schema


Number = TypeVar("Number")


def _number(field: str, parse: Callable[[Any], Number]) -> cached_property[Number]:
    """A property that parses the text of a field."""
    return cached_property(lambda model: parse(getattr(model, field)))


class TorchOptions(PolicyModel):
    """What to record besides operators and kernels. Expensive options are off by default."""

    sample_stacks: bool = True
    """Sample the Python stacks of all threads of the trainer and its DataLoader workers, to show the time spent outside
    operators. Off with `with_stack`."""
    record_shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    with_stack: bool = False
    """Trace every Python call: exact, but several times slower if there are many calls."""
    profile_memory: bool = Field(default=False, description="Record allocations.")


class NsysOptions(PolicyModel):
    """What Nsight Systems records of the process, from outside."""

    trace: Listed[Literal["cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx"]] | None = Field(
        default=None,
        max_length=7,
        json_schema_extra={"minItems": 1},  # (pydantic's own would count an invalid entry as one that is missing)
        description="The interfaces whose calls are recorded (default: those that the ranks were launched with, "
        "`--nsys-trace`). Others than those are refused.",
    )
    sample: Literal["none", "cpu"] = "none"
    """Sample the stacks of the process (`cpu`), which slows it down."""
    sqlite: bool = Field(default=True, description="Also export the report to SQLite, for other programs.")


class StacksOptions(PolicyModel):
    """What to add to the Python stacks. Either option takes them once, from outside the process, without steps."""

    native: bool = Field(default=False, description="Include C and C++ frames; stops the process for longer.")
    flight_recorder: bool = False
    """Include the flight recorder of torch.distributed: the collectives entered and left."""


class ProfilerRun(PolicyModel):
    """One time-boxed run of a profiler."""

    profiler: ProfilerChoice = "auto"
    """`auto`: `stacks` for work of the host, `torch` (or `nsys`, if the job runs under it) for computation, and the
    other one if the first leaves the cause open; `torch`: operators, kernels and stacks; `nsys`: Nsight Systems;
    `stacks`: Python stacks during the steps, or from outside if the rank is stalled."""
    steps: int = Field(default=5, ge=1, le=1000, description="Steps to record.")
    warmup_steps: int = Field(default=1, ge=0, le=100)
    """Steps the profiler runs before it records; stacks need none."""
    samples_per_second: int = Field(default=200, ge=1, le=1000)
    """Maximum stack samples per second. Sampling takes at most a 40th of the time."""
    max_seconds: int = Field(default=60, ge=1, le=3600)
    """Seconds after which the capture ends in any case."""
    max_bytes: fields.TraceSize = "512Mi"
    """Maximum size of a trace; larger ones are not kept. The torch profiler records as many steps as fit."""
    torch: TorchOptions = Field(default=TorchOptions(), description="Options of the torch profiler.")
    nsys: NsysOptions = Field(default=NsysOptions(), description="Options of Nsight Systems.")
    stacks: StacksOptions = Field(default=StacksOptions(), description="Options of stacks taken from outside.")

    max_trace_bytes = _number("max_bytes", fields.size_bytes)


class Capture(ProfilerRun):
    """One time-boxed run of a profiler on a suspect's ranks."""

    sample: int = Field(default=1, ge=1, le=1024)
    """Maximum number of the suspect's ranks to capture: their traces look alike, and each costs the job."""
    ranks: Listed[fields.Rank] = Field(default=(), max_length=1024)
    """Capture these ranks instead of the suspect's."""
    control_ranks: int = Field(default=0, ge=0, le=16)
    """Number of healthy peers to capture in the same steps, for comparison."""


def idle_fields(capture: dict[str, Any], *, stalled: bool) -> dict[str, str]:
    """The fields of a capture that have no effect with its profiler, each with the reason; ``stalled``: on a stall."""
    profiler = capture.get("profiler", "auto")
    if profiler not in (*PROFILERS, "auto"):
        return {}
    mine = {"stacks"} if stalled else {profiler} if profiler != "auto" else set(PROFILERS)
    beside = "on stalled" if stalled and profiler == "auto" else f"with the profiler {profiler}"
    idle = {other: f"options of {other} have no effect {beside}" for other in PROFILERS}
    options = capture.get("stacks")
    from_outside = isinstance(options, dict) and True in (options.get("native"), options.get("flight_recorder"))
    if stalled or (profiler == "stacks" and from_outside):
        of = "of a stalled rank" if stalled else "with native frames or the flight recorder"
        once = f"no effect: stacks {of} are taken once, from outside, without steps"
        idle |= dict.fromkeys(("steps", "warmup_steps", "samples_per_second"), once)
    elif profiler == "stacks":
        idle["warmup_steps"] = "stacks need no warm-up, because no profiler is started"
    elif profiler == "nsys":
        idle["samples_per_second"] = "no effect: with the profiler nsys, the trainer samples no stacks"
    return {field: why for field, why in idle.items() if field not in mine}


class Detection(PolicyModel):
    """How windows are cut and when a window counts as slow."""

    window_steps: int = Field(default=50, ge=2, le=10_000)
    """Steps in a window. If not set, fewer for long steps, down to 10."""
    stride_steps: int = Field(default=10, ge=1, le=10_000)
    """Steps from one window to the next. If not set, fewer for shorter windows."""
    warmup_steps: int = Field(default=20, ge=0, le=1_000_000)
    """Steps at the start of a job that are not judged. If not set, fewer for long steps, down to 4."""
    min_gain: fields.Share = Field(default="4%", description="Minimum gain of a suspect: a share of exposed step time.")
    false_names_per_million_steps: float = Field(default=0.1, ge=1e-6, le=1e5)
    """How often chance alone may name a suspect. With a lower value a fault must last longer to be named
    (docs/verdicts.md explains the trade-off)."""
    min_persistence: fields.Fraction = 0.6
    """Minimum fraction of the window's steps that show what all ranks share, and of the captured steps that show a
    reproduced fault."""
    min_coverage: fields.Fraction = 0.95
    """Minimum fraction of the window's ranks and steps that are recorded."""
    contended_after: fields.Cooldown = "30s"
    """How long contention for CPUs that may explain a suspect must last before it is captured; `0s` does not
    wait."""
    stalled_after: fields.StallTime = "60s"
    """Minimum time without a rank moving before a step is `stalled`; longer if the job's own pauses are
    longer."""

    min_gain_fraction = _number("min_gain", fields.fraction)
    contended_for = _number("contended_after", lambda text: fields.Lasting(seconds=fields.seconds(text)))
    stalled_after_s = _number("stalled_after", fields.seconds)


class Match(PolicyModel):
    """Which verdicts a rule matches."""

    label: Label = "suspect"
    """The verdict's label: `suspect`, or `stalled`, for which only stacks can be taken."""
    reason: Literal["regressed"] | None = None
    """Instead of a label: `regressed`, the job is slower than its own best. `gain` is the slowdown, `stage` its place;
    such a rule only notifies."""
    scope: Listed[Scope] = Field(default=(), max_length=8)
    """Scopes of the suspect: one `rank`, the ranks of a `host` or of a `cohort`, or `all`. Empty: any."""
    stage: Listed[fields.Stage] = Field(default=(), max_length=32)
    """Stages of the suspect. Empty: any, including a rank slow in all stages."""
    gain: fields.Gain = ">= 0%"
    """Minimum gain of the suspect, such as `>= 5% and >= 10ms`."""
    cost: fields.Cost | None = None
    """What the suspect must have cost the job since the run began, such as `>= 5 GPU-hours`: hours of all its ranks,
    with or without GPUs."""
    pattern: Listed[Pattern] = Field(default=(), max_length=3)
    """Patterns of the fault: `chronic`, it stays; `recurring`, it comes back; `one-off`, it has passed, and is never
    captured. Empty: any."""


class Webhook(PolicyModel):
    """Where to send a message. The address is a secret, so the policy only names where to find it."""

    url_from_env: fields.EnvironmentName | None = None
    """The environment variable that holds the address."""
    url_from_file: fields.AbsolutePath | None = Field(default=None, description="The file that holds the address.")
    format: Literal["cloudevents", "slack"] = "cloudevents"
    """`cloudevents`: a CloudEvents 1.0 envelope; `slack`: a Slack message."""


class Notification(PolicyModel):
    """Where to send a message when a rule matches."""

    webhook: Webhook = Field(description="An HTTP POST of the decision.")


class Rule(PolicyModel):
    """What to do if verdicts match: capture, notify, or, with neither, only record the match."""

    name: fields.Name = Field(description="Unique in the policy; part of capture ids and manifests.")
    match: Match = Field(description="Which verdicts the rule matches.")
    lasting: fields.LastingText = Field(default="1 step", alias="for")
    """How long the same suspect must match, in steps or time, such as `100 steps` or `30s`: from its first step in the
    first window that names it to the last step of the current window, each step counted once. `2 windows`, from older
    policies, means the steps that two consecutive windows span."""
    capture: Capture | None = Field(default=None, description="What to capture; a rule without it only observes.")
    notify: Listed[Notification] = Field(default=(), max_length=16)
    """Messages to send when the rule matches, with or without a capture; repeated only after the cooldown."""
    cooldown: fields.Cooldown = "10m"
    """Time after a capture of a suspect (its ranks and stage) before this rule captures the same suspect again, and
    after a message before it sends another. Other suspects do not wait."""

    cooldown_s = _number("cooldown", fields.seconds)

    def lasts(self, detection: Detection) -> fields.Lasting:
        """``for`` in steps or seconds, with windows cut according to ``detection``."""
        found = fields.lasting(self.lasting)
        if not found.windows:
            return found
        # The steps that these windows span; one step for one window, since a single window is enough.
        more = found.windows - 1
        return fields.Lasting(steps=detection.window_steps + more * detection.stride_steps if more else 1)

    min_share = _number("match", lambda match: fields.gain(match.gain)[0])
    min_gain_s = _number("match", lambda match: fields.gain(match.gain)[1])
    min_cost_hours = _number("match", lambda match: 0.0 if match.cost is None else fields.cost(match.cost))

    def misses(self, label: str, suspect: Suspect) -> tuple[bool, bool, bool, bool]:
        """Whether label, scope, stage and pattern do not match; an empty condition matches any."""
        match = self.match
        return (
            match.label != label or match.reason is not None,
            bool(match.scope) and suspect.scope not in match.scope,
            bool(match.stage) and suspect.stage not in match.stage,
            bool(match.pattern) and suspect.pattern not in match.pattern,
        )

    def reached(self, share: float, gain_s: float) -> bool:
        """Whether a gain is enough for the rule; NaN never is."""
        return share >= self.min_share and gain_s >= self.min_gain_s


class OnNeedsEvidence(PolicyModel):
    """What to do about a window that cannot be decided."""

    hold: fields.Held = Field(default=True, json_schema_extra={"enum": [True]})
    """Capture nothing; only true is allowed."""
    gather: Listed[Literal["bucket_ready", "nvml", "next_windows"]] = Field(default=(), max_length=3)
    """Cheap evidence that may resolve it: when the last gradients are ready, the state of the GPUs, more
    windows."""


class Limits(PolicyModel):
    """What captures may cost a job, over all rules. Each captured rank counts as one capture, control ranks too."""

    captures_per_hour: int = Field(default=4, ge=1, le=10_000)
    """Maximum captures requested in any hour, whatever their result. The default allows a suspect and a control rank,
    twice. If more than one, the last is reserved for a suspect larger than any before."""
    captures_per_day: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description=f"Maximum captures requested in any 24 hours. If not set, {CAPTURES_PER_DAY} (as many traces as a "
        "person can read in a day), or `captures_per_hour` if that is more.",
    )
    captures_per_run: int | None = Field(default=None, ge=1, le=10_000)
    """Maximum captures in one run; unlimited if not set. A long job may use them up in its first days. Refused and
    failed captures do not count."""
    concurrent_ranks: int = Field(default=2, ge=1, le=1024, description="Maximum ranks captured at the same time.")
    overhead_budget: fields.Budget = "0.5%"
    """Maximum share of the run's time that captures may cost the job; when it is spent, captures wait."""

    @cached_property
    def day_limit(self) -> int:
        """``captures_per_day``, or its default."""
        return self.captures_per_day or max(CAPTURES_PER_DAY, self.captures_per_hour)

    overhead_fraction = _number("overhead_budget", fields.fraction)


class Active(PolicyModel):
    """When captures are allowed. Everything else happens at any time."""

    cron: fields.Cron = "* * * * *"
    """The minutes in which captures may start, as minute, hour, day, month and weekday (by name), all of which must
    match."""
    timezone: fields.TimeZone = Field(default="UTC", description="The time zone of `cron`, such as Europe/Berlin.")

    @cached_property
    def trigger(self) -> CronTrigger | None:
        """The minutes of ``cron``; None if it is all of them."""
        return None if self.cron.split() == ["*"] * 5 else fields.cron_trigger(self.cron, fields.zone(self.timezone))


class Mitigate(PolicyModel):
    """Remedies that sftriage may try on a straggler that stays, and undoes if they do not help."""

    remedies: Listed[Literal["stragglar", "pipeline"]] = Field(
        max_length=2, json_schema_extra={"minItems": 1, "items": {"type": "string", "enum": ["stragglar", "pipeline"]}}
    )
    """The allowed remedies, if the job has installed them (docs/mitigate.md): `stragglar` reduces gradients around the
    straggler, `pipeline` runs stages further ahead over a slow link."""
    min_saving: fields.Share = "2%"
    """Share of a step that a remedy must save: by its model to be tried, and measured to be kept."""
    steps: int = Field(default=50, ge=5, le=10_000)
    """Steps of each part of a trial: with the remedy and without, each twice in turn."""
    cooldown: fields.Cooldown = "1h"
    """Time after undoing a remedy before it is tried again on the same straggler."""

    min_saving_fraction = _number("min_saving", fields.fraction)
    cooldown_s = _number("cooldown", fields.seconds)


class Retention(PolicyModel):
    """How long traces are kept. What is not set is not limited."""

    age: fields.Age | None = Field(default=None, description="Traces older than this are removed.")
    bytes: fields.StoreSize | None = None
    """Maximum size of all traces; beyond it the oldest are removed."""

    age_s = _number("age", lambda age: None if age is None else fields.seconds(age))
    size_bytes = _number("bytes", lambda size: None if size is None else fields.size_bytes(size))


class Spec(PolicyModel):
    """The content of the policy."""

    detection: Detection = Field(default=Detection(), description="How windows are cut and judged.")
    rules: Listed[Rule] = Field(
        max_length=MAX_ITEMS,
        json_schema_extra={"minItems": 1},  # pydantic's own would count an invalid rule as one that is missing
        description="The rules in order; the first that may capture decides.",
    )
    on_needs_evidence: OnNeedsEvidence = OnNeedsEvidence()
    """What to do about a window that cannot be decided."""
    limits: Limits = Field(default=Limits(), description="What captures may cost a job.")
    active: Active = Field(default=Active(), description="When captures are allowed.")
    mitigate: Mitigate | None = None
    """Remedies that sftriage may try on a straggler that stays; without it, sftriage only advises."""
    retention: Retention | None = Field(default=None, description="How long traces are kept; forever if not set.")


def _in_a_cluster(schema: JsonDict) -> None:
    """Fields left to Kubernetes (see `sftriage.policy.parsing.OBJECT_META`)."""
    texts: JsonDict = {"type": "object", "additionalProperties": {"type": "string"}}
    properties = schema["properties"]
    if isinstance(properties, dict):
        properties["namespace"] = {"type": "string", "description": "In a cluster, the namespace where it is in force."}
        properties["labels"] = {**texts, "description": "In a cluster, its labels, for selectors."}
        properties["annotations"] = {**texts, "description": "In a cluster, its annotations, for other programs."}


class Metadata(PolicyModel):
    """The name of the policy."""

    model_config = ConfigDict(json_schema_extra=_in_a_cluster)

    name: fields.Name = Field(description="The policy's name.")


class TriagePolicy(PolicyModel):
    """A triage policy."""

    api_version: Literal["sftriage.dev/v1alpha1"] = Field(alias="apiVersion", description="Version of this format.")
    kind: Literal["TriagePolicy"] = Field(description="Always TriagePolicy.")
    metadata: Metadata = Field(description="The name of the policy.")
    spec: Spec = Field(description="The content of the policy.")

    def filled(self) -> dict[str, Any]:
        """The policy as plain data with every default filled in, ready to be written as YAML and read again.

        Fields that would be mistakes are left out, such as the options of unused profilers.
        """
        filled = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        filled["spec"]["limits"]["captures_per_day"] = self.spec.limits.day_limit
        for rule in filled["spec"]["rules"]:
            if "reason" in rule["match"]:
                del rule["match"]["label"]
            capture = rule.get("capture")
            if capture is None:
                continue
            idle = idle_fields(capture, stalled=rule["match"].get("label") == "stalled")
            for word in (*idle, "sample" if capture["ranks"] else "ranks"):
                capture.pop(word, None)
        return filled
