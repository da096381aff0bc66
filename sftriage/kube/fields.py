"""The types that the objects' fields are of. What goes into a status is made to fit, so that no server refuses it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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
