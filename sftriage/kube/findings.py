"""What a look at a cluster has found, and the words that all of its checks have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sftriage.kube.conditions import status_of
from sftriage.kube.pods import items, text
from sftriage.kube.snapshot import Body, Snapshot

PATIENCE_S = 60.0
"""How long what was just made may take until somebody has looked at it."""
MAX_NAMED = 3
"""Of what is wrong alike, so many are named."""

State = Literal["ok", "wrong", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        code: what was looked at, for programs.
        state: whether it is as it should be; ``unknown`` where that could not be seen.
        says: how it is.
        do: what to do about it; "" where there is nothing to do.
    """

    code: str
    state: State
    says: str
    do: str = ""


def available(deployment: Body) -> bool:
    """Whether somebody of a deployment runs."""
    return bool(status_of(deployment).get("availableReplicas"))


def said(deployment: Body) -> str:
    """Why a deployment does not run, as it says itself."""
    found = [one for one in items(status_of(deployment), "conditions") if one.get("type") == "ReplicaFailure"]
    return f" ({text(found[0], 'message')})" if found and text(found[0], "message") else ""


def age_s(seen: Snapshot, body: Body) -> float:
    """How old an object is."""
    created = moment(body)
    return 0.0 if created is None else seen.now_s - created


def moment(body: Body) -> float | None:
    """When an object was created, in seconds since the epoch."""
    return seconds(body["metadata"].get("creationTimestamp"))


def seconds(told: Any) -> float | None:
    """A time as a server writes it, in seconds since the epoch; None where it is none."""
    try:
        return datetime.fromisoformat(str(told).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def not_seen(seen: Snapshot, part: str, what: str) -> Finding:
    """That a part may not be looked at."""
    return Finding(part, "unknown", f"you may not look at {what}{why(seen, part)}")


def why(seen: Snapshot, part: str) -> str:
    """Why a part could not be read, as the end of a sentence."""
    return f": {seen.unread[part]}" if part in seen.unread else ""


def named(bodies: Sequence[Body]) -> str:
    """Some objects by their names."""
    return some([str(one["metadata"]["name"]) for one in bodies])


def some(names: Sequence[str]) -> str:
    """The first few, and how many there are beside them."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
