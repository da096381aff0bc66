"""The models of a policy, in Kubernetes form, so that one file serves the command line and a cluster.

`sftriage policy schema` prints them as a JSON schema, and `sftriage.kube` generates a CRD from them, so docstrings of
fields are user documentation. A CRD's structural schemas allow no unions: every field has one type (except a fraction,
which may be a percentage), quantities are strings with their unit, and optional fields have a default. A property
beside each quantity has its number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sftriage.model.captures import Profiler, ProfilerChoice
from sftriage.model.verdicts import Label, Pattern, Scope, Suspect
from sftriage.policy import fields
from sftriage.policy.fields import Listed

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger

CAPTURES_PER_DAY = 12
MAX_ITEMS = 1000
"""Maximum items of any list in a policy; the parser stops at a longer one."""
PROFILERS: tuple[str, ...] = get_args(Profiler)


class PolicyModel(BaseModel):
    """Strict, so that ``steps: yes`` is a mistake and not 1; frozen, so that a checked policy cannot change."""

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
    """Sample the Python stacks of all threads of the trainer and its DataLoader workers, which shows time outside
    operators. Off with `with_stack`."""
    record_shapes: bool = Field(default=False, description="Record input shapes of operators.")
    with_stack: bool = False
    """Trace every Python call. Exact, but slows steps with many calls several times."""
    profile_memory: bool = Field(default=False, description="Record memory allocations.")


class NsysOptions(PolicyModel):
    """What Nsight Systems records of the rank's process."""

    trace: Listed[Literal["cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx"]] | None = Field(
        default=None,
        max_length=7,
        json_schema_extra={"minItems": 1},  # (pydantic's own would count an invalid entry as one that is missing)
        description="Interfaces to record. Default and maximum: those that the job was launched with (`--nsys-trace`).",
    )
    sample: Literal["none", "cpu"] = "none"
    """`cpu`: also sample the process's stacks, which slows it down."""
    sqlite: bool = Field(default=True, description="Also export the report as SQLite, for other programs.")


class StacksOptions(PolicyModel):
    """What to add to Python stacks, which are then taken once, from outside the process, over no steps."""

    native: bool = Field(default=False, description="Include C and C++ frames; pauses the process for longer.")


class ProfilerRun(PolicyModel):
    """One time-boxed run of a profiler."""

    profiler: ProfilerChoice = "auto"
    """`torch`: operators, kernels and stacks by torch.profiler; `nsys`: Nsight Systems; `stacks`: Python stacks over
    the steps, or from outside if the rank is stalled; `auto`: `stacks` if the suspect is slow in host work, `torch` (or
    `nsys`, if the job runs under it) if in computation, then another if the cause stays open."""
    steps: int = Field(default=5, ge=1, le=1000, description="Number of steps to record.")
    warmup_steps: int = Field(default=1, ge=0, le=100)
    """Steps that the profiler runs before it records. Stacks need none."""
    samples_per_second: int = Field(default=200, ge=1, le=1000)
    """Maximum stack samples per second; fewer if sampling would take more than a 40th of the time."""
    max_seconds: int = Field(default=60, ge=1, le=3600)
    """Seconds after which a capture ends, even with fewer steps."""
    max_bytes: fields.TraceSize = "512Mi"
    """Maximum size of a trace; larger ones are discarded. The torch profiler records only as many steps as fit."""
    torch: TorchOptions = Field(default=TorchOptions(), description="Options of the torch profiler.")
    nsys: NsysOptions = Field(default=NsysOptions(), description="Options of Nsight Systems.")
    stacks: StacksOptions = Field(default=StacksOptions(), description="Options of stacks taken from outside.")

    max_trace_bytes = _number("max_bytes", fields.size_bytes)


class Capture(ProfilerRun):
    """One time-boxed run of a profiler on a suspect's ranks."""

    sample: int = Field(default=1, ge=1, le=1024)
    """Maximum ranks of the suspect to capture. Their traces look alike, and each costs the job. On `stalled`: missing
    ranks whose stacks are taken in a job of more than 64 ranks."""
    ranks: Listed[fields.Rank] = Field(default=(), max_length=1024)
    """Capture these ranks instead of the suspect's."""
    control_ranks: int = Field(default=0, ge=0, le=16)
    """Healthy peers to capture in the same steps, for comparison. On `stalled`: waiting ranks whose stacks are taken
    in a job of more than 64 ranks."""


def idle_fields(capture: dict[str, Any], *, stalled: bool) -> dict[str, str]:
    """The fields of a capture that have no effect with its profiler, each with the reason; ``stalled``: on a stall."""
    profiler = capture.get("profiler", "auto")
    if profiler not in (*PROFILERS, "auto"):
        return {}
    mine = set() if stalled else {profiler} if profiler != "auto" else set(PROFILERS)
    beside = "on stalled" if stalled else f"with the profiler {profiler}"
    idle = {other: f"options of {other} have no effect {beside}" for other in PROFILERS}
    options = capture.get("stacks")
    if stalled or (profiler == "stacks" and isinstance(options, dict) and options.get("native") is True):
        of = "of a stalled job" if stalled else "with native frames"
        once = f"no effect: stacks {of} are taken once, {'all together' if stalled else 'from outside'}, without steps"
        idle |= dict.fromkeys(("steps", "warmup_steps", "samples_per_second"), once)
    elif profiler == "stacks":
        idle["warmup_steps"] = "stacks need no warm-up, because no profiler is started"
    elif profiler == "nsys":
        idle["samples_per_second"] = "no effect: with the profiler nsys, the trainer samples no stacks"
    return {field: why for field, why in idle.items() if field not in mine}


class Detection(PolicyModel):
    """How windows are cut, and when a window counts as slow."""

    window_steps: int = Field(default=50, ge=2, le=10_000)
    """Steps per window. If not set, long steps reduce it, down to 10."""
    stride_steps: int = Field(default=10, ge=1, le=10_000)
    """Steps from the start of one window to the start of the next. If not set, shorter windows reduce it."""
    warmup_steps: int = Field(default=20, ge=0, le=1_000_000)
    """Steps at the start of a job that are not judged. If not set, long steps reduce it, down to 4."""
    min_gain: fields.Share = Field(default="4%", description="Minimum gain of a suspect: a share of exposed step time.")
    false_names_per_million_steps: float = Field(default=0.1, ge=1e-6, le=1e5)
    """How often chance alone may name a suspect, per million steps. With a lower value a fault must last longer before
    it is named (docs/verdicts.md explains the trade-off)."""
    min_persistence: fields.Fraction = 0.6
    """Minimum fraction of a window's steps that show a slowdown of all ranks, and of captured steps that show the fault
    for it to count as reproduced."""
    min_coverage: fields.Fraction = 0.95
    """Minimum fraction of a window's ranks and steps that must be recorded to judge it."""
    contended_after: fields.Cooldown = "30s"
    """How long CPU contention must last before a suspect that it may explain is captured. `0s`: no wait."""
    stalled_after: fields.StallTime | None = None
    """Time without progress on any rank after which a step is `stalled`, whatever the ranks wait for. If not set, ten
    times the job's longest ordinary pause, at least 10 s (docs/verdicts.md)."""

    min_gain_fraction = _number("min_gain", fields.fraction)
    contended_for = _number("contended_after", lambda text: fields.Lasting(seconds=fields.seconds(text)))
    stalled_after_s = _number("stalled_after", lambda text: None if text is None else fields.seconds(text))


class Match(PolicyModel):
    """Which verdicts a rule matches."""

    label: Label = "suspect"
    """Label of the verdict: `suspect`, or `stalled`, where the stacks and collectives of all ranks can be captured."""
    reason: Literal["regressed", "slow_link"] | None = None
    """Instead of a label, `regressed` matches a job slower than its own best: `gain` is the slowdown, `stage` where it
    is. `slow_link` matches a slow link between hosts: `gain` is what it costs. Such a rule can only notify."""
    scope: Listed[Scope] = Field(default=(), max_length=8)
    """Scopes of the suspect: one `rank`, the ranks of a `host` or of a `cohort`, or `all` ranks. Empty: any scope."""
    stage: Listed[fields.Stage] = Field(default=(), max_length=32)
    """Stages in which the suspect is slow. Empty: any stage, and suspects that are slow in all stages."""
    gain: fields.Gain = ">= 0%"
    """Minimum gain of the suspect, such as `>= 5% and >= 10ms`."""
    cost: fields.Cost | None = None
    """Minimum cost of the suspect since the run began, such as `>= 5 GPU-hours`: hours lost by all ranks of the job."""
    pattern: Listed[Pattern] = Field(default=(), max_length=3)
    """Patterns of the fault: `chronic` stays, `recurring` comes back, `one-off` has passed and is never captured.
    Empty: any pattern."""


class Webhook(PolicyModel):
    """Where to send a message. The URL is a secret, so the policy only names the variable or file that holds it."""

    url_from_env: fields.EnvironmentName | None = None
    """Environment variable that holds the URL."""
    url_from_file: fields.AbsolutePath | None = Field(default=None, description="File that holds the URL.")
    format: Literal["cloudevents", "slack"] = "cloudevents"
    """Body of the message: `cloudevents`, a CloudEvent 1.0 in JSON, or `slack`, a line of text for Slack."""


class Notification(PolicyModel):
    """Where to send a message when a rule matches."""

    webhook: Webhook = Field(description="An HTTP POST of the decision.")


class Rule(PolicyModel):
    """What to do when a verdict matches: capture, notify, or, with neither, only record the match."""

    name: fields.Name = Field(description="Unique name; appears in capture ids and manifests.")
    match: Match = Field(description="Which verdicts the rule matches.")
    lasting: fields.LastingText = Field(default="1 step", alias="for")
    """How long the same suspect must match, such as `100 steps` or `30s`: from its first step in the first window that
    names it to the last step of the current window, each step counted once. `2 windows` means the steps that two
    consecutive windows span."""
    capture: Capture | None = Field(default=None, description="What to capture. Without it, the rule only observes.")
    notify: Listed[Notification] = Field(default=(), max_length=16)
    """Messages to send when the rule matches, with or without a capture. Repeated only after the cooldown."""
    cooldown: fields.Cooldown = "10m"
    """Minimum time between two captures of the same suspect (ranks and stage) by this rule, and between two messages
    about it. Other suspects do not wait."""

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
    """What to do about a window that sftriage cannot decide."""

    hold: fields.Held = Field(default=True, json_schema_extra={"enum": [True]})
    """Capture nothing. Only `true` is allowed."""
    gather: Listed[Literal["bucket_ready", "nvml", "next_windows"]] = Field(default=(), max_length=3)
    """Cheap evidence to collect: `bucket_ready`, when each rank's last gradients are ready; `nvml`, the state of the
    GPUs; `next_windows`, the windows that follow."""


class Limits(PolicyModel):
    """What captures may cost a job, over all rules. Each captured rank counts as a capture, control ranks included."""

    captures_per_hour: int = Field(default=4, ge=1, le=10_000)
    """Maximum captures requested in any hour, whatever their result. The default is enough for a suspect and a control
    rank, twice. The last one of several is reserved for a suspect larger than any before."""
    captures_per_day: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description=f"Maximum captures requested in any 24 hours. If not set, {CAPTURES_PER_DAY} (what a person can "
        "read in a day), or `captures_per_hour` if that is more.",
    )
    captures_per_run: int | None = Field(default=None, ge=1, le=10_000)
    """Maximum captures in one run, not counting refused and failed ones; unlimited if not set. A long job may use them
    up in its first days."""
    concurrent_ranks: int = Field(default=2, ge=1, le=1024, description="Maximum ranks captured at the same time.")
    overhead_budget: fields.Budget = "0.5%"
    """Maximum share of the run's time that captures may cost the job. Once it is spent, captures wait."""

    @cached_property
    def day_limit(self) -> int:
        """``captures_per_day``, or its default."""
        return self.captures_per_day or max(CAPTURES_PER_DAY, self.captures_per_hour)

    overhead_fraction = _number("overhead_budget", fields.fraction)


class Active(PolicyModel):
    """When captures are allowed. It limits nothing else: verdicts and messages come at any time."""

    cron: fields.Cron = "* * * * *"
    """Minutes in which captures may start, as a cron expression: minute, hour, day, month, and weekday by name, such as
    `* 20-23 * * mon-fri`. All five must match."""
    timezone: fields.TimeZone = Field(default="UTC", description="Time zone of `cron`, such as `Europe/Berlin`.")

    @cached_property
    def trigger(self) -> CronTrigger | None:
        """The minutes of ``cron``; None if it is all of them."""
        return None if self.cron.split() == ["*"] * 5 else fields.cron_trigger(self.cron, fields.zone(self.timezone))


class Mitigate(PolicyModel):
    """Remedies that sftriage may try on a chronic straggler, and undoes if they do not help."""

    remedies: Listed[Literal["stragglar", "pipeline"]] = Field(
        max_length=2, json_schema_extra={"minItems": 1, "items": {"type": "string", "enum": ["stragglar", "pipeline"]}}
    )
    """Allowed remedies, which the training script must install (docs/mitigate.md): `stragglar` reduces gradients around
    the straggler, `pipeline` lets stages run further ahead of a slow link."""
    min_saving: fields.Share = "2%"
    """Share of a step that a remedy must save: in the model to be tried, and as measured to be kept."""
    steps: int = Field(default=50, ge=5, le=10_000)
    """Steps in each of a trial's four parts: with the remedy and without, twice in turn."""
    cooldown: fields.Cooldown = "1h"
    """Minimum time between undoing a remedy and trying it again on the same straggler."""

    min_saving_fraction = _number("min_saving", fields.fraction)
    cooldown_s = _number("cooldown", fields.seconds)


class Retention(PolicyModel):
    """How long traces are kept. A field that is not set does not limit them."""

    age: fields.Age | None = Field(default=None, description="Remove traces older than this, such as `14d`.")
    bytes: fields.StoreSize | None = None
    """Maximum size of all traces, such as `50Gi`; beyond it the oldest are removed."""

    age_s = _number("age", lambda age: None if age is None else fields.seconds(age))
    size_bytes = _number("bytes", lambda size: None if size is None else fields.size_bytes(size))


class Spec(PolicyModel):
    """The content of the policy."""

    detection: Detection = Field(default=Detection(), description="How windows are cut and judged.")
    rules: Listed[Rule] = Field(
        max_length=MAX_ITEMS,
        json_schema_extra={"minItems": 1},  # pydantic's own would count an invalid rule as one that is missing
        description="Rules, in order: the first that may capture decides.",
    )
    on_needs_evidence: OnNeedsEvidence = OnNeedsEvidence()
    """What to do about a window that sftriage cannot decide."""
    limits: Limits = Field(default=Limits(), description="What captures may cost a job.")
    active: Active = Field(default=Active(), description="When captures are allowed.")
    mitigate: Mitigate | None = None
    """Remedies that sftriage may try on a chronic straggler. Without it, sftriage only advises."""
    retention: Retention | None = Field(default=None, description="How long traces are kept; forever if not set.")


def _in_a_cluster(schema: JsonDict) -> None:
    """Fields left to Kubernetes (see `sftriage.policy.parsing.OBJECT_META`)."""
    texts: JsonDict = {"type": "object", "additionalProperties": {"type": "string"}}
    properties = schema["properties"]
    if isinstance(properties, dict):
        properties["namespace"] = {"type": "string", "description": "In a cluster, where the policy applies."}
        properties["labels"] = {**texts, "description": "In a cluster, labels for selectors."}
        properties["annotations"] = {**texts, "description": "In a cluster, annotations for other programs."}


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
