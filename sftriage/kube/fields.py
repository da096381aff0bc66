"""Fields and conditions of the objects. What goes into a status is clipped, so that no server refuses it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sftriage.words.amounts import clock

MAX_SENTENCE = 2000
MAX_LINE = 500
MAX_WORD = 253


class ObjectModel(BaseModel):
    """A part of an object. Kubernetes' own words are in its own case, and those of sftriage as in policies."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def plain(self) -> dict[str, Any]:
        """As JSON-ready values; what is not there is left out."""
        return self.model_dump(mode="json", exclude_none=True)


def _clipped(limit: int) -> BeforeValidator:
    def clip(value: object) -> object:
        if not isinstance(value, str):
            return value
        # No server takes half of a surrogate pair, which a file's name may hold.
        text = value.encode("utf-8", "replace").decode()
        return text if len(text) <= limit else f"{text[: limit - 1]}…"

    return BeforeValidator(clip)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Sentence = Annotated[str, Field(max_length=MAX_SENTENCE), _clipped(MAX_SENTENCE)]
Line = Annotated[str, Field(max_length=MAX_LINE), _clipped(MAX_LINE)]
Word = Annotated[str, Field(max_length=MAX_WORD), _clipped(MAX_WORD)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float | None, BeforeValidator(_finite)]
Message = Annotated[str, Field(min_length=1, max_length=32_768), _clipped(32_768)]


class Condition(ObjectModel):
    """One condition of an object, as all of Kubernetes has them."""

    type: Annotated[str, Field(max_length=316)] = Field(description="What it is about, such as `Accepted`.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")] = Field(
        description="Why, as one word for programs."
    )
    message: Message = Field(description="Why, for people.")
    lastTransitionTime: str = Field(  # as Kubernetes writes it
        description="Since when the status is what it is.", json_schema_extra={"format": "date-time"}
    )
    observedGeneration: Count | None = Field(default=None, description="The generation of the object that it is about.")


class ObservedStatus(ObjectModel):
    """What every status has."""

    observedGeneration: Count | None = Field(
        default=None, description="The generation of the object that this status is about."
    )
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8)] = Field(
        default=(),
        description="The latest conditions; `kubectl wait --for=condition=TYPE` waits for one.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )


Answer = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Now:
    """What is so of an object as it is now: ``status`` says whether it is, ``reason`` why, ``message`` in words."""

    type: str
    status: Answer
    reason: str
    message: str


def dated(found: Iterable[Now], before: Any, generation: int | None, now_s: float) -> tuple[Condition, ...]:
    """The conditions of an object, each since when it is so.

    Args:
        found: what is so now.
        before: the conditions that the object had, as the server has them: anybody may have written them.
        generation: the object's, that they are about.
        now_s: seconds since the epoch.
    """
    since = {one.type: one for one in readable(before)}
    return tuple(_dated(one, since.get(one.type), generation, now_s) for one in found)


def _dated(found: Now, before: Condition | None, generation: int | None, now_s: float) -> Condition:
    same = before is not None and before.status == found.status
    return Condition(
        type=found.type,
        status=found.status,
        reason=found.reason,
        message=found.message or found.reason,
        lastTransitionTime=before.lastTransitionTime if same and before is not None else clock(now_s),
        observedGeneration=generation,
    )


def readable(conditions: Any) -> list[Condition]:
    """The conditions that an object has, but for what is none."""
    found = []
    for one in conditions if isinstance(conditions, Sequence) else ():
        try:
            found.append(Condition.model_validate(one))
        except ValidationError:
            continue
    return found


def status_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status that an object has; empty where there is none yet."""
    status = body.get("status")
    return status if isinstance(status, Mapping) else {}


def condition(body: Mapping[str, Any], kind: str) -> Condition | None:
    """One condition of an object, as the server has it."""
    return next((one for one in readable(status_of(body).get("conditions")) if one.type == kind), None)
