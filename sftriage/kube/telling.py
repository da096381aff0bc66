"""Events of a cluster about a job: what its report says now and did not before, few and bounded. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sftriage.kube.jobs import JobRef
from sftriage.kube.mirrored import metadata_of
from sftriage.words.amounts import clock
from sftriage.words.objects import NEWS

_TROUBLE = ("suspect", "captured", "held", "regressed", "throttled", "stalled", "unknown")
_SILENT = (None, "no_run", "warming_up")
_MAX_MESSAGE = 1024
EVERY_S = 60.0
"""How often the same is told again at most; how often it was so meanwhile is counted."""


@dataclass(frozen=True, slots=True)
class News:
    """Something to tell: ``reason`` is one of a few words, so that an event of each is all that a job ever has."""

    reason: str
    kind: Literal["Normal", "Warning"]
    message: str


def news(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[News]:
    """What a report says, by its status, that it did not say before."""
    health, was = now.get("health"), before.get("health")
    if health != was and health not in _SILENT and not (health == "healthy" and was in _SILENT):
        reason = "".join(word.capitalize() for word in str(health).split("_"))
        yield News(reason, "Warning" if health in _TROUBLE else "Normal", str(now.get("summary") or health))
    remedy = now.get("remedy")
    if isinstance(remedy, Mapping) and remedy != before.get("remedy"):
        yield News(f"Remedy{str(remedy.get('state')).capitalize()}", "Normal", str(remedy.get("words")))
    known = {one["capture_id"]: one["state"] for one in _captures(before)}
    for state, reason in (("stored", "CaptureStored"), ("failed", "CaptureFailed"), ("expired", "CaptureFailed")):
        new = [one for one in _captures(now) if one["state"] == state != known.get(one["capture_id"])]
        if new:
            words = NEWS[state].format(count=len(new), capture_id=new[0]["capture_id"], rank=new[0]["rank"])
            message = f"{words} {new[0].get('cause') or ''}".strip()
            yield News(reason, "Normal" if state == "stored" else "Warning", message)


def _captures(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [one for one in status.get("captures") or () if isinstance(one, Mapping) and "capture_id" in one]


def event_name(job: JobRef, reason: str) -> str:
    """The name of the one event of a job that has this reason."""
    return f"{job.object_name}.{reason.lower()}"


def event_body(
    job: JobRef, report: Mapping[str, Any], told: News, before: Mapping[str, Any], times: int, now_s: float
) -> dict[str, Any]:
    """The event that says so, of the report.

    Args:
        job: the job.
        report: its report, as the server has it.
        told: what is told.
        before: the event of this reason as the server has it; empty where there is none.
        times: how often it was so since.
        now_s: seconds since the epoch.
    """
    about = {name: report["metadata"].get(name) for name in ("name", "namespace", "uid")}
    count = before.get("count")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": metadata_of(job, name=event_name(job, told.reason)),
        "involvedObject": {"apiVersion": report["apiVersion"], "kind": report["kind"], **about},
        "reason": told.reason,
        "type": told.kind,
        "message": told.message[:_MAX_MESSAGE],
        "count": (count if isinstance(count, int) else 0) + times,
        "firstTimestamp": before.get("firstTimestamp") or clock(now_s),
        "lastTimestamp": clock(now_s),
        "source": {"component": "sftriage"},
    }
