"""Conditions: what is so of an object, why, and since when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from sftriage.kube.fields import Condition
from sftriage.words.amounts import clock

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
