"""The models of a policy, in the Kubernetes form, so that one file serves the command line and a cluster.

A CRD is made of them (`sftriage.kube`), whose structural schemas know no unions: every field has one type (a fraction,
which may be written as a percentage, has none), quantities are strings with their unit, and what is optional has a
default. The parsed number of a quantity is a property beside it.
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
"""More than any list of a policy has; where one goes on, the text is read no further."""
PROFILERS: tuple[str, ...] = get_args(Profiler)


class PolicyModel(BaseModel):
    """Strict, so that ``steps: yes`` is a mistake and not 1; frozen, so that a policy is the one that was checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A schema as a CRD may have it, which knows no `anyOf`, no `default: null` and no `const`."""
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
    """What a field says in text, as a number: a property beside it."""
    return cached_property(lambda model: parse(getattr(model, field)))


class TorchOptions(PolicyModel):
    """What is recorded beside operators and kernels. What costs time and memory is off unless asked for."""

    sample_stacks: bool = True
    """Sample the Python stacks of all threads, from one in the trainer, and in its DataLoader's workers: they say where
    what is no operator took its time. Not beside `with_stack`."""
    record_shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    with_stack: bool = False
    """Trace every Python call: exact, and several times slower where there are many."""
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
    sample: Literal["none", "cpu"] = "none"
    """Whether the stacks of the process are sampled (`cpu`), which slows it."""
    sqlite: bool = Field(default=True, description="Export the report to SQLite too, which other programs can read.")


class StacksOptions(PolicyModel):
    """What is taken along with the Python stacks of all threads. Either means one look from outside, over no steps."""

    native: bool = Field(default=False, description="The frames of C and C++ too; the process stops for longer.")
    flight_recorder: bool = False
    """The flight recorder of torch.distributed too: the collectives entered and left."""


class ProfilerRun(PolicyModel):
    """One time-boxed run of a profiler, whoever it is of."""

    profiler: ProfilerChoice = "auto"
    """`auto`: `stacks` where the host does the work, `torch` (or `nsys`, where the job runs under it) for what
    computes, and what one leaves open by another; `torch`: operators and kernels, and stacks beside; `nsys`: Nsight
    Systems; `stacks`: Python stacks over the steps, or from outside of a rank that takes none."""
    steps: int = Field(default=5, ge=1, le=1000, description="Steps to record.")
    warmup_steps: int = Field(default=1, ge=0, le=100)
    """Steps the profiler runs before those that count; stacks need none."""
    samples_per_second: int = Field(default=200, ge=1, le=1000)
    """How often stacks are sampled over the steps, at most: sampling has a 40th of the time."""
    max_seconds: int = Field(default=60, ge=1, le=3600)
    """Seconds after which the capture ends, whatever happens."""
    max_bytes: fields.TraceSize = "512Mi"
    """Size over which a trace is not kept. Of many steps the torch profiler records as many as fit."""
    torch: TorchOptions = Field(default=TorchOptions(), description="Options of the torch profiler.")
    nsys: NsysOptions = Field(default=NsysOptions(), description="Options of Nsight Systems.")
    stacks: StacksOptions = Field(default=StacksOptions(), description="Options of a look from outside.")

    max_trace_bytes = _number("max_bytes", fields.size_bytes)


class Capture(ProfilerRun):
    """One time-boxed run of a profiler on a suspect's ranks."""

    sample: int = Field(default=1, ge=1, le=1024)
    """Of the suspect's ranks only so many: what is slow alike looks alike, and each costs the job."""
    ranks: Listed[fields.Rank] = Field(default=(), max_length=1024)
    """These ranks, instead of the suspect's."""
    control_ranks: int = Field(default=0, ge=0, le=16)
    """So many healthy peers too, in the same steps, to compare with."""


def idle_fields(capture: dict[str, Any], *, stalled: bool) -> dict[str, str]:
    """The fields of a capture that mean nothing beside its profiler, each with why; in a rule on stalls or suspects."""
    profiler = capture.get("profiler", "auto")
    if profiler not in (*PROFILERS, "auto"):
        return {}
    mine = {"stacks"} if stalled else {profiler} if profiler != "auto" else set(PROFILERS)
    beside = "on stalled" if stalled and profiler == "auto" else f"where the profiler is {profiler}"
    idle = {other: f"options of {other} do nothing {beside}" for other in PROFILERS}
    options = capture.get("stacks")
    from_outside = isinstance(options, dict) and True in (options.get("native"), options.get("flight_recorder"))
    if stalled or (profiler == "stacks" and from_outside):
        of = "of a rank that stands still" if stalled else "with native frames, or the flight recorder's dump,"
        once = f"stacks {of} are taken once, from outside, and of no steps"
        idle |= dict.fromkeys(("steps", "warmup_steps", "samples_per_second"), once)
    elif profiler == "stacks":
        idle["warmup_steps"] = "stacks need no warm-up: no profiler is started"
    elif profiler == "nsys":
        idle["samples_per_second"] = "no stacks are sampled in the trainer where the profiler is nsys"
    return {field: why for field, why in idle.items() if field not in mine}


class Detection(PolicyModel):
    """How windows are cut and when a window counts as slow."""

    window_steps: int = Field(default=50, ge=2, le=10_000)
    """Steps in a window; not said, fewer where steps are long, down to 10."""
    stride_steps: int = Field(default=10, ge=1, le=10_000)
    """Steps from one window to the next; not said, fewer where windows have fewer."""
    warmup_steps: int = Field(default=20, ge=0, le=1_000_000)
    """Steps at the start of a job that are not judged; not said, fewer where steps are long, down to 4."""
    min_gain: fields.Share = Field(default="4%", description="Share of the exposed step time a suspect must be worth.")
    false_names_per_million_steps: float = Field(default=0.1, ge=1e-6, le=1e5)
    """How often chance alone may name somebody; the fewer, the longer a fault must last to be named (docs/verdicts.md
    has the trade-off)."""
    min_persistence: fields.Fraction = 0.6
    """Fraction of the window's steps in which what all ranks share must be there, and of the captured steps in which a
    fault must be to be reproduced."""
    min_coverage: fields.Fraction = 0.95
    """Fraction of the window's ranks and steps that must be present."""
    contended_after: fields.Cooldown = "30s"
    """How long contention for CPUs, where that may be why somebody is slow, must have gone on before anything is
    captured for it; `0s` waits for nothing."""
    stalled_after: fields.StallTime = "60s"
    """Time without any rank moving from which on a step may be `stalled`; more is allowed where the job itself takes
    longer."""

    min_gain_fraction = _number("min_gain", fields.fraction)
    contended_for = _number("contended_after", lambda text: fields.Lasting(seconds=fields.seconds(text)))
    stalled_after_s = _number("stalled_after", fields.seconds)


class Match(PolicyModel):
    """Which verdicts a rule is about."""

    label: Label = "suspect"
    """The verdict's label: `suspect`, or `stalled`, of which only stacks can be taken."""
    reason: Literal["regressed"] | None = None
    """In place of a label `regressed`: the job is slower than its own best. `gain` is then by how much, `stage` where;
    such a rule tells somebody, and captures nothing."""
    scope: Listed[Scope] = Field(default=(), max_length=8)
    """Who the suspect may be: one `rank`, the ranks of a `host` or of a `cohort`, or `all`; none named means any."""
    stage: Listed[fields.Stage] = Field(default=(), max_length=32)
    """Stages the suspect may be in; none named means any, a whole slow rank among them."""
    gain: fields.Gain = ">= 0%"
    """What the suspect must be worth, such as `>= 5% and >= 10ms`."""
    cost: fields.Cost | None = None
    """What the suspect must have cost the job since the run began, such as `>= 5 GPU-hours`: the hours of all its
    ranks, whatever they run on."""
    pattern: Listed[Pattern] = Field(default=(), max_length=3)
    """How the fault behaves: `chronic`, it is there to stay; `recurring`, it comes back; `one-off`, it has passed, and
    is never captured; none named means any."""


class Webhook(PolicyModel):
    """Where to send a message. The address is a secret, so the policy says only where to find it."""

    url_from_env: fields.EnvironmentName | None = None
    """The environment variable that holds the address."""
    url_from_file: fields.AbsolutePath | None = Field(default=None, description="The file that holds the address.")
    format: Literal["cloudevents", "slack"] = "cloudevents"
    """`cloudevents`: a CloudEvents 1.0 envelope; `slack`: what Slack takes."""


class Notification(PolicyModel):
    """Who is told that a rule matches."""

    webhook: Webhook = Field(description="An HTTP POST of what was decided.")


class Rule(PolicyModel):
    """If verdicts match, capture, and tell somebody; or, with neither, put on record that it would have matched."""

    name: fields.Name = Field(description="Unique in the policy; goes into capture ids and manifests.")
    match: Match = Field(description="Which verdicts the rule is about.")
    lasting: fields.LastingText = Field(default="1 step", alias="for")
    """How long the same suspect must match, in steps or time, such as `100 steps` or `30s`: from its first step in the
    window that first names it to the last of this one, each step counted once. `2 windows`, of older policies, is the
    steps that two windows in a row span."""
    capture: Capture | None = Field(default=None, description="What to capture; a rule without it observes only.")
    notify: Listed[Notification] = Field(default=(), max_length=16)
    """Who is told when the rule matches, captured or not; again only after the cooldown."""
    cooldown: fields.Cooldown = "10m"
    """Time after a capture of a suspect in which this rule starts no other of that suspect (who and where: its ranks
    and stage), and after a message about it in which it sends none. Others wait for nothing."""

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

    hold: fields.Held = Field(default=True, json_schema_extra={"enum": [True]})
    """Start nothing heavy; only true."""
    gather: Listed[Literal["bucket_ready", "nvml", "next_windows"]] = Field(default=(), max_length=3)
    """Cheap evidence that may resolve it: when the last gradients are ready, what the GPUs say of themselves, more
    windows."""


class Limits(PolicyModel):
    """What captures may cost a job, over all rules. One rank captured once is one capture, a control rank's too."""

    captures_per_hour: int = Field(default=4, ge=1, le=10_000)
    """Captures asked for in any hour, whatever becomes of them: the default is one suspect, a peer to compare with, and
    each once more. Of several, the last is kept for a suspect larger than any before."""
    captures_per_day: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description=f"The same in any 24 hours. Where it is not said it is {CAPTURES_PER_DAY}, no more traces than a "
        "person looks at in a day, or `captures_per_hour` where that is more.",
    )
    captures_per_run: int | None = Field(default=None, ge=1, le=10_000)
    """Captures in one run, if that is to be limited: a job of a month would have none left after the first days. One
    that is refused or fails is not counted."""
    concurrent_ranks: int = Field(default=2, ge=1, le=1024, description="Ranks that may be captured at the same time.")
    overhead_budget: fields.Budget = "0.5%"
    """Share of the run's time that captures may cost the job; when it is spent, captures wait."""

    @cached_property
    def day_limit(self) -> int:
        """``captures_per_day``, said or not."""
        return self.captures_per_day or max(CAPTURES_PER_DAY, self.captures_per_hour)

    overhead_fraction = _number("overhead_budget", fields.fraction)


class Active(PolicyModel):
    """When captures are allowed. Everything else happens at any time."""

    cron: fields.Cron = "* * * * *"
    """The minutes in which captures may start, as minute, hour, day, month and weekday (by name), all of which have to
    match."""
    timezone: fields.TimeZone = Field(default="UTC", description="The time zone of `cron`, such as Europe/Berlin.")

    @cached_property
    def trigger(self) -> CronTrigger | None:
        """The minutes of ``cron``; None if it is all of them."""
        return None if self.cron.split() == ["*"] * 5 else fields.cron_trigger(self.cron, fields.zone(self.timezone))


class Mitigate(PolicyModel):
    """What may be done by itself about a straggler that stays: tried, and undone where it does not help."""

    remedies: Listed[Literal["stragglar", "pipeline"]] = Field(
        max_length=2, json_schema_extra={"minItems": 1, "items": {"type": "string", "enum": ["stragglar", "pipeline"]}}
    )
    """Which, where the job has taken them in (docs/mitigate.md): `stragglar` reduces gradients around the straggler,
    `pipeline` runs stages further ahead under a slow link."""
    min_saving: fields.Share = "2%"
    """Share of a step that a remedy must save: by its model to be tried, measured to stay."""
    steps: int = Field(default=50, ge=5, le=10_000)
    """Steps that each part of a trial takes: with the remedy and without, twice in turn."""
    cooldown: fields.Cooldown = "1h"
    """Time after a remedy was undone in which it is not tried again on the same straggler."""

    min_saving_fraction = _number("min_saving", fields.fraction)
    cooldown_s = _number("cooldown", fields.seconds)


class Retention(PolicyModel):
    """How long traces are kept. What is not said is not limited."""

    age: fields.Age | None = Field(default=None, description="Traces older than this are removed.")
    bytes: fields.StoreSize | None = None
    """Size of all traces over which the oldest are removed."""

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
    on_needs_evidence: OnNeedsEvidence = OnNeedsEvidence()
    """What happens on a window that cannot be decided."""
    limits: Limits = Field(default=Limits(), description="What captures may cost a job.")
    active: Active = Field(default=Active(), description="When captures are allowed.")
    mitigate: Mitigate | None = None
    """What may be done by itself about a straggler that stays; without it, there is advice alone."""
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

    name: fields.Name = Field(description="The policy's name.")


class TriagePolicy(PolicyModel):
    """A triage policy."""

    api_version: Literal["sftriage.dev/v1alpha1"] = Field(alias="apiVersion", description="Version of this format.")
    kind: Literal["TriagePolicy"] = Field(description="Always TriagePolicy.")
    metadata: Metadata = Field(description="How the policy is called.")
    spec: Spec = Field(description="What the policy says.")

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
            idle = idle_fields(capture, stalled=rule["match"].get("label") == "stalled")
            for word in (*idle, "sample" if capture["ranks"] else "ranks"):
                capture.pop(word, None)
        return filled
