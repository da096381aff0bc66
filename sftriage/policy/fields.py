"""The types of a policy's values: how to write each, and how to parse it. `sftriage.policy.schema` uses them.

A number without its unit is refused, not guessed: ``cooldown: 10`` could be seconds or minutes, and the difference
would show only in production. Every parser raises ValueError with a message that says what it expected.
"""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from sftriage.errors import SchemaError
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, STAGE_NAME, StageSchema

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger

# Fifteen digits are exact in a float, and no quantity of a policy needs more.
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_PERCENT = re.compile(rf"({_NUMBER})\s?%")
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|d|h|m|s)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_BYTES = re.compile(rf"({_NUMBER})\s?([KMGT]i|[kKMGT]|)(B?)")
_COUNT = re.compile(r"([0-9]{1,7}) (steps?|windows?)")
_HOURS = re.compile(rf"({_NUMBER}) ?(?:GPU|rank)-hours?")
_AT_LEAST = re.compile(r">=\s*(\S.*)")

_ANY, _TIME = r"[0-9]+(\.[0-9]+)?", r"([0-9]+(\.[0-9]+)?(ms|d|h|m|s))+"
PERCENTAGE, DURATION, SIZE = rf"^{_ANY}\s?%$", f"^{_TIME}$", rf"^{_ANY}\s?([KMGT]i|[kKMGT])?B?$"
LASTING, GAIN = f"^([0-9]+ (steps?|windows?)|{_TIME})$", r"^\s*>=\s*[0-9].*$"
COST = rf"^>=\s*{_ANY} ?(GPU|rank)-hours?$"
"""Patterns of quantities for schemas, simple enough to read in an API server's message. They match everything that a
parser accepts."""

MOST_STEPS, MOST_WINDOWS, MOST_S = 1_000_000, 1000, 30 * 86400.0
"""The longest duration that a rule may require."""

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MULTIPLES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def shown(value: object, limit: int = 60) -> str:
    """A value from a document, shortened and printable, for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fraction(text: object) -> float:
    """``"5%"`` as 0.05."""
    found = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"expected a percentage such as 5%, got {shown(text)}")
    return float(found[1]) / 100


def seconds(text: object) -> float:
    """``"90s"``, ``"10m"``, ``"1h30m"`` or ``"10ms"`` in seconds; units fall from left to right."""
    if not (isinstance(text, str) and _DURATION.fullmatch(text)):
        raise ValueError(f"expected a duration with its unit (ms, s, m, h, d) such as 10m, got {shown(text)}")
    parts = _DURATION_PART.findall(text)
    sizes = [_SECONDS[unit] for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True):
        raise ValueError(f"expected each unit once, the largest first, such as 1h30m, got {shown(text)}")
    return sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))


def size_bytes(text: object) -> int:
    """``"512Mi"``, ``"1GiB"`` (powers of 1024) or ``"500MB"`` (powers of 1000) in bytes."""
    found = _BYTES.fullmatch(text) if isinstance(text, str) else None
    if found is None or not found[2] + found[3]:
        raise ValueError(f"expected a size with its unit (Ki, Mi, Gi, KB, MB, GB) such as 512Mi, got {shown(text)}")
    return int(float(found[1]) * _MULTIPLES[found[2]])


@dataclass(frozen=True, slots=True)
class Lasting:
    """A required duration in steps, seconds or windows; the others are 0."""

    steps: int = 0
    seconds: float = 0.0
    windows: int = 0


AT_ONCE = Lasting(steps=1)
"""One step: any window that matches is enough."""

CONTENTION = ""
"""The key for how long CPU contention has lasted; no rule has an empty name."""


def lasting(text: object) -> Lasting:
    """``"100 steps"``, ``"30s"`` or ``"2 windows"``."""
    found = _COUNT.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        count, steps = int(found[1]), found[2].startswith("step")
        if not 1 <= count <= (MOST_STEPS if steps else MOST_WINDOWS):
            raise ValueError(f"expected 1 step to {MOST_STEPS} steps, got {shown(text)}")
        return Lasting(steps=count) if steps else Lasting(windows=count)
    if not (isinstance(text, str) and _DURATION.fullmatch(text)):
        raise ValueError(f"expected steps or a time such as 100 steps, 30s or 5m, got {shown(text)}")
    if not 1.0 <= seconds(text) <= MOST_S:
        raise ValueError(f"expected 1s to 30d, got {shown(text)}")
    return Lasting(seconds=seconds(text))


def gain(text: object) -> tuple[float, float]:
    """``">= 5%"``, ``">= 10ms"`` or both, with ``and``, as a share of the exposed step time and seconds a step."""
    wanted = "expected a condition such as >= 5%, >= 10ms or >= 5% and >= 10ms"
    if not isinstance(text, str):
        raise ValueError(f"{wanted}, got {shown(text)}")
    thresholds: dict[str, float] = {}
    for part in text.split(" and "):
        found = _AT_LEAST.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{wanted}, got {shown(text)}")
        is_share = found[1].endswith("%")
        name = "min_share" if is_share else "min_gain_s"
        if name in thresholds:
            raise ValueError(f"{wanted}; {shown(text)} has the same unit twice")
        thresholds[name] = fraction(found[1]) if is_share else seconds(found[1])
    return thresholds.get("min_share", 0.0), thresholds.get("min_gain_s", 0.0)


def cost(text: object) -> float:
    """``">= 5 GPU-hours"``, or rank-hours, in hours of a job's ranks."""
    wanted = "expected a condition with its unit (GPU-hours, or rank-hours) such as >= 5 GPU-hours"
    found = _AT_LEAST.fullmatch(text) if isinstance(text, str) else None
    hours = None if found is None else _HOURS.fullmatch(found[1])
    if hours is None or not float(hours[1]):
        raise ValueError(f"{wanted}, got {shown(text)}")
    return float(hours[1])


MAX_CRON_LENGTH = 200
UTC = timezone.utc


def zone(name: object) -> tzinfo:
    """The time zone of a name such as ``Europe/Berlin``; raises ValueError if there is none."""
    if name == "UTC":
        return UTC  # also on a machine without time zones
    wanted = f"expected a time zone such as UTC or Europe/Berlin, got {shown(name)}"
    if not isinstance(name, str):
        raise ValueError(wanted)
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = difflib.get_close_matches(name[:100], zoneinfo.available_timezones(), n=1)
        raise ValueError(wanted + (f'; did you mean "{near[0]}"?' if near else "")) from None


def cron_trigger(cron: object, where: tzinfo) -> CronTrigger:
    """The minutes of a cron expression, all of whose fields must match.

    Raises ValueError if it is invalid, ambiguous, or never matches.
    """
    from apscheduler.triggers.cron import CronTrigger

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
        raise ValueError(f"expected a time that occurs, but {shown(cron)} never does")
    return found


def _read(parse: Callable[[object], Any], bounds: str = "", low: float = 0.0, high: float = 0.0) -> BeforeValidator:
    """A validator that keeps a text as it is, and refuses one that is invalid or out of bounds."""

    def check(value: object) -> object:
        found = parse(value)
        if bounds and not low <= found <= high:
            raise ValueError(f"expected {bounds}, got {shown(value)}")
        return value

    return BeforeValidator(check)


def _written(pattern: str) -> object:
    """The pattern of a text, for readers of the schema; our parsers give better messages."""
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
            "must be true: sftriage never captures on a window that cannot be decided; "
            "to capture anyway, request a capture by hand"
        )
    return value


_AS_PERCENTAGE, _AS_DURATION, _AS_SIZE = map(_written, (PERCENTAGE, DURATION, SIZE))

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Stage = Annotated[
    str,
    BeforeValidator(_stage),
    Field(min_length=1, max_length=MAX_STAGE_NAME_BYTES),
    _written(f"^{STAGE_NAME.pattern}$"),
]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[str, _read(fraction, "0% to 100%", 0.0, 1.0), _AS_PERCENTAGE]
Fraction = Annotated[
    float,
    BeforeValidator(lambda value: fraction(value) if isinstance(value, str) else value),
    Field(ge=0, le=1),
    WithJsonSchema({"type": ["number", "string"], "minimum": 0, "maximum": 1, "pattern": PERCENTAGE}),
]
"""A number, or a percentage."""
Budget = Annotated[str, _read(fraction, "0.01% to 100%", 0.0001, 1.0), _AS_PERCENTAGE]
Gain = Annotated[str, _read(gain), _written(GAIN)]
Cost = Annotated[str, _read(cost), _written(COST)]
LastingText = Annotated[str, _read(lasting), _written(LASTING)]
Cooldown = Annotated[str, _read(seconds, "0s to 30d", 0.0, 30 * 86400.0), _AS_DURATION]
StallTime = Annotated[str, _read(seconds, "1s to 1d", 1.0, 86400.0), _AS_DURATION]
Age = Annotated[str, _read(seconds, "1h to 3650d", 3600.0, 3650 * 86400.0), _AS_DURATION]
TraceSize = Annotated[str, _read(size_bytes, "1Mi to 64Gi", 2**20, 2**36), _AS_SIZE]
StoreSize = Annotated[str, _read(size_bytes, "1Mi to 1024Ti", 2**20, 2**50), _AS_SIZE]
Held = Annotated[bool, BeforeValidator(_held)]
Cron = Annotated[str, _read(lambda value: cron_trigger(value, UTC))]
TimeZone = Annotated[str, _read(zone)]
EnvironmentName = Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")]

Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], Field(strict=False)]
"""Several values; not strict, because YAML has lists but no tuples."""
