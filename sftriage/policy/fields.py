"""The types of a policy's fields: text that is checked where it is read, and keeps the words it was written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

from sftriage.errors import SchemaError
from sftriage.policy import cron, quantities
from sftriage.records import MAX_STAGE_NAME_BYTES, StageSchema

Location = tuple[int | str, ...]
"""The way to a value of a document: field names and list indices."""

_MIN_TRACE_BYTES, _MAX_TRACE_BYTES = 2**20, 2**36
_MIN_STORE_BYTES, _MAX_STORE_BYTES = 2**20, 2**50
_MIN_AGE_S, _MAX_AGE_S = 3600.0, 3650 * 86400.0
_MAX_COOLDOWN_S = 30 * 86400.0
_MIN_STALL_S, _MAX_STALL_S = 1.0, 86400.0
_MIN_BUDGET = 0.0001
_MAX_WINDOWS = 1000


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


def _held(value: object) -> object:
    if value is False:
        raise ValueError(
            "only true: that nothing heavy starts on a window that cannot be decided is what sftriage is for; "
            "a person can always ask for a capture"
        )
    return value


def _cron(value: object) -> object:
    cron.trigger(value, cron.UTC)
    return value


def _timezone(value: object) -> object:
    cron.zone(value)
    return value


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Stage = Annotated[str, BeforeValidator(_stage), Field(min_length=1, max_length=MAX_STAGE_NAME_BYTES)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[str, BeforeValidator(_within(quantities.fraction, 0.0, 1.0, "0% to 100%"))]
Budget = Annotated[str, BeforeValidator(_within(quantities.fraction, _MIN_BUDGET, 1.0, "0.01% to 100%"))]
Gain = Annotated[str, BeforeValidator(_gain)]
Windows = Annotated[str, BeforeValidator(_within(quantities.windows, 1, _MAX_WINDOWS, "1 window to 1000 windows"))]
Cooldown = Annotated[str, BeforeValidator(_within(quantities.seconds, 0.0, _MAX_COOLDOWN_S, "0s to 30d"))]
StallTime = Annotated[str, BeforeValidator(_within(quantities.seconds, _MIN_STALL_S, _MAX_STALL_S, "1s to 1d"))]
Age = Annotated[str, BeforeValidator(_within(quantities.seconds, _MIN_AGE_S, _MAX_AGE_S, "1h to 3650d"))]
TraceSize = Annotated[
    str, BeforeValidator(_within(quantities.size_bytes, _MIN_TRACE_BYTES, _MAX_TRACE_BYTES, "1Mi to 64Gi"))
]
StoreSize = Annotated[
    str, BeforeValidator(_within(quantities.size_bytes, _MIN_STORE_BYTES, _MAX_STORE_BYTES, "1Mi to 1024Ti"))
]
Held = Annotated[bool, BeforeValidator(_held)]
Cron = Annotated[str, BeforeValidator(_cron)]
TimeZone = Annotated[str, BeforeValidator(_timezone)]
EnvironmentName = Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")]


class PolicyModel(BaseModel):
    """Strict, so that ``steps: yes`` is a mistake and not 1; frozen, so that a policy is the one that was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def left_out(schema: JsonDict) -> None:
    """Describe a field that is there or left out, never null: a CRD knows neither `anyOf` nor `default: null`."""
    choices = schema.pop("anyOf")
    schema.pop("default")
    if isinstance(choices, list) and isinstance(choices[0], dict):
        schema.update(choices[0])


def only_one(schema: JsonDict) -> None:
    """Describe a field that has one value as a choice of one: a CRD knows no `const`."""
    schema["enum"] = [schema.pop("const")]
