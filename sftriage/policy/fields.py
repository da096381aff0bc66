"""The types of a policy's fields: text that is checked where it is read, and keeps the words it was written in."""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Callable
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Annotated, TypeVar

from apscheduler.triggers.cron import CronTrigger
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict

from sftriage.errors import SchemaError
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, STAGE_NAME, StageSchema
from sftriage.policy import quantities
from sftriage.policy.quantities import shown

UTC = timezone.utc
MAX_CRON_LENGTH = 200

_STEP = re.compile(r"/[0-9]+")
_DIGIT = re.compile(r"[0-9]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_S = 253_402_300_799.0
"""The last second of the year 9999, after which there are no dates."""
_WHEN = datetime(2024, 1, 1, tzinfo=UTC)


def zone(name: object) -> tzinfo:
    """The time zone of a name such as ``Europe/Berlin``.

    Raises:
        ValueError: there is none.
    """
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
    """The minutes of a cron expression: minute, hour, day, month and weekday, all of which have to match.

    Raises:
        ValueError: it is none, could be misread, or names no minute ever.
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


def left_out(schema: JsonDict) -> None:
    """Describe a field that is there or left out, never null: a CRD knows neither `anyOf` nor `default: null`."""
    choices = schema.pop("anyOf")
    schema.pop("default")
    if isinstance(choices, list) and isinstance(choices[0], dict):
        schema.update(choices[0])


def some_or_left_out(schema: JsonDict) -> None:
    """Describe a list that names one at least, or is left out."""
    left_out(schema)
    # (by no bound of pydantic's, which would count an invalid entry as one that is missing)
    schema["minItems"] = 1


def one_left_out(schema: JsonDict) -> None:
    """Describe a field that has one value, or is left out."""
    left_out(schema)
    only_one(schema)


def only_one(schema: JsonDict) -> None:
    """Describe a field that has one value as a choice of one: a CRD knows no `const`."""
    schema["enum"] = [schema.pop("const")]
