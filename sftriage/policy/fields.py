"""The types of a policy's fields, and what may not stand beside what.

Text is checked where it is read, and keeps the words it was written in. `contradictions` finds what is wrong between
fields that are each right, and limits under which nothing could ever happen.
"""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Annotated, Any, TypeVar, get_args

from apscheduler.triggers.cron import CronTrigger
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sftriage.errors import SchemaError
from sftriage.model.captures import Profiler, ProfilerChoice
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, STAGE_NAME, StageSchema
from sftriage.policy import quantities
from sftriage.policy.quantities import shown

UTC = timezone.utc
MAX_CRON_LENGTH = 200
MAX_ITEMS = 1000
"""More than any list of a policy has; where one goes on, the text is read no further."""

_STEP = re.compile(r"/[0-9]+")
_DIGIT = re.compile(r"[0-9]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_S = 253_402_300_799.0
"""The last second of the year 9999, after which there are no dates."""
_WHEN = datetime(2024, 1, 1, tzinfo=UTC)


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
    if _DIGIT.search(_STEP.sub("", weekday)):
        raise ValueError(f"expected the weekday by name, such as mon-fri, got {shown(weekday)}")
    if found.get_next_fire_time(None, _WHEN) is None:
        raise ValueError(f"expected a time that comes, but {shown(cron)} never does")
    return found


def next_open_s(found: CronTrigger, now_s: float) -> float | None:
    """When the window is open, from ``now_s`` on: that itself if it is open now, and None if it never opens again."""
    # By addition, because the C library's conversion has a narrower range.
    now = _EPOCH + timedelta(seconds=min(now_s, _LAST_S))
    opens: datetime | None = found.get_next_fire_time(None, now.replace(second=0, microsecond=0))
    if opens is None:
        return None
    return max(now_s, (opens - _EPOCH).total_seconds())


Location = tuple[int | str, ...]
"""The way to a value of a document: field names and list indices."""


def _read(parse: Callable[..., object]) -> BeforeValidator:
    """A validator that keeps a text as it is, and refuses one that cannot be read."""

    def check(value: object) -> object:
        parse(value)
        return value

    return BeforeValidator(check)


def _within(parse: Callable[[object], float], low: float, high: float, bounds: str) -> BeforeValidator:

    def check(value: object) -> object:
        if not low <= parse(value) <= high:
            raise ValueError(f"expected {bounds}, got {quantities.shown(value)}")
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


_PERCENTAGE, _DURATION, _SIZE = map(_written, (quantities.PERCENTAGE, quantities.DURATION, quantities.SIZE))

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Stage = Annotated[
    str,
    BeforeValidator(_stage),
    Field(min_length=1, max_length=MAX_STAGE_NAME_BYTES),
    _written(f"^{STAGE_NAME.pattern}$"),
]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[str, _within(quantities.fraction, 0.0, 1.0, "0% to 100%"), _PERCENTAGE]
Fraction = Annotated[
    float,
    BeforeValidator(lambda value: quantities.fraction(value) if isinstance(value, str) else value),
    Field(ge=0, le=1),
    WithJsonSchema({"type": ["number", "string"], "minimum": 0, "maximum": 1, "pattern": quantities.PERCENTAGE}),
]
"""A number, or a percentage."""
Budget = Annotated[str, _within(quantities.fraction, 0.0001, 1.0, "0.01% to 100%"), _PERCENTAGE]
Gain = Annotated[str, _read(quantities.gain), _written(quantities.GAIN)]
Cost = Annotated[str, _read(quantities.cost), _written(quantities.COST)]
Lasting = Annotated[str, _read(quantities.lasting), _written(quantities.LASTING)]
Cooldown = Annotated[str, _within(quantities.seconds, 0.0, 30 * 86400.0, "0s to 30d"), _DURATION]
StallTime = Annotated[str, _within(quantities.seconds, 1.0, 86400.0, "1s to 1d"), _DURATION]
Age = Annotated[str, _within(quantities.seconds, 3600.0, 3650 * 86400.0, "1h to 3650d"), _DURATION]
TraceSize = Annotated[str, _within(quantities.size_bytes, 2**20, 2**36, "1Mi to 64Gi"), _SIZE]
StoreSize = Annotated[str, _within(quantities.size_bytes, 2**20, 2**50, "1Mi to 1024Ti"), _SIZE]
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


# Defaults that others are compared with.
WINDOW_STEPS, STRIDE_STEPS = 50, 10
PROFILER: ProfilerChoice = "auto"
SAMPLE = 1
"""What is slow alike looks alike: one of the suspect's ranks shows it, and each more costs the job."""
CONTROL_RANKS = 0
CAPTURES_PER_HOUR = 4
CAPTURES_PER_DAY = 12
CONCURRENT_RANKS = 2

PROFILERS: tuple[str, ...] = get_args(Profiler)

_LIMITS: dict[str, int | None] = {
    "captures_per_hour": CAPTURES_PER_HOUR,
    "captures_per_day": None,
    "captures_per_run": None,
    "concurrent_ranks": CONCURRENT_RANKS,
}
"""Limits that count captures, with their defaults. Without one, a limit that is left out contradicts nothing."""

NO_WAIT = (None, "1 step", "1 steps", "1 window", "1 windows")
"""``for`` of a rule that waits for nothing."""

_OBSERVE = "a policy that is only to observe has rules without a capture"

Mistakes = Iterator[tuple[Location, str]]
"""Where in a document something is wrong, and what."""


def contradictions(document: Any) -> Mistakes:
    """What is wrong between fields that are each right.

    Works on plain data of any shape, without defaults filled in, so that these are reported together with the mistakes
    inside the fields.
    """
    spec = _mapping(document, "spec")
    detection = _mapping(spec, "detection")
    window, stride = detection.get("window_steps", WINDOW_STEPS), detection.get("stride_steps", STRIDE_STEPS)
    if isinstance(window, int) and isinstance(stride, int) and stride > window:
        at = "stride_steps" if "stride_steps" in detection else "window_steps"
        gaps = f"{stride} steps from window to window leave gaps between windows of {window} steps"
        yield ("spec", "detection", at), gaps
    limits = _mapping(spec, "limits")
    for name, none in (*((name, 0) for name in _LIMITS), ("overhead_budget", "0%")):
        if limits.get(name) == none and not isinstance(limits[name], bool):
            yield ("spec", "limits", name), f"{none} would allow no capture ever; {_OBSERVE}"
    if spec.get("retention") == {}:
        yield ("spec", "retention"), "says neither age nor bytes; without retention traces are kept for ever"
    if _mapping(spec, "mitigate").get("remedies") in ([], ()):
        yield ("spec", "mitigate", "remedies"), "names no remedy; without mitigate there is advice alone"
    if spec.get("rules") in ([], ()):
        yield ("spec", "rules"), "no rule; a policy that captures nothing has rules without a capture"
    known: dict[str, int] = {}
    for index, rule in enumerate(_list(spec, "rules")):
        if not isinstance(rule, dict):
            continue
        where: Location = ("spec", "rules", index)
        own = rule.get("name")
        if isinstance(own, str) and known.setdefault(own, index) != index:
            yield (*where, "name"), f"a second rule named {own!r}; the first is spec.rules[{known[own]}]"
        yield from _under(where, _in_rule(rule, limits))


def unsaid(capture: dict[str, Any], *, stalled: bool = False) -> set[str]:
    """The fields of a capture that mean nothing beside its others, in a rule on stalls or on suspects."""
    return {*_idle(capture, stalled=stalled), "sample" if capture.get("ranks") else "ranks"}


def in_capture(capture: dict[str, Any], *, stalled: bool) -> Mistakes:
    """What is wrong between the fields of a capture, in a rule on stalls or on suspects."""
    for field, why in _idle(capture, stalled=stalled).items():
        if field in capture:
            yield (field,), why
    if ranks := _list(capture, "ranks"):
        twice = sorted({rank for rank in ranks if isinstance(rank, int) and ranks.count(rank) > 1})
        if twice:
            yield ("ranks",), f"named twice: {', '.join(map(str, twice))}"
        if "sample" in capture:
            yield ("sample",), "of ranks that are named, all are captured; say sample or ranks"


def _under(where: Location, found: Mistakes) -> Mistakes:
    return (((*where, *at), message) for at, message in found)


def _idle(capture: dict[str, Any], *, stalled: bool) -> dict[str, str]:
    """The fields that mean nothing beside the profiler, each with why."""
    profiler = capture.get("profiler", PROFILER)
    if profiler not in (*PROFILERS, "auto"):
        return {}
    mine = {"stacks"} if stalled else {profiler} if profiler != "auto" else set(PROFILERS)
    beside = "on stalled" if stalled and profiler == "auto" else f"where the profiler is {profiler}"
    idle = {other: f"options of {other} do nothing {beside}" for other in PROFILERS}
    options = _mapping(capture, "stacks")
    from_outside = True in (options.get("native"), options.get("flight_recorder"))
    if stalled or (profiler == "stacks" and from_outside):
        of = "of a rank that stands still" if stalled else "with native frames, or the flight recorder's dump,"
        once = f"stacks {of} are taken once, from outside, and of no steps"
        idle |= dict.fromkeys(("steps", "warmup_steps", "samples_per_second"), once)
    elif profiler == "stacks":
        idle["warmup_steps"] = "stacks need no warm-up: no profiler is started"
    elif profiler == "nsys":
        idle["samples_per_second"] = "no stacks are sampled in the trainer where the profiler is nsys"
    return {field: why for field, why in idle.items() if field not in mine}


def _in_rule(rule: dict[str, Any], limits: dict[str, Any]) -> Mistakes:
    match, capture = _mapping(rule, "match"), _mapping(rule, "capture")
    label, pattern, captures = match.get("label"), match.get("pattern"), rule.get("capture") is not None
    if label in ("healthy", "needs_evidence"):
        yield ("match", "label"), _idle_label(label, captures, bool(rule.get("notify")))
    if match.get("reason") == "regressed":
        yield from _in_regressed(rule, match)
    elif label == "stalled":
        profiler = capture.get("profiler", PROFILER)
        if captures and profiler in ("torch", "nsys"):
            yield (
                ("match", "label"),
                f"no {profiler} capture on stalled, because it starts at a rank's next step, and a stalled rank takes "
                "none; a rule on stalled takes stacks (or says auto), or only observes",
            )
        if pattern:
            yield ("match", "pattern"), "no pattern on stalled: the step has not ended, and is the only one"
        if match.get("cost"):
            yield ("match", "cost"), "no cost on stalled: the step has not ended, and costs more every second"
        if rule.get("for") not in NO_WAIT:
            once = "a stall is reported once; detection.stalled_after says how long it must last"
            yield ("for",), f"no `for` on stalled: {once}"
    elif captures and pattern and set(map(str, pattern)) == {"one-off"}:
        passed = "because the fault has passed and healthy steps would be captured"
        yield ("match", "pattern"), f"no capture on one-off alone, {passed}"
    yield from _under(("capture",), in_capture(capture, stalled=label == "stalled"))
    if captures:
        yield from _under(("capture",), _under_limits(capture, limits))
    for index, one in enumerate(_list(rule, "notify")):
        webhook = one.get("webhook") if isinstance(one, dict) else None
        if not isinstance(webhook, dict):
            continue
        where = ("notify", index, "webhook")
        if "url" in webhook:
            secret = "an address is a secret and stays out of the policy; say url_from_env or url_from_file"
            yield (*where, "url"), secret
        elif len({"url_from_env", "url_from_file"} & set(webhook)) != 1:
            yield where, "say where its address is found: either url_from_env or url_from_file"


def _in_regressed(rule: dict[str, Any], match: dict[str, Any]) -> Mistakes:
    if rule.get("capture") is not None:
        yield ("capture",), "no capture on regressed, because nobody alone is why the job is slower"
    if "label" in match:
        yield ("match", "label"), "no label beside regressed, which is told whatever the label is"
    for name in ("scope", "pattern", "cost"):
        if match.get(name):
            about = "it is about the job, and not about who is suspected"
            yield ("match", name), f"no {name} on regressed: {about}"
    if rule.get("for") not in NO_WAIT:
        yield ("for",), "no windows on regressed: it is told once enough steps are slower, see docs/verdicts.md"


def _idle_label(label: str, captures: bool, notifies: bool) -> str:
    if captures:
        why = "nothing is slow" if label == "healthy" else "the signal cannot say which rank to capture"
        return f"no capture on {label}, because {why}; only suspect may capture"
    if notifies:
        return f"no message on {label}, because such windows come all the time; they are put on record without a rule"
    return f"a rule on {label} would do nothing; such windows are put on record without a rule"


def _under_limits(capture: dict[str, Any], limits: dict[str, Any]) -> Mistakes:
    """A limit under which a rule could never capture as many ranks as it says."""
    ranks, sample = capture.get("ranks", ()), capture.get("sample", SAMPLE)
    if not (isinstance(ranks, list | tuple) and type(sample) is int):
        return
    # Controls come where there is room for them: most suspects are fewer ranks than a rule allows.
    at, wanted = ("ranks", len(ranks)) if ranks else ("sample", sample)
    for name, default in _LIMITS.items():
        most = limits.get(name, default)
        if type(most) is int and 0 < most < wanted:
            yield (at,), f"{wanted} captures at once ({at}: {wanted}), but limits.{name} is {most}"
            return


def _mapping(holder: Any, name: str) -> dict[str, Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}


def _list(holder: dict[str, Any], name: str) -> Sequence[Any]:
    value = holder.get(name)
    return value if isinstance(value, list | tuple) else ()
