"""The status of a TriageReport: bounded, however long the run; and the events that tell of its changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from sftriage.kube.fields import Answer, Now, dated, readable, status_of
from sftriage.kube.jobs import JobRef
from sftriage.kube.mirrored import metadata_of
from sftriage.kube.objects import (
    MAX_CAPTURES,
    MAX_HOLDS,
    Hold,
    LastVerdict,
    ReportedAdvice,
    ReportedCapture,
    ReportedRemedy,
    StragglerCost,
    TriageReportStatus,
)
from sftriage.model.events import RemedyChanged
from sftriage.runs.following import WindowRow
from sftriage.runs.glance import Outlook, advice_of_run, captures_cost_s, glance_of, remedy_line, tried_in
from sftriage.runs.source import View
from sftriage.traces.manifest import Manifest
from sftriage.words.amounts import clock
from sftriage.words.decisions import caused
from sftriage.words.kube import NEWS, REPORTS
from sftriage.words.run import NOTHING, link_name, remedy_told
from sftriage.words.verdicts import explained

_NOT_KNOWN = ("no_run", "warming_up", "unknown")
_MAX_REASONS = 16


def report_status(body: Mapping[str, Any], view: View, now_s: float) -> TriageReportStatus:
    """The status of the report on a job whose newest run is seen so."""
    stands = glance_of(view).outlook
    generation = body["metadata"].get("generation")
    held = [row for row in view.rows if row.outcome in ("hold", "throttle")]
    captures = list(_captures(view))
    found = (_healthy(stands), _watched(view))
    before = status_of(body).get("conditions")
    told = {one.type for one in found}
    return TriageReportStatus(
        observedGeneration=generation,
        # (others say what they know)
        conditions=(
            *dated(found, before, generation, now_s),
            *(one for one in readable(before) if one.type not in told),
        ),
        run=None if view.info is None else view.info.run_id,
        health=stands.face,
        summary=stands.sentence or stands.headline,
        since_step=stands.since_step,
        suspect=stands.named or None,
        verdict=_verdict(view.rows[-1]) if view.rows else None,
        windows=view.windows,
        windows_held=len(held),
        holds=tuple(_holds(held)),
        captures=tuple(captures[:MAX_CAPTURES]),
        captures_total=len(captures),
        cost=_cost(view),
        advice=_advice(view),
        remedy=_remedy(view),
    )


def outdated(body: Mapping[str, Any], now_s: float, keep_s: float) -> bool:
    """Whether a report that no object owns, as that of plain pods, has had nothing new for so long."""
    about = body["metadata"]
    told = [one.lastTransitionTime for one in readable(status_of(body).get("conditions"))]
    newest = max([*told, str(about.get("creationTimestamp", ""))])
    # (times of one form, in UTC, are in the order of their letters)
    return not about.get("ownerReferences") and newest < clock(now_s - keep_s)


def _healthy(stands: Outlook) -> Now:
    status: Answer = "Unknown" if stands.face in _NOT_KNOWN else "True" if stands.face == "healthy" else "False"
    reason = "".join(word.capitalize() for word in stands.face.split("_"))
    words = f"{stands.headline}. {stands.sentence}".strip()
    return Now("Healthy", status, reason, words)


def _watched(view: View) -> Now:
    if view.unwatched:
        return Now("Watched", "False", "Unwatched", REPORTS["unwatched"])
    if view.going:
        return Now("Watched", "True", "Watched", REPORTS["watched"])
    return Now("Watched", "False", "NoRun" if view.info is None else "Ended", REPORTS["over"])


def _verdict(row: WindowRow) -> LastVerdict:
    return LastVerdict(
        label=row.label,
        reasons=row.reasons[:_MAX_REASONS],
        first_step=row.first_step,
        last_step=row.last_step,
        exposed_s=row.exposed_s,
        sentence=row.sentence,
        outcome=row.outcome,
    )


def _holds(held: Sequence[WindowRow]) -> Iterator[Hold]:
    rows: dict[tuple[str, str, tuple[str, ...]], list[WindowRow]] = {}
    for row in reversed(held):
        rows.setdefault((row.outcome, row.reason, row.reasons), []).append(row)
    for (outcome, reason, reasons), those in list(rows.items())[:MAX_HOLDS]:
        yield Hold(
            outcome=cast('Literal["hold", "throttle"]', outcome),
            reason=cast("Any", reason),
            reasons=reasons[:_MAX_REASONS],
            windows=len(those),
            last_step=those[0].last_step,
            words="; ".join(explained(reasons)) if reason in ("undecided", "standstill") else those[0].words,
            resolves=those[0].resolves or None,
        )


def _captures(view: View) -> Iterator[ReportedCapture]:
    stored = {one.capture_id: one for one in view.captures if isinstance(one, Manifest)}
    for capture_id, result in reversed(list(view.states.items())):
        manifest = stored.get(capture_id)
        cause = manifest.cause if manifest is not None else None
        yield ReportedCapture(
            capture_id=capture_id,
            rank=result.rank,
            state=result.state,
            reproduced=None if manifest is None else manifest.holds_fault,
            cause=None if cause is None or cause.code == "unknown" else caused(cause),
        )


def _advice(view: View) -> ReportedAdvice | None:
    advice = advice_of_run(view)
    if (straggler := advice.straggler) is not None:
        about, late_s = f"{straggler.who} in {straggler.where}", straggler.late_s
    elif advice.slow_link is not None:
        about, late_s = link_name(advice.slow_link.link), None
    else:
        return None
    if (best := advice.best) is None:
        return ReportedAdvice(straggler=about, late_s=late_s, words=NOTHING)
    return ReportedAdvice(
        straggler=about,
        late_s=late_s,
        remedy=best.code,
        saves_s=best.saves_s,
        break_even_s=best.pays_from_s,
        words=remedy_line(best),
    )


def _remedy(view: View) -> ReportedRemedy | None:
    """The last remedy that is tried or kept, or else the last one mentioned."""
    told = [one for one in view.notes if isinstance(one, RemedyChanged)]
    told += [one for one in tried_in(view) if one.state != "undone"]
    if not told:
        return None
    newest = told[-1]
    return ReportedRemedy(
        remedy=newest.remedy,
        state=newest.state,
        rank=newest.rank,
        saves_s=newest.numbers.get("saves_s"),
        words=remedy_told(newest),
    )


def _cost(view: View) -> StragglerCost:
    if not view.rows:
        return StragglerCost()
    return StragglerCost(
        stragglers_s=round(view.losses.lost_s, 3),
        stragglers_rank_hours=round(view.losses.rank_s / 3600, 6),
        captures_s=round(captures_cost_s(view.notes), 3),
    )


_TROUBLE = ("suspect", "captured", "held", "regressed", "throttled", "stalled", "unknown")
_SILENT = (None, "no_run", "warming_up")
_MAX_MESSAGE = 1024
EVERY_S = 60.0
"""How often the same is told again at most; how often it was so meanwhile is counted."""


@dataclass(frozen=True, slots=True)
class ReportNews:
    """Something to tell: ``reason`` is one of a few words, so that an event of each is all that a job ever has."""

    reason: str
    kind: Literal["Normal", "Warning"]
    message: str


def news(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[ReportNews]:
    """What a report says, by its status, that it did not say before."""
    health, was = now.get("health"), before.get("health")
    if health != was and health not in _SILENT and not (health == "healthy" and was in _SILENT):
        reason = "".join(word.capitalize() for word in str(health).split("_"))
        yield ReportNews(reason, "Warning" if health in _TROUBLE else "Normal", str(now.get("summary") or health))
    remedy = now.get("remedy")
    if isinstance(remedy, Mapping) and remedy != before.get("remedy"):
        yield ReportNews(f"Remedy{str(remedy.get('state')).capitalize()}", "Normal", str(remedy.get("words")))
    known = {one["capture_id"]: one["state"] for one in _reported(before)}
    for state, reason in (("stored", "CaptureStored"), ("failed", "CaptureFailed"), ("expired", "CaptureFailed")):
        new = [one for one in _reported(now) if one["state"] == state != known.get(one["capture_id"])]
        if new:
            words = NEWS[state].format(count=len(new), capture_id=new[0]["capture_id"], rank=new[0]["rank"])
            message = f"{words} {new[0].get('cause') or ''}".strip()
            yield ReportNews(reason, "Normal" if state == "stored" else "Warning", message)


def _reported(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [one for one in status.get("captures") or () if isinstance(one, Mapping) and "capture_id" in one]


def event_name(job: JobRef, reason: str) -> str:
    """The name of the one event of a job that has this reason."""
    return f"{job.object_name}.{reason.lower()}"


def event_body(
    job: JobRef, report: Mapping[str, Any], told: ReportNews, before: Mapping[str, Any], times: int, now_s: float
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
